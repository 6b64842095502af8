"""Surrogates of the loss as cells of the graph that is differentiated, one a function of algorithm/surrogates.py.

Each is (log p, log rho, A, old log p, segments, shares) -> S, [M] each, where what is not in the loss is all zeros;
`segments` and `shares` are those of LossInputs.
"""

from __future__ import annotations

from typing import Any

from mindspore import nn, ops

from mindgrpo.algorithm.loss_config import LossConfig
from mindgrpo.backend.contract import Group
from mindgrpo.models.parallel_cells import SumOverTokens


class SampleMean(nn.Cell):
    """(x [M], segments, shares) -> the mean of x over the tokens of each token's sample, [M].

    `group` are the ranks that share rows, and so samples; None where each has its own.
    """

    def __init__(self, group: Group | None) -> None:
        super().__init__()
        self.num_parts = 1 if group is None else group.size
        if group is not None:
            self.over_parts = SumOverTokens(group)

    def construct(self, x: Any, segments: Any, shares: Any) -> Any:
        sums = ops.unsorted_segment_sum(x * shares, segments, x.shape[0] * self.num_parts)
        if self.num_parts > 1:
            sums = self.over_parts(sums)
        return ops.gather(sums, segments, 0)


class Surrogate(nn.Cell):
    """Holds what surrogates read of the settings; `mean` is SampleMean."""

    def __init__(self, config: LossConfig, mean: SampleMean) -> None:
        super().__init__()
        self.mean = mean
        self.low, self.high = 1.0 - config.epsilon_low, 1.0 + config.epsilon_high
        self.delta, self.dual_clip = config.delta, config.dual_clip


class Clip(Surrogate):
    def construct(
        self, logp: Any, log_ratio: Any, advantages: Any, old: Any, segments: Any, shares: Any
    ) -> Any:
        ratio = ops.exp(log_ratio)
        clipped = ops.clamp(ratio, self.low, self.high)
        if self.delta is not None:
            ratio = ops.clamp(ratio, None, self.delta)
        gain = ops.minimum(ratio * advantages, clipped * advantages)
        if self.dual_clip is not None:
            bound = self.dual_clip * ops.minimum(advantages, ops.zeros_like(advantages))
            gain = ops.maximum(gain, bound)
        return gain


class Cispo(Surrogate):
    def construct(
        self, logp: Any, log_ratio: Any, advantages: Any, old: Any, segments: Any, shares: Any
    ) -> Any:
        clipped = ops.clamp(ops.exp(log_ratio), self.low, self.high)
        return ops.stop_gradient(clipped) * advantages * logp


CELLS: dict[str, type[Surrogate]] = {"clip": Clip, "cispo": Cispo}
