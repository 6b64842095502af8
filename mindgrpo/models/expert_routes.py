"""Keeps the experts that a step's tokens are routed to, on the ranks that compute them, and plans graph inputs.

Training graphs never choose experts: the routes are the generator's, a per-token array of the rollout (router replay,
arXiv:2510.11370), or those recorded by an earlier forward pass. All row counts are thus known before a graph starts.
In statistics, a prompt counts once for each of its samples, so that packing does not change the numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from mindgrpo.algorithm.packing import MicroBatch
from mindgrpo.algorithm.sample import Rollout
from mindgrpo.backend.contract import Backend
from mindgrpo.backend.remote_arrays import FetchedArrays
from mindgrpo.models.expert_plan import (
    NO_EXPERT,
    ExpertInputs,
    ExpertSpread,
    capacity,
    plan_experts,
    plan_spread,
    rows_by_expert,
)
from mindgrpo.models.shard import Shard, routing


class Choices(NamedTuple):
    """The routers' choices for N tokens in L layers: `topk_ids` int32 [L, N, K] and `margins` float32 [L, N], as in
    backend/kernels/contract.py."""

    topk_ids: np.ndarray
    margins: np.ndarray


@dataclass(frozen=True)
class Margins:
    """Statistics of router margins: the `total` over `count` (token, layer) pairs, and the `least`.

    A margin is the score of the last chosen expert minus that of the best expert not chosen.
    """

    total: float = 0.0
    count: float = 0.0
    least: float = np.inf

    def __add__(self, other: Margins) -> Margins:
        least = min(self.least, other.least)
        return Margins(self.total + other.total, self.count + other.count, least)

    @property
    def mean(self) -> float:
        return self.total / self.count


@dataclass(frozen=True)
class ExpertStatistics:
    """Routing statistics of a step, of one rank or of all.

    `load_max` is load_of_fullest over all samples and layers (None on a rank without expert layers). `is_replayed`: the
    routes are the generator's. `compared` counts the (token, layer) pairs for which routers chose while replaying, and
    `changed` those for which they chose different experts. `margins` are those of the first pass over all samples in
    which routers chose; their count is 0 before.
    """

    load_max: float | None = None
    is_replayed: bool = False
    compared: int = 0
    changed: int = 0
    margins: Margins = Margins()

    @classmethod
    def merged(cls, by_rank: Sequence[ExpertStatistics]) -> ExpertStatistics:
        return cls(
            max(own.load_max for own in by_rank if own.load_max is not None),
            by_rank[0].is_replayed,
            sum(own.compared for own in by_rank),
            sum(own.changed for own in by_rank),
            sum((own.margins for own in by_rank), Margins()),
        )

    def metrics(self) -> dict[str, float | None]:
        """Returns the step's metrics, without those that no pass has measured."""
        metrics = {"moe/load_max": self.load_max, "moe/routes_replayed": float(self.is_replayed)}
        if self.compared:
            metrics["moe/routes_changed"] = self.changed / self.compared
        if self.margins.count:
            metrics["moe/margin_mean"] = self.margins.mean
            metrics["moe/margin_min"] = self.margins.least
        return metrics


@dataclass(frozen=True)
class TokenShare:
    """Shard `index` of `of` equal token shards (sequence parallelism)."""

    index: int = 0
    of: int = 1

    def within(self, count: int) -> slice:
        size = count // self.of
        return slice(self.index * size, (self.index + 1) * size)


ALL_TOKENS = TokenShare()


class StageExperts:
    """The mixture-of-experts layers of `shard`'s stage; its methods are collective over all ranks.

    `layers` are the indices of the stage's L expert layers among the model's `num_layers` expert layers. `same_layers`
    is the group of ranks that compute other tokens with the same layers; None without such layers. `share` selects this
    rank's tokens of a micro-batch, and `group` is the ep x etp group over which experts are sharded (`spread`).
    """

    def __init__(self, shard: Shard, backend: Backend) -> None:
        mesh, rank, moe = shard.weights.layout.mesh, shard.weights.rank, shard.config.moe
        assert moe is not None
        with_experts = [i for i, kind in enumerate(shard.config.layers) if kind.has_experts]
        own = [i for chunk in shard.chunks for i in chunk.layers if i in with_experts]
        self.moe, self.num_layers = moe, len(with_experts)
        self.layers = [with_experts.index(i) for i in own]
        self.world, axes = backend.world, ("dp", "cp", "tp")
        self.same_layers = backend.group(mesh.group(rank, axes)) if own else None
        self.share = ALL_TOKENS
        if shard.token_shares > 1:
            self.share = TokenShare(shard.group.index, shard.token_shares)
        self.group = shard.expert_groups["ep", "etp"]
        self.spread = ExpertSpread(mesh.ep, mesh.etp, self.group.index)

    def replayed(self, rollout: Rollout) -> StepExperts | None:
        """Returns the generator's routes of a rollout, or None if it recorded none."""
        arrays = rollout.token_arrays.get("routes")
        if arrays is None:
            return None
        routes = FetchedArrays(arrays, self.layers, self.world)
        return StepExperts(self, routes, ExpertStatistics(is_replayed=True)).loaded(len(rollout))

    def recorded(
        self, batches: Sequence[MicroBatch], choices: Sequence[Choices], num_samples: int
    ) -> StepExperts:
        """Returns the routers' `choices` for `batches` as routes by sample.

        Together, the micro-batches of the ranks with the same layers must contain all samples.
        """
        routes: dict[int, np.ndarray] = {}
        if self.same_layers is not None:
            own = routes_by_sample(batches, [each.topk_ids for each in choices], self.share)
            routes = merge_routes(self.same_layers.gather_objects(own))
        return StepExperts(self, routes).loaded(num_samples).measured(batches, choices)


@dataclass(frozen=True)
class StepExperts:
    """The routes of a step's samples on this rank: expert ids int [prompt + completion - 1, L, K] by sample, in the L
    expert layers of its `stage`; empty without such layers."""

    stage: StageExperts
    routes: Mapping[int, np.ndarray]
    statistics: ExpertStatistics = ExpertStatistics()

    def _with(self, **figures: Any) -> StepExperts:
        return replace(self, statistics=replace(self.statistics, **figures))

    def loaded(self, num_samples: int) -> StepExperts:
        """Collective call: returns a copy with the load of all samples in its statistics."""
        load = self.load(range(num_samples))
        return self._with(load_max=load_of_fullest(load)) if load.size else self

    def measured(self, batches: Sequence[MicroBatch], choices: Sequence[Choices]) -> StepExperts:
        """Returns a copy with the margins of `choices`, made for all samples, in its statistics."""
        if not routing(self.stage.moe).has_rest:
            return self
        pairs = zip(batches, choices, strict=bool(choices))
        own = (margins_of(batch, each.margins, self.stage.share) for batch, each in pairs)
        return self._with(margins=sum(own, Margins()))

    def compared(
        self, inputs: Sequence[ExpertInputs] | None, choices: Sequence[Choices]
    ) -> StepExperts:
        """Returns a copy that counts how `choices` differ from the replayed `inputs`, if these are the generator's."""
        own = self.statistics
        if not own.is_replayed or inputs is None:
            return self
        pairs = zip(choices, inputs, strict=True)
        counts = [count_choices(one.topk_ids, other.topk_ids) for one, other in pairs]
        compared, changed = np.sum(counts, 0).tolist()
        return self._with(compared=own.compared + compared, changed=own.changed + changed)

    def load(self, members: Sequence[int]) -> np.ndarray:
        """Collective call: returns load_by_expert of samples `members`, int64 [L, E]; each rank counts a part."""
        stage, number, routes = self.stage, self.stage.moe.num_experts, self.routes
        if isinstance(routes, FetchedArrays):
            load = np.zeros(stage.num_layers * number, np.int64)
            for segment, times in routes.owned(members):
                load += times * load_by_expert([segment], stage.num_layers, number).reshape(-1)
            return stage.world.sum_array(load).reshape(-1, number)[stage.layers]
        group = stage.same_layers
        if group is None:
            return np.zeros((0, number), np.int64)
        own = (routes[i] for i in members[group.index :: group.size])
        return np.sum(group.gather_objects(load_by_expert(own, len(stage.layers), number)), 0)

    def inputs(
        self,
        batches: Sequence[MicroBatch],
        members: Sequence[int] | None = None,
        scale: float = 1.0,
    ) -> list[ExpertInputs] | None:
        """Collective call: returns the ExpertInputs of each micro-batch, or None if the stage has no expert layers.

        With `members`, the samples of an update, they include the balancing loss, multiplied by `scale`.
        """
        stage, moe, routes = self.stage, self.stage.moe, self.routes
        if isinstance(routes, FetchedArrays):
            own_rows = (row for batch in batches for row in batch.rows)
            routes.fetch(placed.sample for row in own_rows for placed in row)
        factors = None
        if members is not None and moe.balance_coef > 0:
            coef = moe.balance_coef * scale / stage.num_layers
            factors = balance_factors(self.load(members), moe.per_token, coef)
        if not routes:
            return None
        sizes = len(stage.layers), moe.per_token
        ids = [routes_of(batch, routes, sizes, stage.share) for batch in batches]
        if stage.spread.size == 1:
            plans = [plan_experts(own, moe.num_experts) for own in ids]
        else:
            counts = np.stack([rows_by_expert(own, moe.num_experts) for own in ids])
            sent = np.stack(stage.group.gather_objects(counts))
            rows = capacity(sent, stage.spread, ids[0][0].size)
            plans = [plan_spread(own, sent[:, i], stage.spread, rows) for i, own in enumerate(ids)]
        if factors is None:
            return plans
        balances = [balance(batch, factors, stage.share) for batch in batches]
        return [own._replace(balance=b) for own, b in zip(plans, balances, strict=True)]


def count_choices(chosen: np.ndarray, topk_ids: np.ndarray) -> np.ndarray:
    """Returns int64 [2]: how many (layer, token) pairs have experts, and for how many `chosen` differs from `topk_ids`.

    Both are int [L, N, K]; the order of a token's experts does not matter.
    """
    is_token = (topk_ids >= 0).all(-1)
    differs = (np.sort(chosen, -1) != np.sort(topk_ids, -1)).any(-1)
    return np.array([is_token.sum(), (is_token & differs).sum()], np.int64)


def routes_by_sample(
    batches: Sequence[MicroBatch], recorded: Sequence[np.ndarray], share: TokenShare = ALL_TOKENS
) -> dict[int, np.ndarray]:
    """Splits the routes [L, N, K] of each micro-batch, or of a token shard of it, by sample: int16
    [prompt + completion - 1, L, K]. Tokens of other ranks that share the rows get NO_EXPERT.
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
    """Merges the routes by sample, int16 [prompt + completion - 1, L, K], of ranks with the same layers."""
    merged: dict[int, np.ndarray] = {}
    for routes in by_rank:
        for sample, own in routes.items():
            merged[sample] = np.maximum(merged[sample], own) if sample in merged else own
    return merged


def load_by_expert(routes: Iterable[np.ndarray], layers: int, num_experts: int) -> np.ndarray:
    """Returns each expert's number of tokens, int64 [L, E], in samples with `routes` [tokens, L, K]."""
    load = np.zeros(layers * num_experts, np.int64)
    first = np.arange(layers)[:, None] * num_experts
    for own in routes:
        load += np.bincount((own + first)[own >= 0], minlength=load.size)
    return load.reshape(layers, num_experts)


def load_of_fullest(load: np.ndarray) -> float:
    """Returns the largest load of an expert in `load` [L, E], relative to the mean of its layer; 1 or more."""
    return float((load.max(1) / np.maximum(load.mean(1), 1.0 / load.shape[1])).max())


def balance_factors(load: np.ndarray, per_token: int, coef: float) -> np.ndarray:
    """Returns the factors, float32 [L, E], of the experts' summed router probabilities in the load-balancing loss.

    The loss of a layer is coef E sum_e f_e P_e, where f_e is the fraction of the tokens that are routed to e and P_e
    the mean of e's probability over all samples of an update (arXiv:2101.03961, equation 4). `load` int64 [L, E] is
    load_by_expert of these samples.
    """
    tokens = load.sum(1, keepdims=True) / per_token
    return (coef * load.shape[1] * load / np.maximum(tokens, 1) ** 2).astype(np.float32)


def balance(batch: MicroBatch, factors: np.ndarray, share: TokenShare = ALL_TOKENS) -> np.ndarray:
    """Returns float32 [L, N + E]: the number of samples that contain each token of a micro-batch, or of a token shard
    of it, followed by the `factors` [L, E]."""
    return np.concatenate([np.tile(_repeats(batch, share), (len(factors), 1)), factors], 1)


def _repeats(batch: MicroBatch, share: TokenShare) -> np.ndarray:
    """Returns how many samples contain each token of a micro-batch, or of a token shard of it, float32 [N]."""
    whole = np.zeros(batch.positions.shape, np.float32)
    for number, row in enumerate(batch.rows):
        for placed in row:
            whole[number, placed.inputs] += 1
    own = batch.own(whole)
    return own[share.within(own.size)]


def margins_of(batch: MicroBatch, margins: np.ndarray, share: TokenShare = ALL_TOKENS) -> Margins:
    """Returns statistics of the `margins` float32 [L, N] of a micro-batch's tokens, or of a token shard of them."""
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
    """Gathers the routes of a micro-batch's tokens, or of a token shard, int32 [L, N, K], from those of its samples.

    `sizes` are (L, K), since a micro-batch may have no samples.
    """
    layers, slots = sizes
    whole = np.full((*batch.positions.shape, layers, slots), NO_EXPERT, np.int32)
    for number, row in enumerate(batch.rows):
        # Reversed, so that a prompt gets the routes of its first sample.
        for placed in reversed(row):
            whole[number, placed.inputs] = samples[placed.sample]
    own = batch.own(whole)
    return np.ascontiguousarray(np.moveaxis(own[share.within(len(own))], 1, 0))
