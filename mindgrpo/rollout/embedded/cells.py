"""The generator's graphs: prompts into the cache, and one token for every slot.

The cache of a layer is one array [slots * K * S, D]; row (slot * K + head) * S + position. `B` slots, `S` cache
length; other letters as in model/decoder.py. Refuses to decide which sample sits in which slot.
"""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from mindgrpo.models.decoder import NEVER, Shard
from mindgrpo.models.parallel_cells import Linear, ReduceFrom, VocabParallelEmbedding
from mindgrpo.models.rotary import rotary_table
from mindgrpo.rollout.embedded.plain_layers import (
    GatedMlp,
    Head,
    Layer,
    Projections,
    RMSNorm,
)
from mindgrpo.rollout.embedded.sampling import Sampler
from mindgrpo.rollout.sampling_params import SamplingSettings


class CachedLayer(nn.Cell):
    """One token a slot against the layer's cache."""

    def __init__(self, shard: Shard, index: int, keys: Parameter, values: Parameter) -> None:
        super().__init__()
        prefix, eps = f"model.layers.{index}.", shard.config.rms_norm_eps
        self.norm_in = RMSNorm(shard[prefix + "input_layernorm.weight"], eps)
        self.project = Projections(shard, prefix)
        self.out = Linear(shard[prefix + "self_attn.o_proj.weight"])
        self.out_bias = shard.get(prefix + "self_attn.o_proj.bias")
        self.has_out_bias = self.out_bias is not None
        self.reduce = ReduceFrom(shard.group)
        self.norm_mlp = RMSNorm(shard[prefix + "post_attention_layernorm.weight"], eps)
        self.mlp = GatedMlp(shard, prefix)
        self.keys, self.values = keys, values
        self.kv, self.dim = shard.kv_heads, shard.config.head_dim
        self.share = shard.query_heads // shard.kv_heads
        self.scores = ops.BatchMatMul(transpose_b=True)
        self.mix = ops.BatchMatMul()
        self.scale = self.dim**-0.5

    def construct(self, x: Any, angles: Any, cache_rows: Any, mask: Any) -> Any:
        slots, length = mask.shape[0], mask.shape[2]
        turned, values = self.project(self.norm_in(x), angles)
        queries = turned[:, : self.kv * self.share].reshape(slots * self.kv, self.share, self.dim)
        fresh = turned[:, self.kv * self.share :].reshape(slots * self.kv, self.dim)
        keys = ops.scatter_update(self.keys, cache_rows, fresh)
        cached = ops.scatter_update(
            self.values, cache_rows, values.reshape(slots * self.kv, self.dim)
        )
        keys = keys.reshape(slots * self.kv, length, self.dim)
        cached = cached.reshape(slots * self.kv, length, self.dim)
        scores = self.scores(queries * self.scale, keys)
        scores = scores.reshape(slots, self.kv * self.share, length) + mask
        weights = ops.softmax(scores, -1).reshape(slots * self.kv, self.share, length)
        mixed = self.mix(weights, cached).reshape(slots, -1)
        y = self.reduce(self.out(mixed))
        if self.has_out_bias:
            y = y + self.out_bias
        x = x + y
        return x + self.mlp(self.norm_mlp(x))


class Decode(nn.Cell):
    """(tokens int32 [B], positions int32 [B], noise, banned [B]) -> next tokens int32 [B], log-probs [B].

    `noise` is float32 [B, local vocabulary], see sampling.py.
    """

    def __init__(
        self,
        shard: Shard,
        caches: list[tuple[Parameter, Parameter]],
        slots: int,
        length: int,
        settings: SamplingSettings,
        seen: Parameter | None,
    ) -> None:
        super().__init__()
        self.embed = VocabParallelEmbedding(
            shard["model.embed_tokens.weight"], shard.first_token, shard.group
        )
        self.layers = nn.CellList(
            [CachedLayer(shard, i, *cache) for i, cache in zip(shard.layers, caches, strict=True)]
        )
        self.head = Head(shard, 1.0)
        self.sample = Sampler(settings, shard.local_vocab, shard.first_token, shard.group)
        self.angles = Tensor(rotary_table(shard.config, length))
        self.order = Tensor([list(range(length))], ms.int32)
        heads = slots * shard.kv_heads
        self.row_starts = Tensor([[i * length for i in range(heads)]], ms.int32).reshape(
            slots, shard.kv_heads
        )
        self.penalises = seen is not None
        self.seen = seen
        first = shard.first_token
        self.ids = Tensor([list(range(first, first + shard.local_vocab))], ms.int32)

    def construct(self, tokens: Any, positions: Any, noise: Any, banned: Any) -> Any:
        at = ops.expand_dims(positions, 1)
        past = (self.order <= at).astype(ms.float32)
        mask = ops.expand_dims((past - 1.0) * -NEVER, 1)
        rows = (self.row_starts + at).reshape(-1)
        angles = ops.expand_dims(ops.gather(self.angles, positions, 0), 1)
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, angles, rows, mask)
        logits = self.head(x)
        seen = logits
        if self.penalises:
            fresh = ops.equal(ops.expand_dims(tokens, 1), self.ids).astype(ms.float32)
            seen = ops.assign(self.seen, ops.maximum(self.seen, fresh))
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
        self.embed = VocabParallelEmbedding(
            shard["model.embed_tokens.weight"], shard.first_token, shard.group
        )
        self.layers = nn.CellList([Layer(shard, i) for i in shard.layers])
        self.keys = ms.ParameterTuple([cache[0] for cache in caches])
        self.values = ms.ParameterTuple([cache[1] for cache in caches])
        self.angles = Tensor(rotary_table(shard.config, length)[:, None, :])
        causal = np.tril(np.ones((1, 1, length, length), np.float32))
        self.mask = Tensor((causal - 1.0) * np.float32(-NEVER))
        self.kv, self.dim = shard.kv_heads, shard.config.head_dim
        self.queries = shard.query_heads

    def construct(self, tokens: Any, source: Any, cache_rows: Any) -> Any:
        prompts, length = tokens.shape
        angles = ops.tile(self.angles, (prompts, 1, 1))
        x = self.embed(tokens.reshape(-1))
        for i in range(len(self.layers)):
            layer = self.layers[i]
            turned, values = layer.attention.project(layer.norm_in(x), angles)
            self._store(
                self.keys[i], turned[:, self.queries :], prompts, length, source, cache_rows
            )
            self._store(self.values[i], values, prompts, length, source, cache_rows)
            x = layer(x, angles, self.mask)
        return x[:1, :1]

    def _store(
        self, cache: Any, heads: Any, prompts: int, length: int, source: Any, cache_rows: Any
    ) -> None:
        heads = heads.reshape(prompts, length, self.kv, self.dim).transpose(0, 2, 1, 3)
        copies = ops.gather(heads, source, 0).reshape(-1, self.dim)
        ops.scatter_update(cache, cache_rows, copies)
