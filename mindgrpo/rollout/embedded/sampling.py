"""Defines how a token is drawn, in MindSpore operations, from logits that are split over the ranks of a group.

1. Repetition penalty, then the inverse temperature, then -1e30 for stop ids that are banned: the logit x of a token.
2. A token is kept while x is at least a threshold, the largest of three, where they are on: the k-th largest logit
   (top-k); of the logits that top-k keeps, the smallest with less than p of their mass above it (top-p); the largest
   logit plus log(min_p) (min-p). That is Hugging Face's order, but that equal logits stay or go together.
3. The score of a kept token is x plus noise.gumbel of (seed, step, sample, position, token); without noise where the
   temperature is 0. The token with the largest score is drawn, of equal scores the lowest: a sample of softmax(x) over
   the kept tokens (E. J. Gumbel, 1954; Maddison, Tarlow and Minka, arXiv:1411.0030).
4. The reported log-prob is that of the unpenalised, untruncated distribution at the temperature: what the trainer
   computes.

All in float32. Noise and score of a token know nothing of the other tokens, so a layout, which changes logits by
rounding alone, changes the token only where two scores lie within that rounding. The kernels native/head.c and draw.c
do the same; tests/test_sampling.py compares both with the definition in NumPy.

The noise is that of rollout/noise.py as graph code: the same bits, in int32, whose products wrap as uint32's do. The
variates are computed in float32, of the smaller of u and 1 - u, and so to some 1e-6 what float64 gives.
"""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from mindgrpo.backend.contract import Group
from mindgrpo.backend.kernels.sampling_params import SamplingParams
from mindgrpo.backend.kernels.shapes import NEVER
from mindgrpo.models.parallel_cells import GatherColumns
from mindgrpo.rollout.noise import TOKEN_STRIDE, TRIPLE32


def _signed(number: int) -> int:
    """Returns the int32 with the bits of a uint32."""
    return int(np.uint32(number).astype(np.int32))


class _Triple32(nn.Cell):
    """(low int32 [B], high int32 [B]) -> int32 [B, numbers], see noise._triple32."""

    def __init__(self, numbers: np.ndarray) -> None:
        super().__init__()
        self.strides = Tensor((numbers * TOKEN_STRIDE).astype(np.int32)[None])
        self.shifts = tuple(shift for shift, _ in TRIPLE32)
        self.factors = tuple(_signed(factor) for _, factor in TRIPLE32)

    def shifted(self, x: Any, shift: int) -> Any:
        """Returns x >> shift, with zeros from above."""
        return ops.bitwise_and(ops.bitwise_right_shift(x, shift), (1 << (32 - shift)) - 1)

    def construct(self, low: Any, high: Any) -> Any:
        x = self.strides + ops.expand_dims(low, 1)
        for i in range(len(self.shifts)):
            x = ops.bitwise_xor(x, self.shifted(x, self.shifts[i]))
            if i == 1:
                x = x + ops.expand_dims(high, 1)
            x = x * self.factors[i]
        return ops.bitwise_xor(x, self.shifted(x, 14))


class GumbelNoise(nn.Cell):
    """keys int32 [B, 2], halves of noise.position_keys -> float32 [B, tokens], for tokens from `first` on."""

    def __init__(self, first: int, num_tokens: int) -> None:
        super().__init__()
        begin, end = first // 32 * 32, first + num_tokens
        self.start, self.stop = first - begin, end - begin
        self.pairs = _Triple32(np.arange(begin // 2, -(-end // 32) * 16, dtype=np.uint32))
        self.tokens = _Triple32(np.arange(first, end, dtype=np.uint32))

    def bits(self, keys: Any) -> Any:
        """Returns int32 [B, tokens] with the bits of noise.token_bits."""
        low, high = keys[:, 0], keys[:, 1]
        pairs = self.pairs(low, high).reshape(keys.shape[0], -1, 1, 16)
        halves = ops.concat((pairs * 65536, ops.bitwise_and(pairs, -65536)), 2)
        upper = halves.reshape(keys.shape[0], -1)[:, self.start : self.stop]
        lower = ops.bitwise_and(ops.bitwise_right_shift(self.tokens(high, low), 16), 0xFFFF)
        return ops.bitwise_or(upper, lower)

    def construct(self, keys: Any) -> Any:
        return variates(self.bits(keys))


def variates(bits: Any) -> Any:
    """Returns float32 Gumbel variates of int32 with the bits of uint32, see noise.gumbel_of."""
    is_upper = bits < 0
    # Of uint32 bits >= 2^31 the distance to 2^32, which float32 holds as exactly as the small ones.
    nearest = ops.where(is_upper, -1 - bits, bits)
    share = (nearest.astype(ms.float32) + 0.5) * 2.0**-32
    # -log(1 - share) of small shares, the largest variates, as its series: log1p was seen to be log of the sum.
    series = share / 7.0
    for i in range(6, 0, -1):
        series = (series + 1.0 / i) * share
    upper = ops.where(share < 0.0625, series, -ops.log(1.0 - share))
    return -ops.log(ops.where(is_upper, upper, -ops.log(share)))


class Sampler(nn.Cell):
    """(logits [B, local vocabulary] at temperature 1, noise [B, local vocabulary], banned [B], seen [B, local
    vocabulary]) -> tokens int32 [B], log-probs float32 [B], alike on every rank of the group.

    `noise` is not read at temperature 0. `banned` is 1.0 where stop ids may not be drawn yet; `seen` is 1.0 for tokens
    that the penalty applies to.
    """

    def __init__(
        self, sampling: SamplingParams, local_vocab: int, first_token: int, group: Group
    ) -> None:
        super().__init__()
        self.greedy = sampling.greedy
        self.scale = sampling.scale
        self.penalty = sampling.repetition_penalty
        self.top_p, self.min_p = sampling.top_p, sampling.min_p
        self.first_token = first_token
        self.top_k = min(sampling.top_k, local_vocab * group.size) if sampling.top_k > 0 else 0
        # Any of the k largest of all is among the k largest of its own rank.
        self.candidates = min(self.top_k, local_vocab) if self.top_k else local_vocab
        self.truncates = self.top_k > 0 or sampling.top_p < 1.0
        self.gather = GatherColumns(group)
        stops = set(sampling.stop_ids)
        ids = range(first_token, first_token + local_vocab)
        self.stops = Tensor([[NEVER if i in stops else 0.0 for i in ids]], ms.float32)
        self.bans = sampling.min_tokens > 0
        self.cumulate = ops.CumSum()

    def construct(self, logits: Any, noise: Any, banned: Any, seen: Any) -> Any:
        raw = logits * self.scale
        raw_top = raw.max(axis=1, keepdims=True)
        raw_mass = ops.exp(raw - raw_top).sum(axis=1, keepdims=True)
        scores = self._scores(self._processed(logits, banned, seen), noise)
        # The first of equal ones: ranks hold the vocabulary in order, so that is the lowest token here and below.
        best = ops.expand_dims(ops.argmax(scores, 1), 1)
        score = ops.gather_elements(scores, 1, best)
        logit = ops.gather_elements(raw, 1, best)
        token = best.astype(ms.float32) + self.first_token
        by_rank = self.gather(ops.concat((score, token, logit, raw_top, raw_mass), 1))
        winner = ops.expand_dims(ops.argmax(by_rank[:, :, 0], 1), 1)
        drawn = ops.gather_elements(by_rank[:, :, 1], 1, winner)[:, 0].astype(ms.int32)
        logit = ops.gather_elements(by_rank[:, :, 2], 1, winner)[:, 0]
        highest = by_rank[:, :, 3].max(axis=1, keepdims=True)
        total = (by_rank[:, :, 4] * ops.exp(by_rank[:, :, 3] - highest)).sum(axis=1)
        return drawn, logit - (highest[:, 0] + ops.log(total))

    def _processed(self, logits: Any, banned: Any, seen: Any) -> Any:
        if self.penalty != 1.0:
            lowered = ops.where(logits < 0, logits * self.penalty, logits / self.penalty)
            logits = ops.where(seen > 0, lowered, logits)
        logits = logits * self.scale
        if self.bans:
            logits = logits + ops.expand_dims(banned, 1) * self.stops
        return logits

    def _scores(self, logits: Any, noise: Any) -> Any:
        if self.greedy:
            return logits
        scores = logits + noise
        if not self.truncates and self.min_p == 0:
            return scores
        if self.truncates:
            lowest, highest = self._threshold(logits)
        else:
            highest = self.gather(logits.max(axis=1, keepdims=True)).max(axis=1)
            lowest = highest + NEVER
        if self.min_p > 0:
            lowest = ops.maximum(lowest, highest + ops.log(Tensor(self.min_p, ms.float32)))
        return ops.where(logits >= lowest, scores, ops.full_like(scores, NEVER))

    def _threshold(self, logits: Any) -> Any:
        """Returns [B, 1] each: the smallest logit that top-k and top-p keep, and the largest of all."""
        local, _ = ops.topk(logits, self.candidates)
        ends = local[:, -1:]
        # Logits that equal the smallest candidate are kept with it, and count for top-p.
        more = ops.equal(logits, ends).astype(ms.float32).sum(axis=1, keepdims=True)
        more = more - ops.equal(local, ends).astype(ms.float32).sum(axis=1, keepdims=True)
        by_rank = self.gather(ops.concat((local, more), 1))
        every = by_rank[:, :, : self.candidates].reshape(logits.shape[0], -1)
        kept = self.top_k if self.top_k else every.shape[1]
        best, _ = ops.topk(every, kept)
        lowest, top = best[:, -1:], best[:, :1]
        if self.top_p < 1.0:
            more = by_rank[:, :, self.candidates]
            ends = by_rank[:, :, self.candidates - 1]
            total = (more * ops.equal(ends, lowest).astype(ms.float32)).sum(axis=1, keepdims=True)
            total = total * ops.exp(lowest - top)
            counted = (every >= lowest).astype(ms.float32)
            total = total + (counted * ops.exp(every - top)).sum(axis=1, keepdims=True)
            mass = ops.exp(best - top)
            earlier = self.cumulate(mass, 1) - mass
            inside = earlier < self.top_p * total
            lowest = ops.where(inside, best, top).min(axis=1, keepdims=True)
        return lowest, top
