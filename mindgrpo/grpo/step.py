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

from mindgrpo.algorithm import finite
from mindgrpo.algorithm.credit import assign_credit
from mindgrpo.algorithm.finite import NonFinite, NotFinite
from mindgrpo.algorithm.loss_config import Credit
from mindgrpo.algorithm.rollout_correction import Mismatch
from mindgrpo.algorithm.types import Samples
from mindgrpo.grpo.dynamic_sampling import Refills, refill
from mindgrpo.grpo.rank_consistency import (
    agree,
    check_alike,
    digest,
    step_digests,
)
from mindgrpo.grpo.roles import Roles
from mindgrpo.grpo.rollout import Scored, generate, sample_logps
from mindgrpo.rollout.embedded.engine import Draw
from mindgrpo.rollout.noise import ROLLOUT
from mindgrpo.rollout.stats import Usage
from mindgrpo.training.update import UpdateReport, update

DIFFERENT_DRAWS = "every rank has to draw from the same numbers: give all ranks one configuration, data set and code"
DIFFERENT_SAMPLES = (
    "these are the same on every rank unless memory was damaged or ranks run different code or data"
)
# Scores samples, whose `groups` are numbers of the step's prompts.
Score = Callable[[Samples], Scored]
# Further prompts, int32 [n] each, for the groups of these numbers.
Prompts = Callable[[Sequence[int]], Sequence[np.ndarray]]


@dataclass(frozen=True)
class Skip:
    """Update number `update` of the step (from 0) over samples `members` was not made, for what `rank` found."""

    update: int
    members: list[int]
    lr: float
    found: NonFinite
    rank: int


@dataclass(frozen=True)
class StepOutcome:
    """`reports` are of the updates that were made; `lr` is the last update's.

    `seconds` by phase on this rank, and of the whole under "step". `usage` is this rank's, of all the step's rollouts.
    `refills` is None without dynamic sampling, `mismatch` without a correction for the generator.
    """

    samples: Samples
    scored: Scored
    reports: list[UpdateReport]
    lr: float
    seconds: dict[str, float]
    usage: Usage
    skipped: list[Skip]
    refills: Refills | None = None
    mismatch: Mismatch | None = None


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
        self._credit = Credit.of(roles.plan.config)
        self._learning_rate = learning_rate
        self._seconds: dict[str, float] = {}
        self._usages: list[Usage] = []

    def run(
        self,
        step: int,
        prompts: Sequence[np.ndarray],
        score: Score,
        further: Prompts | None = None,
    ) -> StepOutcome:
        """Step number `step` on `prompts` (int32 [n] each); all ranks together, the same outcome on each.

        Dynamic sampling, where it is configured, needs `further`.
        """
        self._seconds, self._usages = {}, []
        self.roles.weight_check.begin_step(step)
        started = time.perf_counter()
        samples = self._rollout(step, prompts)
        scored = self._score(samples, score)
        refills = None
        if self.plan.config.rl_config.dynamic_sampling:
            if further is None:
                raise ValueError("dynamic sampling needs further prompts")
            scored, refills = self._refill(step, samples, scored, score, further)
        self._reference(samples)
        self._old(samples)
        mismatch, bad = self._assign_credit(step, samples, scored)
        reports, skipped, lr = self._update(step, samples, bad)
        self._sync_reference(step)
        self._seconds["step"] = time.perf_counter() - started
        usage = Usage.total(self._usages)
        return StepOutcome(
            samples, scored, reports, lr, self._seconds, usage, skipped, refills, mismatch
        )

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        with self._watch(name):
            yield
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - started

    def _rollout(self, step: int, prompts: Sequence[np.ndarray], first: int = 0) -> Samples:
        rl = self.plan.config.rl_config
        with self._phase("reshard"):
            self.roles.refresh_generator()
        with self._phase("rollout"):
            self.roles.enter("rollout")
            self.roles.check_generator()
            drawn = {"rl_config.seed": digest(rl.seed), "step": digest(step)}
            drawn |= {"prompts": digest(list(prompts)), "numbers of samples": digest(first)}
            agree(self.backend, drawn, f"before the rollout of step {step + 1}", DIFFERENT_DRAWS)
            samples = generate(
                self.roles.generator,
                self.plan.infer,
                self.backend,
                prompts,
                rl.num_generations,
                Draw(rl.seed, ROLLOUT, step),
                self.roles.policy.version,
                first,
            )
        self._usages.append(self.roles.generator.usage)
        return samples

    def _score(self, samples: Samples, score: Score) -> Scored:
        with self._phase("score"):
            return score(samples)

    def _refill(
        self, step: int, samples: Samples, scored: Scored, score: Score, further: Prompts
    ) -> tuple[Scored, Refills]:
        rl = self.plan.config.rl_config

        def draw(number: int, groups: Sequence[int]) -> tuple[Samples, Scored]:
            # Numbered beyond every sample of the rounds before, so that no noise is used twice.
            fresh = self._rollout(step, further(groups), number * len(samples))
            fresh.groups = [group for group in groups for _ in range(rl.num_generations)]
            return fresh, self._score(fresh, score)

        return refill(samples, scored, rl.num_generations, rl.refill_rounds, draw)

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
        several = self.plan.batch.updates_per_step > 1
        if not self._credit.needs_old and not (
            several and self.plan.config.rl_config.enable_oldpolicy
        ):
            return
        with self._phase("old_logps"):
            self.roles.enter("old_logps")
            samples.old_logps = sample_logps(
                self.roles.policy.pipeline,
                self.plan.train,
                self.backend,
                samples,
            )

    def _assign_credit(
        self, step: int, samples: Samples, scored: Scored
    ) -> tuple[Mismatch | None, tuple[int, NonFinite] | None]:
        """Also (rank, what is not finite there), if it is anywhere. Raises RanksDisagree."""
        rewards = scored.scores.total
        mismatch = None
        bad = finite.in_rollout(samples, rewards)
        if bad is None:
            mismatch = assign_credit(samples, rewards, self._credit)
            bad = finite.in_credit(samples)
        told = self.backend.world.gather_objects((bad, step_digests(samples, rewards)))
        found = next(
            ((rank, each) for rank, (each, _) in enumerate(told) if each is not None), None
        )
        if found is None:
            check_alike([digests for _, digests in told], f"in step {step + 1}", DIFFERENT_SAMPLES)
        return mismatch, found

    def _update(
        self, step: int, samples: Samples, bad: tuple[int, NonFinite] | None
    ) -> tuple[list[UpdateReport], list[Skip], float]:
        """No update at all of samples with something `bad`."""
        batch = self.plan.batch
        reports: list[UpdateReport] = []
        skipped: list[Skip] = []
        lr = 0.0
        shares = np.array_split(np.arange(len(samples)), batch.updates_per_rollout)
        with self._phase("update"):
            self.roles.enter("update")
            for index, share in enumerate(shares * batch.num_iterations):
                members = share.tolist()
                lr = self._learning_rate(step * batch.updates_per_step + index)
                if bad is not None:
                    skipped.append(Skip(index, members, lr, bad[1], bad[0]))
                    continue
                try:
                    reports.append(update(self.roles.policy, samples, members, lr))
                except NotFinite as error:
                    skipped.append(Skip(index, members, lr, error.found, error.rank))
        return reports, skipped, lr

    def _sync_reference(self, step: int) -> None:
        ref = self.plan.config.ref_config
        if ref.sync_ref_model and (step + 1) % ref.ref_model_sync_steps == 0:
            with self._phase("sync_reference"):
                self.roles.sync_reference()
