"""One step of supervised training on this rank, and the loss on held-out rows.

The update is GRPO's with every advantage 1 and no ratio, so that the loss is the mean negative log-likelihood of the
update's trained tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from mindgrpo.algorithm.packing import PackedRollout
from mindgrpo.algorithm.sample import Rollout, TrainBatch
from mindgrpo.data.prompts import Prompt
from mindgrpo.data.supervised import as_sample
from mindgrpo.grpo.evaluation import Evaluation
from mindgrpo.grpo.metrics import StepOutcome, resources
from mindgrpo.grpo.roles import TrainedRoles
from mindgrpo.grpo.scoring import Scored
from mindgrpo.grpo.state import Run, State
from mindgrpo.grpo.updates import agree_on_batch, make_updates
from mindgrpo.models.pipeline import compute_log_probs
from mindgrpo.rewards.scores import Scores
from mindgrpo.rollout.engine import RolloutStats

# Prefixes of GRPO's metrics that supervised training does not have.
_OF_ROLLOUTS = ("reshard/", "rollout/", "moe/routes_")


def rows_as_rollout(rows: Sequence[Prompt]) -> Rollout:
    """Turns rows into the samples of a rollout, each in a group of its own."""
    samples = tuple(as_sample(number, row.ids) for number, row in enumerate(rows))
    return Rollout(samples, tuple(range(len(samples))))


class SupervisedStepper:
    """Runs the steps of `run`; each is one update with the next rows."""

    def __init__(self, run: Run[TrainedRoles]) -> None:
        self._roles, self._rows = run.roles, run.prompts
        self._learning_rate, self._phases = run.learning_rate, run.phases
        # Graphs that were compiled after this session's first step; None before its end.
        self._late_compiles: int | None = None

    def run(self, state: State) -> StepOutcome:
        """Runs the step that follows `state`, and advances `state`. Collective, with the same outcome on every rank."""
        backend, policy, step = self._roles.backend, self._roles.policy, state.step
        started, compiles = time.perf_counter(), len(backend.compile_log.entries)
        self._rows.position = state.position
        rows = self._rows.begin_step(step)
        rollout = rows_as_rollout(rows)
        ones, count = np.ones(len(rollout), np.float32), len(rollout)
        batch = TrainBatch(rollout, ones)
        bad = agree_on_batch(backend, batch, ones, None, step)
        if self._roles.encoder is not None:
            with self._phases("images"), backend.computing():
                self._roles.encode_images([row.ids for row in rows])
        with self._phases("update"), backend.computing():
            self._roles.enter("update")
            updating = time.perf_counter()
            reports, skipped, lr = make_updates(
                policy,
                batch,
                PackedRollout(rollout, self._roles.image_table),
                [np.arange(count)],
                lambda _: self._learning_rate(step),
                bad,
            )
        ended = time.perf_counter()
        compiles = len(backend.compile_log.entries) - compiles
        self._late_compiles = 0 if self._late_compiles is None else self._late_compiles + compiles
        state.step, state.position = step + 1, self._rows.position
        return StepOutcome(
            batch=batch,
            scored=Scored(Scores({}, ones, np.zeros(count, bool)), []),
            reports=reports,
            lr=lr,
            seconds={"update": ended - updating, "step": ended - started},
            stats=RolloutStats(),
            skipped=skipped,
            late_compiles=self._late_compiles,
        )

    def metrics(self, outcome: StepOutcome) -> dict[str, Any]:
        """Returns the step's metrics, without those that a run adds. Collective."""
        return supervised_metrics(outcome, self._roles, self._rows.position)

    def evaluate(self, rows: Sequence[Prompt], step: int, check: Callable[[], None]) -> Evaluation:
        """Computes the loss on held-out rows. Collective."""
        loss = held_out_loss(self._roles, rows)
        return Evaluation({"loss": loss}, {"eval/loss": loss}, is_loss=True)

    def close(self) -> None:
        """Does nothing: supervised training has no worker processes."""


def supervised_metrics(outcome: StepOutcome, roles: TrainedRoles, rows_used: int) -> dict[str, Any]:
    """Returns a step's metrics, without those that a run adds; `rows_used` counts the whole run's rows. Collective."""
    rollout = outcome.batch.rollout
    report = outcome.reports[0] if outcome.reports else None
    metrics = {
        "loss": None if report is None else report.loss,
        "grad_norm": None if report is None else report.grad_norm,
        "entropy": None if report is None else report.entropy,
        "padding_share": None if report is None else report.padding_share,
        "lr": outcome.lr,
        "tokens": int(rollout.total_lengths.sum()),
        "tokens_learned": int(rollout.action_lengths.sum()),
        "rows_used": rows_used,
        "weights_version": roles.policy.version,
    }
    if report is not None and report.experts is not None:
        metrics |= report.experts.metrics()
    metrics |= resources(outcome, roles)
    return {key: value for key, value in metrics.items() if not key.startswith(_OF_ROLLOUTS)}


def held_out_loss(roles: TrainedRoles, rows: Sequence[Prompt]) -> float:
    """Computes the mean negative log-likelihood of the rows' trained tokens, in nats. Collective.

    Rows are packed in pieces of at most an update's tokens, which bounds memory for any number of rows.
    """
    policy, plan = roles.policy, roles.plan
    mesh, total, count = policy.weights.layout.mesh, 0.0, 0
    most = plan.batch.prompts_per_step * plan.config.rl_config.seq_length
    with roles.backend.computing():
        for some in in_pieces(rows, most):
            roles.encode_images([row.ids for row in some])
            roles.enter("old_logps")
            rollout = rows_as_rollout(some)
            packed = PackedRollout(rollout, roles.image_table)
            logps = compute_log_probs(policy.pipeline, mesh, roles.backend, packed)
            for values, mask in zip(logps, rollout.action_mask, strict=True):
                total += float(values[mask].sum(dtype=np.float64))
                count += int(mask.sum())
    return -total / count


def in_pieces(rows: Sequence[Prompt], most: int) -> Iterator[list[Prompt]]:
    """Splits the rows, in order, into lists of at most `most` tokens each; a longer row is alone in its list."""
    piece: list[Prompt] = []
    tokens = 0
    for row in rows:
        if piece and tokens + len(row.ids) > most:
            yield piece
            piece, tokens = [], 0
        piece.append(row)
        tokens += len(row.ids)
    if piece:
        yield piece
