"""Plain values that kernels are made for: a rank's heads and vocabulary, and the numbers of a step and of a draw."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

Activation = Literal["silu", "gelu_tanh"]
# Added to what must have no part in a softmax.
NEVER = -1e30


@dataclass(frozen=True)
class Heads:
    """A rank's heads: `queries` a multiple of `kv`, each `dim` wide; `norm_eps` None without norms inside heads.

    A row of a projection holds the queries, then the keys, then the values: [(queries + 2 kv) dim]. Scores are
    multiplied by `query_scale`, by dim^-0.5 where it is None.
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
    """How a router chooses `per_token` of `num_experts` for a token and scores them.

    By the softmax of its logits, or their sigmoids; with `renormalise` divided by the sum of the chosen ones', times
    `scaling`. For the choice alone a bias is added (`has_bias`), and of experts in `groups` of equal size those of the
    `groups_taken` groups are left whose two best make the largest sums (arXiv:2412.19437, section 2.1.2).
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
        """Returns whether groups that are taken have more experts than are chosen."""
        return self.num_experts // self.groups * self.groups_taken > self.per_token

    @property
    def dtype(self) -> np.dtype:
        """Returns the dtype in which numbers of experts are kept and sent."""
        return np.dtype(np.uint8 if self.num_experts <= 256 else np.uint16)


@dataclass(frozen=True)
class AdamWNumbers:
    """One step of AdamW (arXiv:1711.05101): `scale` is on the gradient; update number `count` from 1."""

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
        """Returns the numbers of one step, of a parameter that decays or does not."""
        decay = self.weight_decay if decays else 0.0
        return AdamWNumbers(lr, self.beta1, self.beta2, self.eps, decay, update, scale)


@dataclass(frozen=True)
class Vocabulary:
    """A rank's share: of `width` columns of logits `real` ones are tokens, from `first` on; the rest is padding.

    Stats of a row are kept for each of `leaves` equal stretches of the columns.
    """

    first: int
    width: int
    real: int
    scale: float = 1.0
    leaves: int = 1


@dataclass(frozen=True)
class SamplingParams:
    """`temperature` 0 takes the likeliest token; `top_k` 0 or less, `top_p` 1, `min_p` 0 and penalty 1 are off."""

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
        """The temperature of the log-probs; the likeliest token's are those at 1."""
        return self.temperature or 1.0

    @property
    def scale(self) -> float:
        """The factor of the logits."""
        return 1.0 / self.trainer_temperature
