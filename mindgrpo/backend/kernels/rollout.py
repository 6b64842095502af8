"""Data structures shared by the generator and the kernels that decode samples in slots, without a graph.

native/rollout.py implements the slots; rollout/embedded/slots.py schedules samples on them.
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
    """This rank's shard of the experts: `count` experts from number `first` on, each with MLP size `inner`.

    `layers` are the mixture-of-experts layers. `group` is the kernel_id of the expert-parallel group (Group.kernel_id).
    `shared_inner` is the MLP size of the shared expert, which every rank holds; 0 without one.
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
    """Multi-head latent attention, like decoder_config.LatentConfig; `query_rank` is 0 if queries are not compressed.

    With latent attention, `Heads` describes the query heads and a single key head of width `rank` + `rope_dim`.
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
        """Returns the output width of the down-projection, which makes queries or their latents, and those of keys."""
        return (self.query_rank or self.query_width(queries)) + self.rank + self.rope_dim


@dataclass(frozen=True)
class LocalModelShape:
    """The shapes of this rank's tensor-parallel shard of a model: heads, MLP size and vocabulary are split by tp_size.

    `group` is the kernel_id of the tensor-parallel group (Group.kernel_id). Row-parallel GEMMs are summed in `leaves`,
    as in Kernels.matmul. `inner` is the MLP size of dense layers, 0 if all layers have experts.
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
        """Returns (in, out, leaves) of a layer's matrices: qkv, out, gate_up, down, and the up-projection of query
        latents, if any. In a mixture-of-experts layer, gate_up and down repeat for each local expert and the shared
        expert."""
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
        """Returns (in, out, leaves) of the matrices of all layers, in order, then of the LM head."""
        layers = chain.from_iterable(self.matrices_of(layer) for layer in range(self.layers))
        return [*layers, (self.hidden, self.vocabulary.width, 1)]

    def packed_sizes(self, num_parts: int | None, head_parts: int | None) -> list[int]:
        """Returns the bytes of each of `matrices` when packed for bfloat16 GEMMs; 0 for float32 GEMMs."""
        part_counts = [num_parts or 0] * (len(self.matrices) - 1) + [head_parts or 0]
        pairs = zip(self.matrices, part_counts, strict=True)
        return [packed_bytes(k, n, own, leaves) for (k, n, leaves), own in pairs]


@dataclass
class GenerationBatch:
    """Samples to generate, and their output arrays.

    Inputs: `prompts`, int32 [prompt tokens] each; and per sample, [samples]: `prompt_of` int32, its prompt's index,
    `limits` int32, the maximum of new tokens, and `keys` uint64, the random seed. Outputs: `tokens` int32 and `logps`
    float32 [samples, longest], where longest is the largest limit; `lengths` and `stopped` int32 [samples].
    `samples` are the numbers that identify samples when they continue later; () if none does. `arrays` are further
    per-token arrays by name: with `records_routes`, the chosen experts of each computed token.
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
    """A sample that is still in the KV cache: `shared` positions in prefix block `prefix`, and `own` in `slot`."""

    slot: int
    prefix: int
    shared: int
    own: int


@dataclass(frozen=True)
class KVCacheLayout:
    """The KV cache of a batch: `slots` of `slot_size` positions, and `prefix_blocks` of `prefix_block_size` each."""

    slots: int
    slot_size: int
    prefix_blocks: int
    prefix_block_size: int


@dataclass(frozen=True)
class Memory:
    """Flat views of the generator's pools.

    `cache`: keys and values. `scratch` float32: workspace of the kernels. `inputs` float32 [rows * hidden]: the input
    embedding of each row of the next decode step, which has at most so many. `starts` float32 [prefix blocks * hidden]:
    the embedding of each prompt's last token, the first input of its samples. `seen`: one byte for each slot and token
    of this rank's vocabulary shard, for the repetition penalty. `packed`: weights packed for bfloat16 GEMMs
    (LocalModelShape.packed_sizes), if any. `parked` float32 [slots * hidden]: next input embeddings of ended samples
    that may continue later.
    """

    cache: np.ndarray
    scratch: np.ndarray
    inputs: np.ndarray
    starts: np.ndarray
    seen: np.ndarray
    packed: np.ndarray | None = None
    parked: np.ndarray | None = None


class LayerWeights(NamedTuple):
    """Weights of one layer. Dimensions as in native/rollout.Slots; norms and biases float32, matrices compute dtype."""

    norm: np.ndarray  # [H], before attention
    qkv: np.ndarray  # [H, W]
    bias: np.ndarray | None  # [W]
    q_norm: np.ndarray | None  # [D]
    k_norm: np.ndarray | None  # [D]
    out: np.ndarray  # [Q D, H]
    out_bias: np.ndarray | None  # [H]
    norm_mlp: np.ndarray  # [H]
    gate_up: np.ndarray  # [H, 2 I], or [X, H, 2 J] of experts
    down: np.ndarray  # [I, H], or [X, J, H] of experts
    router: np.ndarray | None = None  # float32 [H, E], in layers with experts
    router_bias: np.ndarray | None = None  # float32 [E], added only to choose experts
    shared_gate_up: np.ndarray | None = None  # [H, 2 S], of the shared expert
    shared_down: np.ndarray | None = None  # [S, H]
    latent_norm: np.ndarray | None = None  # [C]; `qkv` then is the down-projection to latents
    query_norm: np.ndarray | None = None  # [A]
    query_up: np.ndarray | None = None  # [A, U], up-projection of query latents
    latent_up: np.ndarray | None = None  # float32 [C, Z], latents to keys and values

    @property
    def matrices(self) -> tuple[np.ndarray, ...]:
        last = (self.shared_gate_up, self.shared_down, self.query_up)
        others = [matrix for matrix in last if matrix is not None]
        if self.router is None:
            return self.qkv, self.out, self.gate_up, self.down, *others
        experts = chain(*zip(self.gate_up, self.down, strict=True))
        return self.qkv, self.out, *experts, *others


class TokenWeights(NamedTuple):
    """The final `norm` float32 [H], the LM `head` [V, H], and the embedding `table` [V, H], which may be the head."""

    norm: np.ndarray
    head: np.ndarray
    table: np.ndarray
