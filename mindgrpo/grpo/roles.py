"""The roles of a run on this rank (policy, reference, engine), moved between phases and kept in step.

Knows which role needs which memory when, and that the engine's weights are the policy's current ones.
"""

from __future__ import annotations

from dataclasses import dataclass

from mindgrpo.backend.contract import Backend
from mindgrpo.grpo.run_plan import RunPlan
from mindgrpo.memory.residency import PHASES, Residency
from mindgrpo.models.pipeline import ForwardPipeline
from mindgrpo.rollout.engine import RolloutEngine
from mindgrpo.training.policy import Policy
from mindgrpo.weight_sync.execute import Traffic
from mindgrpo.weight_sync.plan import Plan
from mindgrpo.weight_sync.syncer import Delivery
from mindgrpo.weight_sync.verify import WeightCheck
from mindgrpo.weights.local_weights import Weights


@dataclass
class Reference:
    """`pipeline` is None on ranks outside of the reference's grid."""

    weights: Weights
    pipeline: ForwardPipeline | None


class Roles:
    """`reference` is None where no loss needs one; `traffic` is of the last publish."""

    def __init__(
        self,
        plan: RunPlan,
        backend: Backend,
        policy: Policy,
        engine: RolloutEngine,
        reference: Reference | None,
        weight_check: WeightCheck,
        residency: Residency,
    ) -> None:
        self.plan, self.backend = plan, backend
        self.policy, self.engine, self.reference = policy, engine, reference
        self.weight_check, self.residency = weight_check, residency
        self.traffic = Traffic(0, 0.0)
        self._to_engine = self._delivery_to(engine.weights, plan.reshard)
        self._to_reference: Delivery | None = None
        self._own_memory()

    def _own_memory(self) -> None:
        policy, residency = self.policy, self.residency
        trained = [policy.adapters.weights.pool] if policy.adapters else []
        residency.own("policy", [policy.weights.pool, *trained], rebuilt=False, filled=True)
        residency.own("gradients", [policy.gradients.pool], rebuilt=True, filled=False)
        moments = [policy.optimizer.first.pool, policy.optimizer.second.pool]
        if not policy.settings.moments_on_host:
            residency.own("optimizer", moments, rebuilt=False, filled=True)
        for name, pools in self.engine.pools.items():
            residency.own(name, pools, rebuilt=True, filled=False)
        if self.reference is not None:
            residency.own("reference", [self.reference.weights.pool], rebuilt=False, filled=True)
        residency.check_budget()

    def enter(self, phase: str) -> None:
        """Brings the phase's roles onto the device and sends the others away."""
        needs_engine = "generator" in PHASES[phase]
        if not needs_engine:
            self.engine.sleep()
        self.residency.enter(phase)
        if needs_engine:
            self.engine.wake()

    def refresh_engine(self) -> None:
        """Gives the engine the policy's current weights, unless it has them already."""
        policy = self.policy
        is_fresh = self.engine.version == policy.version
        if is_fresh and not self.weight_check.lacks(policy.version):
            return
        self.enter("reshard")
        weights = [policy.weights]
        if policy.adapters is not None:
            weights.append(policy.adapters.weights)
        self.weight_check.keep(weights, policy.version)
        if not is_fresh:
            self.traffic = self.engine.publish(self._to_engine.run, policy.version)

    def enter_rollout(self) -> int:
        """Has the engine ready to draw by the policy's weights, whose version it returns. Raises WeightsDiffer."""
        self.enter("rollout")
        self.weight_check.check(self.engine.weights, self.policy.version)
        return self.policy.version

    def _delivery_to(self, target: Weights, plan: Plan | None = None) -> Delivery:
        policy = self.policy
        return Delivery(policy.weights, policy.adapters, target, self.backend, plan)

    def sync_reference(self, share: float) -> None:
        """reference = share * policy + (1 - share) * reference (TR-DPO, arXiv:2404.09656)."""
        if self.reference is None:
            return
        self.enter("sync_reference")
        old = self.reference.weights
        if share >= 1.0:
            if self._to_reference is None:
                self._to_reference = self._delivery_to(old)
            self._to_reference.run()
            return
        fresh = Weights(old.layout, self.backend.rank, self.backend)
        self._delivery_to(fresh).run()
        for run, new in zip(old.runs, fresh.runs, strict=True):
            run *= 1.0 - share
            run += share * new
        old.pool.push()
        fresh.pool.release()
