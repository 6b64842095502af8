"""One optimizer update of the critic over chosen samples of a batch, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mindgrpo.algorithm.gae import explained_variance, value_loss
from mindgrpo.algorithm.packing import MicroBatch, PackedRollout, padding_share
from mindgrpo.algorithm.sample import TrainBatch
from mindgrpo.models.pipeline import by_sample
from mindgrpo.training.policy import Policy
from mindgrpo.training.stage_graphs import LossInputs
from mindgrpo.training.update import refuse_non_finite


@dataclass(frozen=True)
class CriticReport:
    """Statistics of an update of the critic over the policy's tokens; values are from before the update.

    `clip_fraction` is the fraction of tokens whose clipped value counts, `explained_variance` 1 - Var(R - v) / Var(R),
    None where returns are constant.
    """

    loss: float
    clip_fraction: float
    explained_variance: float | None
    value_mean: float
    return_mean: float
    grad_norm: float
    padding_share: float


def update_critic(
    critic: Policy, batch: TrainBatch, packed: PackedRollout, members: Sequence[int], lr: float
) -> CriticReport:
    """Updates the critic with samples `members` of `batch`, whose rollout is `packed`. Collective over all ranks.

    The loss is the mean over the policy's tokens of `members`. Raises NonFiniteUpdate, on all ranks alike, where a
    value, the loss or the gradient is not finite; weights and moments are untouched then.
    """
    mesh, rank = critic.weights.layout.mesh, critic.backend.rank
    weights = _weights(batch, members)
    share, part = (mesh.index(rank, axis) for axis in ("dp", "cp"))
    shape = critic.shapes.choose(packed, mesh.dp, members)
    micro_batches = packed.micro_batches(shape, mesh.dp, share, members, part)
    inputs = [_loss_inputs(micro, batch, weights) for micro in micro_batches]
    results = critic.accumulate(micro_batches, inputs, has_old=True)
    own = by_sample(micro_batches, results, critic.shard.context_group)
    # Ranks of one cp and tp group have the same results: the first reports them.
    if mesh.group(rank, ("cp", "tp"))[0] != rank:
        own = {}
    num_tokens = len(micro_batches) * shape.tokens * mesh.dp * mesh.cp
    padding = padding_share(packed.rows(shape, members), num_tokens)
    values: dict[int, np.ndarray] = {}
    for of_rank in critic.backend.world.gather_objects(own):
        values |= {i: pair[0] for i, pair in of_rank.items()}
    norm = critic.gradient_norm()
    report = _report(critic, batch, values, members, norm, padding)
    refuse_non_finite(critic, values, report.loss, norm)
    critic.apply(norm, lr)
    return report


def _weights(batch: TrainBatch, members: Sequence[int]) -> np.ndarray:
    """Returns float32 [samples]: the loss weight of each of the policy's tokens, 0 for samples that do not count."""
    counts = np.zeros(len(batch), bool)
    counts[list(members)] = True
    if batch.sample_mask is not None:
        counts &= batch.sample_mask
    total = int(batch.rollout.action_lengths[counts].sum())
    return np.where(counts, 1.0 / max(1, total), 0.0).astype(np.float32)


def _loss_inputs(micro: MicroBatch, batch: TrainBatch, weights: np.ndarray) -> LossInputs:
    assert batch.values is not None and batch.returns is not None
    zeros = np.zeros(micro.picks.size, np.float32)
    return LossInputs(
        old=micro.spread(batch.values),
        reference=zeros,
        advantages=micro.spread(batch.returns),
        weights=micro.spread(weights) * micro.actions,
        rollout_is_weights=zeros,
        segments=zeros.astype(np.int32),
        shares=zeros,
        penalties=zeros,
    )


def _report(
    critic: Policy,
    batch: TrainBatch,
    predicted: dict[int, np.ndarray],
    members: Sequence[int],
    norm: float,
    padding: float,
) -> CriticReport:
    """Recomputes the loss in float64, in the order of samples, so that it does not depend on the layout."""
    assert batch.values is not None and batch.returns is not None
    masks, weights = batch.rollout.action_mask, _weights(batch, members)
    order = [i for i in sorted(predicted) if weights[i] > 0]

    def tokens(arrays: dict[int, np.ndarray] | Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate([*(arrays[i][masks[i]] for i in order), np.zeros(0)])

    values, old, returns = tokens(predicted), tokens(batch.values), tokens(batch.returns)
    terms, clipped = value_loss(
        values, old, returns, critic.settings.loss_config.cliprange_value or None
    )
    count = max(1, values.size)
    return CriticReport(
        loss=float(terms.sum() / count),
        clip_fraction=float(clipped.sum() / count),
        explained_variance=explained_variance(values, returns),
        value_mean=float(values.sum() / count),
        return_mean=float(returns.sum() / count),
        grad_norm=norm,
        padding_share=padding,
    )
