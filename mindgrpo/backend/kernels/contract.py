"""The kernels' interface: factories of the cells that a model consists of.

`Kernels` implements each in plain MindSpore operations, which run on every device and are the reference for faster
kernels. Backends with their own kernels override methods (native/kernels.py, ascend.py), and tests compare them with
the reference. Kernels do not communicate; collectives are up to the caller.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import MethodType
from typing import TYPE_CHECKING, Any

import numpy as np
from mindspore import nn, ops

from mindgrpo.backend.kernels import mindspore_attention, mindspore_experts, mindspore_ops
from mindgrpo.backend.kernels.rollout import LocalModelShape, Memory
from mindgrpo.backend.kernels.shapes import (
    Activation,
    AdamWNumbers,
    Heads,
    Routing,
    SamplingParams,
    Vocabulary,
)

if TYPE_CHECKING:
    from mindgrpo.backend.kernels.native.rollout import Slots


class Kernels:
    """Reference kernels in plain MindSpore operations; attention is padded and masked, whatever the samples' lengths.

    Dimensions: N tokens, H hidden size, I MLP (inner) size, V vocabulary shard, D head dim, R rows of T tokens each,
    N = R T. Mixture of experts: E experts; K expert slots per token, numbered token * K + k; S dispatched rows, sorted
    by expert. `order` int32 [S] is the slot of each row and `home` int32 [N, K] the row of each slot, -1 for none.

    Weight matrices and embedding tables have the compute dtype. Weight vectors (norms, biases) are float32, or the
    compute dtype if nothing is trained and `takes_narrow_vectors`. Input and output activations have the same dtype:
    the compute dtype, or float32 if the kernels want that.
    """

    # Whether attention's cost follows the samples' lengths, so that padding costs nothing.
    ragged = False
    # Whether `adamw` is the fastest optimizer in device memory; otherwise the optimizer is a graph.
    has_adamw = False
    # How many bfloat16 numbers each GEMM operand is split into (dtypes.py); None for float32 operands.
    num_parts: int | None = None
    # Whether weight vectors may have the compute dtype.
    takes_narrow_vectors = True
    # Whether `slots` is implemented; otherwise the generator decodes with plain operations.
    has_slots = False
    # Whether to compute logits in float32.
    fp32_lm_head = False
    # Whether the LM head's inputs must be float32 for that.
    widens_head = True
    # Whether a token's results must be bitwise identical in `slots` and in graphs, on any number of ranks.
    batch_invariant = False

    @property
    def head_parts(self) -> int | None:
        """Returns num_parts of the LM head's GEMM."""
        return self.num_parts

    def leave(self, names: Iterable[str]) -> None:
        """Makes the methods `names` fall back to this class's reference implementations (context.plain_kernels)."""
        # The formats of masks, angles and optimizer inputs belong to the cell that takes them.
        together = {
            "attention": ("rope_and_mask",),
            "context_attention": ("context_inputs",),
            "cached_attention": ("cached_angles",),
            "adamw_cell": ("adamw_inputs",),
        }
        for name in names:
            for method in (name, *together.get(name, ())):
                setattr(self, method, MethodType(getattr(Kernels, method), self))

    def matmul(self, transpose_b: bool = False, leaves: int = 1) -> Any:
        """Makes a GEMM cell: (x [N, K], weight [K, M], or [M, K] with `transpose_b`) -> [N, M], differentiable.

        The gradient of the weight has the weight's dtype or float32. `transpose_b` is used by the LM head, and obeys
        `fp32_lm_head`. Kernels that are `batch_invariant` sum K in `leaves` equal parts, and add these in a binary
        tree; other kernels may ignore `leaves`.
        """
        return ops.MatMul(transpose_b=transpose_b)

    def add_matmul(self) -> nn.Cell:
        """Makes a cell: (bias [M], x [N, K], weight [K, M]) -> x weight + bias [N, M], not differentiable."""
        return mindspore_ops.AddMatMul(self.matmul())

    def matmul_back(self) -> Any:
        """Makes a cell: (dy [N, M], weight [K, M]) -> dy weight^T [N, K], a GEMM's gradient of x."""
        return ops.MatMul(transpose_b=True)

    def matmul_gradient(self) -> Any:
        """Makes a cell: (x [N, K], dy [N, M]) -> x^T dy float32 [K, M], a GEMM's gradient of its weight."""
        return mindspore_ops.MatMulGradient()

    def float32_matmul(self) -> Any:
        """Makes a cell: (a float32 [N, K], b float32 [K, M]) -> a b float32 [N, M], at any matmul precision."""
        return ops.MatMul()

    def float32_product(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """Returns a b, float32 [N, M], of numpy arrays; bitwise equal to float32_matmul if `batch_invariant`."""
        return a @ b

    def rms_norm(self, eps: float) -> nn.Cell:
        """Makes a cell: (x [N, H], weight [H]) -> x / sqrt(mean(x^2) + eps) * weight (arXiv:1910.07467)."""
        return mindspore_ops.RmsNorm(eps)

    def add_rms_norm(self, eps: float) -> nn.Cell:
        """Makes a cell: (x [N, H], added [N, H], weight [H]) -> (x + added [N, H], rms_norm(x + added) [N, H])."""
        return mindspore_ops.AddRmsNorm(eps)

    def glu(self, activation: Activation) -> nn.Cell:
        """Makes a cell: gate and up, concatenated [N, 2 I] -> activation(gate) * up [N, I] (GLU, arXiv:2002.05202).

        silu(x) = x sigmoid(x); gelu_tanh(x) = x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))).
        """
        return mindspore_ops.Glu(activation)

    def router(self, routing: Routing) -> nn.Cell:
        """Makes a cell: (x [N, H], weight [H, E], topk_ids int32 [N, K]) -> scores of `topk_ids`, float32 [N, K].

        The score of expert -1 is 0. Logits, sums and scores are float32 at any matmul precision. Scores are taken from
        the dense softmax or sigmoid over all experts, through which x and the weight get gradients (arXiv:1701.06538).
        """
        return mindspore_experts.PlainRouter(routing)

    def choose_experts(self, routing: Routing) -> nn.Cell:
        """Makes a cell: (x [N, H], weight [H, E], bias float32 [E]) -> (topk_ids int32 [N, K], margins float32 [N]).

        Chooses the experts with the largest scores in descending order, as `routing` says; ties between experts or
        groups go to the first. The margin is the biased score of the last chosen expert minus that of the best one
        left in the chosen groups, or 1e30 if none is left. Not differentiable. `bias` is any tensor [1] if
        `routing` has none.
        """
        return mindspore_experts.PlainChooseExperts(routing)

    def sort_slots(self, routing: Routing) -> nn.Cell:
        """Makes a cell: topk_ids int32 [N, K] -> (order int32 [N K], counts int32 [E], home int32 [N, K]).

        Sorts slots into rows by expert, stably; slots of expert -1 get no row. `counts` are the rows of each expert.
        """
        return mindspore_experts.PlainSortSlots(routing)

    def take_rows(self) -> nn.Cell:
        """Makes a cell: (x [N, H], order [S], home [N, K]) -> [S, H]: gathers each row's token, zeros for -1.

        The gradient of x is weighted_sum with scores of 1, a sum in the order of a token's slots.
        """
        return mindspore_experts.PlainTakeRows()

    def expert_mlp(self, activation: Activation) -> nn.Cell:
        """Makes a cell: (x [S, H], counts int32 [E], gate_up [E, H, 2 I], down [E, I, H]) -> [S, H].

        Expert e computes glu(x gate_up[e]) down[e] for the next counts[e] rows; the rows after those of all experts are
        zeros. Experts without rows get zero gradients.
        """
        return mindspore_experts.PlainExpertMlp(activation)

    def expert_matmul(self, in_float32: bool = False) -> nn.Cell:
        """Makes a grouped GEMM cell: (x [S, K], weight [E, K, M], counts int32 [E]) -> [S, M], differentiable.

        Multiplies the rows of each expert by its matrix. The rows after those of all experts are zeros, in x and in
        gradients too. `expert_mlp` is bitwise equal to two of these with `glu` in between. `in_float32`: for float32
        tensors at any matmul precision.
        """
        return mindspore_experts.PlainExpertMatMul()

    def weighted_sum(self) -> nn.Cell:
        """Makes a cell: (y [S, H], scores float32 [N, K], order [S], home [N, K]) -> [N, H] in the dtype of y.

        Combines the rows of a token: multiplies each by its score and adds in float32, in the order of the slots.
        """
        return mindspore_experts.PlainWeightedSum()

    def embedding(self, first_token: int) -> nn.Cell:
        """Makes a cell: (tokens int32 [N], table [V, H]) -> rows [N, H], the embeddings of token - first_token.

        Tokens outside first_token + [0, V), those of other vocabulary shards, get zeros.
        """
        return mindspore_ops.PlainEmbedding(first_token)

    def exact_embedding(self, first_token: int) -> nn.Cell:
        """Makes a cell like `embedding`, but with a float32 gradient for a table of 16-bit weights."""
        return mindspore_ops.ExactEmbedding(first_token)

    def pick(self) -> nn.Cell:
        """Makes a cell: (picks int32 [M], x [N, H]) -> rows [M, H], zeros for -1; sums the gradient of x in float32."""
        return mindspore_ops.Pick()

    def rope_and_mask(self, rotary: np.ndarray | None, is_causal: bool = False) -> nn.Cell:
        """Makes a cell: (positions int32 [R, T], spans int32 [R, T, 3]) -> the last inputs of every `attention`.

        A span is (first column of a shared prefix, its length, first column of the token's own run): a token attends to
        the prefix, and to its run up to itself. A run comes after its prefix, with only runs of the same prefix in
        between. A run that is its own prefix attends to all of itself, without a causal mask. `rotary` float32
        [positions, 2 D] holds cosines, then sines; if it is None, the cell takes the tokens' rows of such a table,
        float32 [R, T, 2 D], in place of positions. `is_causal` promises that each row is a single run from column 0
        followed by padding, so that kernels may ignore spans.
        """
        return mindspore_attention.RopeAndMask(rotary)

    def attention(
        self, heads: Heads, rotary: np.ndarray | None, is_causal: bool = False
    ) -> nn.Cell:
        """Makes an attention cell for packed rows: (qkv [N, heads.width], bias, q_norm, k_norm, *outputs of
        `rope_and_mask` with the same `rotary` and `is_causal`) -> [N, queries D].

        Adds `bias` [heads.width], normalizes queries and keys with weights `q_norm` and `k_norm` [D], applies rotary
        embeddings and attends (arXiv:1706.03762, section 3.2.1). `bias` and norms are any tensors [1] if `heads` has
        none.
        """
        return mindspore_attention.PlainPackedAttention(heads)

    def context_inputs(self, rotary: np.ndarray | None, index: int) -> nn.Cell:
        """Makes a cell: (positions int32 [R, T], spans int32 [R, T, 3], columns int32 [G, R, T / G]) -> inputs of
        every `context_attention`.

        The tokens of each row are sharded over G context-parallel ranks, of which this one is `index`: columns[g] are
        the columns of rank g, ascending in each row. Positions and spans are those of whole rows, as for
        `rope_and_mask`.
        """
        return mindspore_attention.ContextMask(rotary, index)

    def context_attention(
        self,
        heads: Heads,
        rotary: np.ndarray | None,
        index: int,
        gather: nn.Cell,
        scatter: nn.Cell,
        gathers_again: bool = False,
    ) -> nn.Cell:
        """Makes a context-parallel attention cell for this rank's n = N / G tokens: (qkv [n, heads.width], bias,
        q_norm, k_norm, *outputs of `context_inputs`) -> [n, queries D]; otherwise like `attention`.

        `gather` is a differentiable all-gather cell, [n, w] -> [G n, w] in rank order; `scatter` is the reduce-scatter
        cell of its gradient, [G, n, w] -> [n, w]. With `gathers_again`, kernels that can do so do not store the
        gathered keys and values, but gather them again in the backward pass.
        """
        return mindspore_attention.PlainContextAttention(heads, gather)

    def prefill_attention(self, heads: Heads, keys: Any, values: Any) -> nn.Cell:
        """Makes a prefill cell for P padded prompts, N = P T: (qkv, bias, q_norm, k_norm as in `attention`, mask
        float32 [1, 1, T, T], angles float32 [N, 1, 2 D], source int32 [C], cache_rows int32 [C]) -> [N, queries D].

        `mask` is 0 if a token attends to another, else NEVER; `angles` are rows of the rotary table. Writes rows
        `source` of the prompts' keys and values [N kv, D] to rows `cache_rows` of the KV cache, the parameters `keys`
        and `values` [rows, D].
        """
        return mindspore_attention.PlainPrefillAttention(heads, keys, values)

    def cached_angles(self, heads: Heads) -> nn.Cell:
        """Makes a cell: rows of the rotary table float32 [B, 1, 2 D] -> the angles that `cached_attention` takes."""
        return nn.Identity()

    def cached_attention(self, heads: Heads, keys: Any, values: Any) -> nn.Cell:
        """Makes a decode cell for one token of each of B slots: (qkv [B, heads.width], bias, q_norm, k_norm, mask
        float32 [B kv, 1, S], angles of `cached_angles`, cache_rows int32 [B kv], pages int32 [B kv, S / P]) ->
        [B, queries D].

        The paged KV cache is the parameters `keys` and `values` [pages P, D]; a page holds P positions of one KV head.
        Writes the token's key and value of each slot and head to row `cache_rows`, then attends to the positions in
        `pages` that `mask` allows, S per slot and head in order. Slots may share pages.
        """
        return mindspore_attention.PlainCachedAttention(heads, keys, values)

    def largest(self, count: int) -> nn.Cell:
        """Makes a top-k cell: x [B, V] -> (the `count` largest values of each row, descending, and their columns), both
        [B, count]."""
        return mindspore_ops.Largest(count)

    def adamw(
        self,
        weight: np.ndarray,
        gradient: np.ndarray,
        first: np.ndarray,
        second: np.ndarray,
        numbers: AdamWNumbers,
    ) -> None:
        """Applies an AdamW step to float32 [n] arrays in place, outside graphs, and zeroes the gradient."""
        mindspore_ops.adamw(weight, gradient, first, second, numbers)

    def adamw_cell(self, beta1: float, beta2: float, eps: float, weight_decay: float) -> nn.Cell:
        """Makes an AdamW cell: (weight, gradient, first, second, *adamw_inputs) -> any value, available after the step.

        Updates the float32 parameters `weight`, `first` and `second` moments [...] in place (arXiv:1711.05101). The
        gradient is a tensor of the same shape, and is left unchanged.
        """
        return mindspore_ops.AdamWUpdate(beta1, beta2, weight_decay)

    def adamw_inputs(self, numbers: AdamWNumbers) -> Sequence[Any]:
        """Returns the scalars of a step that `adamw_cell` takes, as graph inputs, so that it is compiled only once."""
        return mindspore_ops.adamw_inputs(numbers)

    def squares(self) -> nn.Cell:
        """Makes a cell: x float32 [...] -> the sum of its squares, float32 []."""
        return mindspore_ops.Squares()

    def square_sum(self, array: np.ndarray) -> float:
        """Returns the sum of the squares of a float32 array [...], added in float64."""
        return float(np.sum(np.square(array, dtype=np.float64)))

    def log_prob_stats(self, vocabulary: Vocabulary) -> nn.Cell:
        """Makes a cell: (logits [M, V], labels int32 [M]) -> log-prob statistics, float32 [M, 4 leaves].

        The four statistics of a leaf, with l = logits * scale over its real columns: top = max l; sum exp(l - top);
        sum exp(l - top) l; l of the label, or 0 if the label is not in the leaf.
        """
        return mindspore_ops.LogProbStats(vocabulary)

    def log_probs_of_stats(self) -> nn.Cell:
        """Makes a cell: log_prob_stats of the whole vocabulary in order, float32 [M, 4 L] -> (log-prob, entropy,
        log-sum-exp), float32 [M] each."""
        return mindspore_ops.LogProbsOfStats()

    def log_prob_grad(self, vocabulary: Vocabulary) -> nn.Cell:
        """Makes a cell: (logits [M, V], labels [M], log-sum-exp [M], entropy [M], dlogp [M], dentropy [M]) -> dlogits
        [M, V].

        dlogp/dl = onehot - p; dH/dl = -p (log p + H).
        """
        return mindspore_ops.LogProbGrad(vocabulary)

    def linear_log_prob_stats(self, vocabulary: Vocabulary, rows: int) -> nn.Cell:
        """Makes a fused LM head cell: (x [M, H], table [V, H], labels int32 [M]) -> log_prob_stats of x table^T.

        Works in chunks, so that the logits of at most `rows` rows exist at a time.
        """
        return mindspore_ops.LinearLogProbStats(self, vocabulary, rows)

    def linear_log_prob_grad(
        self, vocabulary: Vocabulary, rows: int, is_trained: bool = True
    ) -> nn.Cell:
        """Makes a cell: (x [M, H], table [V, H], labels [M], log-sum-exp [M], entropy [M], dlogp [M], dentropy [M]) ->
        (dx [M, H], dtable float32 [V, H], or [1] unless the table `is_trained`).

        Recomputes logits in chunks of at most `rows` rows.
        """
        return mindspore_ops.LinearLogProbGrad(self, vocabulary, rows, is_trained)

    def slots(
        self,
        model_shape: LocalModelShape,
        sampling: SamplingParams,
        rotary: np.ndarray,
        slots: int,
        prompt_rows: int,
        memory: Memory,
    ) -> Slots:
        """Makes the slots that decode samples without a graph (see rollout.py); `rotary` as in `rope_and_mask`."""
        raise NotImplementedError
