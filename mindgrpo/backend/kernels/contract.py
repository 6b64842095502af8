"""What a model computes beside its matrix products, as cells that a backend gives: the contract.

A backend answers with MindSpore's own operations (plain_kernels.py, everywhere) or with kernels of its own
(native_kernels.py). Both are held equal by tests. Refuses to communicate: sums over ranks are the caller's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from mindspore import nn

    from mindgrpo.backend.kernels.rollout import (
        Memory,
        Rules,
        Share,
        Slots,
    )


@dataclass(frozen=True)
class Heads:
    """A rank's heads: `queries` a multiple of `kv`, each `dim` wide; `norm_eps` None without norms inside heads.

    A row of a projection holds the queries, then the keys, then the values: [(queries + 2 kv) dim].
    """

    queries: int
    kv: int
    dim: int
    has_bias: bool = False
    norm_eps: float | None = None

    @property
    def width(self) -> int:
        return (self.queries + 2 * self.kv) * self.dim


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
class Vocabulary:
    """A rank's share: of `width` columns of logits `real` ones are tokens, from `first` on; the rest is padding."""

    first: int
    width: int
    real: int
    scale: float = 1.0


class Kernels(ABC):
    """Letters: N tokens, H hidden, I inner, V local vocabulary, D head dim, R rows of T tokens, N = R T."""

    # True where attention's cost follows the samples' lengths, so that one long row wastes nothing.
    ragged: bool
    # True where `adamw` is the fastest way on the device's memory; else the optimizer there is a graph.
    has_adamw: bool
    # True where `slots` gives them; without, the generator does with plain operations.
    has_slots: bool

    @abstractmethod
    def rms_norm(self, eps: float) -> nn.Cell:
        """(x [N, H], weight [H]) -> x / sqrt(mean(x^2) + eps) * weight (arXiv:1910.07467)."""

    @abstractmethod
    def add_rms_norm(self, eps: float) -> nn.Cell:
        """(x [N, H], added [N, H], weight [H]) -> (x + added, the norm of that sum)."""

    @abstractmethod
    def gated(self) -> nn.Cell:
        """[N, 2 I], gate then up -> silu(gate) * up [N, I] (arXiv:2002.05202)."""

    @abstractmethod
    def embedding(self, first_token: int) -> nn.Cell:
        """(tokens int32 [N], table [V, H]) -> rows [N, H], zero where the token is not one of first_token + [0, V)."""

    @abstractmethod
    def places(self, heads: Heads, rotary: np.ndarray) -> nn.Cell:
        """(positions int32 [R, T], spans int32 [R, T, 3]) -> two tensors, which every layer's attention takes.

        A span is (first column of a shared prefix, its length, first column of the token's own run): a token sees
        the prefix, and its run from the first column up to itself. A run with a prefix stands after it, and between
        them only runs with the same prefix. `rotary` float32 [positions, 2 D] holds cos, then sin.
        """

    @abstractmethod
    def attention(self, heads: Heads, rotary: np.ndarray) -> nn.Cell:
        """(qkv [N, heads.width], bias, q_norm, k_norm, two of `places`) -> mixed values [N, queries D].

        Adds the bias [heads.width], norms queries and keys with weights [D] and turns them, and attends; `bias` and
        the norms are any tensors [1] where `heads` has none.
        """

    @abstractmethod
    def adamw(
        self,
        weight: np.ndarray,
        gradient: np.ndarray,
        first: np.ndarray,
        second: np.ndarray,
        numbers: AdamWNumbers,
    ) -> None:
        """Updates float32 [n] arrays in place, between graphs; the gradient is zero afterwards."""

    @abstractmethod
    def square_sum(self, array: np.ndarray) -> float:
        """The float64 sum of a float32 array's squares."""

    @abstractmethod
    def log_prob_pieces(self, vocabulary: Vocabulary) -> nn.Cell:
        """(logits [M, V], labels int32 [M]) -> [M, 4], with l = logits * scale over the real columns:
        top = max l; sum exp(l - top); sum exp(l - top) l; l of the label, 0 where another rank has it.
        """

    @abstractmethod
    def log_prob_grad(self, vocabulary: Vocabulary) -> nn.Cell:
        """(logits, labels, log-sum-exp [M], entropy [M], dlogp [M], dentropy [M]) -> dlogits [M, V].

        dlogp/dl = onehot - p; dH/dl = -p (log p + H).
        """

    def slots(
        self,
        share: Share,
        rules: Rules,
        rotary: np.ndarray,
        slots: int,
        prompt_rows: int,
        memory: Memory,
    ) -> Slots:
        """See rollout.py; `rotary` as for `places`."""
        raise NotImplementedError
