"""Log-probabilities of given tokens, and the entropy, over a vocabulary split across ranks.

One collective a call, forward; none backward. Where the logits of all rows would be larger than a set size, they are
made in parts, and again for the backward.
"""

from __future__ import annotations

from typing import Any

from mindspore import nn, ops
from mindspore.ops.auto_generate import SumExt

from mindgrpo.backend.contract import Group
from mindgrpo.backend.kernels.contract import Kernels
from mindgrpo.backend.kernels.shapes import Vocabulary
from mindgrpo.models.parallel_cells import GatherColumns


class TokenLogProbs(nn.Cell):
    """(x [M, H], table [V, H], labels int32 [M]) -> (log p(label) [M], entropy [M]), in nats.

    log p = l_y - lse(l); H = lse(l) - sum_v p_v l_v, with l = x table^T * scale. `chunk_bytes` bounds the logits that
    are there at a time. A table that is not trained (`is_trained`) gets no gradient.
    """

    def __init__(
        self,
        kernels: Kernels,
        vocabulary: Vocabulary,
        group: Group,
        chunk_bytes: int,
        is_trained: bool = True,
    ) -> None:
        super().__init__()
        self.rows = max(1, chunk_bytes // (4 * vocabulary.width))
        self.logits = kernels.matmul(transpose_b=True)
        self.whole = _Whole(kernels, vocabulary, group)
        self.in_parts = _InParts(kernels, vocabulary, group, self.rows, is_trained)

    def construct(self, x: Any, table: Any, labels: Any) -> Any:
        if x.shape[0] <= self.rows:
            logp, entropy, _ = self.whole(self.logits(x, table), labels)
        else:
            logp, entropy, _ = self.in_parts(x, table, labels)
        return logp, entropy


class _OfStats(nn.Cell):
    """A rank's stats [M, 4] -> (log p, entropy, log-sum-exp) over all ranks, [M] each.

    In operations themselves: a tensor's methods and indices are Python, which the compiler reads anew in each graph.
    That took a quarter of a last stage's forward pass.
    """

    def __init__(self, group: Group) -> None:
        super().__init__()
        self.gather = GatherColumns(group)
        self.slice = ops.StridedSlice(shrink_axis_mask=0b100)
        self.max, self.sum = ops.ArgMaxWithValue(1, True), SumExt()

    def column(self, stats: Any, index: int) -> Any:
        rows, ranks, _ = stats.shape
        return self.slice(stats, (0, 0, index), (rows, ranks, index + 1), (1, 1, 1))

    def total(self, x: Any) -> Any:
        return self.sum(x, (1,), False, None)

    def construct(self, stats: Any) -> Any:
        stats = self.gather(stats)
        tops = self.column(stats, 0)
        _, highest = self.max(tops)
        share = ops.exp(tops - highest)
        sums = self.total(self.column(stats, 1) * share)
        log_total = highest.reshape(-1) + ops.log(sums)
        mean_logit = self.total(self.column(stats, 2) * share) / sums
        return self.total(self.column(stats, 3)) - log_total, log_total - mean_logit, log_total


class _Whole(nn.Cell):
    """(logits [M, V], labels [M]) -> (log p, entropy, log-sum-exp), [M] each."""

    def __init__(self, kernels: Kernels, vocabulary: Vocabulary, group: Group) -> None:
        super().__init__()
        self.stats = kernels.log_prob_stats(vocabulary)
        self.gradient = kernels.log_prob_grad(vocabulary)
        self.of_stats = _OfStats(group)

    def construct(self, logits: Any, labels: Any) -> Any:
        return self.of_stats(self.stats(logits, labels))

    def bprop(self, logits: Any, labels: Any, out: Any, dout: Any) -> Any:
        dlogits = self.gradient(logits, labels, out[2], out[1], dout[0], dout[1])
        return dlogits, ops.zeros_like(labels)


class _InParts(nn.Cell):
    """As _Whole, from (x, table, labels): x is kept for the backward and not its logits."""

    def __init__(
        self, kernels: Kernels, vocabulary: Vocabulary, group: Group, rows: int, is_trained: bool
    ) -> None:
        super().__init__()
        self.is_trained = is_trained
        self.stats = kernels.linear_log_prob_stats(vocabulary, rows)
        self.gradient = kernels.linear_log_prob_grad(vocabulary, rows, is_trained)
        self.of_stats = _OfStats(group)

    def construct(self, x: Any, table: Any, labels: Any) -> Any:
        return self.of_stats(self.stats(x, table, labels))

    def bprop(self, x: Any, table: Any, labels: Any, out: Any, dout: Any) -> Any:
        dx, dtable = self.gradient(x, table, labels, out[2], out[1], dout[0], dout[1])
        if not self.is_trained:
            dtable = ops.zeros_like(table)
        return dx, dtable, ops.zeros_like(labels)
