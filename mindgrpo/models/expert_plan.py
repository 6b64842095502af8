"""Plans which rows a layer's experts compute, from the experts of every token: before a graph starts, on the host."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

# A token without experts; so is padding, which is sent nowhere.
NO_EXPERT = -1


class ExpertInputs(NamedTuple):
    """Holds what graphs read of N tokens in L layers with experts, as backend/kernels/contract.py has it.

    int32 `topk_ids` [L, N, K], -1 of none; the slots and rows of them, `order` [L, S], `counts` [L, experts of this
    rank] and `home` [L, N, K]. Where experts are spread over ranks, S = ep C: C rows that are sent to each rank of
    other experts, those of one expert beside each other. `by_expert` [L, etp S] are the arrived rows in the order of
    this rank's experts, and `as_arrived` [L, etp S] are their places in it, -1 where nothing is; [L, 1] elsewhere.
    `balance` float32 is expert_routes.balance, [L, 1] without.
    """

    topk_ids: np.ndarray
    order: np.ndarray
    counts: np.ndarray
    home: np.ndarray
    by_expert: np.ndarray
    as_arrived: np.ndarray
    balance: np.ndarray

    def of_layers(self, layers: slice) -> ExpertInputs:
        return ExpertInputs(*(own[layers] for own in self))


class ExpertSpread(NamedTuple):
    """How experts are spread: `ep` ranks have other ones, `etp` ranks each other columns; this rank is number `member`
    of both, counted along `etp` first."""

    ep: int
    etp: int
    member: int

    @property
    def size(self) -> int:
        return self.ep * self.etp


# Rows that a rank may get in multiples of an even share: few, as each is a graph of its own.
CAPACITIES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)


def plan_experts(topk_ids: np.ndarray, num_experts: int) -> ExpertInputs:
    """Plans layers whose tokens have experts `topk_ids` int [L, N, K], on a rank that has all experts."""
    layers, count = len(topk_ids), topk_ids[0].size
    order, home = _empty(layers, count), _empty(layers, count)
    for layer, own in enumerate(topk_ids.reshape(layers, -1)):
        slots = _by_expert(own)
        order[layer, : slots.size] = slots
        home[layer, slots] = np.arange(slots.size)
    counts, nothing = rows_by_expert(topk_ids, num_experts), _empty(layers, 1)
    plan = order, counts, home.reshape(topk_ids.shape), nothing, nothing
    return ExpertInputs(topk_ids, *plan, np.zeros((layers, 1), np.float32))


def rows_by_expert(topk_ids: np.ndarray, num_experts: int) -> np.ndarray:
    """Counts each layer's rows of each expert: int32 [L, E]."""
    flat = topk_ids.reshape(len(topk_ids), -1)
    counts = [np.bincount(own[own >= 0], minlength=num_experts) for own in flat]
    return np.stack(counts).astype(np.int32)


def capacity(sent: np.ndarray, spread: ExpertSpread, slots: int) -> int:
    """Returns the rows that each rank sends to each: enough for all of `sent` int [ranks, ..., E], whose tokens have
    `slots` experts altogether on a rank, and a multiple of few."""
    to_each = sent.reshape(*sent.shape[:-1], spread.ep, -1).sum(-1)
    even = -(-slots // spread.ep)
    rows = int(to_each.max())
    enough = next((size for size in CAPACITIES if size * even >= rows), spread.ep)
    return min(slots, enough * even)


def plan_spread(
    topk_ids: np.ndarray, sent: np.ndarray, spread: ExpertSpread, rows: int
) -> ExpertInputs:
    """Plans layers whose experts are spread over ranks.

    `topk_ids` int [L, N, K] are this rank's tokens' experts, `sent` int [ranks, L, E] the rows of each expert that each
    rank has, and `rows` the capacity.
    """
    (layers, *_), experts = topk_ids.shape, sent.shape[-1] // spread.ep
    order = _empty(layers, spread.ep * rows)
    home = _empty(layers, topk_ids[0].size)
    by_expert, as_arrived = (_empty(layers, spread.size * rows) for _ in range(2))
    first = spread.member // spread.etp * experts
    # [etp, ep, L, own experts], as rows arrive.
    arriving = sent.reshape(spread.ep, spread.etp, layers, -1)[..., first : first + experts]
    arriving = arriving.swapaxes(0, 1).astype(np.int64)
    blocks = np.arange(spread.size).reshape(spread.etp, spread.ep, 1) * rows
    for layer, own in enumerate(topk_ids.reshape(layers, -1)):
        slots = _by_expert(own)
        owner = own[slots] // experts
        starts = np.searchsorted(owner, np.arange(spread.ep))
        places = owner * rows + np.arange(slots.size) - starts[owner]
        order[layer, places], home[layer, slots] = slots, places
        counts = arriving[:, :, layer]
        begins = blocks + np.cumsum(counts, -1) - counts
        lengths, begins = (np.moveaxis(each, -1, 0).reshape(-1) for each in (counts, begins))
        total = int(lengths.sum())
        arrived = np.repeat(begins - np.cumsum(lengths) + lengths, lengths) + np.arange(total)
        by_expert[layer, :total], as_arrived[layer, arrived] = arrived, np.arange(total)
    own_counts = arriving.sum((0, 1)).astype(np.int32)
    plan = order, own_counts, home.reshape(topk_ids.shape), by_expert, as_arrived
    return ExpertInputs(topk_ids, *plan, np.zeros((layers, 1), np.float32))


def _empty(layers: int, count: int) -> np.ndarray:
    return np.full((layers, count), NO_EXPERT, np.int32)


def _by_expert(own: np.ndarray) -> np.ndarray:
    """Returns the slots of `own` [N K] that have experts, in the order of these."""
    slots = np.flatnonzero(own >= 0)
    return slots[np.argsort(own[slots], kind="stable")]
