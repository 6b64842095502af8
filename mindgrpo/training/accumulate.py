"""Gradients of an update's samples: those that have one go forward and backward, the others only forward."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mindgrpo.algorithm import losses
from mindgrpo.algorithm.loss_config import LossConfig
from mindgrpo.algorithm.packing import MicroBatch, PackedRollout, num_micro_batches, padding_share
from mindgrpo.algorithm.sample import Arrays, TrainBatch
from mindgrpo.training.policy import Policy

# What a pass forward costs of one forward and backward.
FORWARD_SHARE = 1 / 3

# By sample, (log-probs, entropies), float32 [completion length] each.
PerSample = dict[int, tuple[np.ndarray, np.ndarray]]


def accumulate_gradients(
    policy: Policy,
    batch: TrainBatch,
    packed: PackedRollout,
    members: Sequence[int],
    weights: np.ndarray,
) -> tuple[PerSample, float]:
    """Adds the gradients of `members` to the policy's; `weights` float32 [samples], of each of a sample's tokens.

    What this rank's samples gave, nothing where it is not a last stage; and the share of padding, over all ranks.
    """
    with_gradient, forward_only = _split(policy, batch, packed, members, weights)
    own: PerSample = {}
    if with_gradient:
        own |= _backward(policy, batch, _micro_batches(policy, packed, with_gradient), weights)
    if forward_only:
        micro_batches = _micro_batches(policy, packed, forward_only)
        own |= _by_sample(micro_batches, policy.pipeline.log_probs(micro_batches))
    return own, _padding(policy, packed, [with_gradient, forward_only])


def _split(
    policy: Policy,
    batch: TrainBatch,
    packed: PackedRollout,
    members: Sequence[int],
    weights: np.ndarray,
) -> tuple[list[int], list[int]]:
    """`members` that go backward, and those that have no gradient, where that spares time: else none of these."""
    everybody = list(members)
    has_gradient = losses.has_gradient(batch.loss_advantages, weights, policy.settings.loss_config)
    kept = [i for i in everybody if has_gradient[i]]
    rest = [i for i in everybody if not has_gradient[i]]
    if not rest:
        return everybody, []
    whole, backward, forward = (
        _num_micro_batches(policy, packed, samples) for samples in (everybody, kept, rest)
    )
    if backward + FORWARD_SHARE * forward < whole:
        return kept, rest
    return everybody, []


def _num_micro_batches(policy: Policy, packed: PackedRollout, members: list[int]) -> int:
    """Of a rank."""
    shape, num_shares = policy.settings.shape, policy.weights.layout.mesh.dp
    return num_micro_batches(packed.rows(shape, members), shape, num_shares)


def _micro_batches(policy: Policy, packed: PackedRollout, members: list[int]) -> list[MicroBatch]:
    mesh = policy.weights.layout.mesh
    share = mesh.index(policy.backend.rank, "dp")
    return packed.micro_batches(policy.settings.shape, mesh.dp, share, members)


def _backward(
    policy: Policy, batch: TrainBatch, micro_batches: list[MicroBatch], weights: np.ndarray
) -> PerSample:
    """Accumulates their gradients; nothing is returned where this is not the last stage."""
    config = policy.settings.loss_config
    inputs = [_loss_inputs(micro, batch, weights, config) for micro in micro_batches]
    results = policy.accumulate(micro_batches, inputs, batch.old_logps is not None)
    pairs = None if results is None else [(result.logps, result.entropy) for result in results]
    return _by_sample(micro_batches, pairs)


def _by_sample(
    micro_batches: list[MicroBatch], results: list[tuple[np.ndarray, np.ndarray]] | None
) -> PerSample:
    pairs: PerSample = {}
    for micro, (logps, entropies) in zip(micro_batches, results or [], strict=bool(results)):
        entropy = micro.gather(entropies)
        pairs |= {i: (values, entropy[i]) for i, values in micro.gather(logps).items()}
    return pairs


def _padding(policy: Policy, packed: PackedRollout, members: Sequence[list[int]]) -> float:
    shape, mesh = policy.settings.shape, policy.weights.layout.mesh
    chosen = [samples for samples in members if samples]
    rows = [row for samples in chosen for row in packed.rows(shape, samples)]
    count = sum(_num_micro_batches(policy, packed, samples) for samples in chosen)
    return padding_share(rows, count * shape.tokens * mesh.dp)


def _loss_inputs(
    micro: MicroBatch, batch: TrainBatch, weights: np.ndarray, config: LossConfig
) -> tuple[np.ndarray, ...]:
    """What PolicyLoss takes after the entropy, [M] each; what its settings do not read is all zeros."""
    zeros = np.zeros(micro.picks.size, np.float32)

    def spread(values: Arrays | np.ndarray | None) -> np.ndarray:
        return zeros if values is None else micro.spread(values)

    segments = (zeros.astype(np.int32), zeros)
    if config.by_sequence:
        segments = micro.segments()
    return (
        spread(batch.old_logps),
        spread(batch.reference_logps),
        spread(batch.loss_advantages),
        spread(weights) * micro.actions,
        spread(batch.rollout_is_weights),
        *segments,
    )
