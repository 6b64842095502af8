"""Settings that kernels are built with: attention heads, routing, vocabulary shards, optimizer and sampling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

Activation = Literal["silu", "gelu_tanh"]
# Added to scores to mask them out of a softmax.
NEVER = -1e30


@dataclass(frozen=True)
class Heads:
    """A rank's attention heads: `queries` query heads, a multiple of `kv` key-value heads, each of size `dim`.

    A row of the fused projection holds queries, keys and values, [(queries + 2 kv) dim]. `norm_eps` is None without
    query and key norms. Scores are multiplied by `query_scale`, or by dim^-0.5 if it is None.
    """

    queries: int
    kv: int
    dim: int
    has_bias: bool = False
    norm_eps: float | None = None
    query_scale: float | None = None

    @property
    def scale(self) -> float:
        return self.dim**-0.5 if self.query_scale is None else self.query_scale

    @property
    def width(self) -> int:
        return (self.queries + 2 * self.kv) * self.dim


@dataclass(frozen=True)
class Routing:
    """How a router chooses `per_token` of `num_experts` experts for a token, and scores them.

    Scores are the softmax or the sigmoids of the router's logits, divided by the sum over the chosen experts with
    `renormalise`, and multiplied by `scaling`. To choose experts only, a bias is added (`has_bias`), and of `groups` of
    equal size only the `groups_taken` with the largest sums of their two best scores are eligible (arXiv:2412.19437,
    section 2.1.2).
    """

    num_experts: int
    per_token: int
    is_sigmoid: bool = False
    renormalise: bool = True
    scaling: float = 1.0
    groups: int = 1
    groups_taken: int = 1
    has_bias: bool = False

    @property
    def has_rest(self) -> bool:
        """Returns whether the eligible groups have more experts than a token chooses."""
        return self.num_experts // self.groups * self.groups_taken > self.per_token

    @property
    def dtype(self) -> np.dtype:
        """Returns the smallest unsigned dtype that can store and transfer expert ids."""
        return np.dtype(np.uint8 if self.num_experts <= 256 else np.uint16)


@dataclass(frozen=True)
class AdamWNumbers:
    """Scalars of one AdamW step (arXiv:1711.05101). `scale` multiplies the gradient; `count` is the step, from 1."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    count: int
    scale: float


@dataclass(frozen=True)
class AdamWSettings:
    beta1: float
    beta2: float
    eps: float
    weight_decay: float

    def at(self, update: int, lr: float, scale: float, decays: bool = True) -> AdamWNumbers:
        """Returns the scalars of step `update`, for a parameter with or without weight decay."""
        decay = self.weight_decay if decays else 0.0
        return AdamWNumbers(lr, self.beta1, self.beta2, self.eps, decay, update, scale)


@dataclass(frozen=True)
class Vocabulary:
    """A rank's vocabulary shard: `width` columns of logits, `real` of them for the tokens from id `first` on.

    The other columns are padding. Log-prob statistics are kept separately for each of `leaves` equal column blocks.
    """

    first: int
    width: int
    real: int
    scale: float = 1.0
    leaves: int = 1


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters. `temperature` 0 is greedy; `top_k` <= 0, `top_p` 1, `min_p` 0 and penalty 1 are off."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    max_tokens: int = 128
    stop_ids: tuple[int, ...] = ()

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def trainer_temperature(self) -> float:
        """Returns the temperature of log-probs, which is 1 for greedy sampling."""
        return self.temperature or 1.0

    @property
    def scale(self) -> float:
        """Returns the factor of logits, 1 / temperature."""
        return 1.0 / self.trainer_temperature
