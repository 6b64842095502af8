"""One GRPO step on this rank, in timed phases: weight sync, rollout, score, reference, old log-probs, update.

The trainer's loop and the benchmarks run this same code.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from mindgrpo.algorithm import non_finite
from mindgrpo.algorithm.advantages import role_baselines, zero_std_groups
from mindgrpo.algorithm.non_finite import NonFinite
from mindgrpo.algorithm.packing import PackedRollout
from mindgrpo.algorithm.rollout_correction import RolloutCorrection
from mindgrpo.algorithm.sample import Arrays, Rollout, TrainBatch
from mindgrpo.algorithm.train_batch import compute_advantages
from mindgrpo.backend.rank_consistency import agree, digest
from mindgrpo.data.prompts import Prompt
from mindgrpo.grpo.build import evaluation_modes
from mindgrpo.grpo.ended_groups import EndedGroups
from mindgrpo.grpo.evaluation import Evaluation, Evaluator
from mindgrpo.grpo.metrics import (
    CriticUpdates,
    Resampling,
    SkippedUpdate,
    StepOutcome,
    all_metrics,
    check_gap,
    gap_limit,
    logprob_gap,
)
from mindgrpo.grpo.roles import Roles
from mindgrpo.grpo.scoring import RolloutScorer, Scored
from mindgrpo.grpo.state import Run, State
from mindgrpo.grpo.updates import agree_on_batch, make_critic_updates, make_updates
from mindgrpo.models.expert_routes import StepExperts
from mindgrpo.models.pipeline import ForwardPipeline, record_log_probs
from mindgrpo.rewards.scores import Scores, mean_of
from mindgrpo.rollout.conversations import Conversations
from mindgrpo.rollout.engine import Capabilities, RolloutStats, SeedKey
from mindgrpo.rollout.noise import ROLLOUT
from mindgrpo.rollout.partial import PartialRollouts, PartialSettings
from mindgrpo.rollout.replicas import Replicas
from mindgrpo.rollout.turns import turn_metrics
from mindgrpo.training.update import UpdateReport
from mindgrpo.weights.local_weights import Weights

# Waits for the scores of a rollout; collective.
Scoring = Callable[[], Scored]
DIFFERENT_DRAWS = "every rank has to draw from the same numbers: give all ranks one configuration, data set and code"


class Stepper:
    """Runs the steps of `run`: `replicas` (or `partial`, for partial rollouts) draw samples, `scorer` scores them."""

    def __init__(
        self,
        run: Run[Roles],
        replicas: Replicas,
        scorer: RolloutScorer,
        partial: PartialRollouts | None = None,
    ) -> None:
        self._run, self.config = run, run.config
        self.backend, self.roles = run.backend, run.roles
        self.replicas, self.scorer, self.partial = replicas, scorer, partial
        self._sampling, self._prompts = run.inputs.sampling, run.prompts
        self._phases = run.phases
        self._baselines: Mapping[str, float] = {}
        self._seconds: dict[str, float] = {}
        self._score_hidden = 0.0
        # Graphs that were compiled after this session's first step; None before its end.
        self._late_compiles: int | None = None

    def run(self, state: State) -> StepOutcome:
        """Runs the step that follows `state`, and advances `state`. Collective, with the same outcome on every rank.

        Raises GapTooLarge.
        """
        step, rl = state.step, self.config.rl_config
        self._seconds, self.replicas.stats = {}, RolloutStats()
        self._score_hidden = 0.0
        self._prompts.position, self._prompts.solved = state.position, set(state.solved)
        self._baselines = state.baselines
        if self.partial is not None:
            self.partial.unfinished = state.unfinished
        started, compiles = time.perf_counter(), len(self.backend.compile_log.entries)
        self.roles.weight_check.begin_step(step)
        rollout, scores, resampling = self.collect(step)
        greedy = None
        if rl.estimator.needs_greedy:
            scores = _ready(scores())
            greedy = self.greedy_rewards(step, rollout)
        packed = PackedRollout(rollout, self.roles.image_table)
        reference_logps = self._reference_logps(packed)
        old_logps, experts = self._old_logps(rollout, packed)
        values = self._values(packed)
        scored = scores()
        batch, correction, bad = self._train_batch(
            step, rollout, scored, greedy, old_logps, reference_logps, values
        )
        critic = self._update_critic(step, batch, packed, bad)
        reports, skipped, lr = self._update(step, batch, packed, bad, experts)
        self._sync_reference(step)
        self._seconds["step"] = time.perf_counter() - started
        compiles = len(self.backend.compile_log.entries) - compiles
        self._late_compiles = 0 if self._late_compiles is None else self._late_compiles + compiles
        self._commit(state)
        return StepOutcome(
            batch=batch,
            scored=scored,
            reports=reports,
            lr=lr,
            seconds=self._seconds,
            score_hidden=self._score_hidden,
            stats=self.replicas.stats,
            skipped=skipped,
            resampling=resampling,
            correction=correction,
            partial=None if self.partial is None else self.partial.metrics,
            late_compiles=self._late_compiles,
            greedy=greedy,
            solved=None if rl.no_positive_resampling is None else len(state.solved),
            critic=critic,
        )

    def _commit(self, state: State) -> None:
        state.step += 1
        state.position, state.solved = self._prompts.position, frozenset(self._prompts.solved)
        state.baselines = self._baselines
        state.unfinished = () if self.partial is None else self.partial.unfinished

    def metrics(self, outcome: StepOutcome) -> dict[str, Any]:
        """Returns the step's metrics, without those that a run adds. Collective."""
        metrics = all_metrics(outcome, self.roles, self._prompts.position)
        turns = self._run.inputs.turns
        if turns is not None:
            metrics |= turn_metrics(outcome.batch.rollout.messages, turns.names)
        return metrics

    def evaluate(
        self, prompts: Sequence[Prompt], step: int, check: Callable[[], None]
    ) -> Evaluation:
        """Evaluates the policy on held-out prompts after `step` steps. Collective.

        `check` is called between generating and scoring; its exceptions propagate.
        """
        if self.roles.encoder is not None:
            self.roles.encode_images(self._shown_ids(prompts))
        self.roles.refresh_engine()
        version = self.roles.enter_rollout()
        modes = evaluation_modes(self.config, self._sampling)
        evaluator = Evaluator(self.replicas, self.scorer, self.config.rl_config.seed)
        return Evaluation.of(evaluator.run(prompts, modes, step, version, check))

    def close(self) -> Capabilities:
        """Ends the processes of rewards, tools, environments and the engine; returns the engine's capabilities."""
        self.scorer.close()
        if self.replicas.conversations is not None:
            self.replicas.conversations.close()
        engine = self.roles.engine.capabilities
        self.roles.engine.close()
        return engine

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        with self._phases(name):
            yield
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - started

    def collect(self, step: int) -> tuple[Rollout, Scoring, Resampling | None]:
        """Generates the step's samples, and starts to score them.

        With dynamic sampling (DAPO, arXiv:2503.14476, section 3.2, equation 11), groups whose rewards are all equal
        (advantage 0) are replaced with groups of new prompts; those still equal after the last round are kept. Scores
        are waited for at once then.
        """
        rl = self.config.rl_config
        if self.partial is not None:
            rollout = self._partial_rollout(step, self.partial)
            return rollout, self._begin_score(rollout), None
        rollout, ended = self._rollout(step, self._prompts.begin_step(step))
        scores = self._begin_score(rollout, ended)
        if not rl.resampling_rounds:
            return rollout, scores, None
        scored = scores()
        totals, replaced = [scored.scores.known_totals], 0
        for number in range(1, rl.resampling_rounds + 1):
            is_equal = zero_std_groups(scored.scores.total, rl.num_generations)
            groups = np.flatnonzero(is_equal).tolist()
            if not groups:
                break
            # Sample numbers continue behind those of earlier rounds, so that no noise is used twice.
            first = number * len(rollout)
            fresh, ended = self._rollout(step, self._prompts.replace(groups), first, groups)
            fresh_scored = self._begin_score(fresh, ended)()
            scored = scored.with_replaced(rollout.samples_of(groups), fresh_scored)
            rollout = rollout.with_groups_of(fresh)
            totals.append(fresh_scored.scores.known_totals)
            replaced += len(groups)
        mean = mean_of(np.concatenate(totals))
        return rollout, _ready(scored), Resampling(len(totals) - 1, replaced, mean)

    def greedy_rewards(self, step: int, rollout: Rollout) -> np.ndarray:
        """Returns the reward of each prompt's greedy completion (remax), float [groups], nan where scoring failed."""
        groups = rollout.group_ids[:: self.config.rl_config.num_generations]
        prompts = self._prompts.owners(groups)
        likeliest, _ = self._rollout(step, prompts, greedy=True)
        with self._phase("score"):
            scores = self.scorer.score(likeliest, prompts).scores
            return np.where(scores.failed, np.float32(np.nan), scores.total)

    def _rollout(
        self,
        step: int,
        prompts: Sequence[Prompt],
        first: int = 0,
        groups: Sequence[int] | None = None,
        greedy: bool = False,
    ) -> tuple[Rollout, EndedGroups | None]:
        """Returns samples of the prompts, and what has scored those of this replica as they ended, if it does."""
        count, sampling = self.config.rl_config.num_generations, self._sampling
        ended = None
        if self.config.reward_config.score_as_ended and not greedy:
            ended = self.scorer.ended_groups(prompts, count, first)
        if greedy:
            count, sampling = 1, replace(sampling, temperature=0.0)

        def generate(key: SeedKey, version: int) -> Rollout:
            add = None if ended is None else ended.add
            return self.replicas.generate(
                prompts, count, sampling, key, version, first, groups, add
            )

        self._encode_images(self._shown_ids(prompts), keeps=first > 0 or greedy)
        ids = [prompt.ids for prompt in prompts]
        drawn = {"prompts": digest(ids), "numbers of samples": digest(first)}
        return self._draw(step, drawn, generate), ended

    def _partial_rollout(self, step: int, partial: PartialRollouts) -> Rollout:
        def generate(key: SeedKey, version: int) -> Rollout:
            return partial.generate(self._sampling, key, version)

        drawn = {"prompts and unfinished completions": digest(partial.begin_step(step))}
        self._encode_images(partial.prompts)
        return self._draw(step, drawn, generate)

    def _shown_ids(self, prompts: Sequence[Prompt]) -> list[np.ndarray]:
        """Returns the ids of prompts that are generated from: an environment has its own."""
        opens = self.config.rl_config.environment is not None
        return [] if opens else [prompt.ids for prompt in prompts]

    def _encode_images(self, prompts: Sequence[np.ndarray], keeps: bool = False) -> None:
        """Encodes the prompts' images that have no features yet, and frees others unless it `keeps` them."""
        if self.roles.encoder is None:
            return
        with self._phase("images"), self.backend.computing():
            self.roles.encode_images(prompts, keeps)

    def _draw(
        self, step: int, drawn: Mapping[str, str], generate: Callable[[SeedKey, int], Rollout]
    ) -> Rollout:
        """Refreshes the engine's weights, then calls `generate` with the step's noise key and the weights' version.

        `drawn` are digests that have to agree on every rank. Raises RanksDisagree.
        """
        seed = self.config.rl_config.seed
        with self._phase("reshard"), self.backend.computing():
            self.roles.refresh_engine()
        with self._phase("rollout"), self.backend.computing():
            version = self.roles.enter_rollout()
            alike = {"rl_config.seed": digest(seed), "step": digest(step), **drawn}
            agree(self.backend, alike, f"before the rollout of step {step + 1}", DIFFERENT_DRAWS)
            return generate(SeedKey(seed, ROLLOUT, step), version)

    def _begin_score(self, rollout: Rollout, ended: EndedGroups | None = None) -> Scoring:
        prompts = self._prompts.owners(rollout.group_ids)
        as_ended = self.config.reward_config.score_as_ended
        with self._phase("score"):
            wait: Scoring
            if as_ended:
                wait = functools.partial(self.scorer.wait_for_ended, rollout, prompts, ended)
            else:
                wait = self.scorer.begin(rollout, prompts)
        begun = time.perf_counter()

        def scores() -> Scored:
            started = time.perf_counter()
            self._run.beside("score", started - begun)
            with self._phase("score"):
                scored = wait()
            reports, waited = scored.scores.reports.values(), time.perf_counter() - started
            longest = max((report.seconds for report in reports), default=0.0)
            # Functions have worked since `begun`, or whenever groups had ended.
            hidden = longest - waited if as_ended else min(started - begun, longest)
            self._score_hidden += max(0.0, hidden)
            self._solve(rollout, scored.scores)
            return scored

        return scores

    def _solve(self, rollout: Rollout, scores: Scores) -> None:
        """Notes prompts that the policy has solved (rl_config.no_positive_resampling)."""
        rl = self.config.rl_config
        if rl.no_positive_resampling is None:
            return
        # A sample whose reward failed has the mean of others as its total, which does not count as passed.
        passed = (scores.total >= rl.eval_pass_threshold) & ~scores.failed
        rates = passed.reshape(-1, rl.num_generations).mean(1)
        of_groups = rollout.group_ids[:: rl.num_generations]
        are_solved = (rates >= rl.no_positive_resampling).tolist()
        self._prompts.solve(
            [g for g, is_solved in zip(of_groups, are_solved, strict=True) if is_solved]
        )

    def _reference_logps(self, packed: PackedRollout) -> Arrays | None:
        reference = self.roles.reference
        if reference is None:
            return None
        pipeline, weights = reference.pipeline, reference.weights
        return self._log_probs("reference", pipeline, weights, packed)[0]

    def _old_logps(
        self, rollout: Rollout, packed: PackedRollout
    ) -> tuple[Arrays | None, StepExperts | None]:
        """Returns the old log-probs, None if the loss needs none, and the experts that their forward pass recorded.

        With batch-invariant kernels the generator's log-probs are reused: they are the same bits, except for tokens
        that older weights generated (partial rollouts).
        """
        rl = self.config.rl_config
        if rl.old_source == "generator":
            return rollout.generator_logps, None
        several = self._run.inputs.plan.batch.updates_per_step > 1 and rl.enable_oldpolicy
        if not several and not rl.needs_old:
            return None, None
        if self.backend.kernels.batch_invariant and self.partial is None:
            return rollout.generator_logps, None
        policy = self.roles.policy
        return self._log_probs("old_logps", policy.pipeline, policy.weights, packed)

    def _values(self, packed: PackedRollout) -> Arrays | None:
        """Returns the critic's values, float32 [completion length] per sample; None without a critic."""
        critic = self.roles.critic
        if critic is None:
            return None
        return self._log_probs("values", critic.pipeline, critic.weights, packed)[0]

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
        values: Arrays | None,
    ) -> tuple[TrainBatch, RolloutCorrection | None, tuple[int, NonFinite] | None]:
        """Computes advantages; returns the batch, the correction, and (rank, number) of a non-finite number or None.

        Raises RanksDisagree.
        """
        rewards, correction, rl = scored.scores.total, None, self.config.rl_config
        bad = non_finite.in_rollout(rollout, rewards, reference_logps, old_logps, values)
        if bad is None:
            batch, correction = compute_advantages(
                rollout,
                rewards,
                rl,
                old_logps,
                reference_logps,
                scored.turn_rewards,
                scored.scores.components if rl.estimator.by_function else (),
                greedy,
                self._role_baselines(rollout, scored.scores),
                scored.scores.failed,
                values,
            )
            bad = non_finite.in_batch(batch)
        else:
            unknown = np.full(len(rollout), np.nan, np.float32)
            batch = TrainBatch(rollout, unknown, None, old_logps, reference_logps)
        return batch, correction, agree_on_batch(self.backend, batch, rewards, bad, step)

    def _role_baselines(self, rollout: Rollout, scores: Scores) -> np.ndarray | None:
        """Updates rae's moving averages, once per step; returns the baselines, float64 [samples], None without rae."""
        rl = self.config.rl_config
        column = rl.role_column
        if not rl.estimator.needs_baselines:
            return None
        roles = [""] * len(rollout)
        if column is not None:
            owners = self._prompts.owners(rollout.group_ids)
            roles = [str(owner.columns[column]) for owner in owners]
        gamma = rl.role_baseline_ema_gamma
        own, self._baselines = role_baselines(
            scores.total, roles, self._baselines, gamma, scores.failed
        )
        return own

    def _shares(self, batch: TrainBatch) -> list[np.ndarray]:
        """Returns the samples of each of the step's updates."""
        shares = np.array_split(
            np.arange(len(batch)), self._run.inputs.plan.batch.updates_per_rollout
        )
        return shares * self.config.rl_config.num_iterations

    def _update_critic(
        self,
        step: int,
        batch: TrainBatch,
        packed: PackedRollout,
        bad: tuple[int, NonFinite] | None,
    ) -> CriticUpdates | None:
        """Runs the critic's updates of the step, before the policy's; None without a critic."""
        critic, first = self.roles.critic, step * self._run.inputs.plan.batch.updates_per_step
        if critic is None:
            return None
        with self._phase("update_critic"), self.backend.computing():
            self.roles.enter("update_critic")
            return make_critic_updates(
                critic,
                batch,
                packed,
                self._shares(batch),
                lambda index: self._run.critic_rate(first + index),
                bad,
            )

    def _update(
        self,
        step: int,
        batch: TrainBatch,
        packed: PackedRollout,
        bad: tuple[int, NonFinite] | None,
        experts: StepExperts | None,
    ) -> tuple[list[UpdateReport], list[SkippedUpdate], float]:
        """Runs the step's updates (`make_updates`). Raises GapTooLarge before any weight has changed."""
        first = step * self._run.inputs.plan.batch.updates_per_step
        if step < self.config.rl_config.critic_warmup:
            return [], [], self._run.learning_rate(first)

        def check(report: UpdateReport) -> None:
            self._check_gap(batch, report)

        with self._phase("update"), self.backend.computing():
            self.roles.enter("update")
            return make_updates(
                self.roles.policy,
                batch,
                packed,
                self._shares(batch),
                lambda index: self._run.learning_rate(first + index),
                bad,
                check,
                experts,
            )

    def _check_gap(self, batch: TrainBatch, first: UpdateReport) -> None:
        """Checks the log-prob gap with the report of the step's first update. Raises GapTooLarge."""
        drawn = None if self.partial is None else self.partial.metrics
        # Tokens from older weights are left out: their gap is what the policy has learnt since.
        gap = logprob_gap(batch, [first], None if drawn is None else drawn.version)
        backend = self.backend
        limit = gap_limit(
            self.config,
            backend.matmul_precision,
            backend.compute_dtype,
            backend.kernels.batch_invariant,
        )
        if gap is not None and limit is not None:
            check_gap(gap, limit)

    def _sync_reference(self, step: int) -> None:
        ref = self.config.ref_config
        if ref.sync_ref_model and (step + 1) % ref.ref_model_sync_steps == 0:
            with self._phase("sync_reference"):
                self.roles.sync_reference()


def _ready(scored: Scored) -> Scoring:
    return lambda: scored


def make_stepper(
    run: Run[Roles], scorer: RolloutScorer, conversations: Conversations | None = None
) -> Stepper:
    """Builds the Stepper, with whole or partial rollouts as configured."""
    plan = run.inputs.plan
    replicas = Replicas(run.roles.engine, plan.infer.mesh, run.backend, conversations)
    settings = PartialSettings.of(plan.batch)
    partial = None if settings is None else PartialRollouts(settings, run.prompts, replicas)
    return Stepper(run, replicas, scorer, partial)
