"""Log-probabilities of given tokens, and the entropy, over a vocabulary that is sharded over the tp group.

Takes one collective per forward call and none in the backward. If the logits of all rows exceed a given size, they are
computed in chunks, and recomputed in the backward.
"""

from __future__ import annotations

from typing import Any

from mindspore import nn, ops

from mindgrpo.backend.contract import Group
from mindgrpo.backend.kernels.contract import Kernels
from mindgrpo.backend.kernels.shapes import Vocabulary
from mindgrpo.models.parallel_cells import GatherColumns


class TokenLogProbs(nn.Cell):
    """(x [M, H], table [V, H], labels int32 [M]) -> (log-probs of labels float32 [M], entropies float32 [M]), in nats.

    log p = l_y - lse(l); H = lse(l) - sum_v p_v l_v, with l = x table^T * scale. `chunk_bytes` limits the logits that
    exist at a time. The table gets a gradient only if it `is_trained`.
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
    """A rank's statistics float32 [M, 4 leaves] -> (log-prob, entropy, log-sum-exp) over the whole vocabulary, float32
    [M] each."""

    def __init__(self, kernels: Kernels, group: Group) -> None:
        super().__init__()
        self.gather = GatherColumns(group)
        self.reshape = ops.Reshape()
        self.of_stats = kernels.log_probs_of_stats()

    def construct(self, stats: Any) -> Any:
        return self.of_stats(self.reshape(self.gather(stats), (stats.shape[0], -1)))


class _Whole(nn.Cell):
    """(logits [M, V], labels int32 [M]) -> (log-prob, entropy, log-sum-exp), float32 [M] each."""

    def __init__(self, kernels: Kernels, vocabulary: Vocabulary, group: Group) -> None:
        super().__init__()
        self.stats = kernels.log_prob_stats(vocabulary)
        self.gradient = kernels.log_prob_grad(vocabulary)
        self.of_stats = _OfStats(kernels, group)

    def construct(self, logits: Any, labels: Any) -> Any:
        return self.of_stats(self.stats(logits, labels))

    def bprop(self, logits: Any, labels: Any, out: Any, dout: Any) -> Any:
        dlogits = self.gradient(logits, labels, out[2], out[1], dout[0], dout[1])
        return dlogits, ops.zeros_like(labels)


class _InParts(nn.Cell):
    """(x [M, H], table [V, H], labels [M]) -> as _Whole, in chunks; stores x instead of logits for the backward."""

    def __init__(
        self, kernels: Kernels, vocabulary: Vocabulary, group: Group, rows: int, is_trained: bool
    ) -> None:
        super().__init__()
        self.is_trained = is_trained
        self.stats = kernels.linear_log_prob_stats(vocabulary, rows)
        self.gradient = kernels.linear_log_prob_grad(vocabulary, rows, is_trained)
        self.of_stats = _OfStats(kernels, group)

    def construct(self, x: Any, table: Any, labels: Any) -> Any:
        return self.of_stats(self.stats(x, table, labels))

    def bprop(self, x: Any, table: Any, labels: Any, out: Any, dout: Any) -> Any:
        dx, dtable = self.gradient(x, table, labels, out[2], out[1], dout[0], dout[1])
        if not self.is_trained:
            dtable = ops.zeros_like(table)
        return dx, dtable, ops.zeros_like(labels)
