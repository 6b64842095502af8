"""Weights move between eight ranks whose memory is MindSpore's, bit for bit.

The ranks take turns in one process. Does not prove that communication carries what they hand over:
tests/test_distributed.py does, on four ranks. Nor does it take all pairs of layouts: tests/test_reshard_plan.py does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

import numpy as np
import pytest
from test_nested_splits import moe_specs
from test_reshard_plan import layouts

from mindgrpo.backend.connect import connect
from mindgrpo.backend.contract import Backend, Pool
from mindgrpo.backend.device.host_cpu import fill, joined_bits
from mindgrpo.backend.dtypes import Dtype, bits_of
from mindgrpo.backend.targets import choose_target
from mindgrpo.parallel.mesh import Mesh
from mindgrpo.parallel.sharding import Box, Layout
from mindgrpo.weight_sync.execute import DeviceRounds
from mindgrpo.weight_sync.plan import plan_reshard
from mindgrpo.weight_sync.transfer import FirstHolders
from mindgrpo.weights.checksum import PartSums, host_sums
from mindgrpo.weights.local_weights import Weights
from mindgrpo.weights.pretrained import fill_random


@pytest.fixture(scope="module")
def device() -> Backend:
    return connect(choose_target("CPU", "device"), {})


class RankInTurn:
    """One of many ranks on one device. What it sends is in `mail`, by its round; it receives what is there already."""

    def __init__(self, device: Backend, rank: int, bucket_bytes: int, mail: dict[Any, Any]) -> None:
        self.rank, self.bucket_bytes = rank, bucket_bytes
        self._device, self._mail = device, mail
        self._number = count()

    def pool(self, size: int, shared: bool, dtype: Dtype) -> Pool:
        return self._device.pool(size, shared, dtype)

    def zeros(self, shape: Sequence[int], dtype: Dtype) -> Any:
        return self._device.zeros(shape, dtype)

    def synchronize(self) -> None:
        self._device.synchronize()
        self._number = count()

    def exchange(
        self, sends: Mapping[int, Sequence[Any]], receives: Mapping[int, Sequence[Any]]
    ) -> None:
        number = next(self._number)
        for peer, tensors in sends.items():
            self._mail[self.rank, peer, number] = joined_bits(tensors)
        for peer, tensors in receives.items():
            if (peer, self.rank, number) in self._mail:
                fill(tensors, self._mail[peer, self.rank, number])


def put_bits(weights: Weights, boxes: Mapping[str, Box], wanted: Mapping[str, np.ndarray]) -> None:
    with weights.on_host(write=True) as host:
        for name, box in boxes.items():
            bits_of(host.hf_views[name])[...] = wanted[name][box.slices]


def random_bits(layout: Layout, dtype: str) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    high = np.iinfo(dtype).max + 1
    return {spec.name: rng.integers(0, high, spec.shape, dtype) for spec in layout.specs}


def moved(device: Backend, source: Layout, target: Layout, dtype: Dtype, bucket: int) -> None:
    plan = plan_reshard(source, target, 4 if dtype == "float32" else 2)
    wanted = random_bits(source, "uint32" if dtype == "float32" else "uint16")
    mail: dict[Any, Any] = {}
    ranks: list[Any] = [RankInTurn(device, rank, bucket, mail) for rank in range(plan.num_ranks)]
    old, new = (
        [Weights(layout, backend.rank, backend, dtype=dtype) for backend in ranks]
        for layout in (source, target)
    )
    for held, taken in zip(old, new, strict=True):
        put_bits(held, held.boxes, wanted)
        taken.pool.load()
    # In the first turn all that is sent is collected, in the second all of it is there.
    for _ in range(2):
        for sides in zip(old, new, ranks, strict=True):
            DeviceRounds(plan, *sides).run()
    check_bits(new, wanted)


def check_bits(by_rank: Sequence[Weights], wanted: Mapping[str, np.ndarray]) -> None:
    for rank, weights in enumerate(by_rank):
        with weights.on_host() as host:
            for name, box in weights.boxes.items():
                found = bits_of(host.hf_views[name])
                np.testing.assert_array_equal(found, wanted[name][box.slices], f"{name} {rank}")


def test_every_bit_arrives_where_it_belongs(device: Backend) -> None:
    source, target = layouts(Mesh(1, 4, 2), Mesh(4, 2))
    moved(device, source, target, "float32", 1 << 20)
    moved(device, target, source, "float16", 1 << 12)


def test_every_bit_of_experts_arrives_where_it_belongs(device: Backend) -> None:
    specs = tuple(s for s in moe_specs(1, 8, 6, 4, 11, (4, 2, 2)) if len(s.shape) == 3)
    source = Layout.of(Mesh(4, 1, ep=4), specs)
    target = Layout.of(Mesh(2, 2, ep=2, etp=2), specs)
    moved(device, source, target, "float32", 400)
    moved(device, target, source, "float16", 1 << 20)
    weights = Weights(target, 1, device)
    fill_random(weights, seed=4)
    assert PartSums(device).of(weights) == host_sums(weights)


def test_ranks_of_one_layout_give_each_other_what_the_first_holders_have(device: Backend) -> None:
    layout, _ = layouts(Mesh(2, 2, 2), Mesh(8, 1))
    readers = FirstHolders(layout.mesh, layout.specs, layout.stage_layers)
    plan, wanted = plan_reshard(readers, layout), random_bits(layout, "uint32")
    mail: dict[Any, Any] = {}
    ranks: list[Any] = [RankInTurn(device, rank, 1 << 12, mail) for rank in range(8)]
    filled = [Weights(layout, backend.rank, backend) for backend in ranks]
    for weights in filled:
        put_bits(weights, readers.held_by(weights.rank), wanted)
    for _ in range(2):
        for weights, backend in zip(filled, ranks, strict=True):
            DeviceRounds(plan, weights, weights, backend).run()
    check_bits(filled, wanted)
