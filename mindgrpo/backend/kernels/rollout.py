"""What a backend may offer the generator beside plain operations: samples decoded in slots, inside the graph.

The contract between the kernels, which keep the slots, and rollout/embedded/slots.py, which makes graphs of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mindgrpo.backend.kernels.contract import Heads, Vocabulary
from mindgrpo.backend.kernels.sampling_params import SamplingParams
from mindgrpo.backend.matmul_precision import packed_bytes

if TYPE_CHECKING:
    from mindspore import nn


@dataclass(frozen=True)
class LocalModelShape:
    """This rank's share of a model: `tp_size` ranks split heads, inner width and vocabulary; this one is `tp_rank`.

    `group` is what kernels know these ranks by (Group.kernel_id).
    """

    layers: int
    hidden: int
    inner: int
    heads: Heads
    vocabulary: Vocabulary
    norm_eps: float
    tp_size: int
    tp_rank: int
    group: int = -1

    @property
    def matrices(self) -> list[tuple[int, int]]:
        """[in, out] of each layer's qkv, out, gate and up together, and down; at the end that of the head."""
        heads, hidden, inner = self.heads, self.hidden, self.inner
        layer = [
            (hidden, heads.width),
            (heads.queries * heads.dim, hidden),
            (hidden, 2 * inner),
            (inner, hidden),
        ]
        return self.layers * layer + [(hidden, self.vocabulary.width)]

    def packed_bytes(self, num_parts: int | None) -> int:
        """Of all matrices as the generator keeps them for products of bfloat16; 0 for those of float32."""
        return sum(packed_bytes(k, n, num_parts) for k, n in self.matrices) if num_parts else 0


@dataclass
class GenerationBatch:
    """Samples to make, and the arrays that they are written to; `longest` columns, `limits` of them may be used.

    `prompts` int32 [n] each; of sample i: `prompt_of`, `limits` int32, `keys` uint64 of its noise, `lengths`,
    `stopped` int32 [samples], `tokens` int32, `logps` float32 [samples, longest]. `samples` are their numbers, by which
    they are known again when they go on; () where none does.
    """

    prompts: Sequence[np.ndarray]
    prompt_of: np.ndarray
    limits: np.ndarray
    keys: np.ndarray
    tokens: np.ndarray
    logps: np.ndarray
    lengths: np.ndarray
    stopped: np.ndarray
    samples: Sequence[int] = ()

    @classmethod
    def of(
        cls,
        prompts: Sequence[np.ndarray],
        prompt_of: Sequence[int],
        limits: Sequence[int],
        keys: np.ndarray,
        samples: Sequence[int] = (),
    ) -> GenerationBatch:
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
            samples,
        )


@dataclass(frozen=True)
class KeptRow:
    """A sample whose keys are in the cache still: `shared` of its prompt in `prefix`, `own` in `slot`."""

    slot: int
    prefix: int
    shared: int
    own: int


@dataclass(frozen=True)
class KVCacheLayout:
    """The cache of a batch: `slots` of `slot_size` positions and `prefix_blocks` of `prefix_block_size`."""

    slots: int
    slot_size: int
    prefix_blocks: int
    prefix_block_size: int


@dataclass(frozen=True)
class Memory:
    """Views of the generator's pools, of one dim: keys and values; float32 what kernels need while they run, `inputs`
    of slots and first inputs of prefix blocks (`starts`), hidden floats each, and with a penalty a byte of `seen` for
    each slot and token of this rank. `packed`: LocalModelShape.packed_bytes of bfloat16, where there are any. `parked`:
    hidden floats for each slot, where samples may go on after they have ended."""

    cache: np.ndarray
    scratch: np.ndarray
    inputs: np.ndarray
    starts: np.ndarray
    seen: np.ndarray
    packed: np.ndarray | None = None
    parked: np.ndarray | None = None


class Slots(ABC):
    """Letters: B rows of a graph, H hidden, W a projection's width, I inner, V local vocabulary, C stats of a row.

    The cells do nothing for rows that are not in use. Those of layers take and give (x, what is to be added to it).
    Where weights are optional, any tensor [1] says that there is none.
    """

    # Samples that wait for a slot and rows in use; prefix blocks with no sample left have 0 users.
    users: np.ndarray

    def take_weights(self, matrices: Sequence[np.ndarray]) -> None:
        """Has to be called when weights have changed: those of LocalModelShape.matrices [in, out], the head's
        [out, in]. Kernels that read the weights themselves have nothing to do."""
        return None

    @abstractmethod
    def use(self, sampling: SamplingParams) -> None:
        """Draws by `sampling` from the next batch on; cells made from now on are such as they need.

        Raises ValueError where they have a penalty and those that the slots were made with have none.
        """

    @abstractmethod
    def serves(self, made_with: SamplingParams) -> bool:
        """Whether cells that were made while `made_with` was in use can draw by the parameters in use now."""

    @abstractmethod
    def start(self, batch: GenerationBatch, layout: KVCacheLayout) -> None: ...

    @abstractmethod
    def resume(self, batch: GenerationBatch, rows: Sequence[KeptRow], known: np.ndarray) -> None:
        """Goes on with samples that have ended, from where their keys are; nothing waits and no prompt is computed.

        Columns of `batch.tokens` are counted from a sample's first token in its slot: from `own` up to `known` int32
        [samples] they hold tokens that are there already, and `limits` count from the same.
        """

    @abstractmethod
    def kept(self, batch: GenerationBatch) -> list[tuple[int, int]]:
        """Slot and prefix of each sample, once all have ended."""

    @abstractmethod
    def enqueue(self, sample: int, prefix: int) -> None:
        """The sample takes a slot as soon as one is free; its prompt will be in `prefix` by then."""

    @abstractmethod
    def set_prompt_rows(
        self, prefix_blocks: np.ndarray, seen: np.ndarray, start_prefixes: np.ndarray
    ) -> None:
        """What the prompt graph's rows are: tokens for `prefix_blocks` that see `seen` keys, then first inputs."""

    @property
    @abstractmethod
    def waiting(self) -> int: ...

    @property
    @abstractmethod
    def steps(self) -> tuple[int, int]:
        """Decode steps of the batch with any row, and rows that they computed."""

    @abstractmethod
    def begin(self) -> nn.Cell:
        """(anything) -> x [B, H], the inputs of the next token."""

    @abstractmethod
    def layer(self, number: int, is_prompt: bool, keeps_only: bool) -> nn.Cell:
        """(x [B, H], added [B, H] or [1], norm [H], qkv [H, W], its bias, q_norm, k_norm, out [Q D, H], its bias, norm
        of the MLP [H], gate and up [H, 2 I], down [I, H]) -> the pair, summed over the ranks.

        With `keeps_only` it only keeps keys and values, and the pair means nothing; what comes after k_norm can be [1].
        """

    @abstractmethod
    def head(self) -> nn.Cell:
        """(x, added, norm [H], table [V, H]) -> (logits [B, V], stats [B, C])."""

    @property
    @abstractmethod
    def num_truncation_rounds(self) -> int:
        """How often `truncate` and a gathering must follow `head` before `draw`, by the parameters in use."""

    @abstractmethod
    def truncate(self, number: int) -> nn.Cell:
        """(logits, gathered stats [tp_size, B, C], gathered answer of the round before) -> [B, ...]."""

    @abstractmethod
    def draw(self) -> nn.Cell:
        """(logits, gathered stats, gathered answer of the last round, embeddings [V, H]) -> drawn [B, H + 2].

        Zero on all ranks but one a row: their sum is what `commit` wants.
        """

    @abstractmethod
    def commit(self) -> nn.Cell:
        """(drawn [B, H + 2]) -> (x [B, H] of the next token, samples that are running or waiting int32 [1])."""
