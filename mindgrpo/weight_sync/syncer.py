"""The policy's weights as other roles want them: resharded into their layout, adapters added in.

Refuses to say when: weights have to be on the device on both sides.
"""

from __future__ import annotations

from dataclasses import replace

from mindgrpo.backend.contract import Backend
from mindgrpo.models.lora import merge
from mindgrpo.models.shard import Adapters
from mindgrpo.weight_sync.execute import Resharder, Traffic
from mindgrpo.weight_sync.plan import Plan, plan_reshard
from mindgrpo.weights.local_weights import Weights


class Delivery:
    """Repeats one way from `source` and its adapters to `target`, whose layout may be any; `plan` is the base's."""

    def __init__(
        self,
        source: Weights,
        adapters: Adapters | None,
        target: Weights,
        backend: Backend,
        plan: Plan | None = None,
    ) -> None:
        self._target, self._given = target, adapters
        plan = plan or plan_reshard(source.layout, target.layout)
        self._base = Resharder(plan, source, target, backend)
        self._adapters: Weights | None = None
        if adapters is not None:
            own = adapters.weights
            layout = replace(target.layout, specs=own.layout.specs)
            self._adapters = Weights(layout, backend.rank, backend)
            plan = plan_reshard(own.layout, layout)
            self._low_rank = Resharder(plan, own, self._adapters, backend)

    def run(self) -> Traffic:
        """All ranks together."""
        traffic = self._base.run()
        if self._given is None or self._adapters is None:
            return traffic
        more = self._low_rank.run()
        merge(self._target, self._adapters, self._given.settings)
        self._adapters.pool.release()
        return Traffic(traffic.bytes_received + more.bytes_received, traffic.seconds + more.seconds)
