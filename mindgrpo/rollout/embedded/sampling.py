"""Defines how a token is drawn from logits that are split over the ranks of a group: candidates in the graph, the
choice among them on the host.

1. Repetition penalty, then the inverse temperature, then -1e30 for stop ids that are banned: the logit x of a token.
2. A token is kept while x is at least a threshold, the largest of three, where they are on: the k-th largest logit
   (top-k); of the logits that top-k keeps, the smallest with less than p of their mass above it (top-p); the largest
   logit plus log(min_p) (min-p). That is Hugging Face's order, but that equal logits stay or go together.
3. The score of a kept token is x plus noise.gumbel of (seed, step, sample, position, token); without noise where the
   temperature is 0. The token with the largest score is drawn, of equal scores the lowest: a sample of softmax(x) over
   the kept tokens (E. J. Gumbel, 1954; Maddison, Tarlow and Minka, arXiv:1411.0030).
4. The reported log-prob is that of the unpenalised, untruncated distribution at the temperature: what the trainer
   computes.

Logits are float32. Noise and score of a token know nothing of the other tokens, so a layout, which changes logits by
rounding alone, changes the token only where two scores lie within that rounding. The kernels native/head.c and draw.c
do the same; tests/test_sampling.py compares both with the definition in NumPy.

With a threshold, the graph gives each rank's largest logits, which nearly always hold all that is kept, and the noise
of those alone is made; `draw` tells where others could be kept, and then all logits are candidates. Without, each
token's noise is made in the graph, and a rank's one candidate has its largest score. The noise is that of
rollout/noise.py: the same bits, in int32, whose products wrap as uint32's do; the graph's variates are computed in
float32, of the smaller of u and 1 - u, and so to some 1e-6 what float64 gives.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.ops.auto_generate import SumExt

from mindgrpo.algorithm.exponentials import exp, log
from mindgrpo.backend.contract import Group
from mindgrpo.backend.kernels.contract import Kernels
from mindgrpo.backend.kernels.mindspore_ops import right_shift
from mindgrpo.backend.kernels.shapes import NEVER, SamplingParams
from mindgrpo.models.parallel_cells import GatherColumns
from mindgrpo.rollout.noise import TOKEN_STRIDE, TRIPLE32, bits_at, gumbel_of

# Candidates beyond top-k of each rank, for logits that equal the k-th: of bfloat16 numbers there are some.
SPARE = 64
# Candidates of all ranks together where only a mass says how many are kept.
BY_MASS = 1024


def _signed(number: int) -> int:
    """Returns the int32 with the bits of a uint32."""
    return int(np.uint32(number).astype(np.int32))


class GumbelNoise(nn.Cell):
    """keys int32 [B, 2], halves of noise.position_keys -> float32 [B, tokens], for tokens from `first` on.

    Numbers of pairs and of tokens are hashed together: of 32 tokens one row of 16 pairs and two of tokens, whose keys
    have their halves exchanged.
    """

    def __init__(self, first: int, num_tokens: int) -> None:
        super().__init__()
        begin, end = first // 32 * 32, -(-(first + num_tokens) // 32) * 32
        self.start, self.stop = first - begin, first + num_tokens - begin
        pairs = np.arange(begin // 2, end // 2, dtype=np.uint32).reshape(-1, 1, 16)
        tokens = np.arange(begin, end, dtype=np.uint32).reshape(-1, 2, 16)
        numbers = np.concatenate([pairs, tokens], 1)
        self.strides = Tensor((numbers * TOKEN_STRIDE).astype(np.int32)[None])
        # Which half of the key is added at first, and which later, to each of the three rows.
        self.halves = Tensor([0, 1, 1], ms.int32), Tensor([1, 0, 0], ms.int32)
        self.shifts = tuple(shift for shift, _ in TRIPLE32)
        self.factors = tuple(_signed(factor) for _, factor in TRIPLE32)

    def bits(self, keys: Any) -> Any:
        """Returns int32 [B, tokens] with the bits of noise.token_bits."""
        first, second = [ops.gather(keys, half, 1).reshape(-1, 1, 3, 1) for half in self.halves]
        x = self.strides + first
        for i in range(len(self.shifts)):
            x = ops.bitwise_xor(x, right_shift(x, self.shifts[i]))
            if i == 1:
                x = x + second
            x = x * self.factors[i]
        x = ops.bitwise_xor(x, right_shift(x, 14))
        pairs, tokens = x[:, :, :1], x[:, :, 1:]
        upper = ops.concat((pairs * 65536, ops.bitwise_and(pairs, -65536)), 2)
        bits = ops.bitwise_or(upper, right_shift(tokens, 16)).reshape(keys.shape[0], -1)
        return bits[:, self.start : self.stop]

    def construct(self, keys: Any) -> Any:
        return variates(self.bits(keys))


def variates(bits: Any) -> Any:
    """Returns float32 Gumbel variates of int32 with the bits of uint32, see noise.gumbel_of."""
    is_upper = bits < 0
    # Of uint32 bits >= 2^31 the distance to 2^32, which float32 holds as exactly as the small ones.
    nearest = ops.where(is_upper, -1 - bits, bits)
    share = (ops.cast(nearest, ms.float32) + 0.5) * 2.0**-32
    # log(1 - share) of small shares, the largest variates, as its series: log1p was seen to be log of the sum.
    series = share / -7.0
    for i in range(6, 0, -1):
        series = (series - 1.0 / i) * share
    log = ops.log(ops.where(is_upper, 1.0 - share, share))
    return -ops.log(-ops.where(ops.logical_and(is_upper, share < 0.0625), series, log))


class Candidates(nn.Cell):
    """(logits [B, local vocabulary] at temperature 1, keys int32 [B, 2] as GumbelNoise's, banned [B], seen [B, local
    vocabulary]) -> float32 [B, ranks, 3 C + 3], alike on every rank of the group.

    Of each rank's C candidates x, or the score where noise is in it, in falling order; the logits at the temperature
    alone; the tokens. Then the largest of these logits and their mass relative to it, and the mass of x relative to its
    largest. `banned` is 1.0 where stop ids may not be drawn yet; `seen` is 1.0 for tokens that the penalty applies to.
    """

    def __init__(
        self,
        sampling: SamplingParams,
        local_vocab: int,
        first_token: int,
        group: Group,
        kernels: Kernels,
        takes_all: bool = False,
    ) -> None:
        """`takes_all`: every token is a candidate where there is a threshold."""
        super().__init__()
        self.scale = sampling.scale
        self.penalty = sampling.repetition_penalty
        self.first_token = first_token
        self.has_threshold = has_threshold(sampling)
        self.has_noise = not self.has_threshold and not sampling.greedy
        self.noise = GumbelNoise(first_token, local_vocab)
        spare = max(0, sampling.top_k) + SPARE if sampling.top_k > 0 else BY_MASS // group.size
        self.count = 1
        if self.has_threshold:
            self.count = local_vocab if takes_all else min(local_vocab, spare)
        self.largest = kernels.largest(self.count)
        self.gather = GatherColumns(group)
        stops = set(sampling.stop_ids)
        ids = range(first_token, first_token + local_vocab)
        self.stops = Tensor([[NEVER if i in stops else 0.0 for i in ids]], ms.float32)
        self.bans = sampling.min_tokens > 0
        self.is_processed = self.bans or self.penalty != 1.0
        self.max, self.sum = ops.ArgMaxWithValue(1, True), SumExt()
        self.concat, self.slice = ops.Concat(1), ops.StridedSlice()

    def construct(self, logits: Any, keys: Any, banned: Any, seen: Any) -> Any:
        raw = logits * self.scale
        _, raw_top = self.max(raw)
        raw_mass = self.mass(raw, raw_top)
        x = self._processed(logits, banned, seen)
        mass = raw_mass
        if self.has_threshold:
            best, at = self.largest(x)
            if self.is_processed:
                top = self.slice(best, (0, 0), (best.shape[0], 1), (1, 1))
                mass = self.mass(x, top)
        else:
            if self.has_noise:
                x = x + self.noise(keys)
            # The first of equal ones: ranks hold the vocabulary in order, so that is the lowest token.
            at = ops.expand_dims(ops.argmax(x, 1), 1)
            best = ops.gather_elements(x, 1, at)
        tokens = ops.cast(at, ms.float32) + self.first_token
        logit = ops.gather_elements(raw, 1, at)
        return self.gather(self.concat((best, logit, tokens, raw_top, raw_mass, mass)))

    def mass(self, x: Any, top: Any) -> Any:
        return self.sum(ops.exp(x - top), (1,), True, None)

    def _processed(self, logits: Any, banned: Any, seen: Any) -> Any:
        if self.penalty != 1.0:
            # The one of the two that is farther from being drawn.
            products = logits * self.penalty, logits / self.penalty
            lowered = ops.minimum(*products) if self.penalty > 1.0 else ops.maximum(*products)
            logits = ops.where(seen > 0, lowered, logits)
        logits = logits * self.scale
        if self.bans:
            logits = logits + ops.expand_dims(banned, 1) * self.stops
        return logits


def has_threshold(sampling: SamplingParams) -> bool:
    """Tells whether tokens are kept by their logits; where the likeliest is taken, it always is."""
    cuts = sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0
    return cuts and not sampling.greedy


class Drawn(NamedTuple):
    """Holds what was drawn, [B] each; where `is_complete` is false, a token that is no candidate might be kept."""

    tokens: np.ndarray
    logps: np.ndarray
    is_complete: np.ndarray


def draw(
    sampling: SamplingParams, columns: np.ndarray, keys: np.ndarray, local_vocab: int
) -> Drawn:
    """Draws from what Candidates gives, float32 [B, ranks, 3 C + 3], with noise of position_keys uint64 [B]."""
    size, count = len(columns), columns.shape[2] // 3 - 1
    x, logits, tokens = (
        columns[:, :, i * count : (i + 1) * count].reshape(size, -1) for i in range(3)
    )
    is_complete = np.ones(size, bool)
    if has_threshold(sampling):
        masses = (columns[:, :, -1] * exp(columns[:, :, 0] - x.max(1)[:, None])).sum(1)
        ends = columns[:, :, count - 1].max(1)
        kept, is_complete = _kept(sampling, x, ends, masses)
        is_complete |= count == local_vocab
        rows, places = np.nonzero(kept)
        noise = gumbel_of(bits_at(keys[rows], tokens[rows, places].astype(np.uint32)))
        scores = np.full_like(x, -np.inf)
        scores[rows, places] = x[rows, places] + noise
        x = scores
    is_best = x == x.max(1, keepdims=True)
    at = np.where(is_best, tokens, np.inf).argmin(1)[:, None]
    tops, sums = columns[:, :, -3], columns[:, :, -2]
    highest = tops.max(1)
    log_total = highest + log((sums * exp(tops - highest[:, None])).sum(1))
    logps = np.take_along_axis(logits, at, 1)[:, 0] - log_total
    drawn = np.take_along_axis(tokens, at, 1)[:, 0].astype(np.int32)
    return Drawn(drawn, logps.astype(np.float32), is_complete)


def _kept(
    sampling: SamplingParams, x: np.ndarray, ends: np.ndarray, masses: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns which candidates `x` [B, n] are kept, and whether [B] no other token can be.

    `ends` [B] are the largest of the ranks' smallest candidates: every logit above is here. `masses` [B] are those of
    all tokens, relative to the largest.
    """
    order = np.sort(x, 1)[:, ::-1]
    highest = order[:, :1]
    lowest = np.full_like(highest, -np.inf)
    is_complete = np.ones(len(x), bool)
    if sampling.top_k > 0:
        lowest = order[:, [min(sampling.top_k, x.shape[1]) - 1]]
    if sampling.top_p < 1.0:
        mass = exp((order - highest).astype(np.float64))
        if sampling.top_k > 0:
            # Of more logits that equal the k-th the mass would be counted, too.
            is_complete = ends < lowest[:, 0]
            masses = (mass * (order >= lowest)).sum(1)
        inside = np.cumsum(mass, 1) - mass < sampling.top_p * masses[:, None]
        lowest = np.maximum(lowest, np.where(inside, order, highest).min(1, keepdims=True))
    if sampling.min_p > 0:
        lowest = np.maximum(lowest, highest + np.log(np.float32(sampling.min_p)))
    return x >= lowest, is_complete & (ends < lowest[:, 0])
