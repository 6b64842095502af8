"""The values that the generator and kernels hand to each other where samples are decoded in slots, without a graph.

native/rollout.py keeps the slots; rollout/embedded/slots.py brings them work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from mindgrpo.backend.dtypes import packed_bytes
from mindgrpo.backend.kernels.shapes import Heads, Routing, Vocabulary


@dataclass(frozen=True)
class LocalExperts:
    """This rank's experts, `count` from number `first` on, each `inner` wide, and the layers that have experts.

    `group` is what kernels know the ranks by that have the others (Group.kernel_id). All tokens pass an expert that is
    `shared_inner` wide, which every rank has; 0 where there is none.
    """

    routing: Routing
    first: int
    count: int
    inner: int
    layers: tuple[int, ...]
    group: int = -1
    shared_inner: int = 0


@dataclass(frozen=True)
class LocalLatents:
    """The latents of attention, as decoder_config.LatentConfig has them; `query_rank` is 0 where queries have none.

    The heads of a model with these are its queries' and one of keys, `rank` + `rope_dim` wide.
    """

    rank: int
    query_rank: int
    nope_dim: int
    rope_dim: int
    value: int
    is_interleaved: bool
    eps: float

    def query_width(self, queries: int) -> int:
        return queries * (self.nope_dim + self.rope_dim)

    def down_width(self, queries: int) -> int:
        """Returns the width of what the first product makes."""
        return (self.query_rank or self.query_width(queries)) + self.rank + self.rope_dim


@dataclass(frozen=True)
class LocalModelShape:
    """This rank's share of a model: `tp_size` ranks split heads, inner width and vocabulary; this one is `tp_rank`.

    `group` is what kernels know these ranks by (Group.kernel_id). Products whose sums go over ranks are summed in
    `leaves`, as in Kernels.matmul. `inner` is the width of layers without experts, 0 where all have them.
    """

    layers: int
    hidden: int
    inner: int
    heads: Heads
    vocabulary: Vocabulary
    norm_eps: float
    tp_size: int
    tp_rank: int
    group: int = -1
    leaves: int = 1
    experts: LocalExperts | None = None
    latents: LocalLatents | None = None

    @property
    def expert_layers(self) -> tuple[int, ...]:
        return self.experts.layers if self.experts else ()

    def matrices_of(self, layer: int) -> list[tuple[int, int, int]]:
        """[in, out] and leaves of a layer's qkv, out, gate and up together, and down: the last two of each expert and
        of the shared one. Then what makes queries of latents."""
        heads, hidden, inner, latents = self.heads, self.hidden, self.inner, self.latents
        width, mixed, of_queries = (
            heads.width,
            heads.queries * heads.dim,
            list[tuple[int, int, int]](),
        )
        if latents is not None:
            width, mixed = latents.down_width(heads.queries), heads.queries * latents.value
            if latents.query_rank:
                of_queries = [(latents.query_rank, latents.query_width(heads.queries), 1)]
        matrices = [(hidden, width, 1), (mixed, hidden, self.leaves)]
        if self.experts is None or layer not in self.experts.layers:
            return [*matrices, (hidden, 2 * inner, 1), (inner, hidden, self.leaves), *of_queries]
        inner, shared = self.experts.inner, self.experts.shared_inner
        matrices += self.experts.count * [(hidden, 2 * inner, 1), (inner, hidden, 1)]
        matrices += [(hidden, 2 * shared, 1), (shared, hidden, 1)] if shared else []
        return matrices + of_queries

    @property
    def matrices(self) -> list[tuple[int, int, int]]:
        """Those of all layers, in their order, and at the end the head's."""
        layers = chain.from_iterable(self.matrices_of(layer) for layer in range(self.layers))
        return [*layers, (self.hidden, self.vocabulary.width, 1)]

    def packed_sizes(self, num_parts: int | None, head_parts: int | None) -> list[int]:
        """Returns the bytes of each of `matrices` as kept for products of bfloat16; 0 for those of float32."""
        part_counts = [num_parts or 0] * (len(self.matrices) - 1) + [head_parts or 0]
        pairs = zip(self.matrices, part_counts, strict=True)
        return [packed_bytes(k, n, own, leaves) for (k, n, leaves), own in pairs]


@dataclass
class GenerationBatch:
    """Samples to make, and the arrays that they are written to; `longest` columns, `limits` of them may be used.

    `prompts` int32 [n] each; of sample i: `prompt_of`, `limits` int32, `keys` uint64 of its noise, `lengths`,
    `stopped` int32 [samples], `tokens` int32, `logps` float32 [samples, longest]. `samples` are their numbers, by which
    they are known again when they continue; () where none does. `arrays` are further per-token arrays of the samples,
    by name: a decoder that `records_routes` gives the experts of the tokens that it computes for a sample.
    """

    prompts: Sequence[np.ndarray]
    prompt_of: np.ndarray
    limits: np.ndarray
    keys: np.ndarray
    tokens: np.ndarray
    logps: np.ndarray
    lengths: np.ndarray
    stopped: np.ndarray
    samples: Sequence[int] = ()
    records_routes: bool = False
    arrays: dict[str, list[Any]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        prompts: Sequence[np.ndarray],
        prompt_of: Sequence[int],
        limits: Sequence[int],
        keys: np.ndarray,
        samples: Sequence[int] = (),
        records_routes: bool = False,
    ) -> GenerationBatch:
        count, longest = len(prompt_of), max(limits)
        return cls(
            prompts,
            np.array(prompt_of, np.int32),
            np.array(limits, np.int32),
            keys,
            np.zeros((count, longest), np.int32),
            np.zeros((count, longest), np.float32),
            np.zeros(count, np.int32),
            np.zeros(count, np.int32),
            samples,
            records_routes,
        )


@dataclass(frozen=True)
class KeptRow:
    """A sample whose keys are in the cache still: `shared` of its prompt in `prefix`, `own` in `slot`."""

    slot: int
    prefix: int
    shared: int
    own: int


@dataclass(frozen=True)
class KVCacheLayout:
    """The cache of a batch: `slots` of `slot_size` positions and `prefix_blocks` of `prefix_block_size`."""

    slots: int
    slot_size: int
    prefix_blocks: int
    prefix_block_size: int


@dataclass(frozen=True)
class Memory:
    """Views of the generator's pools, of one dim: keys and values; float32 what kernels need while they run, `inputs`
    of slots and first inputs of prefix blocks (`starts`), hidden floats each, and with a penalty a byte of `seen` for
    each slot and token of this rank. `packed`: LocalModelShape.packed_sizes of bfloat16, where there are any. `parked`:
    hidden floats for each slot, where samples may continue after they have ended."""

    cache: np.ndarray
    scratch: np.ndarray
    inputs: np.ndarray
    starts: np.ndarray
    seen: np.ndarray
    packed: np.ndarray | None = None
    parked: np.ndarray | None = None


class LayerWeights(NamedTuple):
    """Letters as in native/rollout.Slots. Norms and biases float32; matrices of the compute dtype."""

    norm: np.ndarray  # [H], before attention
    qkv: np.ndarray  # [H, W]
    bias: np.ndarray | None  # [W]
    q_norm: np.ndarray | None  # [D]
    k_norm: np.ndarray | None  # [D]
    out: np.ndarray  # [Q D, H]
    out_bias: np.ndarray | None  # [H]
    norm_mlp: np.ndarray  # [H]
    gate_up: np.ndarray  # [H, 2 I], or of experts [X, H, 2 J]
    down: np.ndarray  # [I, H], or of experts [X, J, H]
    router: np.ndarray | None = None  # float32 [H, E], where the layer has experts
    router_bias: np.ndarray | None = None  # float32 [E], for the choice alone
    shared_gate_up: np.ndarray | None = None  # [H, 2 S], of the expert that all tokens pass
    shared_down: np.ndarray | None = None  # [S, H]
    latent_norm: np.ndarray | None = None  # [C]; `qkv` then makes latents
    query_norm: np.ndarray | None = None  # [A]
    query_up: np.ndarray | None = None  # [A, U], queries of their latents
    latent_up: np.ndarray | None = None  # float32 [C, Z], keys and values of latents

    @property
    def matrices(self) -> tuple[np.ndarray, ...]:
        last = (self.shared_gate_up, self.shared_down, self.query_up)
        others = [matrix for matrix in last if matrix is not None]
        if self.router is None:
            return self.qkv, self.out, self.gate_up, self.down, *others
        experts = chain(*zip(self.gate_up, self.down, strict=True))
        return self.qkv, self.out, *experts, *others


class TokenWeights(NamedTuple):
    """`norm` float32 [H] before the head [V, H]; `table` [V, H] of embeddings, which may be the head."""

    norm: np.ndarray
    head: np.ndarray
    table: np.ndarray
