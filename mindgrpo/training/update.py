"""One optimizer update over chosen samples of a batch, weighted over all of them, and what came of it.

Samples that have a gradient go forward and backward, the others only forward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mindgrpo.algorithm import losses, non_finite
from mindgrpo.algorithm.non_finite import NonFinite, NonFiniteUpdate
from mindgrpo.algorithm.packing import (
    MicroBatch,
    PackedRollout,
    PackedRow,
    num_micro_batches,
    padding_share,
)
from mindgrpo.algorithm.sample import Arrays, TrainBatch
from mindgrpo.algorithm.surrogates import LossConfig, Tokens
from mindgrpo.algorithm.token_selection import select_tokens
from mindgrpo.models.expert_plan import ExpertInputs
from mindgrpo.models.expert_routes import ExpertStatistics, StepExperts
from mindgrpo.models.pipeline import Predictions, by_sample
from mindgrpo.training.policy import Policy, UpdateSettings
from mindgrpo.training.stage_graphs import LossInputs

# The cost of a forward pass relative to a forward and backward pass.
FORWARD_SHARE = 1 / 3

# By sample.
PerSample = dict[int, Predictions]


def accumulate_gradients(
    policy: Policy,
    batch: TrainBatch,
    packed: PackedRollout,
    members: Sequence[int],
    weights: np.ndarray,
    experts: StepExperts | None = None,
) -> tuple[PerSample, float, StepExperts | None]:
    """Accumulates the gradients of samples `members`; `weights` float32 [samples] weigh each token of a sample.

    Returns log-probs and entropies of this rank's samples (empty unless it is on the last stage), the fraction of
    padding over all ranks, and the step's `experts` with the statistics of these passes added; if `experts` is None,
    they are obtained from the policy first.
    """
    mesh = policy.weights.layout.mesh
    share, part = (mesh.index(policy.backend.rank, axis) for axis in ("dp", "cp"))
    experts = experts or policy.pipeline.experts_of(packed)
    with_gradient, forward_only = _split(policy, batch, packed, members, weights)
    own: PerSample = {}
    rows: list[PackedRow] = []
    num_tokens = 0
    for samples, shapes in ((with_gradient, policy.shapes), (forward_only, policy.pipeline.shapes)):
        if not samples:
            continue
        shape = shapes.choose(packed, mesh.dp, samples)
        micro_batches = packed.micro_batches(shape, mesh.dp, share, samples, part)
        if samples is with_gradient:
            scale = policy.settings.loss_scale
            inputs = None if experts is None else experts.inputs(micro_batches, samples, scale)
            results = _backward(policy, batch, micro_batches, weights, inputs)
        else:
            results, experts = policy.pipeline.replay(micro_batches, experts)
        own |= by_sample(micro_batches, results, policy.shard.context_group)
        rows += packed.rows(shape, samples)
        num_tokens += len(micro_batches) * shape.tokens * mesh.dp * mesh.cp
    return own, padding_share(rows, num_tokens), experts


def _with_selection(
    policy: Policy,
    batch: TrainBatch,
    packed: PackedRollout,
    members: Sequence[int],
    weights: np.ndarray,
    experts: StepExperts | None,
) -> tuple[TrainBatch, float | None, StepExperts | None]:
    """Runs `select_tokens` on the log-probs of an extra forward pass over `members`.

    Returns the batch with the resulting factors and penalties, the fraction of tokens whose surrogate is dropped (None
    unless the settings drop any), and the step's experts.
    """
    config, mesh = policy.settings.loss_config, policy.weights.layout.mesh
    rank = policy.backend.rank
    micro_batches = policy.pipeline.batches_of(packed, list(members))
    results, experts = policy.pipeline.replay(micro_batches, experts)
    own = by_sample(micro_batches, results, policy.shard.context_group)
    if mesh.group(rank, ("cp", "tp"))[0] != rank:
        own = {}
    merged: PerSample = {}
    for of_rank in policy.backend.world.gather_objects(own):
        merged |= of_rank
    logps, entropies = ({i: pair[k] for i, pair in merged.items()} for k in (0, 1))
    tokens = _tokens(batch, logps, entropies, weights)
    # Drawn alike on every rank, and after a resume.
    rng = np.random.default_rng((config.seed, policy.updates))
    chosen = select_tokens(tokens, config, rng)
    factors, penalties = (_by_sample(batch, weights, values) for values in chosen)
    if batch.rollout_is_weights is not None:
        pairs = zip(batch.rollout_is_weights, factors, strict=True)
        factors = [corrected * factor for corrected, factor in pairs]
    unselected = _mean(chosen[0] == 0) if config.leaves_out else None
    return replace(batch, rollout_is_weights=factors, penalties=penalties), unselected, experts


def _by_sample(batch: TrainBatch, weights: np.ndarray, values: np.ndarray) -> list[np.ndarray]:
    """Scatters flat `values`, in the order of `_tokens`, to float32 [completion length] per sample; 0 elsewhere."""
    masks = batch.rollout.action_mask
    spread = [np.zeros(mask.size, np.float32) for mask in masks]
    order = np.flatnonzero(weights > 0).tolist()
    ends = np.cumsum([int(masks[i].sum()) for i in order])
    for i, own in zip(order, np.split(values, ends[:-1]) if order else [], strict=True):
        spread[i][masks[i]] = own
    return spread


def _split(
    policy: Policy,
    batch: TrainBatch,
    packed: PackedRollout,
    members: Sequence[int],
    weights: np.ndarray,
) -> tuple[list[int], list[int]]:
    """Splits `members` into samples to run forward and backward, and samples without a gradient to run forward only.

    The second list is empty where the split would not save time.
    """
    everybody = list(members)
    moe = policy.shard.config.moe
    if moe is not None and moe.balance_coef > 0:
        return everybody, []
    has_gradient = losses.has_gradient(batch.loss_advantages, weights, policy.settings.loss_config)
    kept = [i for i in everybody if has_gradient[i]]
    rest = [i for i in everybody if not has_gradient[i]]
    if not rest:
        return everybody, []
    num_shares = policy.weights.layout.mesh.dp
    shape = policy.shapes.look(packed, num_shares, everybody)
    whole, backward, forward = (
        num_micro_batches(packed.rows(shape, samples), shape, num_shares)
        for samples in (everybody, kept, rest)
    )
    if backward + FORWARD_SHARE * forward < whole:
        return kept, rest
    return everybody, []


def _backward(
    policy: Policy,
    batch: TrainBatch,
    micro_batches: Sequence[MicroBatch],
    weights: np.ndarray,
    experts: Sequence[ExpertInputs] | None,
) -> list[Predictions] | None:
    """Accumulates the micro-batches' gradients; returns log-probs and entropies on the last stage, else None."""
    config = policy.settings.loss_config
    inputs = [_loss_inputs(micro, batch, weights, config) for micro in micro_batches]
    return policy.accumulate(micro_batches, inputs, batch.old_logps is not None, experts)


def _loss_inputs(
    micro: MicroBatch, batch: TrainBatch, weights: np.ndarray, config: LossConfig
) -> LossInputs:
    """Gathers the batch's values at the micro-batch's picks, [M] each; inputs that the loss ignores are zeros."""
    zeros = np.zeros(micro.picks.size, np.float32)

    def spread(values: Arrays | np.ndarray | None) -> np.ndarray:
        return zeros if values is None else micro.spread(values)

    segments, shares = (zeros.astype(np.int32), zeros)
    if config.of_samples:
        segments, shares = micro.segments()
    return LossInputs(
        old=spread(batch.old_logps),
        reference=spread(batch.reference_logps),
        advantages=spread(batch.loss_advantages),
        weights=spread(weights) * micro.actions,
        rollout_is_weights=spread(batch.rollout_is_weights),
        segments=segments,
        shares=shares,
        penalties=spread(batch.penalties),
    )


PerToken = dict[int, np.ndarray]


@dataclass(frozen=True)
class UpdateReport:
    """Statistics of one update; means and fractions are over the tokens in the loss.

    `logps` and `entropies` are float32 [completion length] by sample, from before the update; `entropies` is empty
    unless the settings keep them. `clipped_low` and `clipped_high` are the fractions of tokens (of samples, where
    ratios are per sample) clipped at the lower and at the upper bound. `padding_share` is the fraction of row positions
    that are padding. `unselected` and `off_policy` are the fractions of tokens dropped by `select_tokens` and by
    off_policy_mask_threshold, None if the settings do not use them. `experts` covers all ranks and all passes of the
    step so far; None for a model without experts.
    """

    loss: float
    kl: float
    entropy: float
    clipped_low: float
    clipped_high: float
    grad_norm: float
    logps: PerToken
    entropies: PerToken
    padding_share: float
    unselected: float | None = None
    off_policy: float | None = None
    experts: ExpertStatistics | None = None

    @property
    def clip_fraction(self) -> float:
        return self.clipped_low + self.clipped_high


def update(
    policy: Policy,
    batch: TrainBatch,
    packed: PackedRollout,
    members: Sequence[int],
    lr: float,
    check: Callable[[UpdateReport], None] | None = None,
    experts: StepExperts | None = None,
) -> UpdateReport:
    """Updates the policy with samples `members` of `batch`, whose rollout is `packed`. Collective over all ranks.

    `experts` are the choices that an earlier forward pass recorded; without them an extra forward pass records them.
    The loss is normalised over `members`, independent of their placement on ranks and rows. Samples without a gradient
    may run forward only. Raises NonFiniteUpdate, on all ranks alike, where a log-prob, the loss or the gradient is not
    finite, and whatever `check` raises for the report, which is the same on every rank; weights and moments are
    untouched in both cases.
    """
    settings = policy.settings
    weights = _weights(batch, members, settings)
    experts = experts or policy.pipeline.experts_of(packed)
    unselected = None
    if settings.loss_config.selects:
        batch, unselected, experts = _with_selection(
            policy, batch, packed, members, weights, experts
        )
    own, padding, experts = accumulate_gradients(policy, batch, packed, members, weights, experts)
    rank = policy.backend.rank
    # Ranks of one cp and tp group have the same results: the first reports them.
    if policy.weights.layout.mesh.group(rank, ("cp", "tp"))[0] != rank:
        own = {}
    by_rank = policy.backend.world.gather_objects((own, experts and experts.statistics))
    merged = {i: pair for samples, _ in by_rank for i, pair in samples.items()}
    statistics = [own for _, own in by_rank if own is not None]
    norm = policy.gradient_norm()
    report = replace(
        _report(settings, batch, merged, weights, norm, padding),
        unselected=unselected,
        experts=ExpertStatistics.merged(statistics) if statistics else None,
    )
    refuse_non_finite(policy, report.logps, report.loss, norm)
    if check is not None:
        try:
            check(report)
        except BaseException:
            policy.clear_gradients()
            raise
    policy.apply(norm, lr)
    if settings.bias_update_rate > 0 and experts is not None:
        policy.move_biases(experts.load(members))
    return report


def refuse_non_finite(policy: Policy, results: PerToken, loss: float, grad_norm: float) -> None:
    """Raises NonFiniteUpdate on all ranks, with gradients cleared, if a number is not finite. Collective.

    `results` are the log-probs, or a critic's values, by sample.
    """
    bad = non_finite.in_logps(results) or non_finite.in_arrays([("the loss", loss)])
    norm = None
    if bad is None and not np.isfinite(grad_norm):
        bad = policy.bad_gradient()
        norm = NonFinite("the gradient norm", grad_norm)
    by_rank = policy.backend.world.gather_objects((bad, norm))
    # Prefers a report that names the gradient to one that only has the norm.
    for kind in (0, 1):
        for rank, pair in enumerate(by_rank):
            number = pair[kind]
            if number is not None:
                policy.clear_gradients()
                raise NonFiniteUpdate(number, rank)


def _weights(batch: TrainBatch, members: Sequence[int], settings: UpdateSettings) -> np.ndarray:
    """Returns float32 [samples]: the loss weight of each action token of a sample, 0 for samples not in `members`."""
    chosen = list(members)
    mask = None if batch.sample_mask is None else batch.sample_mask[chosen]
    weights = np.zeros(len(batch), np.float32)
    lengths, groups = (
        batch.rollout.action_lengths[chosen],
        np.array(batch.rollout.group_ids)[chosen],
    )
    config, longest = settings.loss_config, settings.max_tokens
    weights[chosen] = losses.token_weights(lengths, config, mask, groups, longest)
    return weights


def _report(
    settings: UpdateSettings,
    batch: TrainBatch,
    merged: Mapping[int, tuple[np.ndarray, np.ndarray]],
    weights: np.ndarray,
    norm: float,
    padding: float,
) -> UpdateReport:
    config = settings.loss_config
    logps = {i: pair[0] for i, pair in merged.items()}
    entropy = {i: pair[1] for i, pair in merged.items()}
    tokens = _tokens(batch, logps, entropy, weights)
    kl = np.zeros(0)
    if batch.reference_logps is not None:
        kl = losses.kl_estimate(tokens.logps, tokens.reference, config.kl_estimator)
    low, high = losses.clipped(tokens, config)
    off_policy = None
    if config.off_policy_mask_threshold is not None:
        off_policy = _mean(
            losses.off_policy(tokens, config.off_policy_mask_threshold, tokens.logps)
        )
    return UpdateReport(
        loss=losses.policy_loss(tokens, config),
        kl=_mean(kl),
        entropy=_mean(tokens.entropy),
        clipped_low=_mean(low),
        clipped_high=_mean(high),
        grad_norm=norm,
        logps=logps,
        entropies=entropy if settings.keeps_entropies else {},
        padding_share=padding,
        off_policy=off_policy,
    )


def _tokens(batch: TrainBatch, logps: PerToken, entropy: PerToken, weights: np.ndarray) -> Tokens:
    """Returns the tokens in the loss, in the order of samples, to recompute the graph's loss in float64.

    On-policy, the loss is a sum that cancels almost entirely: in float32 every digit would depend on the order of the
    rows, and so on the layout.
    """
    order = [i for i in sorted(logps) if weights[i] > 0]
    masks = batch.rollout.action_mask

    def tokens(values: PerToken | Arrays | np.ndarray | None) -> np.ndarray:
        if values is None:
            return own
        rows = [np.broadcast_to(values[i], logps[i].shape)[masks[i]] for i in order]
        return np.concatenate([*rows, np.zeros(0)])

    own = tokens(logps)
    correction = batch.rollout_is_weights
    return Tokens(
        logps=own,
        old=tokens(batch.old_logps),
        reference=tokens(batch.reference_logps),
        entropy=tokens(entropy),
        advantages=tokens(batch.loss_advantages),
        weights=tokens(weights),
        rollout_is_weights=np.ones(own.size) if correction is None else tokens(correction),
        penalties=np.zeros(own.size) if batch.penalties is None else tokens(batch.penalties),
        lengths=batch.rollout.action_lengths[order],
    )


def _mean(values: np.ndarray) -> float:
    """Returns the mean, 0.0 where there is no token at all."""
    return float(values.mean()) if values.size else 0.0
