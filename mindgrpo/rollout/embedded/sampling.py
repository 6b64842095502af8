"""Draws tokens inside a graph from logits that are split over ranks; every rank of the group draws the same.

Order, as Hugging Face's: repetition penalty, temperature, top-k, top-p, min-p. The token is the inverse of the
cumulative distribution in vocabulary order at a given uniform number, so the layout does not show in it. Reported
log-probs are those of the untruncated, unpenalised distribution at the temperature: what the trainer computes.
"""

from __future__ import annotations

from typing import Any

import mindspore as ms
from mindspore import Tensor, nn, ops

from mindgrpo.backend.contract import Group
from mindgrpo.backend.kernels.contract import NEVER
from mindgrpo.models.parallel_cells import GatherColumns
from mindgrpo.rollout.sampling_params import SamplingSettings


class Sampler(nn.Cell):
    """(logits [B, local vocabulary] at temperature 1, uniforms [B], banned [B], seen [B, local vocabulary])
    -> tokens int32 [B], logps float32 [B].

    `banned` is 1.0 where stop ids may not be drawn yet; `seen` is 1.0 for tokens that the penalty applies to.
    Ties at the border of top-k or top-p are all kept.
    """

    def __init__(
        self, settings: SamplingSettings, local_vocab: int, first_token: int, group: Group
    ) -> None:
        super().__init__()
        self.greedy = settings.temperature == 0
        self.scale = 1.0 / settings.trainer_temperature
        self.penalty = settings.repetition_penalty
        self.top_p, self.min_p = settings.top_p, settings.min_p
        self.local_vocab = local_vocab
        self.top_k = min(settings.top_k, local_vocab * group.size) if settings.top_k > 0 else 0
        # Any of the k largest of all is among the k largest of its own rank.
        self.candidates = min(self.top_k, local_vocab) if self.top_k else local_vocab
        self.truncates = self.top_k > 0 or settings.top_p < 1.0
        self.gather = GatherColumns(group)
        self.index = group.index
        ids = range(first_token, first_token + local_vocab)
        self.ids = Tensor([list(ids)], ms.float32)
        stops = set(settings.stop_ids)
        self.stops = Tensor([[NEVER if i in stops else 0.0 for i in ids]], ms.float32)
        self.bans = settings.min_tokens > 0
        self.before = Tensor(
            [[1.0 if i < group.index else 0.0 for i in range(group.size)]], ms.float32
        )
        self.cumulate = ops.CumSum()

    def _processed(self, logits: Any, banned: Any, seen: Any) -> Any:
        if self.penalty != 1.0:
            lowered = ops.where(logits < 0, logits * self.penalty, logits / self.penalty)
            logits = ops.where(seen > 0, lowered, logits)
        logits = logits * self.scale
        if self.bans:
            logits = logits + ops.expand_dims(banned, 1) * self.stops
        return logits

    def _threshold(self, logits: Any) -> Any:
        """[B, 1]: the smallest logit that top-k and top-p keep."""
        local, _ = ops.topk(logits, self.candidates)
        ends = local[:, -1:]
        # Logits that equal the smallest candidate are kept with it, and count for top-p.
        more = ops.equal(logits, ends).astype(ms.float32).sum(axis=1, keepdims=True)
        more = more - ops.equal(local, ends).astype(ms.float32).sum(axis=1, keepdims=True)
        pieces = self.gather(ops.concat((local, more), 1))
        every = pieces[:, :, : self.candidates].reshape(logits.shape[0], -1)
        kept = self.top_k if self.top_k else every.shape[1]
        best, _ = ops.topk(every, kept)
        lowest = best[:, -1:]
        if self.top_p < 1.0:
            top = best[:, :1]
            more = pieces[:, :, self.candidates]
            ends = pieces[:, :, self.candidates - 1]
            total = (more * ops.equal(ends, lowest).astype(ms.float32)).sum(axis=1, keepdims=True)
            total = total * ops.exp(lowest - top)
            counted = (every >= lowest).astype(ms.float32)
            total = total + (counted * ops.exp(every - top)).sum(axis=1, keepdims=True)
            mass = ops.exp(best - top)
            earlier = self.cumulate(mass, 1) - mass
            inside = earlier < self.top_p * total
            lowest = ops.where(inside, best, top).min(axis=1, keepdims=True)
        return lowest

    def construct(self, logits: Any, uniforms: Any, banned: Any, seen: Any) -> Any:
        raw = logits * self.scale
        processed = self._processed(logits, banned, seen)
        top = processed.max(axis=1, keepdims=True)
        mass = ops.exp(processed - top)
        raw_top = raw.max(axis=1, keepdims=True)
        raw_mass = ops.exp(raw - raw_top).sum(axis=1, keepdims=True)
        columns = (top, mass.sum(axis=1, keepdims=True), raw_top, raw_mass)
        pieces = self.gather(ops.concat(columns, 1))
        tops = pieces[:, :, 0]
        highest = tops.max(axis=1, keepdims=True)
        raw_highest = pieces[:, :, 2].max(axis=1, keepdims=True)
        raw_total = (pieces[:, :, 3] * ops.exp(pieces[:, :, 2] - raw_highest)).sum(axis=1)
        log_total = raw_highest[:, 0] + ops.log(raw_total)
        if self.greedy:
            onehot = self._first_of(ops.equal(processed, highest))
            owner = self._first_rank(tops, highest)
        else:
            onehot, owner = self._draw(processed, mass, top, highest, pieces, uniforms)
        mine = onehot * owner
        token = (mine * self.ids).sum(axis=1, keepdims=True)
        logit = ops.where(mine > 0, raw, ops.zeros_like(raw)).sum(axis=1, keepdims=True)
        chosen = self.gather(ops.concat((token, logit), 1)).sum(axis=1)
        return chosen[:, 0].astype(ms.int32), chosen[:, 1] - log_total

    def _first_of(self, flags: Any) -> Any:
        ones = flags.astype(ms.float32)
        return ones * (ops.equal(self.cumulate(ones, 1), 1.0)).astype(ms.float32)

    def _first_rank(self, tops: Any, highest: Any) -> Any:
        return self._first_of(ops.equal(tops, highest))[:, self.index : self.index + 1]

    def _draw(
        self, processed: Any, mass: Any, top: Any, highest: Any, pieces: Any, uniforms: Any
    ) -> Any:
        """(one-hot over the local vocabulary, 1.0 on the rank that owns the token)."""
        lift = ops.exp(top - highest)
        if self.truncates or self.min_p > 0:
            lowest = ops.full_like(highest, NEVER)
            if self.truncates:
                lowest = self._threshold(processed)
            if self.min_p > 0:
                lowest = ops.maximum(lowest, highest + ops.log(Tensor(self.min_p, ms.float32)))
            mass = mass * (processed >= lowest).astype(ms.float32) * lift
            shares = self.gather(mass.sum(axis=1, keepdims=True))[:, :, 0]
        else:
            mass = mass * lift
            shares = pieces[:, :, 1] * ops.exp(pieces[:, :, 0] - highest)
        ends = self.cumulate(shares, 1)
        aim = ops.expand_dims(uniforms, 1) * ends[:, -1:]
        # Rounding may leave the aim at the very end: the last rank with any mass takes it then.
        aim = ops.minimum(aim, ends[:, -1:] * (1.0 - 1e-7))
        owner = self._first_of(ends > aim)[:, self.index : self.index + 1]
        begin = (shares * self.before).sum(axis=1, keepdims=True)
        sums = self.cumulate(mass, 1)
        # `begin` and `ends` round apart; below zero, a token without mass would be first past the aim.
        within = ops.maximum(aim - begin, ops.zeros_like(begin))
        within = ops.minimum(within, sums[:, -1:] * (1.0 - 1e-7))
        return self._first_of(sums > within), owner
