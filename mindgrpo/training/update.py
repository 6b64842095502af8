"""One optimizer update over chosen samples: packed, weighted over the whole batch, and what came of it.

Refuses to choose the samples or the learning rate, and to make an update of numbers that are not finite.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mindgrpo.algorithm import finite, packing
from mindgrpo.algorithm import losses as loss
from mindgrpo.algorithm.finite import NonFinite, NotFinite
from mindgrpo.algorithm.loss_config import Objective
from mindgrpo.algorithm.packing import MicroBatch
from mindgrpo.algorithm.types import Samples
from mindgrpo.training.policy import Policy

PerToken = dict[int, np.ndarray]


@dataclass(frozen=True)
class UpdateReport:
    """`logps` by sample, before the update; means and fractions are over the tokens that have a part in the loss.

    `clipped_low` and `clipped_high` are the shares of tokens, with ratios of whole samples the shares of samples, that
    either end of the clip decided; `padding_share` is of the rows'
    places.
    """

    loss: float
    kl: float
    entropy: float
    clipped_low: float
    clipped_high: float
    grad_norm: float
    logps: PerToken
    padding_share: float

    @property
    def clip_fraction(self) -> float:
        return self.clipped_low + self.clipped_high


def update(policy: Policy, samples: Samples, members: Sequence[int], lr: float) -> UpdateReport:
    """All ranks together; the loss is normalised over `members`, whatever rank or row they are on.

    Raises NotFinite, on all ranks alike and with weights and moments untouched, where a log-prob, the loss or the
    gradient is not finite.
    """
    backend, settings = policy.backend, policy.settings
    grid = policy.weights.layout.grid
    place = grid.coordinates(backend.rank)
    rows = packing.pack(samples, members, settings.shape)
    batches = packing.micro_batches(samples, rows, settings.shape, grid.data_parallel, place.data)
    weights = _weights(samples, members, settings.objective)
    has_old = samples.old_logps is not None
    extras = [_extras(batch, samples, weights, settings.objective) for batch in batches]
    results = policy.accumulate(batches, extras, has_old)
    own = None
    if results is not None and place.model == 0:
        logps: PerToken = {}
        entropy: PerToken = {}
        for batch, result in zip(batches, results, strict=True):
            logps |= batch.gather(result.logps)
            entropy |= batch.gather(result.entropy)
        own = (logps, entropy)
    parts = [part for part in backend.world.gather_objects(own) if part is not None]
    norm = policy.gradient_norm()
    places = len(batches) * settings.shape.tokens * grid.data_parallel
    padding = packing.padding_share(rows, places)
    report = _report(settings.objective, samples, parts, weights, norm, padding)
    _refuse_non_finite(policy, report)
    policy.apply(norm, lr)
    return report


def _refuse_non_finite(policy: Policy, report: UpdateReport) -> None:
    bad = finite.in_logps(report.logps) or finite.in_arrays([("the loss", report.loss)])
    norm = None
    if bad is None and not np.isfinite(report.grad_norm):
        bad = policy.bad_gradient()
        norm = NonFinite("the gradient norm", report.grad_norm)
    told = policy.backend.world.gather_objects((bad, norm))
    # A rank that sees no more than a norm leaves the word to one that sees the gradient.
    for kind in (0, 1):
        for rank, pair in enumerate(told):
            found = pair[kind]
            if found is not None:
                policy.clear_gradients()
                raise NotFinite(found, rank, "the update was not made")


def _weights(samples: Samples, members: Sequence[int], objective: Objective) -> np.ndarray:
    """float32 [samples], 0 for those that are no members."""
    chosen = list(members)
    counted = None if samples.counted is None else samples.counted[chosen]
    weights = np.zeros(len(samples), np.float32)
    weights[chosen] = loss.token_weights(samples.completion_lengths[chosen], objective, counted)
    return weights


def _extras(
    batch: MicroBatch, samples: Samples, weights: np.ndarray, objective: Objective
) -> tuple[np.ndarray, ...]:
    """What PolicyLoss takes after the entropy; what its objective does not read is all zeros."""
    none = np.zeros(batch.picks.size, np.float32)

    def spread(values: Sequence[np.ndarray] | np.ndarray | None) -> np.ndarray:
        return none if values is None else batch.spread(values)

    segments = (none.astype(np.int32), none)
    if objective.by_sequence:
        segments = batch.segments()
    return (
        spread(samples.old_logps),
        spread(samples.reference_logps),
        spread(_advantages(samples)),
        spread(weights),
        spread(samples.factors),
        *segments,
    )


def _advantages(samples: Samples) -> Sequence[np.ndarray] | np.ndarray:
    return samples.advantages if samples.token_advantages is None else samples.token_advantages


def _report(
    objective: Objective,
    samples: Samples,
    parts: Sequence[tuple[PerToken, PerToken]],
    weights: np.ndarray,
    norm: float,
    padding: float,
) -> UpdateReport:
    logps: PerToken = {}
    entropy: PerToken = {}
    for part_logps, part_entropy in parts:
        logps |= part_logps
        entropy |= part_entropy
    tokens = _tokens(samples, logps, entropy, weights)
    kl = np.zeros(0)
    if samples.reference_logps is not None:
        kl = loss.kl_estimate(tokens.logps, tokens.reference, objective.kl_estimator)
    low, high = loss.clipped(tokens, objective)
    return UpdateReport(
        loss=loss.policy_loss(tokens, objective),
        kl=_mean(kl),
        entropy=_mean(tokens.entropy),
        clipped_low=_mean(low),
        clipped_high=_mean(high),
        grad_norm=norm,
        logps=logps,
        padding_share=padding,
    )


def _tokens(
    samples: Samples, logps: PerToken, entropy: PerToken, weights: np.ndarray
) -> loss.Tokens:
    """The update's tokens that count, in float64 and in the order of the samples, for the graph's loss again.

    On-policy the loss is a sum that cancels to nearly nothing, where float32 would show the order of
    the rows, and so the layout, in every digit.
    """
    order = [i for i in sorted(logps) if weights[i] > 0]
    lengths = np.array([logps[i].size for i in order], np.int64)

    def tokens(values: PerToken | Sequence[np.ndarray] | np.ndarray | None) -> np.ndarray:
        if values is None:
            return own
        parts = [np.broadcast_to(values[i], logps[i].shape) for i in order]
        return np.concatenate([*parts, np.zeros(0)])

    own = np.concatenate([*(logps[i] for i in order), np.zeros(0)])
    return loss.Tokens(
        logps=own,
        old=tokens(samples.old_logps),
        reference=tokens(samples.reference_logps),
        entropy=tokens(entropy),
        advantages=tokens(_advantages(samples)),
        weights=tokens(weights),
        factors=np.ones(own.size) if samples.factors is None else tokens(samples.factors),
        lengths=lengths,
    )


def _mean(values: np.ndarray) -> float:
    """0.0 where there is no token at all."""
    return float(values.mean()) if values.size else 0.0
