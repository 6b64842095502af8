"""Plans which rows a layer's experts compute, from the experts of every token: before a graph starts, on the host.

No graph with a gradient chooses experts: routes come from the generator (arXiv:2510.11370) or from a forward pass of
before, which records those of its micro-batches, and with them every count is known. They are kept by sample and spread
over the micro-batches of the update.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from mindgrpo.algorithm.packing import Margins, MicroBatch

# A token without experts; so is padding, which is sent nowhere.
NO_EXPERT = -1


class ExpertPlan(NamedTuple):
    """Names the slots and rows of each of L layers, as backend/kernels/contract.py has them.

    int32 `order` [L, S], `counts` [L, experts of this rank] and `home` [L, N, K]. Where experts are spread over ranks,
    S = ep C: C rows that are sent to each rank of other experts, those of one expert beside each other. `by_expert`
    [L, emp S] are the arrived rows in the order of this rank's experts, and `as_arrived` [L, emp S] are their places in
    it, -1 where nothing is; [L, 1] elsewhere.
    """

    order: np.ndarray
    counts: np.ndarray
    home: np.ndarray
    by_expert: np.ndarray
    as_arrived: np.ndarray


class Choices(NamedTuple):
    """Holds what routers chose for N tokens in L layers: `routes` int32 [L, N, K] and their `margins` float32 [L, N],
    as backend/kernels/contract.py has them."""

    routes: np.ndarray
    margins: np.ndarray


class ExpertSpread(NamedTuple):
    """How experts are spread: `ep` ranks have other ones, `emp` ranks each other columns; this rank is number `member`
    of both, counted along `emp` first."""

    ep: int
    emp: int
    member: int

    @property
    def size(self) -> int:
        return self.ep * self.emp


# Rows that a rank may get in multiples of an even share: few, as each is a graph of its own.
CAPACITIES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)


def plan_experts(routes: np.ndarray, num_experts: int) -> ExpertPlan:
    """Plans layers whose tokens have experts `routes` int [L, N, K], on a rank that has all experts."""
    layers, count = len(routes), routes[0].size
    order, home = _empty(layers, count), _empty(layers, count)
    for layer, own in enumerate(routes.reshape(layers, -1)):
        slots = _by_expert(own)
        order[layer, : slots.size] = slots
        home[layer, slots] = np.arange(slots.size)
    counts = rows_by_expert(routes, num_experts)
    nothing = _empty(layers, 1)
    return ExpertPlan(order, counts, home.reshape(routes.shape), nothing, nothing)


def rows_by_expert(routes: np.ndarray, num_experts: int) -> np.ndarray:
    """Counts each layer's rows of each expert: int32 [L, E]."""
    flat = routes.reshape(len(routes), -1)
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
    routes: np.ndarray, sent: np.ndarray, spread: ExpertSpread, rows: int
) -> ExpertPlan:
    """Plans layers whose experts are spread over ranks.

    `routes` int [L, N, K] are this rank's tokens' experts, `sent` int [ranks, L, E] the rows of each expert that each
    rank has, and `rows` the capacity.
    """
    (layers, *_), experts = routes.shape, sent.shape[-1] // spread.ep
    order = _empty(layers, spread.ep * rows)
    home = _empty(layers, routes[0].size)
    by_expert, as_arrived = (_empty(layers, spread.size * rows) for _ in range(2))
    first = spread.member // spread.emp * experts
    # [emp, ep, L, own experts], as rows arrive.
    arriving = sent.reshape(spread.ep, spread.emp, layers, -1)[..., first : first + experts]
    arriving = arriving.swapaxes(0, 1).astype(np.int64)
    blocks = np.arange(spread.size).reshape(spread.emp, spread.ep, 1) * rows
    for layer, own in enumerate(routes.reshape(layers, -1)):
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
    return ExpertPlan(order, own_counts, home.reshape(routes.shape), by_expert, as_arrived)


def _empty(layers: int, count: int) -> np.ndarray:
    return np.full((layers, count), NO_EXPERT, np.int32)


def _by_expert(own: np.ndarray) -> np.ndarray:
    """Returns the slots of `own` [N K] that have experts, in the order of these."""
    slots = np.flatnonzero(own >= 0)
    return slots[np.argsort(own[slots], kind="stable")]


@dataclass(frozen=True)
class TokenShare:
    """Part `index` of `of` equal ones of a rank's tokens, where ranks share them out."""

    index: int = 0
    of: int = 1

    def within(self, count: int) -> slice:
        size = count // self.of
        return slice(self.index * size, (self.index + 1) * size)


ALL_TOKENS = TokenShare()


def count_choices(chosen: np.ndarray, routes: np.ndarray) -> np.ndarray:
    """Counts tokens of layers that have `routes` int [L, N, K], and those for which others are `chosen`: int64 [2].

    The order of a token's experts does not count.
    """
    is_token = (routes >= 0).all(-1)
    differs = (np.sort(chosen, -1) != np.sort(routes, -1)).any(-1)
    return np.array([is_token.sum(), (is_token & differs).sum()], np.int64)


def routes_by_sample(
    batches: Sequence[MicroBatch], recorded: Sequence[np.ndarray], share: TokenShare = ALL_TOKENS
) -> dict[int, np.ndarray]:
    """Splits routes [L, N, K] of each micro-batch, or of a share of it, by sample: int16 [prompt + completion - 1, L,
    K].

    NO_EXPERT is at tokens that other ranks have, which share the rows.
    """
    samples: dict[int, np.ndarray] = {}
    for batch, routes in zip(batches, recorded, strict=True):
        layers, _, slots = routes.shape
        whole = np.full((*batch.positions.shape, layers, slots), NO_EXPERT, np.int16)
        own = np.full((batch.tokens.size, layers, slots), NO_EXPERT, np.int16)
        own[share.within(len(own))] = np.moveaxis(routes, 0, 1)
        own = own.reshape(*batch.tokens.shape, layers, slots)
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


def load_by_expert(routes: Iterable[np.ndarray], layers: int, num_experts: int) -> np.ndarray:
    """Counts each expert's tokens in samples with `routes` [tokens, L, K]: int64 [L, E].

    A prompt counts with each of its samples, so that packing changes nothing.
    """
    load = np.zeros(layers * num_experts, np.int64)
    first = np.arange(layers)[:, None] * num_experts
    for own in routes:
        load += np.bincount((own + first)[own >= 0], minlength=load.size)
    return load.reshape(layers, num_experts)


def load_of_fullest(load: np.ndarray) -> float:
    """Returns how many tokens the fullest expert of any layer has, as a multiple of its layer's mean: 1 or more."""
    return float((load.max(1) / np.maximum(load.mean(1), 1.0 / load.shape[1])).max())


def balance_factors(load: np.ndarray, per_token: int, coef: float) -> np.ndarray:
    """Returns float32 [L, E], factors of experts' probabilities, summed over tokens, in a loss that balances experts.

    The loss of a layer is coef E sum_e f_e P_e, f_e the share of T tokens that are sent to e and P_e the mean of e's
    probability, over all samples of an update (arXiv:2101.03961, equation 4). `load` [L, E] is load_by_expert of them.
    """
    tokens = load.sum(1, keepdims=True) / per_token
    return (coef * load.shape[1] * load / np.maximum(tokens, 1) ** 2).astype(np.float32)


def balance(batch: MicroBatch, factors: np.ndarray, share: TokenShare = ALL_TOKENS) -> np.ndarray:
    """Returns float32 [L, N + E]: how many samples each of a micro-batch's tokens, or of a share of them, is of; and
    the `factors` [L, E]."""
    return np.concatenate([np.tile(_repeats(batch, share), (len(factors), 1)), factors], 1)


def _repeats(batch: MicroBatch, share: TokenShare) -> np.ndarray:
    """Counts the samples that each of a micro-batch's tokens, or of a share of them, is of: float32 [N]."""
    whole = np.zeros(batch.positions.shape, np.float32)
    for number, row in enumerate(batch.rows):
        for placed in row:
            whole[number, placed.inputs] += 1
    own = np.take_along_axis(whole, batch.own_columns, 1).reshape(-1)
    return own[share.within(own.size)]


def margins_of(batch: MicroBatch, margins: np.ndarray, share: TokenShare = ALL_TOKENS) -> Margins:
    """Adds up `margins` [L, N] of a micro-batch's tokens, or of a share of them.

    A prompt counts with each of its samples, so that packing changes nothing.
    """
    repeats = _repeats(batch, share)
    own = margins[:, repeats > 0].astype(np.float64)
    total = float((own @ repeats[repeats > 0]).sum())
    return Margins(total, len(own) * float(repeats.sum()), float(own.min(initial=np.inf)))


def routes_of(
    batch: MicroBatch,
    samples: Mapping[int, np.ndarray],
    sizes: tuple[int, int],
    share: TokenShare = ALL_TOKENS,
) -> np.ndarray:
    """Returns the routes of a micro-batch's tokens, or of a share of them, from those of its samples: int32 [L, N, K].

    `sizes` are L and K: a micro-batch may have no samples.
    """
    layers, slots = sizes
    whole = np.full((*batch.positions.shape, layers, slots), NO_EXPERT, np.int32)
    for number, row in enumerate(batch.rows):
        # A prompt's are those of its first sample.
        for placed in reversed(row):
            whole[number, placed.inputs] = samples[placed.sample]
    own = whole[np.arange(len(whole))[:, None], batch.own_columns].reshape(-1, layers, slots)
    return np.ascontiguousarray(np.moveaxis(own[share.within(len(own))], 1, 0))


def with_plan(
    batch: MicroBatch, routes: np.ndarray, plan: ExpertPlan, balance: np.ndarray | None = None
) -> MicroBatch:
    """Returns the micro-batch with the routes [L, N, K] of its tokens and the plan of them."""
    if balance is None:
        balance = np.zeros((len(routes), 1), np.float32)
    return replace(batch, routes=routes, balance=balance, **plan._asdict())
