"""Gives the policy's weights to another role: resharded into its layout, adapters added in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import mindspore as ms
import numpy as np
from mindspore import ops

from mindgrpo.backend.contract import Backend, Pool
from mindgrpo.models.lora import merge
from mindgrpo.models.shard import Adapters
from mindgrpo.weight_sync.execute import Resharder
from mindgrpo.weight_sync.plan import Plan, plan_reshard
from mindgrpo.weight_sync.transfer import Traffic
from mindgrpo.weights.checksum import part_sums
from mindgrpo.weights.local_weights import Weights


class WeightSyncer:
    """A WeightTransfer from `source` and its adapters to `target`, whose layout may be any.

    `plan` is that of the base weights (None: computed here). `copies` are the adapters in the target's layout.
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
            layout = replace(target.layout, specs=own.layout.specs)
            self._copy = Weights(layout, backend.rank, backend, "adapters_copy")
            self.copies.append(self._copy.pool)
            self._low_rank = Resharder(plan_reshard(own.layout, layout), own, self._copy, backend)

    def run(self, keeps_sums: bool = False) -> Traffic:
        traffic = self._base.run()
        if self._adapters is None:
            return traffic
        more = self._low_rank.run()
        merge(self._target, self._copy, self._adapters.settings)
        self._backend.synchronize()
        return traffic + more

    def sums(self) -> dict[str, int]:
        return part_sums(self._target)


def mix(old: Weights, new: Weights, share: float) -> None:
    """Makes old = share * new + (1 - share) * old, where they are; both of one layout."""
    if old.pool.is_host_memory:
        for run, fresh in zip(old.arrays.flat_buffers, new.arrays.flat_buffers, strict=True):
            # In float32, whatever dtype they are kept in.
            kept = run.astype(np.float32, copy=False)
            kept *= 1.0 - share
            kept += share * fresh.astype(np.float32, copy=False)
            run[...] = kept
        return
    for key, parameter in old.parameters.items():
        kept, fresh = parameter.astype(ms.float32), new.parameters[key].astype(ms.float32)
        ops.assign(parameter, (kept * (1.0 - share) + fresh * share).astype(parameter.dtype))
