"""The generator's graphs: prompts into the cache, and some tokens for every slot.

The cache of a layer is one array [slots * K * S, D]; row (slot * K + head) * S + position. `B` slots, `S` cache
length; other letters as in model/decoder.py.
"""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from mindgrpo.backend.kernels.sampling_params import SamplingParams
from mindgrpo.backend.kernels.shapes import NEVER
from mindgrpo.models.decoder import Embedding, Head, Layer, Rotary
from mindgrpo.models.shard import Shard
from mindgrpo.rollout.embedded.noise_cell import GumbelNoise
from mindgrpo.rollout.embedded.sampling import Sampler


class Decode(nn.Cell):
    """(tokens int32 [B], positions int32 [B], keys int32 [T, B, 2], banned float32 [T, B]) -> the next T tokens of
    every slot, int32 [T, B], and their log-probs [T, B].

    `keys` are the noise's, the lower and the upper half of each, see noise_cell.py; `banned` as in sampling.py. A slot
    whose sample ends goes on at the last position of its own cache; the caller leaves that out.
    """

    def __init__(
        self,
        shard: Shard,
        caches: list[tuple[Parameter, Parameter]],
        slots: int,
        length: int,
        sampling: SamplingParams,
        seen: Parameter | None,
    ) -> None:
        super().__init__()
        attends = [shard.kernels.cached_attention(shard.heads(), *cache) for cache in caches]
        self.embed = Embedding(shard)
        self.layers = _layers(shard, attends)
        self.head = Head(shard)
        self.sample = Sampler(sampling, shard.local_vocab, shard.first_token, shard.group)
        rotary = Rotary(shard, length)
        self.rotary_of = rotary.of_layer
        self.tables = tuple(Tensor(table) for table in rotary.tables)
        self.order = Tensor([list(range(length))], ms.int32)
        heads = slots * shard.kv_heads
        self.row_starts = Tensor([[i * length for i in range(heads)]], ms.int32).reshape(
            slots, shard.kv_heads
        )
        self.last = length - 1
        self.penalises = seen is not None
        self.seen = seen
        first = shard.first_token
        self.ids = Tensor([list(range(first, first + shard.local_vocab))], ms.int32)
        self.is_greedy = sampling.greedy
        self.noise = GumbelNoise(first, shard.local_vocab)

    def construct(self, tokens: Any, positions: Any, keys: Any, banned: Any) -> Any:
        drawn, logps = [], []
        for i in range(keys.shape[0]):
            at = ops.clamp(positions + i, None, self.last)
            tokens, logp = self.next_token(tokens, at, keys[i], banned[i])
            drawn.append(tokens)
            logps.append(logp)
        return ops.stack(drawn), ops.stack(logps)

    def next_token(self, tokens: Any, positions: Any, keys: Any, banned: Any) -> Any:
        at = ops.expand_dims(positions, 1)
        past = (self.order <= at).astype(ms.float32)
        mask = ops.expand_dims((past - 1.0) * -NEVER, 1)
        rows = (self.row_starts + at).reshape(-1)
        angles = []
        for table in self.tables:
            angles.append(ops.expand_dims(ops.gather(table, positions, 0), 1))
        x = self.embed(tokens)
        added = x
        for i in range(len(self.layers)):
            x, added = self.layers[i](x, added, (mask, angles[self.rotary_of[i]], rows))
        logits = self.head(x + added)
        seen = logits
        if self.penalises:
            fresh = ops.equal(ops.expand_dims(tokens, 1), self.ids).astype(ms.float32)
            seen = ops.assign(self.seen, ops.maximum(self.seen, fresh))
        noise = logits
        if not self.is_greedy:
            noise = self.noise(keys)
        return self.sample(logits, noise, banned, seen)


class Prefill(nn.Cell):
    """Keys and values of whole prompts [P, T] into the cache.

    `source` int32 [C] says which prompt each of C slots gets; `cache_rows` int32 [C * K * T] where it goes.
    """

    def __init__(
        self,
        shard: Shard,
        caches: list[tuple[Parameter, Parameter]],
        length: int,
    ) -> None:
        super().__init__()
        attends = [shard.kernels.prefill_attention(shard.heads(), *cache) for cache in caches]
        self.embed = Embedding(shard)
        self.layers = _layers(shard, attends)
        rotary = Rotary(shard, length)
        self.rotary_of = rotary.of_layer
        self.tables = tuple(Tensor(table[:, None, :]) for table in rotary.tables)
        causal = np.tril(np.ones((1, 1, length, length), np.float32))
        self.mask = Tensor((causal - 1.0) * np.float32(-NEVER))

    def construct(self, tokens: Any, source: Any, cache_rows: Any) -> Any:
        angles = []
        for table in self.tables:
            angles.append(ops.tile(table, (tokens.shape[0], 1, 1)))
        x = self.embed(tokens.reshape(-1))
        added = x
        for i in range(len(self.layers)):
            context = (self.mask, angles[self.rotary_of[i]], source, cache_rows)
            x, added = self.layers[i](x, added, context)
        # What follows the last keys and values is no part of any result, so the compiler leaves it out.
        return source


class MarkSeen(nn.Cell):
    """(marks float32 [B, V], fresh float32 [B, 1]) -> anything; slots with fresh 1 have seen exactly their marks."""

    def __init__(self, seen: Parameter) -> None:
        super().__init__()
        self.seen = seen

    def construct(self, marks: Any, fresh: Any) -> Any:
        return ops.assign(self.seen, ops.where(fresh > 0, marks, self.seen))


def _layers(shard: Shard, attends: list[nn.Cell]) -> nn.CellList:
    shard = shard.sharing_cells()
    pairs = zip(shard.layers, attends, strict=True)
    return nn.CellList([Layer(shard, index, attend) for index, attend in pairs])
