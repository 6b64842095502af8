"""Surrogate objectives as differentiable cells, one for each function of algorithm/surrogates.py.

Each is (log p, log rho, A, old log p, segments, shares) -> S, [M] each; tokens outside the loss are zeros. `segments`
(int32) and `shares` (float32) are those of LossInputs.
"""

from __future__ import annotations

from typing import Any

from mindspore import nn, ops

from mindgrpo.algorithm import surrogates as host
from mindgrpo.algorithm.surrogates import LARGEST_LOG_RATIO, PROBABILITY_FLOOR, LossConfig
from mindgrpo.backend.contract import Group
from mindgrpo.models.parallel_cells import SumOverTokens

# Less than 1 / any number of tokens; keeps the division by the shares of padding finite.
TINY = 1e-12


class SampleMean(nn.Cell):
    """(x, segments, shares) -> each token's mean of x over its sample, [M] each.

    `group` are the cp ranks that share rows, and so samples; None where each rank has its own.
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
    """Base of the surrogates: holds the clip bounds and caps of `config`, and `mean`, a SampleMean."""

    def __init__(self, config: LossConfig, mean: SampleMean) -> None:
        super().__init__()
        self.mean = mean
        self.below, self.above = config.clip_bounds
        self.low, self.high = 1.0 - self.below, 1.0 + self.above
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


class Sapo(Surrogate):
    def __init__(self, config: LossConfig, mean: SampleMean) -> None:
        super().__init__(config, mean)
        self.rising, self.falling = config.sapo_temperature_pos, config.sapo_temperature_neg

    def construct(
        self, logp: Any, log_ratio: Any, advantages: Any, old: Any, segments: Any, shares: Any
    ) -> Any:
        tau = ops.where(advantages > 0, self.rising, self.falling)
        return 4.0 / tau * ops.sigmoid(tau * (ops.exp(log_ratio) - 1.0)) * advantages


class Dppo(Surrogate):
    def __init__(self, config: LossConfig, mean: SampleMean) -> None:
        super().__init__(config, mean)
        self.by_variation, self.cap = config.loss_type == "dppo_tv", config.dppo_ratio_cap

    def construct(
        self, logp: Any, log_ratio: Any, advantages: Any, old: Any, segments: Any, shares: Any
    ) -> Any:
        held = ops.stop_gradient(logp)
        pi, mu, rises = ops.exp(held), ops.exp(old), advantages > 0
        bound = ops.where(rises, self.above, self.below)
        moved = ops.where(rises, pi - mu, mu - pi)
        if self.by_variation:
            keeps = moved <= bound
        else:
            rest = ops.log((1.0 - mu + PROBABILITY_FLOOR) / (1.0 - pi + PROBABILITY_FLOOR))
            divergence = mu * (old - held) + (1.0 - mu) * rest
            keeps = ops.logical_or(divergence <= bound, moved <= 0.0)
        weight = ops.clamp(ops.stop_gradient(ops.exp(log_ratio)), None, self.cap)
        return ops.where(keeps, weight * advantages * logp, ops.zeros_like(logp))


class Gmpo(Surrogate):
    def construct(
        self, logp: Any, log_ratio: Any, advantages: Any, old: Any, segments: Any, shares: Any
    ) -> Any:
        sign = ops.sign(advantages)
        clipped = ops.clamp(log_ratio, -self.below, self.above)
        kept = sign * ops.minimum(sign * log_ratio, sign * clipped)
        return ops.exp(self.mean(kept, segments, shares)) * advantages


class Vespo(Surrogate):
    def __init__(self, config: LossConfig, mean: SampleMean) -> None:
        super().__init__(config, mean)
        self.rising = config.vespo_k_pos, config.vespo_lambda_pos
        self.falling = config.vespo_k_neg, config.vespo_lambda_neg

    def construct(
        self, logp: Any, log_ratio: Any, advantages: Any, old: Any, segments: Any, shares: Any
    ) -> Any:
        means = self.mean(ops.stop_gradient(log_ratio), segments, shares)
        # 1 / share is the sample's number of tokens; the share of padding is 0.
        log_w = ops.clamp(means / ops.clamp(shares, TINY, None), None, LARGEST_LOG_RATIO)
        rises = advantages >= 0
        k = ops.where(rises, self.rising[0], self.falling[0])
        strength = ops.where(rises, self.rising[1], self.falling[1])
        phi = ops.exp(k * log_w + strength * (1.0 - ops.exp(log_w)))
        return phi * advantages * logp


class Ratio(Surrogate):
    def construct(
        self, logp: Any, log_ratio: Any, advantages: Any, old: Any, segments: Any, shares: Any
    ) -> Any:
        return ops.exp(log_ratio) * advantages


class Gpg(Surrogate):
    def construct(
        self, logp: Any, log_ratio: Any, advantages: Any, old: Any, segments: Any, shares: Any
    ) -> Any:
        return advantages * logp


CELLS: dict[host.Surrogate, type[Surrogate]] = {
    host.clipped_surrogate: Clip,
    host.cispo: Cispo,
    host.sapo: Sapo,
    host.dppo: Dppo,
    host.gmpo: Gmpo,
    host.vespo: Vespo,
    host.gpg: Gpg,
    host.plain_ratio: Ratio,
}
