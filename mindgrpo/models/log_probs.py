"""Log-probabilities of given tokens, and the entropy, over a vocabulary split across ranks.

One collective a call, forward; none backward. Rows go through the head in chunks, whose logits are made again for
the backward, so that no [rows, vocabulary] tensor is larger than a set size.
"""

from __future__ import annotations

from typing import Any

import mindspore as ms
from mindspore import Tensor, nn, ops

from mindgrpo.backend.contract import Group
from mindgrpo.backend.kernels.contract import Kernels, Vocabulary
from mindgrpo.models.parallel_cells import GatherColumns


class TokenLogProbs(nn.Cell):
    """(x [M, H], table [V, H], labels int32 [M]) -> (log p(label) [M], entropy [M]), in nats.

    log p = l_y - lse(l); H = lse(l) - sum_v p_v l_v, with l = x table^T * scale. `chunk_bytes` bounds a chunk's
    logits.
    """

    def __init__(
        self, kernels: Kernels, vocabulary: Vocabulary, group: Group, chunk_bytes: int
    ) -> None:
        super().__init__()
        self.rows = max(1, chunk_bytes // (4 * vocabulary.width))
        self.logits = kernels.matmul(transpose_b=True)
        self.chunk = _Chunk(kernels, vocabulary, group)
        self.whole = _Whole(kernels, vocabulary, group)
        self.nothing = Tensor([0.0], ms.float32)

    def construct(self, x: Any, table: Any, labels: Any) -> Any:
        count = x.shape[0]
        if count <= self.rows:
            logp, entropy, _ = self.whole(self.logits(x, table), labels)
            return logp, entropy
        logps, entropies = [], []
        before = self.nothing
        for start in range(0, count, self.rows):
            stop = min(start + self.rows, count)
            logp, entropy, before, table = self.chunk(
                x[start:stop], table, labels[start:stop], before
            )
            logps.append(logp)
            entropies.append(entropy)
        return ops.concat(logps, 0), ops.concat(entropies, 0)


class _Whole(nn.Cell):
    """(logits [M, V], labels [M]) -> (log p, entropy, log-sum-exp), [M] each."""

    def __init__(self, kernels: Kernels, vocabulary: Vocabulary, group: Group) -> None:
        super().__init__()
        self.stats = kernels.log_prob_stats(vocabulary)
        self.gradient = kernels.log_prob_grad(vocabulary)
        self.gather = GatherColumns(group)

    def construct(self, logits: Any, labels: Any) -> Any:
        stats = self.gather(self.stats(logits, labels))
        tops = stats[:, :, 0]
        highest = tops.max(axis=1, keepdims=True)
        share = ops.exp(tops - highest)
        sums = (stats[:, :, 1] * share).sum(axis=1)
        log_total = highest[:, 0] + ops.log(sums)
        mean_logit = (stats[:, :, 2] * share).sum(axis=1) / sums
        return stats[:, :, 3].sum(axis=1) - log_total, log_total - mean_logit, log_total

    def bprop(self, logits: Any, labels: Any, out: Any, dout: Any) -> Any:
        dlogits = self.gradient(logits, labels, out[2], out[1], dout[0], dout[1])
        return dlogits, ops.zeros_like(labels)


class _Chunk(nn.Cell):
    """As _Whole, from (x, table, labels), keeping x and not its logits for the backward; gives the table on.

    One chunk after the other, or the logits of all would be made at once: `before` is of the chunk before, and the
    table's gradient, a sum over chunks, comes from the one behind.
    """

    def __init__(self, kernels: Kernels, vocabulary: Vocabulary, group: Group) -> None:
        super().__init__()
        self.whole = _Whole(kernels, vocabulary, group)
        self.gradient = kernels.log_prob_grad(vocabulary)
        self.logits = kernels.matmul(transpose_b=True)
        self.to_x = kernels.matmul()
        self.to_table = kernels.matmul_gradient()

    def construct(self, x: Any, table: Any, labels: Any, before: Any) -> Any:
        logp, entropy, log_total = self.whole(self.logits(ops.depend(x, before), table), labels)
        return logp, entropy, log_total, table

    def bprop(self, x: Any, table: Any, labels: Any, before: Any, out: Any, dout: Any) -> Any:
        own = ops.depend(ops.depend(x, dout[0]), dout[3])
        logits = self.logits(own, table)
        dlogits = self.gradient(logits, labels, out[2], out[1], dout[0], dout[1])
        dx, dtable = self.to_x(dlogits, table), dout[3] + self.to_table(dlogits, x)
        return dx, dtable, ops.zeros_like(labels), ops.zeros_like(before)
