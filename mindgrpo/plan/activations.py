"""Computes what a rank's graphs hold beside its pools, by phase, from the configuration and the model's shapes. Pure.

The formulas follow what the cells of models/ keep, as scripts/bench/activations.py measures it. In an update graph a
layer's gradients are added to the pool's before the layer below begins.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from mindgrpo.algorithm.packing import MicroShape
from mindgrpo.algorithm.schedule import chunks_in_flight
from mindgrpo.backend.connect import keeps_slots
from mindgrpo.backend.dtypes import ITEM_BYTES
from mindgrpo.backend.kernels.rollout import LocalExperts
from mindgrpo.backend.kernels.shapes import Heads
from mindgrpo.backend.targets import SHARED_MEMORY
from mindgrpo.models.decoder_config import DecoderConfig
from mindgrpo.models.expert_plan import CAPACITIES
from mindgrpo.models.lora import adapted_names
from mindgrpo.models.precision import compute_dtype
from mindgrpo.models.shard import (
    LOGITS_BYTES,
    cached_heads,
    head_width,
    local_experts,
    local_heads,
    local_inner,
)
from mindgrpo.parallel.sharding import Layout
from mindgrpo.plan.image_needs import encoder_bytes
from mindgrpo.plan.micro_shapes import Kind, kernel_kind, update_shape
from mindgrpo.plan.run_plan import RunPlan
from mindgrpo.rollout.embedded.kv_cache import missing_options

FLOAT = ITEM_BYTES["float32"]
WHOLE_LAYER = frozenset(("attention", "mlp"))
# What flash attention keeps of each query's softmax: its maximum and its sum, eight float32 each.
SOFTMAX_STATE = 2 * 8 * FLOAT
CAUSAL_MASK = 2048 * 2048
# With several chunks a stage, what arrives before the pass that takes it: so many more than there are stages.
ARRIVED = 3
# float32 tensors of logits at once, beside the logits: in the loss's forward pass, and in its backward pass.
PLAIN_STATS, PLAIN_GRADIENT = 3, 4
# float32 rows of the vocabulary that sampling has at once for every slot: logits, noise, their sum, and what a
# truncation sorts.
SAMPLING_ROWS = 6


@dataclass(frozen=True)
class Block:
    """A rank's share of a decoder layer. `has_out_norms`: attention and MLP have norms of their own at their end.

    Layers have a feed-forward that is `inner` wide, or `experts` with one `shared` wide that all tokens pass; of a
    model with both, all are counted as those that need more. `beside_heads`: elements that attention keeps of a token
    beside its heads, of latents and what is made of them.
    """

    hidden: int
    inner: int
    heads: Heads
    is_silu: bool = True
    has_out_norms: bool = False
    experts: LocalExperts | None = None
    expert_columns: int = 1
    shared: int = 0
    beside_heads: int = 0
    has_frozen_experts: bool = False

    @property
    def makes_gate_and_up_again(self) -> bool:
        """Tells whether the processors' kernel computes their product again for the gradient, which it does whole."""
        return self.experts is not None and not self.has_frozen_experts


@dataclass(frozen=True)
class Graphs:
    """How the rank computes: `tokens` = rows * `row_length` in a micro-batch, activations of `itemsize` bytes.

    `vocabulary` is the rank's share; logits of more than `logits_bytes` in float32 are made in chunks. A sum over
    the ranks of a layer makes `summed` bytes per element of a layer's result, 0 where one rank has it all. `is_causal`:
    a row is one sample, and fused attention takes a mask of one fixed size. `merged` bytes are used while a layer adds
    an adapter's product to its largest matrix. Between products, a rank has one of `token_shares` shares of the tokens.
    It gathers the others for a product and, with `gathers_again`, again for its gradient; else, and in layers of which
    something is recomputed, they are kept in between. `context_ranks` share a row, of which `tokens` are the rank's
    own: it gathers keys and values, and native kernels do so again for the gradient, in layers of which nothing is
    recomputed.
    """

    kind: Kind
    block: Block
    vocabulary: int
    tokens: int
    row_length: int
    itemsize: int
    logits_bytes: int
    summed: int
    is_causal: bool = False
    merged: int = 0
    token_shares: int = 1
    gathers_again: bool = True
    context_ranks: int = 1

    @property
    def flow(self) -> int:
        """Returns the bytes of the hidden states between products."""
        return self.tokens * self.block.hidden * self.itemsize // self.token_shares

    @property
    def gathered(self) -> int:
        """Returns the bytes of all tokens' hidden states beside the own ones; 0 where these are all."""
        return self.flow * self.token_shares if self.token_shares > 1 else 0

    @property
    def context(self) -> int:
        """Returns the bytes of gathered keys and values; 0 where no ranks share rows."""
        if self.context_ranks == 1:
            return 0
        heads = self.block.heads
        return self.tokens * self.context_ranks * 2 * heads.kv * heads.dim * self.itemsize


@dataclass(frozen=True)
class ChunkLayers:
    """A chunk of a stage's layers: what is recomputed of each ("attention", "mlp"), and its float32 gradients in bytes.

    Where it has no head, micro-batches in flight keep what each layer gets, and layers are computed again from that. So
    are those of the chunk with the head if all are recomputed, but for its last one, which is computed once. `waiting`
    counts what the stage's other passes in flight keep, hidden states of a micro-batch each. `embedding` and `head` are
    the bytes of their gradients, None where another chunk has them.
    """

    recomputed: Sequence[frozenset[str]]
    gradients: Sequence[int]
    waiting: int
    embedding: int | None
    head: int | None

    @property
    def hands_inputs_on(self) -> bool:
        """Tells whether another graph makes what layers get, as Stage.hands_inputs_on does."""
        all_again = all(again == WHOLE_LAYER for again in self.recomputed)
        return self.head is None or (all_again and len(self.recomputed) > 1)


@dataclass(frozen=True)
class UpdateBytes:
    """Bytes at the moment that needs most: `kept` for the backward pass, `working` space of one layer or of the head,
    its `gradients`, and `waiting` micro-batches between stages."""

    kept: int
    working: int
    gradients: int
    waiting: int

    @property
    def total(self) -> int:
        return self.kept + self.working + self.gradients + self.waiting


def update_bytes(graphs: Graphs, stage: ChunkLayers) -> UpdateBytes:
    """Computes what a chunk's forward and backward pass over one micro-batch need."""
    flow = graphs.flow
    recomputed, waiting = stage.recomputed, stage.waiting * flow
    if stage.head is None:
        recomputed = [WHOLE_LAYER] * len(stage.recomputed)
        # Its own result and its gradient.
        waiting += 2 * flow
    elif stage.hands_inputs_on:
        recomputed = [*recomputed[:-1], frozenset()]
    kept = [_kept(graphs, again) for again in recomputed]
    constant = _mask(graphs)
    moments = []
    if stage.head is not None:
        head = flow + graphs.gathered + _head(graphs, with_gradient=True)
        # The table's gradient is a sum over chunks.
        table = (2 if _chunk_rows(graphs) < graphs.tokens else 1) * stage.head
        moments.append(UpdateBytes(sum(kept) + constant, head, table, waiting))
    for last, again in enumerate(recomputed):
        working = _recomputed(graphs, again) + _backward(graphs) + graphs.merged
        own = sum(kept[: last + 1])
        if stage.hands_inputs_on:
            # Results of a graph before, what layers above got is there until this one ends.
            own += flow * (len(kept) - last - 1)
        moments.append(UpdateBytes(own + constant, working, stage.gradients[last], waiting))
    embedding = 2 * flow + graphs.gathered
    moments.append(UpdateBytes(constant, embedding, stage.embedding or 0, waiting))
    return max(moments, key=lambda moment: moment.total)


def forward_bytes(graphs: Graphs, has_head: bool) -> int:
    """Computes the bytes of a stage's forward pass alone over one micro-batch, which keeps the current layer only."""
    size, heads = graphs.itemsize, graphs.block.heads
    mixed = heads.queries * heads.dim
    attention = (heads.width + mixed) * size
    if graphs.kind == "plain":
        attention = 2 * heads.queries * graphs.row_length * FLOAT + 2 * (heads.width + mixed) * size
    mlp = _inside_mlp(graphs, 5 if graphs.kind == "plain" else 3)
    inside = max(graphs.tokens * attention + graphs.context, graphs.tokens * mlp) + graphs.merged
    layer = 4 * graphs.flow + graphs.gathered + inside + _sum(graphs)
    head = graphs.flow + graphs.gathered + _head(graphs, False) if has_head else 0
    return max(layer, head) + _mask(graphs)


def _kept(graphs: Graphs, again: frozenset[str]) -> int:
    """Returns the bytes that a layer keeps from its forward to its backward pass."""
    if again == WHOLE_LAYER:
        return graphs.flow
    gathers_again = graphs.kind == "native" and not again
    context = 0 if gathers_again else graphs.context
    return _norms(graphs, again) + _modules(graphs, WHOLE_LAYER - again) + context


def _recomputed(graphs: Graphs, again: frozenset[str]) -> int:
    norms = _norms(graphs, again) + graphs.context if again == WHOLE_LAYER else 0
    return norms + _modules(graphs, again)


def _modules(graphs: Graphs, names: frozenset[str]) -> int:
    a_token = _attention(graphs) if "attention" in names else 0
    return graphs.tokens * (a_token + (_mlp(graphs) if "mlp" in names else 0))


def _norms(graphs: Graphs, again: frozenset[str]) -> int:
    """Returns the bytes of each norm's input and of its result, which a matrix product takes."""
    block = graphs.block
    # Plain operations keep the scaled input, and a float32 copy of a narrow one.
    exact = block.hidden * FLOAT * (1 if graphs.itemsize == FLOAT else 2)
    own = graphs.flow
    own += graphs.tokens * exact // graphs.token_shares if graphs.kind == "plain" else 0
    keeps_own = not graphs.gathered or (graphs.gathers_again and not again)
    factor = graphs.flow if keeps_own else graphs.gathered
    return 2 * (own + factor) + (2 * own if block.has_out_norms else 0)


def _sum(graphs: Graphs) -> int:
    """Returns the bytes that a sum over the ranks of a layer makes of its result."""
    return graphs.tokens * graphs.block.hidden * graphs.summed // graphs.token_shares


def _attention(graphs: Graphs) -> int:
    """Returns the bytes per token between the norm and the product with o_proj."""
    heads, size = graphs.block.heads, graphs.itemsize
    base = (heads.width + heads.queries * heads.dim + graphs.block.beside_heads) * size
    if graphs.kind == "native":
        return base + heads.queries * size
    before_norms = (heads.queries + heads.kv) * heads.dim * size if heads.norm_eps else 0
    if graphs.kind == "fused":
        return base + before_norms + heads.queries * SOFTMAX_STATE
    scores = heads.queries * graphs.row_length
    return base + 2 * before_norms + scores * (FLOAT + (size if size != FLOAT else 0))


def _mlp(graphs: Graphs) -> int:
    """Returns the bytes per token of gate and up, and of their product."""
    block, size = graphs.block, graphs.itemsize
    is_short = graphs.kind != "plain" and block.is_silu
    a_width = 3 * size if is_short else 4 * FLOAT + size
    dense = block.inner * a_width
    if block.experts is None:
        return dense
    a_width -= size if graphs.kind == "native" and block.makes_gate_and_up_again else 0
    return max(dense, _of_experts(graphs, block.experts, a_width))


def _of_experts(graphs: Graphs, experts: LocalExperts, a_width: int) -> int:
    """Returns the bytes per token of its rows, which experts get and make, and of scores.

    With experts of other ranks, there are as many rows as CAPACITIES begin with, in multiples of the own ones; they are
    kept as they came, too. With parts of experts, all of their ranks' rows are here.
    """
    number, rows = experts.routing.num_experts, experts.routing.per_token
    ep, columns = number // experts.count, graphs.block.expert_columns
    arrived = rows * min(CAPACITIES[0], ep)
    copies = 1 if ep * columns == 1 else 2
    a_row = copies * graphs.block.hidden * graphs.itemsize + experts.inner // columns * a_width
    bytes_here = arrived * columns * a_row + arrived * graphs.block.hidden * graphs.itemsize
    bytes_here += graphs.block.shared * a_width
    return -(-(bytes_here + FLOAT * (number + 2 * rows)) // graphs.token_shares)


def _inside_mlp(graphs: Graphs, widths: int, again: int = 0) -> int:
    """Returns the bytes per token of so many tensors as wide as the feed-forward, which are not kept.

    Those of experts are `again` more.
    """
    block, size = graphs.block, graphs.itemsize if graphs.kind != "plain" else FLOAT
    dense = block.inner * widths * size
    if block.experts is None:
        return dense
    return max(dense, _of_experts(graphs, block.experts, (widths + again) * size))


def _backward(graphs: Graphs) -> int:
    """Returns the bytes of gradients of a layer's results beside what it keeps, at the larger of its two halves."""
    size, heads = graphs.itemsize, graphs.block.heads
    is_again = graphs.kind == "native" and graphs.block.makes_gate_and_up_again
    mlp = _inside_mlp(graphs, 3, again=is_again)
    attention = (heads.width + heads.queries * heads.dim) * size
    if graphs.kind == "plain":
        attention += 2 * heads.queries * graphs.row_length * FLOAT
    # Attention follows when the MLP's share has been released. Gathered keys and values, and their gradients.
    context = 2 * graphs.context
    largest = max(graphs.tokens * mlp, graphs.tokens * (attention - _mlp(graphs)) + context)
    return 2 * graphs.flow + graphs.gathered + largest + _sum(graphs)


def _mask(graphs: Graphs) -> int:
    """Returns the bytes of the mask of all rows, which every layer takes; the processor's kernels read spans."""
    if graphs.kind == "native":
        return 0
    if graphs.kind == "fused" and graphs.is_causal and graphs.context_ranks == 1:
        return CAUSAL_MASK
    return graphs.tokens * graphs.row_length * (1 if graphs.kind == "fused" else FLOAT)


def _head(graphs: Graphs, with_gradient: bool) -> int:
    """Returns the bytes of the picked rows, their norm, and the logits of one chunk (and their gradient)."""
    picked = 2 * graphs.tokens * graphs.block.hidden * graphs.itemsize
    rows = min(graphs.tokens, _chunk_rows(graphs))
    tensors = (2 if with_gradient else 1) * graphs.itemsize
    if graphs.kind != "native":
        tensors += FLOAT * (PLAIN_GRADIENT if with_gradient else PLAIN_STATS)
    return picked + rows * graphs.vocabulary * tensors


def _chunk_rows(graphs: Graphs) -> int:
    return max(1, graphs.logits_bytes // (FLOAT * graphs.vocabulary))


def activation_bytes(plan: RunPlan) -> Mapping[str, int]:
    """Computes the bytes of the rank that needs most, by phase; vLLM's own are not known here."""
    ragged = kernel_kind(plan.config) == "native"
    update = graphs_of(plan, plan.train, update_shape(plan.config, ragged))
    by_phase = {
        "rollout": _rollout_bytes(plan),
        "old_logps": _forward_bytes(plan.train, update, keeps_flows=True),
        "update": update_need(plan).total,
    }
    if (vision := plan.model.vision) is not None:
        by_phase["images"] = encoder_bytes(plan, vision)
    for role in plan.forward_roles:
        graphs = graphs_of(plan.of_role(role), role.layout, role.widest(ragged))
        by_phase[role.name] = _forward_bytes(role.layout, graphs)
    if (critic := plan.critic) is not None:
        graphs = graphs_of(critic, critic.train, update_shape(critic.config, ragged))
        by_phase["values"] = _forward_bytes(critic.train, graphs, keeps_flows=True)
        by_phase["update_critic"] = update_need(critic).total
    return by_phase


def update_need(plan: RunPlan) -> UpdateBytes:
    """Computes what an update needs in the stage that needs most."""
    shape = update_shape(plan.config, kernel_kind(plan.config) == "native")
    graphs = graphs_of(plan, plan.train, shape)
    stages = range(len(plan.train.stage_layers))
    chunks = [chunk for stage in stages for chunk in _chunks(plan, stage)]
    return max((update_bytes(graphs, own) for own in chunks), key=lambda need: need.total)


def graphs_of(plan: RunPlan, layout: Layout, shape: MicroShape) -> Graphs:
    model, tp_size = plan.model, layout.mesh.tp
    block = Block(
        model.hidden_size,
        local_inner(model, tp_size),
        local_heads(model, tp_size),
        is_silu=model.activation == "silu",
        has_out_norms=bool(model.family.norms.attention_out or model.family.norms.mlp_out),
        experts=local_experts(model, layout.mesh.ep, 0),
        expert_columns=layout.mesh.etp,
        shared=model.moe.shared_inner if model.moe else 0,
        beside_heads=_beside_heads(model, tp_size),
        has_frozen_experts=layout is plan.train and plan.lora is not None,
    )
    # The processors' kernels have float32 activations whatever weights are.
    on_host = plan.config.context.target == SHARED_MEMORY
    itemsize = FLOAT if on_host else ITEM_BYTES[compute_dtype(plan.config)]
    # In float32, a narrow result becomes another tensor before its sum.
    in_float32 = itemsize != FLOAT and plan.config.context.reduce_dtype == "float32"
    summed = 2 * FLOAT if in_float32 else itemsize
    return Graphs(
        kernel_kind(plan.config),
        block,
        head_width(model, tp_size),
        shape.tokens,
        shape.length,
        itemsize,
        LOGITS_BYTES,
        summed=summed if tp_size > 1 else 0,
        is_causal=shape.max_per_row == 1,
        merged=_merged_bytes(plan) if layout is plan.train else 0,
        token_shares=layout.token_shares,
        gathers_again=plan.lora is None,
        context_ranks=shape.context_ranks,
    )


def _beside_heads(model: DecoderConfig, tp_size: int) -> int:
    """Counts the latents of a token and their norms, and its queries, keys and values before they are laid out."""
    if (latent := model.latent) is None:
        return 0
    heads = model.num_attention_heads // tp_size
    made = heads * (model.head_dim + latent.nope_dim + 2 * latent.value)
    return made + 2 * ((latent.query_rank or 0) + latent.rank) + latent.rope_dim


def _merged_bytes(plan: RunPlan) -> int:
    """Returns the float32 bytes of a layer's largest matrix with adapters: their product, and the sum."""
    if plan.lora is None or not plan.batch_invariant:
        return 0
    adapted, layout = adapted_names(spec.name for spec in plan.trained.specs), plan.train
    return 2 * FLOAT * max(layout.stored_sizes[layout.by_name[name].key] for name in adapted)


def _forward_bytes(layout: Layout, graphs: Graphs, keeps_flows: bool = False) -> int:
    """Computes the bytes of the stage that needs most, with the activations that it receives and sends.

    With `keeps_flows`, stages that are not the last also return what their layers got.
    """
    flow = graphs.flow
    last = forward_bytes(graphs, has_head=True)
    if len(layout.stage_layers) == 1:
        return last
    *without_head, _ = chain(*zip(*layout.stage_layers, strict=True))
    kept = max(map(len, without_head)) if keeps_flows else 0
    arrived = ARRIVED + layout.mesh.pp if layout.num_chunks > 1 else 0
    return max(last, forward_bytes(graphs, has_head=False) + kept * flow) + (2 + arrived) * flow


def _chunks(plan: RunPlan, stage: int) -> list[ChunkLayers]:
    recompute, chunks = plan.config.actor_config.recompute_config, plan.train.stage_layers[stage]
    nothing: frozenset[str] = frozenset()
    num_stages, by_position = len(plan.train.stage_layers), _gradients(plan)
    tied = plan.model.has_table_in_head
    embedding = by_position.get("first_and_last" if tied else "first", 0)
    head = by_position.get("first_and_last", 0) + by_position.get("last", 0)
    others = chunks_in_flight(stage, num_stages, len(chunks)) - 1
    waiting = others * max(map(len, chunks)) + (ARRIVED + num_stages if len(chunks) > 1 else 0)
    return [
        ChunkLayers(
            [nothing if index % recompute.every else recompute.modules for index in layers],
            gradients=[by_position.get(index, 0) for index in layers],
            waiting=waiting,
            embedding=embedding if layers.start == 0 else None,
            head=head if layers.stop == plan.train.num_layers else None,
        )
        for layers in chunks
    ]


def _gradients(plan: RunPlan) -> Mapping[int | str, int]:
    """Returns the bytes of a rank's float32 gradients by their parameters' positions in the model."""
    by_position: Counter[int | str] = Counter()
    for spec in plan.trained.specs:
        by_position[spec.position] += FLOAT * plan.trained.local_sizes[spec.name]
    return by_position


def _rollout_bytes(plan: RunPlan) -> int:
    """Computes the bytes of the plain decoder's graphs: prompts, or one token a slot. The loop in C has only pools."""
    keeps = keeps_slots(plan.config.context.target) and not missing_options(plan.model)
    if plan.config.generate_config.uses_vllm or keeps:
        return 0
    cache, heads = plan.cache_config, cached_heads(plan.model, plan.infer.mesh.tp)
    prompts = MicroShape(cache.prompts_at_once, cache.max_prompt, 1)
    graphs = graphs_of(plan, plan.infer, prompts)
    length, attention = cache.longest, 0
    if graphs.kind != "fused":
        # Scores, and the keys and values of a slot's pages one after the other.
        gathered = 2 * heads.kv * heads.dim * graphs.itemsize
        attention = length * (3 * heads.queries * FLOAT + gathered)
    rows = SAMPLING_ROWS * graphs.vocabulary * FLOAT + length * FLOAT + attention
    one_token = replace(graphs, tokens=cache.rows, row_length=1)
    decode = cache.rows * rows + forward_bytes(one_token, has_head=False)
    return max(forward_bytes(graphs, has_head=False), decode)
