"""What a rollout engine is: requests in, completions out, by weights of a known version.

The steps and evaluations of a run speak to this protocol alone. `embedded/` implements it in the ranks' own graphs; an
engine in other processes implements it with `weights` as the memory that it is handed tensors in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np

from mindgrpo.algorithm.types import Completion
from mindgrpo.backend.contract import Pool
from mindgrpo.backend.kernels.sampling_params import SamplingParams
from mindgrpo.rollout.stats import RolloutStats
from mindgrpo.weights.local_weights import Weights

Result = TypeVar("Result")


class StaleWeights(RuntimeError):
    """The engine's weights are not those of the version that was asked for."""


@dataclass(frozen=True)
class Request:
    """`samples` are the global numbers of the completions wanted of `prompt` int32 [n]; they choose the noise.

    `max_tokens` limits each sample by itself; None takes the settings' limit for all.
    """

    prompt: np.ndarray
    samples: tuple[int, ...]
    max_tokens: tuple[int, ...] | None = None


@dataclass(frozen=True)
class SeedKey:
    """What the noise depends on beside sample and position; `purpose` is rollout/noise.py's."""

    seed: int
    purpose: int
    step: int


@dataclass(frozen=True)
class Capabilities:
    """What engines differ in; `name` is for reports."""

    name: str


class RolloutEngine(Protocol):
    """One rank's hold on an engine; all ranks of a generating replica make the same calls together."""

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def weights(self) -> Weights:
        """This rank's share of the weights that the engine takes, for weight sync to write and to verify."""

    @property
    def version(self) -> int | None:
        """Of the weights that the engine would draw by; None where it has none."""

    @property
    def stats(self) -> RolloutStats:
        """Of the last call of `generate`, on this rank."""

    @property
    def pools(self) -> Mapping[str, Sequence[Pool]]:
        """The engine's memory on this rank by role, "generator" and "kv_cache", for the memory room to move."""

    def generate(
        self, requests: Sequence[Request], sampling: SamplingParams, key: SeedKey, version: int
    ) -> list[Completion]:
        """One Completion a sample, in the order of the requests.

        Raises StaleWeights unless the engine has the weights of `version`, before and after it draws; ValueError for
        what it was not made for.
        """

    def publish(self, transfer: Callable[[], Result], version: int) -> Result:
        """Runs `transfer`, which fills `weights`, and makes them those of `version`; what it returns.

        A transaction: where it raises, the engine has no version and refuses to draw.
        """

    def sleep(self) -> None:
        """Gives up weights and cache: nothing is drawn before the next `publish`. Asleep already, it stays so."""

    def wake(self) -> None:
        """Takes back the memory that `publish` and `generate` need."""

    def memory_bytes(self) -> int:
        """What the engine takes on this rank when it is awake, outside of `pools` included."""
