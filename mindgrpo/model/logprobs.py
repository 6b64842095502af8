"""Log-probabilities of given tokens, and the entropy, over a vocabulary split across ranks.

One collective a call, forward; none backward. The gradient is written out, so no [N, vocabulary] tensor but the
logits and one softmax is kept. Refuses to sample.
"""

from __future__ import annotations

from typing import Any

import mindspore as ms
from mindspore import Tensor, nn, ops

from mindgrpo.backend import Group
from mindgrpo.model.parallel_cells import GatherColumns


class VocabParallelLogProbs(nn.Cell):
    """logits float32 [N, local vocabulary], labels int32 [N] -> (log p(label) [N], entropy [N]) in nats.

    log p = l_y - lse(l); H = lse(l) - sum_v p_v l_v; dlog p/dl = onehot(y) - p; dH/dl = -p (log p + H).
    """

    def __init__(self, local_vocab: int, first_token: int, group: Group) -> None:
        super().__init__()
        self.gather = GatherColumns(group)
        self.ids = Tensor([list(range(first_token, first_token + local_vocab))], ms.int32)

    def _onehot(self, labels: Any) -> Any:
        return ops.equal(ops.expand_dims(labels, 1), self.ids).astype(ms.float32)

    def _forward(self, logits: Any, labels: Any) -> Any:
        top = logits.max(axis=1, keepdims=True)
        mass = ops.exp(logits - top)
        total = mass.sum(axis=1, keepdims=True)
        moment = (mass * logits).sum(axis=1, keepdims=True)
        target = (logits * self._onehot(labels)).sum(axis=1, keepdims=True)
        pieces = self.gather(ops.concat((top, total, moment, target), 1))
        tops = pieces[:, :, 0]
        highest = tops.max(axis=1, keepdims=True)
        share = ops.exp(tops - highest)
        sums = (pieces[:, :, 1] * share).sum(axis=1)
        log_total = highest[:, 0] + ops.log(sums)
        mean_logit = (pieces[:, :, 2] * share).sum(axis=1) / sums
        return pieces[:, :, 3].sum(axis=1) - log_total, log_total - mean_logit, log_total

    def construct(self, logits: Any, labels: Any) -> Any:
        return self._forward(logits, labels)

    def bprop(self, logits: Any, labels: Any, out: Any, dout: Any) -> Any:
        entropy, log_total = ops.expand_dims(out[1], 1), ops.expand_dims(out[2], 1)
        log_p = logits - log_total
        p = ops.exp(log_p)
        to_label = ops.expand_dims(dout[0], 1)
        to_entropy = ops.expand_dims(dout[1], 1)
        gradient = to_label * (self._onehot(labels) - p) - to_entropy * p * (log_p + entropy)
        return gradient, ops.zeros_like(labels)
