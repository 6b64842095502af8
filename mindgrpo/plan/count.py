"""A backend that counts: roles are constructed on it as on a device, and their pools say what memory they take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from mindgrpo.backend.connect import keeps_slots
from mindgrpo.backend.contract import AloneGroup, Backend, Group, Pool
from mindgrpo.backend.dtypes import ITEM_BYTES, Dtype, num_head_parts
from mindgrpo.backend.kernels.contract import Kernels
from mindgrpo.backend.targets import SHARED_MEMORY
from mindgrpo.config import Config
from mindgrpo.health.rank_health import RankHealth
from mindgrpo.memory.residency import CountedPool
from mindgrpo.models.precision import compute_dtype, num_product_parts
from mindgrpo.parallel.mesh import Mesh


class _Kernels(Kernels):
    @property
    def head_parts(self) -> int | None:
        return num_head_parts(self.num_parts, self.fp32_lm_head)


class _Group(AloneGroup):
    """Knows its members, and cannot reach them."""

    def __init__(self, ranks: tuple[int, ...], rank: int) -> None:
        self.ranks, self.index = ranks, ranks.index(rank)


class CountingBackend(Backend):
    """The first rank of a stage of `mesh`, as `config` would have it: nothing is allocated, and nothing computed."""

    def __init__(self, config: Config, mesh: Mesh, stage: int, batch_invariant: bool) -> None:
        target = config.context.target
        self.rank, self.world_size = int(mesh.ranks()[stage].flat[0]), mesh.end
        self.shares_memory = target == SHARED_MEMORY
        self.compute_dtype = compute_dtype(config)
        self.health = RankHealth(self.rank, self.world_size, None)
        self._groups = {}
        self.kernels = _Kernels()
        self.kernels.has_slots = keeps_slots(target)
        self.kernels.batch_invariant = batch_invariant and self.kernels.has_slots
        self.kernels.fp32_lm_head = config.context.fp32_lm_head
        if self.kernels.has_slots:
            self.kernels.num_parts = num_product_parts(config)

    def _make_group(self, ranks: tuple[int, ...]) -> Group:
        return _Group(ranks, self.rank)

    def pool(self, size: int, shared: bool = False, dtype: Dtype = "float32") -> Pool:
        return CountedPool(size * ITEM_BYTES[dtype], dtype, self.shares_memory)

    host_pool = pool

    def link(self, peer: int, shape: Sequence[int]) -> NoReturn:
        raise ValueError("ranks whose memory is only counted exchange nothing")

    def graph(self, cell: Any, name: str) -> Any:
        raise ValueError("a rank whose memory is only counted computes nothing")
