"""One GRPO step on this rank, one call a phase, each timed: sync, rollout, score, reference, old log-probs, update.

The trainer's loop and the benches run this same code.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

import numpy as np

from mindgrpo.algorithm import non_finite
from mindgrpo.algorithm.advantages import role_baselines, zero_std_groups
from mindgrpo.algorithm.loss_config import AdvantageConfig
from mindgrpo.algorithm.non_finite import NonFinite
from mindgrpo.algorithm.packing import PackedRollout
from mindgrpo.algorithm.rollout_correction import RolloutCorrection
from mindgrpo.algorithm.sample import Arrays, CarriedOver, Rollout, TrainBatch
from mindgrpo.algorithm.train_batch import compute_advantages
from mindgrpo.backend.kernels.shapes import SamplingParams
from mindgrpo.backend.rank_consistency import agree, digest
from mindgrpo.data.prompt_source import PromptSource
from mindgrpo.data.prompts import Prompt
from mindgrpo.grpo.metrics import (
    GapLimit,
    Resampling,
    SkippedUpdate,
    StepOutcome,
    check_gap,
    logprob_gap,
)
from mindgrpo.grpo.roles import Roles
from mindgrpo.grpo.scoring import RolloutScorer, Scored
from mindgrpo.grpo.updates import agree_on_batch, make_updates
from mindgrpo.models.expert_routes import StepExperts
from mindgrpo.models.pipeline import ForwardPipeline, record_log_probs
from mindgrpo.rewards.scores import Scores, mean_of
from mindgrpo.rollout.engine import RolloutStats, SeedKey
from mindgrpo.rollout.noise import ROLLOUT
from mindgrpo.rollout.partial import PartialRollouts
from mindgrpo.rollout.replicas import Replicas
from mindgrpo.training.update import UpdateReport
from mindgrpo.weights.local_weights import Weights

DIFFERENT_DRAWS = "every rank has to draw from the same numbers: give all ranks one configuration, data set and code"

# Surrounds a phase, of which the name is known.
Phases = Callable[[str], AbstractContextManager[object]]


@dataclass(frozen=True)
class StepSettings:
    """`old_logps`: the policy's log-probs before a step's first update are kept even if only later ones need them. They
    are the generator's, not computed again, with `batch_invariant` and without partial rollouts; and with
    `old_are_generators` in every step.

    `resampling_rounds` is how often groups of equal rewards are replaced, 0 without dynamic sampling. The reference
    follows the policy every `reference_sync_steps` steps, never if None. `gap_limit` is of the log-prob gap; None: any.
    `role_column` is the column of rows that names a sample's role for rae; None: all have one. Prompts of which the
    share `no_positive_resampling` of samples have rewards of `pass_threshold` at least are not drawn again; None: all
    are.
    """

    num_generations: int
    seed: int
    sampling: SamplingParams
    advantages: AdvantageConfig
    updates_per_rollout: int = 1
    num_iterations: int = 1
    old_logps: bool = True
    old_are_generators: bool = False
    batch_invariant: bool = False
    resampling_rounds: int = 0
    reference_sync_steps: int | None = None
    gap_limit: GapLimit | None = None
    role_column: str | None = None
    no_positive_resampling: float | None = None
    pass_threshold: float = 1.0

    @property
    def updates_per_step(self) -> int:
        return self.updates_per_rollout * self.num_iterations


class Stepper:
    """`learning_rate` gives the rate of an update, counted from 0 over the run; `phases` surrounds each phase."""

    def __init__(
        self,
        settings: StepSettings,
        roles: Roles,
        replicas: Replicas,
        prompts: PromptSource,
        scorer: RolloutScorer,
        learning_rate: Callable[[int], float],
        phases: Phases = nullcontext,
        partial: PartialRollouts | None = None,
        baselines: Mapping[str, float] | None = None,
    ) -> None:
        self.settings, self.roles, self.backend = settings, roles, replicas.backend
        self.replicas, self._prompts, self._scorer = replicas, prompts, scorer
        self.partial, self._learning_rate, self._phases = partial, learning_rate, phases
        self._baselines = baselines or {}
        self._seconds: dict[str, float] = {}
        # Graphs that were compiled after this session's first step; None before its end.
        self._late_compiles: int | None = None

    @property
    def carried(self) -> CarriedOver:
        """Returns what continues in the next step."""
        unfinished = () if self.partial is None else self.partial.unfinished
        return CarriedOver(unfinished, self._baselines, tuple(sorted(self._prompts.solved)))

    def run(self, step: int) -> StepOutcome:
        """Runs step number `step`, from 0; all ranks together, with the same outcome. Raises GapTooLarge."""
        self._seconds, self.replicas.stats = {}, RolloutStats()
        started, compiles = time.perf_counter(), len(self.backend.compile_log.entries)
        self.roles.weight_check.begin_step(step)
        rollout, scored, resampling = self.collect(step)
        greedy = self.greedy_rewards(step, rollout)
        packed = PackedRollout(rollout)
        reference_logps = old_logps = experts = None
        reference, policy = self.roles.reference, self.roles.policy
        if reference is not None:
            reference_logps, _ = self._log_probs(
                "reference", reference.pipeline, reference.weights, packed
            )
        settings = self.settings
        several = settings.updates_per_step > 1 and settings.old_logps
        if settings.old_are_generators:
            old_logps = rollout.generator_logps
        elif several or settings.advantages.needs_old:
            old_logps = rollout.generator_logps
            # Of partial rollouts older weights wrote some tokens.
            if not settings.batch_invariant or self.partial is not None:
                old_logps, experts = self._log_probs(
                    "old_logps", policy.pipeline, policy.weights, packed
                )
        batch, correction, bad = self._train_batch(
            step, rollout, scored, greedy, old_logps, reference_logps
        )
        reports, skipped, lr = self._update(step, batch, packed, bad, experts)
        self._sync_reference(step)
        self._seconds["step"] = time.perf_counter() - started
        compiles = len(self.backend.compile_log.entries) - compiles
        self._late_compiles = 0 if self._late_compiles is None else self._late_compiles + compiles
        return StepOutcome(
            batch,
            scored,
            reports,
            lr,
            self._seconds,
            self.replicas.stats,
            skipped,
            resampling,
            correction,
            None if self.partial is None else self.partial.metrics,
            self._late_compiles,
            greedy,
            None if settings.no_positive_resampling is None else len(self._prompts.solved),
        )

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        with self._phases(name):
            yield
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - started

    def collect(self, step: int) -> tuple[Rollout, Scored, Resampling | None]:
        """Generates the step's samples and scores them.

        With dynamic sampling (DAPO, arXiv:2503.14476, section 3.2, equation 11) groups whose rewards are all equal
        (advantage 0) are replaced by groups of further prompts; those that are equal after the last round stay.
        """
        settings = self.settings
        if self.partial is not None:
            rollout = self._partial_rollout(step, self.partial)
            return rollout, self._score(rollout), None
        rollout = self._rollout(step, self._prompts.begin_step(step))
        scored = self._score(rollout)
        totals, replaced = [scored.scores.known_totals], 0
        for number in range(1, settings.resampling_rounds + 1):
            is_equal = zero_std_groups(scored.scores.total, settings.num_generations)
            groups = np.flatnonzero(is_equal).tolist()
            if not groups:
                break
            # Numbered beyond every sample of the rounds before, so that no noise is used twice.
            first = number * len(rollout)
            fresh = self._rollout(step, self._prompts.replace(groups), first, groups)
            fresh_scored = self._score(fresh)
            scored = scored.with_replaced(rollout.samples_of(groups), fresh_scored)
            rollout = rollout.with_groups_of(fresh)
            totals.append(fresh_scored.scores.known_totals)
            replaced += len(groups)
        if not settings.resampling_rounds:
            return rollout, scored, None
        mean = mean_of(np.concatenate(totals))
        return rollout, scored, Resampling(len(totals) - 1, replaced, mean)

    def greedy_rewards(self, step: int, rollout: Rollout) -> np.ndarray | None:
        """Returns float [groups], the reward of the likeliest completion of each prompt, nan where it failed.

        None if none is needed.
        """
        settings = self.settings
        if settings.advantages.advantage_estimator != "remax":
            return None
        prompts = self._prompts.owners(rollout.group_ids[:: settings.num_generations])
        likeliest = self._rollout(step, prompts, greedy=True)
        with self._phase("score"):
            scores = self._scorer.score(likeliest, prompts).scores
            return np.where(scores.failed, np.float32(np.nan), scores.total)

    def _rollout(
        self,
        step: int,
        prompts: Sequence[Prompt],
        first: int = 0,
        groups: Sequence[int] | None = None,
        greedy: bool = False,
    ) -> Rollout:
        settings = self.settings

        def generate(key: SeedKey, version: int) -> Rollout:
            count, sampling = settings.num_generations, settings.sampling
            if greedy:
                count, sampling = 1, replace(sampling, temperature=0.0)
            return self.replicas.generate(prompts, count, sampling, key, version, first, groups)

        ids = [prompt.ids for prompt in prompts]
        drawn = {"prompts": digest(ids), "numbers of samples": digest(first)}
        return self._draw(step, drawn, generate)

    def _partial_rollout(self, step: int, partial: PartialRollouts) -> Rollout:
        def generate(key: SeedKey, version: int) -> Rollout:
            return partial.generate(self.settings.sampling, key, version)

        drawn = {"prompts and unfinished completions": digest(partial.begin_step(step))}
        return self._draw(step, drawn, generate)

    def _draw(
        self, step: int, drawn: Mapping[str, str], generate: Callable[[SeedKey, int], Rollout]
    ) -> Rollout:
        """Gives the engine the current weights and calls `generate` with the step's noise key and the weights' version.

        `drawn` are digests of what has to be the same on every rank. Raises RanksDisagree.
        """
        seed = self.settings.seed
        with self._phase("reshard"), self.backend.computing():
            self.roles.refresh_engine()
        with self._phase("rollout"), self.backend.computing():
            version = self.roles.enter_rollout()
            alike = {"rl_config.seed": digest(seed), "step": digest(step), **drawn}
            agree(self.backend, alike, f"before the rollout of step {step + 1}", DIFFERENT_DRAWS)
            return generate(SeedKey(seed, ROLLOUT, step), version)

    def _score(self, rollout: Rollout) -> Scored:
        settings = self.settings
        with self._phase("score"):
            scored = self._scorer.score(rollout, self._prompts.owners(rollout.group_ids))
        if settings.no_positive_resampling is not None:
            # What a reward failed on has the mean of others, but earned nothing.
            passed = (scored.scores.total >= settings.pass_threshold) & ~scored.scores.failed
            rates = passed.reshape(-1, settings.num_generations).mean(1)
            of_groups = rollout.group_ids[:: settings.num_generations]
            are_solved = (rates >= settings.no_positive_resampling).tolist()
            self._prompts.solve(
                [g for g, is_solved in zip(of_groups, are_solved, strict=True) if is_solved]
            )
        return scored

    def _log_probs(
        self, phase: str, pipeline: ForwardPipeline | None, weights: Weights, packed: PackedRollout
    ) -> tuple[Arrays, StepExperts | None]:
        with self._phase(phase), self.backend.computing():
            self.roles.enter(phase)
            return record_log_probs(pipeline, weights.layout.mesh, self.backend, packed)

    def _train_batch(
        self,
        step: int,
        rollout: Rollout,
        scored: Scored,
        greedy: np.ndarray | None,
        old_logps: Arrays | None,
        reference_logps: Arrays | None,
    ) -> tuple[TrainBatch, RolloutCorrection | None, tuple[int, NonFinite] | None]:
        """Returns the batch, the rollout's correction, and (rank, the number) where something is not finite.

        Raises RanksDisagree.
        """
        rewards, correction = scored.scores.total, None
        bad = non_finite.in_rollout(rollout, rewards, reference_logps, old_logps)
        if bad is None:
            config = self.settings.advantages
            decoupled = config.advantage_estimator == "gdpo"
            batch, correction = compute_advantages(
                rollout,
                rewards,
                config,
                old_logps,
                reference_logps,
                scored.turn_rewards,
                scored.scores.components if decoupled else (),
                greedy,
                self._role_baselines(rollout, scored.scores),
                scored.scores.failed,
            )
            bad = non_finite.in_batch(batch)
        else:
            unknown = np.full(len(rollout), np.nan, np.float32)
            batch = TrainBatch(rollout, unknown, None, old_logps, reference_logps)
        return batch, correction, agree_on_batch(self.backend, batch, rewards, bad, step)

    def _role_baselines(self, rollout: Rollout, scores: Scores) -> np.ndarray | None:
        """Returns float64 [samples] of `role_baselines`, once a step; None where the advantages are not rae's."""
        config, column = self.settings.advantages, self.settings.role_column
        if config.advantage_estimator != "rae":
            return None
        roles = [""] * len(rollout)
        if column is not None:
            owners = self._prompts.owners(rollout.group_ids)
            roles = [str(owner.columns[column]) for owner in owners]
        gamma = config.role_baseline_ema_gamma
        own, self._baselines = role_baselines(
            scores.total, roles, self._baselines, gamma, scores.failed
        )
        return own

    def _update(
        self,
        step: int,
        batch: TrainBatch,
        packed: PackedRollout,
        bad: tuple[int, NonFinite] | None,
        experts: StepExperts | None,
    ) -> tuple[list[UpdateReport], list[SkippedUpdate], float]:
        """Makes the step's updates (`make_updates`). Raises GapTooLarge before the weights have changed."""
        settings = self.settings
        shares = np.array_split(np.arange(len(batch)), settings.updates_per_rollout)
        first = step * settings.updates_per_step

        def check(report: UpdateReport) -> None:
            self._check_gap(batch, report)

        with self._phase("update"), self.backend.computing():
            self.roles.enter("update")
            return make_updates(
                self.roles.policy,
                batch,
                packed,
                shares * settings.num_iterations,
                lambda index: self._learning_rate(first + index),
                bad,
                check,
                experts,
            )

    def _check_gap(self, batch: TrainBatch, first: UpdateReport) -> None:
        """Checks the log-prob gap by the report of the step's first update. Raises GapTooLarge."""
        drawn = None if self.partial is None else self.partial.metrics
        # Of tokens that older weights wrote the difference is what the policy has learnt since.
        gap = logprob_gap(batch, [first], None if drawn is None else drawn.version)
        if gap is not None and self.settings.gap_limit is not None:
            check_gap(gap, self.settings.gap_limit)

    def _sync_reference(self, step: int) -> None:
        every = self.settings.reference_sync_steps
        if every is not None and (step + 1) % every == 0:
            with self._phase("sync_reference"):
                self.roles.sync_reference()
