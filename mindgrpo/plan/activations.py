"""Adds up what a rank's graphs hold beside its pools: what a backward pass needs of the forward pass, and work space.

Pure. From what the cells of models/ keep, as scripts/bench/activations.py measures it. In an update graph a layer's
gradients stay until the graph ends, where they are added to the pool's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mindgrpo.backend.kernels.shapes import Heads

# Kernels of the processor; fused operations of a device; MindSpore's own operations, which keep whole score matrices.
Kind = Literal["native", "fused", "plain"]
FLOAT = 4
# What flash attention keeps of each query's softmax: its maximum and its sum, eight float32 each.
SOFTMAX_STATE = 2 * 8 * FLOAT
# float32 tensors of logits at once, beside the logits: in the loss's forward pass, and in its backward pass.
PLAIN_STATS, PLAIN_GRADIENT = 3, 4


@dataclass(frozen=True)
class Block:
    """A rank's share of a decoder layer. `has_out_norms`: what attention and MLP add goes through norms of its own."""

    hidden: int
    inner: int
    heads: Heads
    is_silu: bool = True
    has_out_norms: bool = False


@dataclass(frozen=True)
class Graphs:
    """How the rank computes: `tokens` = rows * `row_length` in a micro-batch, activations of `itemsize` bytes.

    `vocabulary` is the rank's share; logits that take more than `logits_bytes` in float32 are made in chunks.
    `sums` : whether results of layers are added up over ranks.
    """

    kind: Kind
    block: Block
    vocabulary: int
    tokens: int
    row_length: int
    itemsize: int
    logits_bytes: int
    sums: bool


@dataclass(frozen=True)
class StageLayers:
    """A stage's layers: what is computed again of each ("attention", "mlp"), and its float32 gradients in bytes.

    `waiting` micro-batches stand before the stage at most. `embedding` and `head` are the bytes of their gradients,
    None where the stage has none of the two.
    """

    recomputed: Sequence[frozenset[str]]
    gradients: Sequence[int]
    waiting: int
    embedding: int | None
    head: int | None


@dataclass(frozen=True)
class UpdateBytes:
    """At the moment that needs most: `kept` for the backward pass, `working` of one layer or of the head, transient
    `gradients`, and `waiting` micro-batches between stages."""

    kept: int
    working: int
    gradients: int
    waiting: int

    @property
    def total(self) -> int:
        return self.kept + self.working + self.gradients + self.waiting


def update_bytes(graphs: Graphs, stage: StageLayers) -> UpdateBytes:
    """Of a stage's forward and backward pass over one micro-batch."""
    kept = [_kept(graphs, index, again) for index, again in enumerate(stage.recomputed)]
    constant = _mask(graphs)
    flow = graphs.tokens * graphs.block.hidden * graphs.itemsize
    # The first stage's micro-batches are token ids; others hand on what they made and wait for its gradient.
    waiting = 0 if stage.embedding is not None else (stage.waiting - 1) * flow
    waiting += 2 * flow if stage.head is None else 0
    moments = []
    if stage.head is not None:
        head = flow + _head(graphs, with_gradient=True)
        # The table's gradient is a sum over chunks.
        table = 2 * stage.head if _chunk_rows(graphs) < graphs.tokens else 0
        moments.append(UpdateBytes(sum(kept) + constant, head, table, waiting))
    gradients = stage.head or 0
    for last in reversed(range(len(kept))):
        again, largest = stage.recomputed[last], stage.gradients[last] // 3
        working = _computed_again(graphs, again) + _backward(graphs) + largest
        # The layer below is computed again while this one's gradients of weights are made.
        if again and last:
            working += _products(graphs)
        done = gradients + sum(stage.gradients[last + 1 :])
        moments.append(UpdateBytes(sum(kept[: last + 1]) + constant, working, done, waiting))
    everything = gradients + sum(stage.gradients) + (stage.embedding or 0)
    moments.append(UpdateBytes(constant, 2 * flow, everything, waiting))
    return max(moments, key=lambda moment: moment.total)


def forward_bytes(graphs: Graphs, has_head: bool) -> int:
    """Of a stage's forward pass alone over one micro-batch: nothing is kept but what the present layer needs."""
    block, size, heads = graphs.block, graphs.itemsize, graphs.block.heads
    flow = 4 * block.hidden * size
    mixed = heads.queries * heads.dim
    attention = (heads.width + mixed) * size
    mlp = 3 * block.inner * size
    if graphs.kind == "plain":
        attention = 2 * heads.queries * graphs.row_length * FLOAT + 2 * (heads.width + mixed) * size
        mlp = 5 * block.inner * FLOAT
    layer = graphs.tokens * (flow + max(attention, mlp) + _summed(graphs))
    head = graphs.tokens * block.hidden * size + _head(graphs, False) if has_head else 0
    return max(layer, head) + _mask(graphs)


def _kept(graphs: Graphs, index: int, again: frozenset[str]) -> int:
    """Bytes that layer `index` of a stage keeps from its forward to its backward pass."""
    hidden = graphs.block.hidden * graphs.itemsize
    if again == {"attention", "mlp"}:
        return graphs.tokens * hidden * (1 if index == 0 else 2)
    a_token = _norms(graphs)
    if "attention" not in again:
        a_token += _attention(graphs)
    if "mlp" not in again:
        a_token += _mlp(graphs)
    return graphs.tokens * a_token


def _computed_again(graphs: Graphs, again: frozenset[str]) -> int:
    a_token = _norms(graphs) if again == {"attention", "mlp"} else 0
    a_token += _attention(graphs) if "attention" in again else 0
    return graphs.tokens * (a_token + (_mlp(graphs) if "mlp" in again else 0))


def _norms(graphs: Graphs) -> int:
    """Bytes a token: each norm's input, and its result, which a matrix product takes."""
    block = graphs.block
    hidden = block.hidden * graphs.itemsize
    # Plain operations keep the scaled input, and a float32 copy of a narrow one.
    exact = block.hidden * FLOAT * (1 if graphs.itemsize == FLOAT else 2)
    inside = 2 * hidden + (exact if graphs.kind == "plain" else 0)
    outside = 2 * (inside - hidden) if block.has_out_norms else 0
    return 2 * inside + outside


def _attention(graphs: Graphs) -> int:
    """Bytes a token: between the norm and the product with o_proj."""
    heads, size = graphs.block.heads, graphs.itemsize
    base = (heads.width + heads.queries * heads.dim) * size
    if graphs.kind == "native":
        return base + heads.queries * size
    before_norms = (heads.queries + heads.kv) * heads.dim * size if heads.norm_eps else 0
    if graphs.kind == "fused":
        return base + before_norms + heads.queries * SOFTMAX_STATE
    scores = heads.queries * graphs.row_length
    return base + 2 * before_norms + scores * (FLOAT + (size if size != FLOAT else 0))


def _mlp(graphs: Graphs) -> int:
    """Bytes a token: gate and up, and their product."""
    block, size = graphs.block, graphs.itemsize
    if graphs.kind != "plain" and block.is_silu:
        return 3 * block.inner * size
    return block.inner * (4 * FLOAT + size)


def _products(graphs: Graphs) -> int:
    """What gradients of a layer's MLP are made of, when the layer below begins."""
    block = graphs.block
    return graphs.tokens * (3 * block.inner + block.hidden) * graphs.itemsize


def _backward(graphs: Graphs) -> int:
    """Gradients of a layer's results beside what the layer keeps, at the larger of its two halves."""
    block, size, heads = graphs.block, graphs.itemsize, graphs.block.heads
    flow = 2 * block.hidden * size
    mlp = 3 * block.inner * (size if graphs.kind != "plain" else FLOAT)
    attention = (heads.width + heads.queries * heads.dim) * size
    if graphs.kind == "plain":
        attention += 2 * heads.queries * graphs.row_length * FLOAT
    # Attention's turn comes when the MLP's share is given up.
    return graphs.tokens * (flow + max(mlp, attention - _mlp(graphs)) + _summed(graphs))


def _summed(graphs: Graphs) -> int:
    """Bytes a token of a sum over ranks, in float32, and of its float32 copy where activations are narrower."""
    copies = 1 if graphs.itemsize == FLOAT else 2
    return copies * graphs.block.hidden * FLOAT if graphs.sums else 0


def _mask(graphs: Graphs) -> int:
    """Of all rows, which every layer takes; the processor's kernels read spans instead."""
    if graphs.kind == "native":
        return 0
    return graphs.tokens * graphs.row_length * (1 if graphs.kind == "fused" else FLOAT)


def _head(graphs: Graphs, with_gradient: bool) -> int:
    """The rows that are picked and their norm, and the logits of one chunk; `with_gradient` the logits' as well."""
    picked = 2 * graphs.tokens * graphs.block.hidden * graphs.itemsize
    rows = min(graphs.tokens, _chunk_rows(graphs))
    tensors = (2 if with_gradient else 1) * graphs.itemsize
    if graphs.kind != "native":
        tensors += FLOAT * (PLAIN_GRADIENT if with_gradient else PLAIN_STATS)
    return picked + rows * graphs.vocabulary * tensors


def _chunk_rows(graphs: Graphs) -> int:
    return max(1, graphs.logits_bytes // (FLOAT * graphs.vocabulary))
