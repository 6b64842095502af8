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


class Kernels(ABC):
    """Letters: N tokens, H hidden, I inner, V local vocabulary, D head dim, R rows of T tokens, N = R T."""

    # True where attention's cost follows the samples' lengths, so that one long row wastes nothing.
    ragged: bool

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
    def attention(self, heads: Heads, rotary: np.ndarray) -> nn.Cell:
        """(qkv [N, heads.width], bias [heads.width], q_norm [D], k_norm [D], *places) -> mixed values [N, queries D].

        Adds the bias, norms and turns queries and keys, and attends. `rotary` float32 [positions, 2 D] holds cos,
        then sin. `bias` and the norms may be any tensor [1] where `heads` has none. `places` are what the `places`
        cell gave.
        """

    @abstractmethod
    def places(self, heads: Heads, rotary: np.ndarray) -> nn.Cell:
        """(positions int32 [R, T], spans int32 [R, T, 3]) -> what all layers' attention cells take.

        A span is (first column of a shared prefix, its length, first column of the token's own run): token i of a
        row sees the prefix and the columns from its run's first up to i.
        """

    @abstractmethod
    def log_probs(self, first_token: int) -> tuple[nn.Cell, nn.Cell]:
        """Cells `local` and `joined`: see model/logprobs.py, which sums over ranks between them."""
