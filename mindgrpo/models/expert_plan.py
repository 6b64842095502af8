"""Plans which rows a layer's experts compute, from the experts of every token: before a graph starts, on the host.

No graph with a gradient chooses experts: routes come from a forward pass of before, and with them every count is known.
A forward pass records the routes of its micro-batches, which are kept by sample and spread over those of the update.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from mindgrpo.algorithm.packing import MicroBatch

# A token without experts; so is padding, which is sent nowhere.
NO_EXPERT = -1


class ExpertPlan(NamedTuple):
    """Names the slots and rows of each of L layers, as backend/kernels/contract.py has them: int32 `order` [L, N K],
    `counts` [L, experts] and `home` [L, N, K]."""

    order: np.ndarray
    counts: np.ndarray
    home: np.ndarray


def plan_experts(routes: np.ndarray, num_experts: int) -> ExpertPlan:
    """Plans layers whose tokens have experts `routes` int [L, N, K], on a rank that has all experts."""
    layers, count = len(routes), routes[0].size
    order = np.full((layers, count), -1, np.int32)
    home = np.full((layers, count), -1, np.int32)
    counts = np.zeros((layers, num_experts), np.int32)
    for layer, own in enumerate(routes.reshape(layers, -1)):
        slots = np.flatnonzero(own >= 0)
        slots = slots[np.argsort(own[slots], kind="stable")]
        order[layer, : slots.size] = slots
        home[layer, slots] = np.arange(slots.size)
        counts[layer] = np.bincount(own[slots], minlength=num_experts)
    return ExpertPlan(order, counts, home.reshape(routes.shape))


def routes_by_sample(
    batches: Sequence[MicroBatch], recorded: Sequence[np.ndarray]
) -> dict[int, np.ndarray]:
    """Splits routes [L, N, K] of each micro-batch by sample: int16 [prompt + completion - 1, L, K].

    NO_EXPERT is at tokens that other ranks have, which share the rows.
    """
    samples: dict[int, np.ndarray] = {}
    for batch, routes in zip(batches, recorded, strict=True):
        layers, _, slots = routes.shape
        whole = np.full((*batch.positions.shape, layers, slots), NO_EXPERT, np.int16)
        own = np.moveaxis(routes, 0, 1).reshape(*batch.tokens.shape, layers, slots)
        whole[np.arange(len(whole))[:, None], batch.own_columns] = own
        for number, row in enumerate(batch.rows):
            for placed in row:
                samples[placed.sample] = whole[number, placed.inputs]
    return samples


def merge_routes(by_rank: Iterable[Mapping[int, np.ndarray]]) -> dict[int, np.ndarray]:
    """Merges the routes by sample of ranks with the same layers."""
    merged: dict[int, np.ndarray] = {}
    for routes in by_rank:
        for sample, own in routes.items():
            merged[sample] = np.maximum(merged[sample], own) if sample in merged else own
    return merged


def load_of_fullest(routes: Mapping[int, np.ndarray], num_experts: int) -> float:
    """Returns how many tokens the fullest expert of any layer has, as a multiple of its layer's mean: 1 or more.

    A prompt counts with each of its samples.
    """
    layers = np.moveaxis(np.concatenate(list(routes.values())), 1, 0)
    counts = np.stack([np.bincount(own[own >= 0], minlength=num_experts) for own in layers])
    return float((counts.max(1) / np.maximum(counts.mean(1), 1.0 / num_experts)).max())


def with_plan(batch: MicroBatch, routes: Mapping[int, np.ndarray], num_experts: int) -> MicroBatch:
    """Returns the micro-batch with the routes of its samples and a plan of them."""
    layers, slots = next(iter(routes.values())).shape[1:]
    whole = np.full((*batch.positions.shape, layers, slots), NO_EXPERT, np.int32)
    for number, row in enumerate(batch.rows):
        # A prompt's are those of its first sample.
        for placed in reversed(row):
            whole[number, placed.inputs] = routes[placed.sample]
    own = whole[np.arange(len(whole))[:, None], batch.own_columns]
    own = np.ascontiguousarray(np.moveaxis(own.reshape(-1, layers, slots), 1, 0))
    return replace(batch, routes=own, **plan_experts(own, num_experts)._asdict())
