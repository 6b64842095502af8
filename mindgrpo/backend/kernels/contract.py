"""The kernels' contract: what a model computes, as cells that a backend gives.

`Kernels` defines each in MindSpore's own operations, which every device has, and what faster kernels are held to. A
backend with kernels of its own overrides them (native/kernels.py, ascend.py); tests hold them equal. No kernel
communicates: sums over ranks are the caller's.
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
    """Computes in MindSpore's own operations, on rows of the full length with a mask, whatever the samples' lengths.

    Letters: N tokens, H hidden, I inner, V local vocabulary, D head dim, R rows of T tokens, N = R T. Of experts: E
    experts, K slots of a token, which are numbered token * K + k, and S rows that experts get. `order` int32 [S] is the
    slot of each row, `home` int32 [N, K] the row of each slot; -1 is none.

    Matrices and tables of weights are of the compute dtype; their vectors are float32, or of the compute dtype as well
    where nothing is trained and `takes_narrow_vectors`. Activations go in and out in one dtype: the compute dtype, or
    float32 where kernels take that.
    """

    # True where attention's cost follows the samples' lengths, so that one long row wastes nothing.
    ragged = False
    # True where `adamw` is the fastest way on the device's memory; else the optimizer there is a graph.
    has_adamw = False
    # Of how many bfloat16 numbers a product's factors are sums (dtypes.py); None where they are float32.
    num_parts: int | None = None
    # True where vectors of weights may be of the compute dtype.
    takes_narrow_vectors = True
    # True where `slots` gives them; without, the generator does with plain operations.
    has_slots = False
    # Set where logits shall be computed in float32.
    fp32_lm_head = False
    # True where the head's inputs have to be float32 for that.
    widens_head = True
    # Set where a token's numbers shall be the same bits in `slots` and in graphs, on any number of ranks.
    batch_invariant = False

    @property
    def head_parts(self) -> int | None:
        """Returns num_parts of the head's product."""
        return self.num_parts

    def leave(self, names: Iterable[str]) -> None:
        """Computes the methods `names` as this class defines them from now on, without this object's own kernels."""
        # Masks, angles and numbers are for the cell that they are made for.
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
        """Makes a cell: (x [N, K], weight [K, M], or [M, K] where it is transposed) -> [N, M], with gradients for both.

        A transposed one is the head's, of `fp32_lm_head`. The weight's may be of its own dtype or float32. `leaves` is
        in how many equal parts K is summed, these in a binary tree, by kernels that are `batch_invariant`; others need
        not.
        """
        return ops.MatMul(transpose_b=transpose_b)

    def add_matmul(self) -> nn.Cell:
        """Makes a cell: (bias [M], x [N, K], weight [K, M]) -> x weight + bias [N, M], without gradients."""
        return mindspore_ops.AddMatMul(self.matmul())

    def matmul_back(self) -> Any:
        """Makes a cell: (dy [N, M], weight [K, M]) -> dy weight^T [N, K]: the gradient of a product's x."""
        return ops.MatMul(transpose_b=True)

    def matmul_gradient(self) -> Any:
        """Makes a cell: (x [N, K], dy [N, M]) -> x^T dy float32 [K, M]: a weight's gradient."""
        return mindspore_ops.MatMulGradient()

    def float32_matmul(self) -> Any:
        """Makes a cell: (a float32 [N, K], b float32 [K, M]) -> a b float32 [N, M], in any precision."""
        return ops.MatMul()

    def float32_product(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """Returns float32_matmul of arrays; the same bits where `batch_invariant`."""
        return a @ b

    def rms_norm(self, eps: float) -> nn.Cell:
        """Makes a cell: (x [N, H], weight [H]) -> x / sqrt(mean(x^2) + eps) * weight (arXiv:1910.07467)."""
        return mindspore_ops.RmsNorm(eps)

    def add_rms_norm(self, eps: float) -> nn.Cell:
        """Makes a cell: (x [N, H], added [N, H], weight [H]) -> (x + added, the norm of that sum)."""
        return mindspore_ops.AddRmsNorm(eps)

    def glu(self, activation: Activation) -> nn.Cell:
        """Makes a cell: [N, 2 I], gate then up -> activation(gate) * up [N, I]: SwiGLU or GeGLU (arXiv:2002.05202).

        silu(x) = x sigmoid(x); gelu_tanh(x) = x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))).
        """
        return mindspore_ops.Glu(activation)

    def router(self, routing: Routing) -> nn.Cell:
        """Makes a cell: (x [N, H], weight [H, E], topk_ids int32 [N, K]) -> float32 [N, K], the scores of the experts
        `topk_ids`, 0 where one is -1.

        Logits, their sums and scores are float32 in any precision. A score is that of the dense softmax, through which
        x and the weight get their gradients (arXiv:1701.06538).
        """
        return mindspore_experts.PlainRouter(routing)

    def choose_experts(self, routing: Routing) -> nn.Cell:
        """Makes a cell: (x [N, H], weight [H, E], bias float32 [E]) -> (topk_ids int32 [N, K], margins float32 [N]).

        They are the experts of the largest scores, falling, as `routing` says; of equal ones, and of equal groups,
        the first. A margin is the score of the last one, with its bias, minus that of the best one that is not chosen
        in the groups that are taken, 1e30 where they have no more. There is no gradient. `bias` is any tensor [1] where
        `routing` has none.
        """
        return mindspore_experts.PlainChooseExperts(routing)

    def sort_slots(self, routing: Routing) -> nn.Cell:
        """Makes a cell: topk_ids int32 [N, K] -> (order [N K], counts int32 [E], home [N, K]).

        Rows are sorted by expert, and those of one lie as their slots do. A slot of expert -1 has no row.
        """
        return mindspore_experts.PlainSortSlots(routing)

    def take_rows(self) -> nn.Cell:
        """Makes a cell: (x [N, H], order [S], home [N, K]) -> [S, H], the token of each row, zeros for -1.

        The gradient of x is weighted_sum with scores of 1: a sum in the order of a token's slots.
        """
        return mindspore_experts.PlainTakeRows()

    def expert_mlp(self, activation: Activation) -> nn.Cell:
        """Makes a cell: (x [S, H], counts int32 [E], gate_up [E, H, 2 I], down [E, I, H]) -> [S, H].

        Expert e computes glu(x gate_up[e]) down[e] of the next counts[e] rows; rows behind all of them are zeros. The
        gradients of an expert without rows are zeros.
        """
        return mindspore_experts.PlainExpertMlp(activation)

    def expert_matmul(self, in_float32: bool = False) -> nn.Cell:
        """Makes a cell: (x [S, K], weight [E, K, M], counts int32 [E]) -> [S, M], the rows of each expert times its
        matrix, with gradients for both; rows behind all of them are zeros, of x and of a gradient too.

        `expert_mlp` has the same bits as two of them with `glu` in between. `in_float32`: of float32 tensors, in any
        precision.
        """
        return mindspore_experts.PlainExpertMatMul()

    def weighted_sum(self) -> nn.Cell:
        """Makes a cell: (y [S, H], scores float32 [N, K], order [S], home [N, K]) -> [N, H] in the dtype of y.

        A token's rows, each times its score, are added in float32 and in the order of its slots.
        """
        return mindspore_experts.PlainWeightedSum()

    def embedding(self, first_token: int) -> nn.Cell:
        """Makes a cell: (tokens int32 [N], table [V, H]) -> rows [N, H], zero where the token is not one of first_token
        + [0, V)."""
        return mindspore_ops.PlainEmbedding(first_token)

    def exact_embedding(self, first_token: int) -> nn.Cell:
        """Makes a cell: as `embedding`, of a table of weights in a narrow dtype: its gradient is float32."""
        return mindspore_ops.ExactEmbedding(first_token)

    def pick(self) -> nn.Cell:
        """Makes a cell: (picks int32 [M], x [N, H]) -> rows [M, H], zero where a pick is -1; x's gradient is summed in
        float32."""
        return mindspore_ops.Pick()

    def rope_and_mask(self, rotary: np.ndarray, is_causal: bool = False) -> nn.Cell:
        """Makes a cell: (positions int32 [R, T], spans int32 [R, T, 3]) -> two tensors, which every layer's attention
        takes.

        A span is (first column of a shared prefix, its length, first column of the token's own run): a token sees
        the prefix, and its run from the first column up to itself. A run with a prefix comes after it, and between
        them only runs with the same prefix. `rotary` float32 [positions, 2 D] holds cos, then sin. With `is_causal`
        each row is one run from its first column on, and what comes after it is of no use: spans need not be read.
        """
        return mindspore_attention.RopeAndMask(rotary)

    def attention(self, heads: Heads, rotary: np.ndarray, is_causal: bool = False) -> nn.Cell:
        """Makes a cell of packed rows: (qkv [N, heads.width], bias, q_norm, k_norm, two of `rope_and_mask`) -> mixed
        [N, queries D]. Both cells have the same `is_causal`.

        Adds the bias [heads.width], norms queries and keys with weights [D], applies the rotary positions and
        attends (arXiv:1706.03762, section 3.2.1); `bias` and the norms are any tensors [1] where `heads` has none.
        """
        return mindspore_attention.PlainPackedAttention(heads)

    def context_inputs(self, rotary: np.ndarray, index: int) -> nn.Cell:
        """Makes a cell: (positions int32 [R, T], spans int32 [R, T, 3], columns int32 [G, R, T / G]) -> tensors, which
        every layer's `context_attention` takes.

        The tokens of a row are dealt out to G ranks, of which this is number `index`: columns[g] are those of rank g,
        ascending in a row. Positions and spans are of the whole rows, as for `rope_and_mask`.
        """
        return mindspore_attention.ContextMask(rotary, index)

    def context_attention(
        self,
        heads: Heads,
        rotary: np.ndarray,
        index: int,
        gather: nn.Cell,
        scatter: nn.Cell,
        gathers_again: bool = False,
    ) -> nn.Cell:
        """Makes a cell of a rank's own tokens of packed rows: (qkv [n, heads.width], bias, q_norm, k_norm, *those of
        `context_inputs`) -> mixed [n, queries D], n = N / G; otherwise as `attention`.

        `gather` is a cell, x [n, w] -> [G n, w], what every rank has in their order, with a gradient; `scatter` makes
        that of [G, n, w], the sum of what each rank has for this one [n, w]. With `gathers_again` kernels that can do
        not keep what is gathered, but gather it once more for the gradient.
        """
        return mindspore_attention.PlainContextAttention(heads, gather)

    def prefill_attention(self, heads: Heads, keys: Any, values: Any) -> nn.Cell:
        """Makes a cell of whole prompts [P, T], N = P T: (qkv, bias, q_norm, k_norm as above, mask [1, 1, T, T], angles
        [N, 1, 2 D], source int32 [C], cache_rows int32 [C]) -> mixed [N, queries D].

        `mask` is 0 where a token sees another and NEVER elsewhere; `angles` are rows of the rotary table. Keys and
        values `source` of the prompts' [N kv, D] go to `cache_rows` of the parameters `keys` and `values` [rows, D].
        """
        return mindspore_attention.PlainPrefillAttention(heads, keys, values)

    def cached_angles(self, heads: Heads) -> nn.Cell:
        """Makes a cell: rows of the rotary table [B, 1, 2 D] -> angles as every `cached_attention` takes them."""
        return nn.Identity()

    def cached_attention(self, heads: Heads, keys: Any, values: Any) -> nn.Cell:
        """Makes a cell of one token of each of B slots: (qkv [B, heads.width], bias, q_norm, k_norm, mask
        [B kv, 1, S], angles of `cached_angles`, cache_rows int32 [B kv], pages int32 [B kv, S / P]) -> mixed
        [B, queries D].

        The parameters `keys` and `values` [pages P, D] are pages of P positions of one head each. The token's own go
        to `cache_rows`, slot by slot and in a slot head by head, before it attends to what `mask` lets it see of the
        `pages` of each slot's heads, in the order of positions. Several slots may have the same page.
        """
        return mindspore_attention.PlainCachedAttention(heads, keys, values)

    def largest(self, count: int) -> nn.Cell:
        """Makes a cell: x [B, V] -> (the `count` largest of each row [B, count], falling, and their columns)."""
        return mindspore_ops.Largest(count)

    def adamw(
        self,
        weight: np.ndarray,
        gradient: np.ndarray,
        first: np.ndarray,
        second: np.ndarray,
        numbers: AdamWNumbers,
    ) -> None:
        """Updates float32 [n] arrays in place, between graphs; the gradient is zero afterwards."""
        mindspore_ops.adamw(weight, gradient, first, second, numbers)

    def adamw_cell(self, beta1: float, beta2: float, eps: float, weight_decay: float) -> nn.Cell:
        """Makes a cell: (weight, gradient, first, second, *adamw_inputs) -> anything, which is there afterwards.

        Updates the float32 parameters `weight`, `first` and `second` in place (arXiv:1711.05101); the gradient is a
        tensor of their shape, and stays.
        """
        return mindspore_ops.AdamWUpdate(beta1, beta2, weight_decay)

    def adamw_inputs(self, numbers: AdamWNumbers) -> Sequence[Any]:
        """Returns what every `adamw_cell` takes of a step: inputs of a graph, which is compiled once for all steps."""
        return mindspore_ops.adamw_inputs(numbers)

    def squares(self) -> nn.Cell:
        """Makes a cell: float32 x [...] -> the sum of its squares []."""
        return mindspore_ops.Squares()

    def square_sum(self, array: np.ndarray) -> float:
        """Returns the float64 sum of a float32 array's squares."""
        return float(np.sum(np.square(array, dtype=np.float64)))

    def log_prob_stats(self, vocabulary: Vocabulary) -> nn.Cell:
        """Makes a cell: (logits [M, V], labels int32 [M]) -> [M, 4 leaves], with l = logits * scale over a leaf's real
        columns: top = max l; sum exp(l - top); sum exp(l - top) l; l of the label, 0 where it is elsewhere."""
        return mindspore_ops.LogProbStats(vocabulary)

    def log_probs_of_stats(self) -> nn.Cell:
        """Makes a cell: log_prob_stats of the whole vocabulary [M, 4 L], in its order -> (log p, entropy, log-sum-exp),
        [M] each."""
        return mindspore_ops.LogProbsOfStats()

    def log_prob_grad(self, vocabulary: Vocabulary) -> nn.Cell:
        """Makes a cell: (logits, labels, log-sum-exp [M], entropy [M], dlogp [M], dentropy [M]) -> dlogits [M, V].

        dlogp/dl = onehot - p; dH/dl = -p (log p + H).
        """
        return mindspore_ops.LogProbGrad(vocabulary)

    def linear_log_prob_stats(self, vocabulary: Vocabulary, rows: int) -> nn.Cell:
        """Makes a cell: (x [M, H], table [V, H], labels int32 [M]) -> log_prob_stats of x table^T.

        The logits of at most `rows` rows are there at a time.
        """
        return mindspore_ops.LinearLogProbStats(self, vocabulary, rows)

    def linear_log_prob_grad(
        self, vocabulary: Vocabulary, rows: int, is_trained: bool = True
    ) -> nn.Cell:
        """Makes a cell: (x, table, labels, log-sum-exp [M], entropy [M], dlogp [M], dentropy [M]) -> (dx [M, H], dtable
        float32 [V, H], or [1] of a table that is not trained), likewise."""
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
        """Makes the slots that decode samples (see rollout.py); `rotary` as for `attention`."""
        raise NotImplementedError
