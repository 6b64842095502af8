"""One optimizer update over chosen samples: packed, weighted over the whole batch, and what came of it.

Refuses to choose the samples or the learning rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mindgrpo.algorithm import loss, packing
from mindgrpo.algorithm.packing import MicroBatch
from mindgrpo.algorithm.samples import Samples
from mindgrpo.update.policy import Policy


@dataclass(frozen=True)
class UpdateReport:
    """`logps` by sample, before the update; `padding_share` of the rows' places."""

    loss: float
    kl: float
    entropy: float
    clip_fraction: float
    grad_norm: float
    logps: dict[int, np.ndarray]
    padding_share: float


def update(policy: Policy, samples: Samples, members: Sequence[int], lr: float) -> UpdateReport:
    """All ranks together; the loss is normalised over `members`, whatever rank or row they are on."""
    backend, settings = policy.backend, policy.settings
    grid = policy.weights.layout.grid
    place = grid.coordinates(backend.rank)
    rows = packing.pack(samples, members, settings.shape)
    batches = packing.micro_batches(samples, rows, settings.shape, grid.data_parallel, place.data)
    weights = np.zeros(len(samples), np.float32)
    weights[list(members)] = loss.token_weights(samples.completion_lengths[list(members)])
    has_old = samples.old_logps is not None
    extras = [_extras(batch, samples, weights) for batch in batches]
    results = policy.accumulate(batches, extras, has_old)
    own = None
    if results is not None and place.model == 0:
        logps: dict[int, np.ndarray] = {}
        entropy: dict[int, np.ndarray] = {}
        for batch, result in zip(batches, results, strict=True):
            logps |= batch.gather(result.logps)
            entropy |= batch.gather(result.entropy)
        own = (logps, entropy)
    parts = [part for part in backend.world.gather_objects(own) if part is not None]
    norm = policy.apply(lr)
    places = len(batches) * settings.shape.tokens * grid.data_parallel
    padding = packing.padding_share(rows, places)
    return _report(policy, samples, parts, weights, norm, padding)


def _extras(batch: MicroBatch, samples: Samples, weights: np.ndarray) -> tuple[np.ndarray, ...]:
    none = np.zeros(batch.picks.size, np.float32)
    old = none if samples.old_logps is None else batch.spread(samples.old_logps)
    reference = none if samples.reference_logps is None else batch.spread(samples.reference_logps)
    return old, reference, batch.spread(samples.advantages), batch.spread(weights)


def _report(
    policy: Policy,
    samples: Samples,
    parts: Sequence[tuple[dict[int, np.ndarray], dict[int, np.ndarray]]],
    weights: np.ndarray,
    norm: float,
    padding: float,
) -> UpdateReport:
    logps: dict[int, np.ndarray] = {}
    entropy: dict[int, np.ndarray] = {}
    for part_logps, part_entropy in parts:
        logps |= part_logps
        entropy |= part_entropy
    kl, clipped = [], []
    for i, values in logps.items():
        if samples.reference_logps is not None:
            kl.append(loss.k3(values, samples.reference_logps[i]))
        old = values if samples.old_logps is None else samples.old_logps[i]
        advantage = float(samples.advantages[i])
        clipped.append(loss.is_clipped(values, old, advantage, policy.settings.epsilon))
    return UpdateReport(
        loss=_loss(policy, samples, logps, weights),
        kl=loss.token_mean(kl),
        entropy=loss.token_mean(list(entropy.values())),
        clip_fraction=loss.token_mean(clipped),
        grad_norm=norm,
        logps=logps,
        padding_share=padding,
    )


def _loss(
    policy: Policy, samples: Samples, logps: dict[int, np.ndarray], weights: np.ndarray
) -> float:
    """The graph's loss again, in float64 and in the order of the samples.

    On-policy it is a sum that cancels to nearly nothing, where float32 would show the order of the
    rows, and so the layout, in every digit.
    """

    def tokens(values: Sequence[np.ndarray] | np.ndarray) -> np.ndarray:
        parts = [np.broadcast_to(values[i], logps[i].shape) for i in sorted(logps)]
        return np.concatenate(parts).astype(np.float64)

    settings = policy.settings
    own = tokens([logps.get(i, np.zeros(0)) for i in range(len(samples))])
    old = own if samples.old_logps is None else tokens(samples.old_logps)
    reference = own if samples.reference_logps is None else tokens(samples.reference_logps)
    return loss.grpo_loss(
        own,
        old,
        reference,
        tokens(samples.advantages),
        tokens(weights),
        settings.epsilon,
        settings.beta,
    )
