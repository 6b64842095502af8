"""Counts what a rank does in each graph of a step, from shapes alone: FLOPs, bytes, sums, kernels, waits. Pure.

What the compiled graphs launch and repeat is data here: kernels of the fused graphs are counted in the compiler's own
output with the accelerator's kernels in 16 bits. A change that launches fewer, or computes a layer less often, changes
a number of FUSED or NATIVE.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from mindgrpo.backend.dtypes import ITEM_BYTES
from mindgrpo.models.expert_plan import CAPACITIES
from mindgrpo.models.shard import cached_heads, local_heads, local_inner, local_vocabulary
from mindgrpo.parallel.sharding import Layout
from mindgrpo.plan.run_plan import RunPlan

FLOAT = ITEM_BYTES["float32"]
# A sum of a layer's attention and one of its MLP; in a backward pass those of two gradients, and of what is computed
# again the one that is not the layer's result.
FORWARD_SUMS, BACKWARD_SUMS, RECOMPUTED_SUMS = 2, 2, 1
# Of copies of tokens: to the ranks of their experts and back.
EXCHANGES = 2
# Attention's backward pass makes five products where its forward pass makes two.
ATTENTION_BACKWARD = 2.5


@dataclass(frozen=True)
class Launches:
    """Kernels of a graph: of each layer, and beside all layers."""

    layer: float
    beside: float = 0

    def of(self, layers: int) -> float:
        return layers * self.layer + self.beside


@dataclass(frozen=True)
class GraphCounts:
    """`first_back` is the backward graph of stages that are not the last, `last` the last stage's with the loss.

    `hands_inputs_on`: `first_back` gets what the stage's layers got and computes each once more, and so does `last` if
    layers are recomputed, all but its last one; else these compute the stage, and what is recomputed once more.
    `float32_sums`: results of layers are summed over ranks in float32, whatever the compute dtype.
    `whole_mask`: attention computes every pair of a row's tokens, or half of them (`is_causal`) where the row is one
    sample. `whole_cache`: a decoded token reads the cache to its full length; `part_caches`: to the least of the
    generator's read_lengths that has all samples. `fits_rows`: rows are as long as their content needs.
    `whole_prompts`: prompts are brought in padded to the longest, a fixed number a call. `is_serial`: the next kernel
    is launched when the last one has ended.
    `tokens_a_graph`: tokens that one call of the decoding graph makes.
    `slow_a_logit`: elements of slow operations per logit that a token is drawn from. `decode_waits`: waits of the
    host a call of the decoding graph.
    Of the optimizer: bytes of memory a parameter, and calls outside of graphs. Of a weight sync: calls a tensor, bytes
    of memory per byte written (scripts/bench/sync_calls.py counts both). Of checksums: calls a tensor, of the policy's
    and of the generator's together, and bytes of memory and elements of slow operations per element.
    """

    decode: Launches
    prompt: Launches
    forward: Launches
    first_back: Launches
    last: Launches
    optimizer: Launches
    hands_inputs_on: bool
    float32_sums: bool
    whole_mask: bool
    is_causal: bool
    whole_cache: bool
    part_caches: bool
    fits_rows: bool
    whole_prompts: bool
    is_serial: bool
    tokens_a_graph: int
    slow_a_logit: float
    decode_waits: float
    optimizer_bytes: float
    optimizer_calls: float
    sync_calls: float
    sync_bytes: float
    checked_calls: float
    checked_bytes: float
    slow_checks: float


FUSED = GraphCounts(
    decode=Launches(14, 56),
    prompt=Launches(19, 4),
    forward=Launches(23, 28),
    first_back=Launches(59, 29),
    # The head's logits in chunks of some 400 rows.
    last=Launches(59, 116),
    optimizer=Launches(42, 23),
    hands_inputs_on=True,
    float32_sums=False,
    whole_mask=True,
    is_causal=True,
    whole_cache=False,
    part_caches=True,
    fits_rows=True,
    whole_prompts=True,
    is_serial=False,
    tokens_a_graph=1,
    slow_a_logit=0.0,
    decode_waits=1.0,
    # Norm 4, scale 8, AdamW 28, rounding 6, zeroing 4.
    optimizer_bytes=50.0,
    # Three numbers that go in, and two that come out.
    optimizer_calls=5.0,
    sync_calls=1.3,
    sync_bytes=2.0,
    checked_calls=1.1,
    checked_bytes=26.0,
    slow_checks=0.0,
)
# Kernels of processors: one C call decodes, attention sees what its spans say, and ranks read one another's memory.
NATIVE = GraphCounts(
    decode=Launches(0),
    prompt=Launches(0),
    forward=Launches(14, 20),
    first_back=Launches(40, 30),
    last=Launches(40, 60),
    optimizer=Launches(0),
    hands_inputs_on=True,
    float32_sums=False,
    whole_mask=False,
    is_causal=True,
    whole_cache=False,
    part_caches=False,
    fits_rows=True,
    whole_prompts=False,
    is_serial=True,
    tokens_a_graph=0,
    slow_a_logit=1.0,
    decode_waits=0.0,
    optimizer_bytes=40.0,
    optimizer_calls=0.0,
    sync_calls=2.0,
    sync_bytes=2.0,
    checked_calls=0.0,
    checked_bytes=4.0,
    slow_checks=0.0,
)


@dataclass(frozen=True)
class Work:
    """Counts of one rank. `products`, `attention`: FLOPs, of which products read `weights` bytes of matrices.

    In bytes: `memory` that other kernels read and write, `summed` over the model group, `sent` over one link
    (`sent_far`: to another host), and `copied` between device and host. `slow` are elements of slow operations; the
    others are numbers: `sums` over ranks, `kernels`, `calls` outside of graphs, `waits` of the host.
    """

    products: float = 0.0
    attention: float = 0.0
    weights: float = 0.0
    memory: float = 0.0
    summed: float = 0.0
    sums: float = 0.0
    sent: float = 0.0
    sent_far: float = 0.0
    copied: float = 0.0
    slow: float = 0.0
    kernels: float = 0.0
    calls: float = 0.0
    waits: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Work)))

    def __mul__(self, times: float) -> Work:
        return Work(*(getattr(self, f.name) * times for f in fields(Work)))

    @property
    def counts(self) -> Mapping[str, float]:
        return {name: value for name, value in vars(self).items() if value}


@dataclass(frozen=True)
class Passes:
    """Tokens of a micro-batch: all of its rows, those that predict, and the pairs that attention looks at in a layer.

    `pairs` counts a query with each key that it sees; of a whole mask, all keys of its row.
    """

    tokens: float
    picks: float
    pairs: float


class LayerWork:
    """Work of a rank's share of a model's layers in `layout`."""

    def __init__(self, plan: RunPlan, layout: Layout, counts: GraphCounts, itemsize: int) -> None:
        model, self.group = plan.model, layout.mesh.mp
        heads, inner = local_heads(model, self.group), local_inner(model, self.group)
        self.moe, self.hidden = model.moe, model.hidden_size
        # Of all layers, those with experts.
        self.expert_share = sum(kind.has_experts for kind in model.layers) / len(model.layers)
        # As wide as an average layer's dense feed-forward, or the expert that all tokens pass.
        shared = model.moe.shared_inner / layout.token_shares if model.moe else 0
        width = (1 - self.expert_share) * inner + self.expert_share * shared
        self.dense_size = 3 * self.hidden * width
        mixed = heads.queries * heads.dim
        self.vocabulary = local_vocabulary(model, self.group)
        self.kv_width, self.mixed = 2 * heads.kv * heads.dim, mixed
        self.attention_size = model.attention_size(self.group)
        cached = cached_heads(model, self.group)
        self.cached_width = 2 * cached.kv * cached.dim
        self.token_shares, self.ep, self.emp = layout.token_shares, layout.mesh.ep, layout.mesh.emp
        self.size = self.attention_size + self.dense_size + self._expert_products()
        self.counts, self.itemsize = counts, itemsize
        in_float32 = counts.float32_sums or plan.config.context.reduce_dtype == "float32"
        self.sum_bytes = FLOAT if in_float32 else itemsize
        self.recomputed_sums: float = RECOMPUTED_SUMS
        self.sums_in_halves = layout.token_shares > 1
        if self.sums_in_halves:
            # Both gathers before its products, and the one half of its first sum.
            self.recomputed_sums = 1.5
        # Hidden states that are gathered once more for gradients, in layers that are not computed again.
        self.gathered_again = 1.0 if self.sums_in_halves and plan.lora is None else 0.0
        # Read and written between products: norms, residuals, rotary positions, the activation.
        own = 10 * self.hidden / layout.token_shares
        self.between = itemsize * (own + 2 * heads.width + mixed + self._between_products(width))
        self.has_adapters = plan.lora is not None
        # Keys and values of the ranks that share rows; processors' kernels gather them again for gradients.
        self.others, self.context_again = layout.mesh.cp - 1, float(counts.is_serial)

    def read_by(self, tokens: float) -> float:
        """Counts the elements of a layer's matrices that tokens use: of one, also its products.

        Tokens choose experts at random, and layers are an average one of the model. A rank's experts get the tokens of
        all ranks that share them.
        """
        size = self.attention_size + self.dense_size
        if self.moe is None:
            return size
        number, coming = self.moe.num_experts, tokens / self.token_shares * self.ep * self.emp
        used = number / self.ep * (1 - (1 - self.moe.per_token / number) ** coming)
        router = self.hidden * number
        of_experts = 3 * self.hidden * self.moe.inner / self.emp * used
        return size + self.expert_share * (of_experts + router)

    def _expert_products(self) -> float:
        """Counts the elements of the router and of experts that a token is multiplied with."""
        if self.moe is None:
            return 0.0
        of_experts = 3 * self.moe.inner * self.moe.per_token + self.moe.num_experts
        return self.expert_share * self.hidden * of_experts / self.token_shares

    def _between_products(self, inner: float) -> float:
        """Counts elements that the activation reads and writes, and the copies of a token, one for each expert."""
        if self.moe is None:
            return 5 * inner
        copies = 4 + 4 * self._is_spread
        of_experts = self.moe.per_token * (5 * self.moe.inner + copies * self.hidden)
        return 5 * inner + self.expert_share * of_experts / self.token_shares

    @property
    def _is_spread(self) -> bool:
        return self.ep * self.emp > 1

    def _exchanges(self, number: float, tokens: float) -> Work:
        """Counts `number` exchanges of a copy of a token for each of its experts, and gathers over its columns.

        As many rows are exchanged as CAPACITIES begin with, in multiples of what is sent evenly.
        """
        if self.moe is None or not self._is_spread:
            return Work()
        rows = tokens / self.token_shares * self.moe.per_token * self.expert_share
        others = min(CAPACITIES[0], self.ep) * (self.ep - 1) / self.ep + (self.emp - 1)
        calls = (self.ep > 1) + (self.emp > 1)
        return Work(sent=number * others * rows * self.hidden * self.itemsize, sums=number * calls)

    def _sums(self, number: float, tokens: float) -> Work:
        """`number` sums of hidden states over the model group, and casts where they are float32 beside narrower."""
        if self.group == 1:
            return Work()
        # Half of them are of feed-forwards, of which those of experts have exchanges.
        number *= 1 - self.expert_share / 2
        summed = number * tokens * self.hidden * self.sum_bytes
        narrow = self.sum_bytes > self.itemsize
        casts = number * tokens * self.hidden * 2 * (FLOAT + self.itemsize) if narrow else 0.0
        # A gather and a scattered sum move the bytes of one sum, in two calls.
        calls = 2 * number if self.sums_in_halves else number
        return Work(summed=summed, sums=calls, memory=casts)

    def _context(self, number: float, tokens: float) -> Work:
        """Counts `number` gathers of keys and values, or scattered sums of their gradients, of `tokens` own ones."""
        if not self.others:
            return Work()
        sent = number * self.others * tokens * self.kv_width * self.itemsize
        return Work(sent=sent, sums=number)

    def forward(self, passes: Passes, layers: int, has_head: bool) -> Work:
        """Counts a forward graph without its launches."""
        work = Work(
            products=2 * passes.tokens * self.size * layers,
            attention=4 * passes.pairs * self.mixed * layers,
            weights=self.read_by(passes.tokens) * self.itemsize * layers,
            memory=passes.tokens * self.between * layers,
        )
        work += self._sums(FORWARD_SUMS * layers, passes.tokens)
        work += self._context(layers, passes.tokens)
        work += self._exchanges(EXCHANGES * layers, passes.tokens)
        return work + self.head(passes.picks, 1) if has_head else work

    def head(self, picks: float, products: int) -> Work:
        """Counts so many products of the head, with what is read and written of the logits."""
        logits = picks * self.vocabulary
        sums = 3 if self.group > 1 else 0
        return Work(
            products=2 * products * logits * self.hidden,
            weights=products * self.vocabulary * self.hidden * self.itemsize,
            memory=2 * products * logits * FLOAT,
            sums=sums,
        )

    def backward(self, passes: Passes, layers: int, recomputed: float, has_head: bool) -> Work:
        """Counts a backward graph; `recomputed` is the share of the layers' products that it makes again.

        The last stage's is counted with the forward pass, whichever graph makes it; where the others get what their
        layers got, they make it all again.
        """
        once = self.forward(passes, layers, False)
        has_forward = has_head or not self.counts.hands_inputs_on
        if not has_forward:
            recomputed = 1.0
        forwards = recomputed + has_forward
        gradients = 1 if self.has_adapters else 2
        work = Work(
            products=once.products * (forwards + gradients),
            attention=once.attention * (forwards + ATTENTION_BACKWARD),
            weights=once.weights * (forwards + 1),
            memory=passes.tokens * self.between * layers * (forwards + 2),
        )
        if not self.has_adapters:
            # Gradients of weights are added to the pool's.
            work += Work(memory=3 * FLOAT * self.read_by(math.inf) * layers)
        sums = (
            BACKWARD_SUMS
            + self.recomputed_sums * recomputed
            + FORWARD_SUMS * (forwards - recomputed)
        )
        sums += self.gathered_again * max(0.0, 1 - recomputed)
        work += self._sums(sums * layers, passes.tokens)
        gathers = forwards + 1 + self.context_again * max(0.0, 1 - recomputed)
        work += self._context(gathers * layers, passes.tokens)
        work += self._exchanges(EXCHANGES * (forwards + 1) * layers, passes.tokens)
        # Forward, again for the gradient, and the two products of the gradient.
        return work + self.head(passes.picks, 4) if has_head else work

    def decode(self, slots: float, layers: int, cached: float, read: float) -> Work:
        """Counts a token of each slot, whose own keys and values are `cached` positions and `read` by the graph."""
        counts = self.counts
        work = replace(self.forward(Passes(slots, slots, slots * cached), layers, True), memory=0.0)
        keys = slots * read * self.cached_width * self.itemsize * layers
        # The few rows of a token stay in the caches between kernels.
        drawn = Work(memory=keys, slow=counts.slow_a_logit * slots * self.vocabulary)
        return work + drawn + Work(kernels=counts.decode.of(layers))
