"""Log-probs straight from the head's input, a chunk of rows at a time: no [rows, vocabulary] tensor is of all rows."""

from __future__ import annotations

from typing import Any

import mindspore as ms
from mindspore import Tensor, nn, ops

from mindgrpo.backend.kernels.contract import Kernels
from mindgrpo.backend.kernels.shapes import Vocabulary


class LinearLogProbStats(nn.Cell):
    """(x [M, H], table [V, H], labels [M]) -> stats [M, 4], by `kernels`' own products and stats of `rows` rows."""

    def __init__(self, kernels: Kernels, vocabulary: Vocabulary, rows: int) -> None:
        super().__init__()
        self.rows = rows
        self.logits = kernels.matmul(transpose_b=True)
        self.stats = kernels.log_prob_stats(vocabulary)

    def construct(self, x: Any, table: Any, labels: Any) -> Any:
        chunks = []
        before = labels
        for start in range(0, x.shape[0], self.rows):
            stop = start + self.rows
            # One chunk after the other, or the logits of all would be made at once.
            logits = self.logits(ops.depend(x[start:stop], before), table)
            before = self.stats(logits, labels[start:stop])
            chunks.append(before)
        return ops.concat(chunks, 0)


class LinearLogProbGrad(nn.Cell):
    """(x, table, labels, log-sum-exp, entropy, dlogp, dentropy) -> (dx, dtable); the logits are made again.

    A table that is not trained has dtable [1].
    """

    def __init__(
        self, kernels: Kernels, vocabulary: Vocabulary, rows: int, is_trained: bool
    ) -> None:
        super().__init__()
        self.rows, self.is_trained = rows, is_trained
        self.nothing = Tensor([0.0], ms.float32)
        self.logits = kernels.matmul(transpose_b=True)
        self.gradient = kernels.log_prob_grad(vocabulary)
        self.to_x = kernels.matmul()
        self.to_table = kernels.matmul_gradient()

    def construct(
        self,
        x: Any,
        table: Any,
        labels: Any,
        totals: Any,
        entropy: Any,
        dlogp: Any,
        dentropy: Any,
    ) -> Any:
        rows, numbers = self.rows, (totals, entropy, dlogp, dentropy)
        # Not before its gradient is there: what is made again is not to be kept from the forward pass on.
        own = ops.depend(x[:rows], dlogp)
        dx, dtable = self.of_chunk(own, table, labels[:rows], [n[:rows] for n in numbers])
        chunks = [dx]
        for start in range(rows, x.shape[0], rows):
            stop = start + rows
            before = dtable if self.is_trained else dx
            own = ops.depend(x[start:stop], before)
            dx, more = self.of_chunk(
                own, table, labels[start:stop], [n[start:stop] for n in numbers]
            )
            dtable = dtable + more
            chunks.append(dx)
        return ops.concat(chunks, 0), dtable

    def of_chunk(self, x: Any, table: Any, labels: Any, numbers: Any) -> Any:
        dlogits = self.gradient(self.logits(x, table), labels, *numbers)
        dx = self.to_x(dlogits, table)
        return dx, self.to_table(dlogits, x) if self.is_trained else self.nothing
