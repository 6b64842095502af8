"""What a backend may offer the generator beside plain operations: samples decoded in slots, inside the graph.

The contract between the kernels, which keep the slots, and generate/slots.py, which makes graphs of them. Refuses to
know a model's weights or what a sample is for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mindgrpo.backend.kernels.contract import Heads, Vocabulary

if TYPE_CHECKING:
    from mindspore import nn


@dataclass(frozen=True)
class Share:
    """This rank's share of a model: `ways` ranks split heads, inner width and vocabulary; this one is `index`."""

    layers: int
    hidden: int
    inner: int
    heads: Heads
    vocabulary: Vocabulary
    norm_eps: float
    ways: int
    index: int


@dataclass(frozen=True)
class Rules:
    """How a token is drawn: `scale` is one over the temperature; `greedy` takes the likeliest; 0, 1.0, 0.0 are off."""

    scale: float
    greedy: bool
    top_k: int
    top_p: float
    min_p: float
    penalty: float
    min_tokens: int
    stop_ids: tuple[int, ...]


@dataclass
class Job:
    """Samples to make, and the arrays that they are written to; `longest` columns, `limits` of them may be used.

    `prompts` int32 [n] each; of sample i: `prompt_of`, `limits` int32, `keys` uint64 of its noise, `lengths`,
    `stopped` int32 [samples], `tokens` int32, `logps` float32 [samples, longest].
    """

    prompts: Sequence[np.ndarray]
    prompt_of: np.ndarray
    limits: np.ndarray
    keys: np.ndarray
    tokens: np.ndarray
    logps: np.ndarray
    lengths: np.ndarray
    stopped: np.ndarray

    @classmethod
    def of(
        cls,
        prompts: Sequence[np.ndarray],
        prompt_of: Sequence[int],
        limits: Sequence[int],
        keys: np.ndarray,
    ) -> Job:
        count, longest = len(prompt_of), max(limits)
        return cls(
            prompts,
            np.array(prompt_of, np.int32),
            np.array(limits, np.int32),
            keys,
            np.zeros((count, longest), np.int32),
            np.zeros((count, longest), np.float32),
            np.zeros(count, np.int32),
            np.zeros(count, np.int32),
        )


@dataclass(frozen=True)
class Partition:
    """How a job shares out the memory: `slots` of `slot_room` positions and `entries` of `entry_room`."""

    slots: int
    slot_room: int
    entries: int
    entry_room: int


@dataclass(frozen=True)
class Memory:
    """Views of the generator's pool, float32 of one dim: keys and values, what kernels need while they run, `inputs`
    of slots and first inputs of entries (`starts`), hidden floats each, and with a penalty a byte of `seen` for each
    slot and token of this rank."""

    cache: np.ndarray
    scratch: np.ndarray
    inputs: np.ndarray
    starts: np.ndarray
    seen: np.ndarray


class Slots(ABC):
    """Letters: B rows of a graph, H hidden, W a projection's width, I inner, V local vocabulary, C pieces of a row.

    The cells do nothing for rows that are not in use. Those of layers take and give (x, what is to be added to it), so
    that the caller sums over ranks between them. Where weights are optional, any tensor [1] says that there is none.
    """

    # Samples that wait for a slot and rows in use; entries with no sample left have 0 users.
    users: np.ndarray

    @abstractmethod
    def use(self, rules: Rules) -> None:
        """Draws by `rules` from the next job on; cells made from now on are such as they need.

        Raises ValueError where the rules have a penalty and those that the slots were made with have none.
        """

    @abstractmethod
    def serves(self, made_with: Rules) -> bool:
        """Whether cells that were made while `made_with` was in use can draw by the rules in use now."""

    @abstractmethod
    def start(self, job: Job, partition: Partition) -> None: ...

    @abstractmethod
    def enqueue(self, sample: int, entry: int) -> None:
        """The sample takes a slot as soon as one is free; its prompt will be in `entry` by then."""

    @abstractmethod
    def set_prompt_rows(
        self, entries: np.ndarray, seen: np.ndarray, start_entries: np.ndarray
    ) -> None:
        """What the prompt graph's rows are: tokens for `entries` that see `seen` keys, then first inputs."""

    @property
    @abstractmethod
    def waiting(self) -> int: ...

    @property
    @abstractmethod
    def steps(self) -> tuple[int, int]:
        """Decode steps of the job with any row, and rows that they computed."""

    @abstractmethod
    def begin(self) -> nn.Cell:
        """(anything) -> x [B, H], the inputs of the next token."""

    @abstractmethod
    def attend(self, layer: int, is_prompt: bool, keeps_only: bool) -> nn.Cell:
        """(x [B, H], added [B, H] or [1], norm [H], qkv [H, W], its bias, q_norm, k_norm, out [Q D, H]) -> the pair.

        With `keeps_only` it only keeps keys and values, and the pair means nothing.
        """

    @abstractmethod
    def mlp(self, is_prompt: bool) -> nn.Cell:
        """(x, added, bias of what is added, norm [H], gate and up [H, 2 I], down [I, H]) -> the pair."""

    @abstractmethod
    def head(self) -> nn.Cell:
        """(x, added, norm [H], table [V, H]) -> (logits [B, V], pieces [B, C])."""

    @property
    @abstractmethod
    def num_narrowings(self) -> int:
        """How often `narrow` and a gathering must follow `head` before `draw`, by the rules in use."""

    @abstractmethod
    def narrow(self, number: int) -> nn.Cell:
        """(logits, gathered pieces [ways, B, C], gathered answer of the narrowing before) -> [B, ...]."""

    @abstractmethod
    def draw(self) -> nn.Cell:
        """(logits, gathered pieces, gathered answer of the last narrowing, embeddings [V, H]) -> drawn [B, H + 2].

        Zero on all ranks but one a row: their sum is what `commit` wants.
        """

    @abstractmethod
    def commit(self) -> nn.Cell:
        """(drawn [B, H + 2]) -> (x [B, H] of the next token, samples that are running or waiting int32 [1])."""
