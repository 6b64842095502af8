"""The outcome of a step, and its conversion to rows of metrics.jsonl and per_token.jsonl.

Metrics of updates are means over the updates made, metrics of rewards means over samples with a known reward; a mean
over nothing is None. The log-prob gap's limit is checked here, too.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from mindgrpo.algorithm.advantages import zero_std_groups
from mindgrpo.algorithm.losses import kl_estimate
from mindgrpo.algorithm.non_finite import NonFinite
from mindgrpo.algorithm.rollout_correction import RolloutCorrection
from mindgrpo.algorithm.sample import LENGTH, TrainBatch
from mindgrpo.algorithm.token_arrays import TOKEN_ARRAYS
from mindgrpo.backend.rank_consistency import digest
from mindgrpo.config import Config
from mindgrpo.grpo.roles import Roles, TrainedRoles
from mindgrpo.grpo.scoring import Scored
from mindgrpo.monitor.host_memory import process_rss
from mindgrpo.rewards.scores import mean_of
from mindgrpo.rollout.engine import RolloutStats
from mindgrpo.rollout.partial import PartialMetrics
from mindgrpo.training.critic_update import CriticReport
from mindgrpo.training.update import PerToken, UpdateReport


@dataclass(frozen=True)
class SkippedUpdate:
    """Update `update` of a step (from 0) over samples `members`, skipped for the non-finite `cause` on `rank`."""

    update: int
    members: list[int]
    lr: float
    cause: NonFinite
    rank: int


@dataclass(frozen=True)
class CriticUpdates:
    """The critic's updates of a step: `reports` of those made, how many were `skipped`, and the last one's `lr`."""

    reports: list[CriticReport]
    skipped: int
    lr: float

    def metrics(self) -> dict[str, Any]:
        names = [field.name for field in fields(CriticReport) if field.name != "padding_share"]
        known = {name: [getattr(own, name) for own in self.reports] for name in names}
        means = {name: [one for one in own if one is not None] for name, own in known.items()}
        return {
            **{
                f"critic/{name}": float(np.mean(own)) if own else None
                for name, own in means.items()
            },
            "critic/lr": self.lr,
            "critic/skipped_updates": self.skipped,
        }


@dataclass(frozen=True)
class Resampling:
    """Statistics of dynamic sampling: `groups` were replaced in `rounds`.

    `sampled_mean` is the mean reward of all samples drawn, including replaced ones, because the mean of the kept ones
    is biased; None where no reward is known.
    """

    rounds: int
    groups: int
    sampled_mean: float | None


@dataclass(frozen=True, kw_only=True)
class StepOutcome:
    """The outcome of a step: `reports` of the updates made, `skipped` ones, and the last update's `lr`.

    `seconds` are this rank's times by phase, with the whole step's under "step", and `score_hidden` what reward
    functions took beside other phases; `stats` cover this rank's rollouts of the step. None if the feature is off:
    `resampling` (dynamic sampling), `correction` (importance sampling correction), `partial` (partial rollouts),
    `critic` (its updates), `greedy` (float [groups], rewards of greedy completions for remax) and `solved` (number of
    prompts no longer drawn). `late_compiles` counts graphs compiled after the session's first step.
    """

    batch: TrainBatch
    scored: Scored
    reports: list[UpdateReport]
    lr: float
    seconds: dict[str, float]
    stats: RolloutStats
    skipped: list[SkippedUpdate]
    score_hidden: float = 0.0
    resampling: Resampling | None = None
    correction: RolloutCorrection | None = None
    partial: PartialMetrics | None = None
    late_compiles: int = 0
    greedy: np.ndarray | None = None
    solved: int | None = None
    critic: CriticUpdates | None = None


def step_digests(batch: TrainBatch, rewards: np.ndarray) -> dict[str, str]:
    """Returns digests of a step's batch before the update, by name for messages."""
    rollout = batch.rollout
    weights = batch.token_advantages, batch.rollout_is_weights
    return {
        "prompts": digest(rollout.prompt_ids),
        "completions": digest(rollout.completion_ids, rollout.finish_reasons, rollout.action_mask),
        **{TOKEN_ARRAYS[name].title: digest(rows) for name, rows in rollout.token_arrays.items()},
        "rewards": digest(rewards),
        "the reference's log-probs": digest(batch.reference_logps),
        "the policy's log-probs": digest(batch.old_logps),
        "advantages": digest(batch.advantages, *weights),
        "samples that count": digest(batch.sample_mask),
        "the critic's values": digest(batch.values, batch.returns),
    }


@dataclass(frozen=True)
class GapLimit:
    """A limit on |generator - trainer| log-probs: on a step's largest, or with `of_mean` on the mean."""

    value: float
    of_mean: bool = False


# By dtype, and "medium" for float32_matmul_precision medium; the widest limit first. In 16 bits the log-prob of one
# unlikely token may be off by more than 1, but the mean is steady.
GAP_LIMITS = {
    "bfloat16": GapLimit(0.5, of_mean=True),
    "medium": GapLimit(0.1, of_mean=True),
    "float16": GapLimit(0.05, of_mean=True),
    "float32": GapLimit(0.01),
}


@dataclass(frozen=True)
class LogProbGap:
    """|generator - trainer| log-probs of a step's tokens in nats: mean, largest, and number of `differing` tokens.

    The largest is at index `token` of `sample`, whose two log-probs are `generator` and `trainer`.
    """

    mean: float
    largest: float
    differing: int
    sample: int
    token: int
    generator: float
    trainer: float


class GapTooLarge(RuntimeError):
    """Raised where the generator's and the trainer's log-probs of the same tokens differ by more than the limit."""


def all_metrics(outcome: StepOutcome, roles: Roles, prompts_used: int) -> dict[str, Any]:
    """Returns a step's metrics, without those that a run adds. Collective."""
    metrics = step_metrics(outcome, roles.plan.config.rl_config.num_generations, prompts_used)
    return {**metrics, "weights_version": roles.policy.version, **resources(outcome, roles)}


def gap_limit(
    config: Config, matmul_precision: str, compute_dtype: str, batch_invariant: bool = False
) -> GapLimit | None:
    """Returns the configured limit; for "auto", the widest limit of the precisions that generator and trainer use."""
    limit, generate = config.rl_config.logprob_gap_limit, config.generate_config
    if limit != "auto":
        return None if limit is None else GapLimit(limit)
    if batch_invariant:
        return GapLimit(0.0)
    used = {compute_dtype, matmul_precision, generate.vllm.dtype if generate.uses_vllm else None}
    return next(limit for name, limit in GAP_LIMITS.items() if name in used or name == "float32")


def step_metrics(outcome: StepOutcome, num_generations: int, prompts_used: int) -> dict[str, Any]:
    """Returns the step's metrics; `prompts_used` counts the whole run's prompts."""
    rollout, scores = outcome.batch.rollout, outcome.scored.scores
    lengths, totals = rollout.action_lengths, scores.known_totals
    # Tokens from older weights are left out: their gap is what the policy has learnt since.
    version = None if outcome.partial is None else outcome.partial.version
    gap = logprob_gap(outcome.batch, outcome.reports, version)
    return {
        "reward/mean": mean_of(totals),
        "reward/std": float(totals.std()) if totals.size else None,
        **scores.metrics(),
        **_of_updates(outcome),
        "zero_std_fraction": float(zero_std_groups(scores.total, num_generations).mean()),
        "completion_length/mean": float(lengths.mean()),
        "completion_length/max": int(lengths.max()),
        "truncated_fraction": rollout.finish_reasons.count(LENGTH) / len(rollout),
        "logprob_gap/mean": None if gap is None else gap.mean,
        "logprob_gap/max": None if gap is None else gap.largest,
        "logprob_gap/differing": None if gap is None else gap.differing,
        "tokens": int(rollout.total_lengths.sum()),
        **_of_options(outcome, prompts_used),
    }


def _of_updates(outcome: StepOutcome) -> dict[str, Any]:
    reports = outcome.reports

    def mean(value: Callable[[UpdateReport], float]) -> float | None:
        return float(np.mean([value(report) for report in reports])) if reports else None

    return {
        "loss": mean(lambda report: report.loss),
        # Without a reference none is computed.
        "kl": mean(lambda report: report.kl) if outcome.batch.reference_logps is not None else None,
        "entropy": mean(lambda report: report.entropy),
        "grad_norm": mean(lambda report: report.grad_norm),
        "lr": outcome.lr,
        "clip_fraction": mean(lambda report: report.clip_fraction),
        "clip_fraction/low": mean(lambda report: report.clipped_low),
        "clip_fraction/high": mean(lambda report: report.clipped_high),
        "padding_share": mean(lambda report: report.padding_share),
        "updates_per_rollout": len(reports) + len(outcome.skipped),
    }


def _of_options(outcome: StepOutcome, prompts_used: int) -> dict[str, Any]:
    """Returns the metrics of optional features."""
    metrics: dict[str, Any] = {}
    if outcome.batch.sample_mask is not None:
        metrics["masked_fraction"] = float(1.0 - outcome.batch.sample_mask.mean())
    if outcome.greedy is not None:
        metrics["reward/greedy"] = mean_of(outcome.greedy[~np.isnan(outcome.greedy)])
    if outcome.solved is not None:
        metrics["solved_prompts"] = outcome.solved
    if outcome.resampling is not None:
        metrics |= {
            "dynamic_sampling/rounds": outcome.resampling.rounds,
            "dynamic_sampling/replaced_groups": outcome.resampling.groups,
            "reward/mean_sampled": outcome.resampling.sampled_mean,
            "prompts_used": prompts_used,
        }
    if outcome.partial is not None:
        partial = outcome.partial
        metrics |= {
            "partial_rollout/rounds": partial.rounds,
            "partial_rollout/groups": partial.groups,
            "partial_rollout/unfinished_groups": partial.unfinished_groups,
            "partial_rollout/unfinished_tokens": partial.unfinished_tokens,
            "partial_rollout/age_mean": partial.age_mean,
            "partial_rollout/age_max": partial.age_max,
            "partial_rollout/stale_token_fraction": partial.stale_tokens,
            "prompts_used": prompts_used,
        }
    if outcome.reports and (experts := outcome.reports[0].experts) is not None:
        metrics |= experts.metrics()
    if outcome.correction is not None:
        metrics |= {
            "importance_weight/mean": outcome.correction.mean,
            "importance_weight/max": outcome.correction.largest,
            "importance_weight/capped_fraction": outcome.correction.capped,
        }
    for name, shares in (
        ("unselected_fraction", [report.unselected for report in outcome.reports]),
        ("off_policy_masked_fraction", [report.off_policy for report in outcome.reports]),
    ):
        if known := [share for share in shares if share is not None]:
            metrics[name] = float(np.mean(known))
    if outcome.critic is not None:
        metrics |= outcome.critic.metrics()
    if outcome.batch.rejected is not None:
        metrics["rejected_fraction"] = float(outcome.batch.rejected.mean())
    return metrics


def logprob_gap(
    batch: TrainBatch, reports: Sequence[UpdateReport], version: int | None = None
) -> LogProbGap | None:
    """Returns the log-prob gap over the policy's own tokens; None where no update was made.

    The trainer's log-probs are those before the first update. With a `version`, only tokens generated by that version
    of the weights count.
    """
    trainer = trainer_logps(batch, reports)
    if trainer is None:
        return None
    generator, masks = batch.rollout.generator_logps, batch.rollout.action_mask
    if version is not None:
        versions = batch.rollout.weights_version
        masks = [m & (v == version) for m, v in zip(masks, versions, strict=True)]
    gaps = {
        i: np.where(masks[i], np.abs(logps - generator[i]), 0.0) for i, logps in trainer.items()
    }
    count = sum(int(masks[i].sum()) for i in gaps)
    if not count:
        return LogProbGap(0.0, 0.0, 0, 0, 0, 0.0, 0.0)
    # NaN counts as the largest, as in numpy's max.
    sample = max(gaps, key=lambda i: _order(gaps[i].max(initial=0.0)))
    token = int(gaps[sample].argmax())
    return LogProbGap(
        sum(float(gap.sum(dtype=np.float64)) for gap in gaps.values()) / count,
        float(gaps[sample][token]),
        sum(int((gap != 0).sum()) for gap in gaps.values()),
        sample,
        token,
        float(generator[sample][token]),
        float(trainer[sample][token]),
    )


def _order(value: float) -> float:
    return np.inf if np.isnan(value) else value


def trainer_logps(batch: TrainBatch, reports: Sequence[UpdateReport]) -> PerToken | None:
    """Returns the trainer's log-probs before the first update, by sample; None where it has computed none.

    They are the old log-probs; if the generator's serve as such, the first update's, of its samples only.
    """
    if batch.old_logps is not None and batch.old_logps is not batch.rollout.generator_logps:
        return dict(enumerate(batch.old_logps))
    return reports[0].logps if reports else None


def check_gap(gap: LogProbGap, limit: GapLimit) -> None:
    """Raises GapTooLarge if the gap exceeds the limit."""
    if (gap.mean if limit.of_mean else gap.largest) <= limit.value:
        return
    how = f"by {gap.mean:.3g} in the mean" if limit.of_mean else f"by up to {gap.largest:.3g}"
    rule = f"rl_config.logprob_gap_limit is {limit.value:g}"
    if limit.value == 0.0:
        rule += ", as context.batch_invariant has both computed with the same bits"
    raise GapTooLarge(
        f"the generator's and the trainer's log-probs of the same tokens differ {how} ({rule}), most of all in token "
        f"{gap.token} of sample {gap.sample}: {gap.generator:.9g} and {gap.trainer:.9g}; {gap.differing} tokens "
        "differ. No update is made; the weights were resharded wrongly, are stale, or the two compute another model"
    )


def resources(outcome: StepOutcome, roles: TrainedRoles) -> dict[str, Any]:
    """Returns this rank's times and peaks, and memory and traffic summed over ranks. Collective."""
    traffic, backend = roles.traffic, roles.backend
    copied = roles.host_device_bytes()
    ranks = backend.world.gather_objects(
        (process_rss(), traffic.bytes_received, outcome.stats, copied)
    )
    rollout = RolloutStats.total([rank[2] for rank in ranks])
    peaks, planned = roles.residency.peaks(), roles.residency.planned_peaks()
    return {
        **{f"time/{name}": spent for name, spent in outcome.seconds.items()},
        "time/score_hidden": outcome.score_hidden,
        **{f"memory/device_peak/{phase}": peak for phase, peak in peaks.items()},
        **{f"memory/device_peak_planned/{phase}": size for phase, size in planned.items()},
        "memory/rss": sum(rank[0] for rank in ranks),
        "host_device_bytes": sum(rank[3] for rank in ranks),
        "reshard/bytes": sum(rank[1] for rank in ranks),
        "reshard/seconds": traffic.seconds,
        **rollout.figures(),
        "compiles": len(backend.compile_log.entries),
        "late_compiles": outcome.late_compiles,
    }


_LARGEST = float(np.finfo(np.float16).max)


def encoded(values: np.ndarray) -> str:
    """Returns base64 of little-endian float16; values beyond its range are clipped, nan stays nan."""
    narrow = np.clip(values, -_LARGEST, _LARGEST).astype("<f2")
    return base64.b64encode(narrow.tobytes()).decode("ascii")


def token_rows(
    batch: TrainBatch, reports: Sequence[UpdateReport], kl_estimator: str
) -> Iterator[dict[str, Any]]:
    """Yields a row per sample; encoded arrays are [completion length], nan for tokens that are not the policy's.

    `logprob` is the generator's, and `gap` the trainer's before the first update minus it. `log_ratio` (to the old
    log-probs; 0 without any), `entropy` and `kl` are from the last update with the sample in its loss. Arrays that were
    not computed for a sample are left out.
    """
    trainer = trainer_logps(batch, reports) or {}
    last = {i: report for report in reports for i in report.logps}
    old, reference, in_loss = batch.old_logps, batch.reference_logps, batch.sample_mask
    for i, generator in enumerate(batch.rollout.generator_logps):
        arrays = {"logprob": generator}
        if batch.values is not None:
            arrays["value"] = batch.values[i]
        if i in trainer:
            arrays["gap"] = trainer[i] - generator
        if i in last and (in_loss is None or in_loss[i]):
            logps = last[i].logps[i]
            arrays["log_ratio"] = logps - (logps if old is None else old[i])
            arrays["entropy"] = last[i].entropies[i]
            if reference is not None:
                # k3 of a small difference cancels almost entirely.
                exact = logps.astype(np.float64)
                arrays["kl"] = kl_estimate(exact, reference[i], kl_estimator)
        mask = batch.rollout.action_mask[i]
        texts = {name: encoded(np.where(mask, v, np.nan)) for name, v in arrays.items()}
        yield {"sample": i, "length": len(generator), **texts}
