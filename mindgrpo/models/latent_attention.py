"""Multi-head latent attention (arXiv:2405.04434, section 2.1) around any attention kernel.

Dimensions as in decoder.py, and: Q query heads of the rank, C latent size, S and T the non-rotary and rotary dims of a
head, V the size of a value head. Kernels rotate the two halves of a head, so heads are laid out as
[S / 2, T / 2, S / 2, T / 2], and the rotary table leaves the first part of each half unchanged. Kernels need values as
wide as keys, so values are padded with zeros.
"""

from __future__ import annotations

from typing import Any

import mindspore as ms
from mindspore import Tensor, nn, ops
from mindspore.ops.auto_generate import SplitWithSize

from mindgrpo.models.decoder_config import LATENT_EPS
from mindgrpo.models.shard import Shard


class LatentAttention(nn.Cell):
    """(normed x_NH, context) -> attention output x_NH, to be added to the residual, like models/attention.Attention.

    The down-projection makes the query latents (or queries), the key-value latents and the rotary part of the keys. It
    is replicated on the tp group; as each rank uses it for its own heads, its gradients are summed over the group. If
    latents `are_cached`, attention runs on latents: queries absorb the up-projection of keys, and a single latent head
    serves as keys and values for all queries (section 2.1.2). Otherwise keys and values are made for each head.
    """

    def __init__(
        self, shard: Shard, prefix: str, attend: nn.Cell, are_cached: bool = False
    ) -> None:
        super().__init__()
        name, latent = prefix + "self_attn.", shard.config.latent
        assert latent is not None
        self.heads, self.dim, self.value = shard.query_heads, shard.config.head_dim, latent.value
        self.nope_dim, self.rope_dim, self.rank = latent.nope_dim, latent.rope_dim, latent.rank
        self.is_interleaved, self.are_cached = latent.is_interleaved, are_cached
        self.down = shard.entering(shard.linear(name + "qkv_a_proj.weight"))
        self.has_query_latent = latent.query_rank is not None
        queries = latent.query_rank or self.heads * self.dim
        self.split, self.widths = SplitWithSize(), (queries, latent.rank, latent.rope_dim)
        self.vector = shard.vector()
        self.norm = shard.cell(shard.kernels.rms_norm, LATENT_EPS)
        self.kv_norm = shard[name + "kv_a_layernorm.weight"]
        if self.has_query_latent:
            self.q_norm = shard[name + "q_a_layernorm.weight"]
            self.q_up = shard.linear(name + "q_b_proj.weight")
        if are_cached:
            self.kv_matrix = shard[name + "kv_b_proj.weight"]
        else:
            self.kv_up = shard.linear(name + "kv_b_proj.weight")
        self.multiply, self.multiply_back = ops.BatchMatMul(), ops.BatchMatMul(transpose_b=True)
        self.attend = attend
        self.nothing = Tensor([0.0], ms.float32)
        self.out = shard.linear(name + "o_proj.weight", over_ranks=True)
        self.leave = shard.leave_region()

    def construct(self, x: Any, context: Any) -> Any:
        made = self.down(x)
        queries, latents, rope = self.split(made, self.widths, 1)
        if self.has_query_latent:
            queries = self.q_up(self.norm(queries, self.vector(self.q_norm)))
        latents = self.norm(latents, self.vector(self.kv_norm))
        queries = queries.reshape(-1, self.heads, self.dim)
        rope = ops.expand_dims(rope, 1)
        if self.are_cached:
            mixed = self.of_latents(queries, latents, rope, context)
        else:
            mixed = self.of_heads(queries, latents, rope, context)
        return self.leave(self.out(mixed), made)

    def of_heads(self, queries: Any, latents: Any, rope: Any, context: Any) -> Any:
        """Attends with separate keys and values for each head.

        Takes queries [N, Q, S + T], latents [N, C], rope [N, 1, T] -> [N, Q V].
        """
        both = self.kv_up(latents).reshape(-1, self.heads, self.nope_dim + self.value)
        keys, values = self.split(both, (self.nope_dim, self.value), 2)
        keys = self.laid_out(keys, ops.tile(rope, (1, self.heads, 1)))
        beyond = self.dim - self.value
        if beyond > 0:
            nothing = ops.zeros((both.shape[0], self.heads, beyond), both.dtype)
            values = ops.concat((values, nothing), 2)
        queries = self.laid_out(*self.split(queries, (self.nope_dim, self.rope_dim), 2))
        mixed = self.attended(ops.concat((queries, keys, values), 1), context)
        if beyond > 0:
            mixed = mixed.reshape(-1, self.heads, self.dim)
            mixed, _ = self.split(mixed, (self.value, beyond), 2)
        return mixed.reshape(-1, self.heads * self.value)

    def of_latents(self, queries: Any, latents: Any, rope: Any, context: Any) -> Any:
        """Attends to latents, then up-projects the result to values.

        Takes queries [N, Q, S + T], latents [N, C], rope [N, 1, T] -> [N, Q V].
        """
        # [C, Q, S + V] -> [Q, C, ..]
        matrix = ops.cast(self.kv_matrix, queries.dtype)
        matrix = matrix.reshape(self.rank, self.heads, -1).transpose(1, 0, 2)
        to_keys, to_values = self.split(matrix, (self.nope_dim, self.value), 2)
        nope, queries = self.split(queries, (self.nope_dim, self.rope_dim), 2)
        seeking = self.multiply_back(nope.transpose(1, 0, 2), to_keys)
        seeking = self.laid_out(seeking.transpose(1, 0, 2), queries)
        keys = self.laid_out(ops.expand_dims(latents, 1), rope)
        mixed = self.attended(ops.concat((seeking, keys, keys), 1), context)
        halves = mixed.reshape(-1, self.heads, 2, (self.rank + self.rope_dim) // 2)
        mixed, _ = self.split(halves, (self.rank // 2, self.rope_dim // 2), 3)
        mixed = mixed.reshape(-1, self.heads, self.rank)
        values = self.multiply(mixed.transpose(1, 0, 2), to_values)
        return values.transpose(1, 0, 2).reshape(-1, self.heads * self.value)

    def laid_out(self, nope: Any, rope: Any) -> Any:
        """Joins `nope` [N, heads, S or C] and `rope` [N, heads, T] to heads [N, heads, ...] in the kernels' layout."""
        count, heads = nope.shape[0], nope.shape[1]
        if self.is_interleaved:
            pairs = rope.reshape(count, heads, -1, 2).transpose(0, 1, 3, 2)
        else:
            pairs = rope.reshape(count, heads, 2, -1)
        halves = ops.concat((nope.reshape(count, heads, 2, -1), pairs), 3)
        return halves.reshape(count, heads, -1)

    def attended(self, heads: Any, context: Any) -> Any:
        rows = heads.reshape(heads.shape[0], -1)
        return self.attend(rows, self.nothing, self.nothing, self.nothing, *context)
