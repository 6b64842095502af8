"""Transfers the policy's weights to another role, resharded and with adapters merged in, and verifies them.

When the generator is refreshed, checksums of the policy's weights are kept with their version; before it samples, they
are compared with the generator's own, so that it uses the policy's weights bit for bit, and so do all replicas.
`load_once` loads a model: each part is read from files by the first rank that holds it and sent to its replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import mindspore as ms
import numpy as np
from mindspore import ops

from mindgrpo.backend.contract import Backend, Pool
from mindgrpo.models.lora import merge
from mindgrpo.models.shard import Adapters
from mindgrpo.parallel.sharding import Box, Layout, ParameterSpec, Ranks
from mindgrpo.weight_sync.execute import Resharder, Traffic
from mindgrpo.weight_sync.plan import Plan, plan_reshard
from mindgrpo.weights.checksum import MODULUS, PartSums, total_sums
from mindgrpo.weights.local_weights import Weights
from mindgrpo.weights.pretrained import check_tensors, fill


class WeightTransfer(Protocol):
    """Repeats one transfer, as after every update."""

    @property
    def layout(self) -> Layout:
        """Returns the receiver's layout."""

    @property
    def copies(self) -> Sequence[Pool]:
        """Lists the pools needed on the device beside the source's and the target's weights."""

    @property
    def host_copies(self) -> Sequence[Pool]:
        """Lists the pools kept in host memory."""

    def run(self, keeps_sums: bool = False) -> Traffic:
        """Transfers the weights, collectively; both sides' weights and `copies` have to be on the device."""

    @property
    def has_sums(self) -> bool:
        """Returns whether `sums` can be called; for streamed weights, only if the last run kept them."""

    def sums(self, own: PartSums) -> dict[str, int]:
        """Returns the checksums of the receiver's weights on this rank; `own` computes them if the run did not."""


class WeightsDiffer(RuntimeError):
    """Raised where replicas, or the generator's and the policy's weights, differ."""


@dataclass(frozen=True)
class _Kept:
    version: int
    sums: dict[str, int]


class WeightCheck:
    """Compares checksums of weights, except of the tensors `adapted`, into which the generator has merged adapters.

    With `interval` n, the first step and steps n, 2n, ... are checked; None checks none.
    """

    def __init__(self, backend: Backend, interval: int | None, adapted: frozenset[str]) -> None:
        self._backend, self._interval, self._adapted = backend, interval, adapted
        self._sums = PartSums(backend)
        self._kept: _Kept | None = None
        self.is_due = False

    def begin_step(self, step: int) -> None:
        """Decides whether step `step`, from 0, is checked."""
        every = self._interval
        self.is_due = every is not None and (step == 0 or (step + 1) % every == 0)

    def lacks(self, version: int) -> bool:
        """Returns whether this step needs checksums of `version` that are not kept yet."""
        return self.is_due and (self._kept is None or self._kept.version != version)

    def keep(self, policy: Sequence[Weights], version: int) -> None:
        """Keeps the checksums of `policy[0]`, and compares the replicas of all of `policy`. Collective.

        Raises WeightsDiffer.
        """
        if self.lacks(version):
            first, *others = policy
            self._kept = _Kept(
                version, self._totals(first.layout, self._sums.of(first), "policy's")
            )
            for weights in others:
                self._totals(weights.layout, self._sums.of(weights), "policy's")

    def check(self, received: WeightTransfer, version: int) -> None:
        """Compares the generator's weights with the policy's of `version`. Collective. Raises WeightsDiffer."""
        if not self.is_due:
            return
        if self._kept is None or self._kept.version != version:
            had = "none" if self._kept is None else f"version {self._kept.version}"
            raise WeightsDiffer(
                f"the generator was to be given the policy's weights of version {version}, but the last that it was "
                f"given are {had}: they are stale"
            )
        sums = self._totals(received.layout, received.sums(self._sums), "generator's")
        wrong = [
            name
            for name, value in self._kept.sums.items()
            if name not in self._adapted and sums.get(name) != value
        ]
        if wrong:
            most = len(wrong) > len(self._kept.sums) // 2
            cause = "they are stale or were not resharded" if most else "the reshard damaged them"
            raise WeightsDiffer(
                f"{len(wrong)} of {len(self._kept.sums)} of the generator's tensors are not the policy's of version "
                f"{version}, first {wrong[0]}: {cause}"
            )

    def _totals(self, layout: Layout, sums: dict[str, int], whose: str) -> dict[str, int]:
        by_rank = self._backend.world.gather_objects(sums)
        totals, wrong = total_sums(layout, by_rank, MODULUS)
        if wrong:
            name, ranks = next(iter(wrong.items()))
            raise WeightsDiffer(
                f"the {whose} {name} on rank {ranks[0]} is not what the other replicas have; {len(wrong)} tensors "
                "differ between replicas: one of them was damaged or missed an update"
            )
        return totals


def adapters_copy(adapters: Adapters, target: Layout, backend: Backend) -> Weights:
    """Allocates a copy of the adapters in the layout of the weights that they are merged into."""
    layout = replace(target, specs=adapters.weights.layout.specs)
    return Weights(layout, backend.rank, backend, "adapters_copy")


class WeightSyncer:
    """A WeightTransfer from `source` and its adapters to `target`, of any layout of the same parameters.

    `plan` reshards the base weights (None: computed here). `copies` holds the adapters in the target's layout.
    """

    host_copies: Sequence[Pool] = ()
    has_sums = True

    def __init__(
        self,
        source: Weights,
        adapters: Adapters | None,
        target: Weights,
        backend: Backend,
        plan: Plan | None = None,
    ) -> None:
        self._target, self._adapters, self._backend = target, adapters, backend
        self.layout = target.layout
        plan = plan or plan_reshard(source.layout, target.layout, source.pool.itemsize)
        self._base = Resharder(plan, source, target, backend)
        self.copies: list[Pool] = []
        if adapters is not None:
            own = adapters.weights
            self._copy = adapters_copy(adapters, target.layout, backend)
            self.copies.append(self._copy.pool)
            between = plan_reshard(own.layout, self._copy.layout)
            self._low_rank = Resharder(between, own, self._copy, backend)

    def run(self, keeps_sums: bool = False) -> Traffic:
        traffic = self._base.run()
        if self._adapters is None:
            return traffic
        more = self._low_rank.run()
        merge(self._target, self._copy, self._adapters.settings, self._backend.kernels)
        self._backend.synchronize()
        return traffic + more

    def sums(self, own: PartSums) -> dict[str, int]:
        return own.of(self._target)


def mix(old: Weights, new: Weights, share: float) -> None:
    """Computes old = share * new + (1 - share) * old in place; both have one layout."""
    if old.pool.is_host_memory:
        for run, fresh in zip(old.arrays.flat_buffers, new.arrays.flat_buffers, strict=True):
            # Computed in float32, whatever the stored dtype.
            kept = run.astype(np.float32, copy=False)
            kept *= 1.0 - share
            kept += share * fresh.astype(np.float32, copy=False)
            run[...] = kept
        return
    for key, parameter in old.parameters.items():
        kept, fresh = parameter.astype(ms.float32), new.parameters[key].astype(ms.float32)
        ops.assign(parameter, (kept * (1.0 - share) + fresh * share).astype(parameter.dtype))


class FirstHolders(Layout):
    """A layout without replicas: of the ranks that hold the same box, only the first has it."""

    def _ranks_by_box(self, spec: ParameterSpec, stages: Ranks) -> dict[Box, Ranks]:
        return {box: ranks[:1] for box, ranks in super()._ranks_by_box(spec, stages).items()}

    def held_by(self, rank: int) -> dict[str, Box]:
        boxes = super().held_by(rank)
        return {n: box for n, box in boxes.items() if self.ranks_by_box(n)[box] == (rank,)}


def load_once(
    weights: Weights, directory: str | Path, backend: Backend, may_lack_score: bool = False
) -> None:
    """Loads the model, reading each part from files once. Collective; pools have to be shared. Raises UserError."""
    layout = weights.layout
    files = check_tensors(directory, layout.specs, may_lack_score)
    readers = FirstHolders(layout.mesh, layout.specs, layout.stage_layers)
    fill(weights, files, readers.held_by(backend.rank))
    plan = plan_reshard(readers, layout, weights.pool.itemsize)
    if plan.bytes_moved:
        Resharder(plan, weights, weights, backend).run()
