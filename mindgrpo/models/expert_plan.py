"""Plans the dispatch of tokens to experts, on the host and before a graph starts, from each token's chosen experts."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

# The expert id of slots without an expert, such as those of padding tokens, which are not dispatched.
NO_EXPERT = -1


class ExpertInputs(NamedTuple):
    """The graph inputs of L mixture-of-experts layers for N tokens of a micro-batch; int32, -1 for none.

    `topk_ids` [L, N, K]: the chosen experts. `order` [L, S], `counts` [L, experts of this rank] and `home` [L, N, K]
    map expert slots to S dispatched rows and back, as in backend/kernels/contract.py; S = N K on a rank with all
    experts. With expert parallelism S = ep C: C rows, the capacity, are sent to each ep rank, sorted by expert. The
    receiver sorts the etp S rows that arrive: `by_expert` [L, etp S] is the arrival position of each sorted row, and
    `as_arrived` [L, etp S] the sorted position of each arrived row; both are [L, 1] without expert parallelism.
    `balance` float32 [L, N + E] is expert_routes.balance, or [L, 1] without a balancing loss.
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
    """Sharding of experts: `ep` ranks hold different experts, `etp` ranks different columns of the same experts.

    `member` is this rank's index in the ep x etp group, where neighbours along etp have consecutive indices.
    """

    ep: int
    etp: int
    member: int

    @property
    def size(self) -> int:
        return self.ep * self.etp


# Capacities in multiples of an even share; only a few, since each needs a graph of its own.
CAPACITIES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)


def plan_experts(topk_ids: np.ndarray, num_experts: int) -> ExpertInputs:
    """Plans L layers whose tokens chose experts `topk_ids` int [L, N, K], on a rank that holds all experts."""
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
    """Returns the number of slots of each expert in each layer, int32 [L, E], of `topk_ids` int [L, N, K]."""
    flat = topk_ids.reshape(len(topk_ids), -1)
    counts = [np.bincount(own[own >= 0], minlength=num_experts) for own in flat]
    return np.stack(counts).astype(np.int32)


def capacity(sent: np.ndarray, spread: ExpertSpread, slots: int) -> int:
    """Returns the capacity: the number of rows that each rank sends to each ep rank.

    It fits the largest of the row counts `sent` int [ranks, ..., E], and is one of a few multiples (CAPACITIES) of an
    even share of `slots`, the number N K of a rank's expert slots.
    """
    to_each = sent.reshape(*sent.shape[:-1], spread.ep, -1).sum(-1)
    even = -(-slots // spread.ep)
    rows = int(to_each.max())
    enough = next((size for size in CAPACITIES if size * even >= rows), spread.ep)
    return min(slots, enough * even)


def plan_spread(
    topk_ids: np.ndarray, sent: np.ndarray, spread: ExpertSpread, rows: int
) -> ExpertInputs:
    """Plans L layers whose experts are sharded over ranks.

    `topk_ids` int [L, N, K] are the experts of this rank's tokens, `sent` int [ranks, L, E] the number of rows that
    each rank sends to each expert, and `rows` is the capacity.
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
    """Returns the slots with an expert, sorted by expert, of expert ids `own` int [N K]."""
    slots = np.flatnonzero(own >= 0)
    return slots[np.argsort(own[slots], kind="stable")]
