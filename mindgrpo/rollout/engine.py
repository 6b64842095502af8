"""Defines a rollout engine: requests in, samples out, by weights of a known version.

The steps and evaluations of a run use this protocol alone. `embedded/` implements it in the ranks' own graphs,
`vllm/` with vLLM in processes of its own, which are handed named tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Protocol, TypeVar

from mindgrpo.algorithm.sample import Request, Sample
from mindgrpo.backend.contract import Pool
from mindgrpo.backend.kernels.shapes import SamplingParams
from mindgrpo.models.shard import Adapters
from mindgrpo.weight_sync.plan import Plan
from mindgrpo.weight_sync.transfer import WeightTransfer
from mindgrpo.weights.local_weights import Weights


@dataclass(frozen=True)
class RolloutStats:
    """`tokens` that were asked for, `rows` computed for them, `places` in slots over all steps, `prompt_tokens`
    computed; decode `steps`, tokens `drafted` in them, and those of these that were right."""

    tokens: int = 0
    rows: int = 0
    places: int = 0
    prompt_tokens: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0

    @classmethod
    def total(cls, usages: Sequence[RolloutStats]) -> RolloutStats:
        columns = zip(*map(astuple, usages), strict=True)
        return cls(*(sum(column) for column in columns))

    def figures(self) -> dict[str, float]:
        """Returns metrics of what was counted: the share of rows that made no token of any sample, the share of slots
        in use, averaged over decode steps, these steps, drafts and those of them that were right."""
        figures: dict[str, float] = {}
        if self.places:
            figures["rollout/wasted_fraction"] = 1.0 - self.tokens / self.rows
            figures["rollout/slot_occupancy"] = self.rows / self.places
        if self.steps:
            figures["rollout/decode_steps"] = self.steps
        if self.steps or self.drafted:
            figures |= {"rollout/drafted": self.drafted, "rollout/accepted": self.accepted}
        return figures


Result = TypeVar("Result")


class StaleWeights(RuntimeError):
    """The engine's weights are not those of the version that was asked for."""


@dataclass(frozen=True)
class SeedKey:
    """Selects the noise, beside sample, turn and position; `purpose` is rollout/noise.py's."""

    seed: int
    purpose: int
    step: int


@dataclass(frozen=True)
class Capabilities:
    """Lists what engines differ in; name and release are for reports."""

    name: str
    release: str | None = None


class RolloutEngine(Protocol):
    """One rank's handle on an engine; all ranks of a generating replica make the same calls together."""

    # Called within `generate` with samples that have ended, each at most once.
    on_ended: Callable[[list[Sample]], None] | None

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def version(self) -> int | None:
        """Returns the version of the weights that the engine would draw by; None where it has none."""

    @property
    def stats(self) -> RolloutStats:
        """Returns figures of the last call of `generate`, on this rank."""

    @property
    def pools(self) -> Mapping[str, Sequence[Pool]]:
        """Returns the engine's memory on this rank by role, "generator" and "kv_cache", for memory/ to move."""

    def generate(
        self, requests: Sequence[Request], sampling: SamplingParams, key: SeedKey, version: int
    ) -> list[Sample]:
        """Draws one Sample for each number, in the order of the requests, with the request's prompt.

        Raises StaleWeights unless the engine has the weights of `version`, before and after it draws; ValueError for
        what it was not made for.
        """

    def transfer_from(
        self, policy: Weights, adapters: Adapters | None, plan: Plan | None = None
    ) -> WeightTransfer:
        """Makes the transfer of the policy's weights, adapters added in, to the engine, to be run inside of `publish`.

        `plan` is that of the base weights into the generating layout, where it is known.
        """

    def publish(self, transfer: Callable[[], Result], version: int) -> Result:
        """Runs `transfer`, which brings the weights, and makes them those of `version`; returns the transfer's result.

        A transaction: where it raises, the engine has no version and refuses to draw.
        """

    def load(self, directory: str, version: int) -> None:
        """Publishes the weights of a model directory. Raises UserError."""

    def sleep(self) -> None:
        """Gives up the cache, and the weights where they are in the ranks' memory: these have no version then.

        Asleep already, it stays so.
        """

    def wake(self) -> None:
        """Takes back the memory that `publish` and `generate` need."""

    def memory_bytes(self) -> int:
        """Counts the engine's bytes on this rank when it is awake, also outside of `pools`."""

    def close(self) -> None:
        """Ends what the engine has started."""
