"""One GRPO step on this rank, one call a phase, each timed: rollout, score, reference, old log-probs, update.

The trainer's loop and the benches run this same code. Refuses to choose prompts, rewards or learning rates, and to
report what came of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import numpy as np

from mindgrpo.algorithm.advantage import group_advantages
from mindgrpo.algorithm.samples import Samples
from mindgrpo.experience import Scored, generate, sample_logps
from mindgrpo.generate.engine import Draw
from mindgrpo.generate.noise import ROLLOUT
from mindgrpo.roles import Roles
from mindgrpo.update.batches import UpdateReport, update


@dataclass(frozen=True)
class StepOutcome:
    """`lr` is the last update's; `seconds` by phase on this rank, and of the whole under "step"."""

    samples: Samples
    scored: Scored
    reports: list[UpdateReport]
    lr: float
    seconds: dict[str, float]


def _unwatched(phase: str) -> AbstractContextManager[None]:
    return nullcontext()


class Stepper:
    """`learning_rate` gives the rate of an update, counted from 0 over the run; `watch` surrounds each phase."""

    def __init__(
        self,
        roles: Roles,
        learning_rate: Callable[[int], float],
        watch: Callable[[str], AbstractContextManager[None]] = _unwatched,
    ) -> None:
        self._watch = watch
        self.roles, self.plan, self.backend = roles, roles.plan, roles.backend
        self._learning_rate = learning_rate
        self._seconds: dict[str, float] = {}

    def run(
        self, step: int, prompts: Sequence[np.ndarray], score: Callable[[Samples], Scored]
    ) -> StepOutcome:
        """Step number `step` on `prompts` (int32 [n] each); all ranks together, the same outcome on each."""
        self._seconds = {}
        started = time.perf_counter()
        samples = self._rollout(step, prompts)
        scored = self._score(samples, score)
        self._reference(samples)
        self._old(samples)
        reports, lr = self._update(step, samples)
        self._sync_reference(step)
        self._seconds["step"] = time.perf_counter() - started
        return StepOutcome(samples, scored, reports, lr, self._seconds)

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        with self._watch(name):
            yield
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - started

    def _rollout(self, step: int, prompts: Sequence[np.ndarray]) -> Samples:
        rl = self.plan.config.rl_config
        with self._phase("reshard"):
            self.roles.refresh_generator()
        with self._phase("rollout"):
            self.roles.enter("rollout")
            return generate(
                self.roles.generator,
                self.plan.infer,
                self.backend,
                prompts,
                rl.num_generations,
                Draw(rl.seed, ROLLOUT, step),
                self.roles.policy.version,
            )

    def _score(self, samples: Samples, score: Callable[[Samples], Scored]) -> Scored:
        rl = self.plan.config.rl_config
        with self._phase("score"):
            scored = score(samples)
            samples.advantages = group_advantages(
                scored.scores.total, rl.num_generations, rl.scale_rewards
            )
        return scored

    def _reference(self, samples: Samples) -> None:
        reference, layout = self.roles.reference, self.plan.reference
        if reference is None or layout is None:
            return
        with self._phase("reference"):
            self.roles.enter("reference")
            samples.reference_logps = sample_logps(
                reference.pipeline,
                layout,
                self.backend,
                samples,
            )

    def _old(self, samples: Samples) -> None:
        rl = self.plan.config.rl_config
        if self.plan.batch.updates_per_step == 1 or not rl.enable_oldpolicy:
            return
        with self._phase("old_logps"):
            self.roles.enter("old_logps")
            samples.old_logps = sample_logps(
                self.roles.policy.pipeline,
                self.plan.train,
                self.backend,
                samples,
            )

    def _update(self, step: int, samples: Samples) -> tuple[list[UpdateReport], float]:
        batch = self.plan.batch
        reports: list[UpdateReport] = []
        lr = 0.0
        with self._phase("update"):
            self.roles.enter("update")
            for _ in range(batch.num_iterations):
                for members in np.array_split(np.arange(len(samples)), batch.updates_per_rollout):
                    lr = self._learning_rate(step * batch.updates_per_step + len(reports))
                    reports.append(update(self.roles.policy, samples, members.tolist(), lr))
        return reports, lr

    def _sync_reference(self, step: int) -> None:
        ref = self.plan.config.ref_config
        if ref.sync_ref_model and (step + 1) % ref.ref_model_sync_steps == 0:
            with self._phase("sync_reference"):
                self.roles.sync_reference(ref.ref_model_mixup_alpha)
