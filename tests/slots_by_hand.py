"""The backend's slots without layers, by ranks that stand side by side as threads of one process: for tests alone.

A rank's logits are whatever a test wants: the inputs are unit vectors that pass the norm unchanged, so that a column
of the head's table holds one row's logits.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from mindgrpo.backend.cpu.shared_group import declare
from mindgrpo.backend.kernels.native.library import library
from mindgrpo.backend.kernels.native.rollout import Slots
from mindgrpo.backend.kernels.rollout import (
    GenerationBatch,
    KVCacheLayout,
    LocalModelShape,
    Memory,
    TokenWeights,
)
from mindgrpo.backend.kernels.shapes import Heads, SamplingParams, Vocabulary

HIDDEN = 256  # its root is a power of two: a unit vector's norm is exact
SLOT_BYTES = 1 << 16


class ThreadGroup:
    """A group of the C library whose members are threads of this process: member i knows it as `ids[i]`."""

    def __init__(self, size: int) -> None:
        native = library()
        assert native is not None
        declare(native)
        num_bytes = native.group_control_bytes(size) + 2 * size * SLOT_BYTES + 64
        self._memory = np.zeros(num_bytes, np.uint8)
        self._pids = np.array([os.getpid()] * size + [0], np.int64)
        address = -(-self._memory.ctypes.data // 64) * 64
        self.ids = [
            native.group_register(address, SLOT_BYTES, index, size, self._pids.ctypes.data, 0)
            for index in range(size)
        ]
        assert min(self.ids) >= 0
        for number in self.ids:
            weakref.finalize(self, native.group_forget, number)


class Ranks:
    """`tp_size` ranks that share a vocabulary, with slots for `rows` rows, made for `settings`.

    `hidden` is 4 to an integer power, see HIDDEN.
    """

    def __init__(
        self, settings: SamplingParams, vocab: int, tp_size: int, rows: int, hidden: int = HIDDEN
    ) -> None:
        self.vocab, self.tp_size, self.rows, self.hidden = vocab, tp_size, rows, hidden
        self.width = -(-vocab // tp_size)
        self._group = ThreadGroup(tp_size)
        self._threads = ThreadPoolExecutor(tp_size)
        self._inputs: list[np.ndarray] = []
        self._units = np.zeros(0, np.float32)
        self.slots = [self._slots(settings, rank) for rank in range(tp_size)]

    def _slots(self, settings: SamplingParams, rank: int) -> Slots:
        first = self.width * rank
        real = min(self.width, max(0, self.vocab - first))
        share = LocalModelShape(
            layers=0,
            hidden=self.hidden,
            inner=1,
            heads=Heads(1, 1, 1),
            vocabulary=Vocabulary(first, self.width, real),
            norm_eps=0.0,
            tp_size=self.tp_size,
            tp_rank=rank,
            group=self._group.ids[rank],
        )
        seen = np.zeros(self.rows * self.width // 4 + 1, np.float32)
        inputs, starts = np.zeros((2, self.rows * self.hidden), np.float32)
        self._inputs.append(inputs)
        # Whatever is in it does not matter.
        width = 3 * self.hidden + max(self.width, self.hidden + 3)
        scratch = np.full(self.rows * width, 77, np.float32)
        memory = Memory(np.zeros(1, np.float32), scratch, inputs, starts, seen)
        rotary = np.zeros(2, np.float32)
        return Slots(share, settings, rotary, self.rows, 1, memory)

    def draw(
        self,
        logits: np.ndarray,
        keys: np.ndarray,
        prompts: Sequence[np.ndarray],
        settings: SamplingParams | None = None,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """By the settings that the slots were made with, or by others in the same slots.

        Row i has logits[i % n] of logits float32 [n, vocabulary], n at most `hidden`, and keys[i] (uint64) for its
        noise. Gives the first token (int32) and log-prob of each row on the first rank, and the embeddings
        [rows, hidden] that follow. The embedding of token t is t everywhere.
        """
        if settings is not None:
            for slots in self.slots:
                slots.use(settings)
        jobs = self._start(logits, keys, prompts, 2)
        x = self._step()
        for job, inputs in zip(jobs[1:], x[1:], strict=True):
            np.testing.assert_array_equal(job.tokens, jobs[0].tokens)
            np.testing.assert_array_equal(inputs, x[0])
        return jobs[0].tokens[:, 0], jobs[0].logps[:, 0], x[0]

    def draw_many(self, logits: np.ndarray, keys: np.ndarray, num_tokens: int) -> np.ndarray:
        """int32 [rows, num_tokens] on the first rank, every token of a row from the same logits."""
        jobs = self._start(logits, keys, [np.ones(1, np.int32)] * self.rows, num_tokens)
        for _ in range(num_tokens):
            self._step()
        return jobs[0].tokens

    def _start(
        self, logits: np.ndarray, keys: np.ndarray, prompts: Sequence[np.ndarray], longest: int
    ) -> list[GenerationBatch]:
        self._take(logits)
        jobs = [
            GenerationBatch.of(prompts, range(self.rows), [longest] * self.rows, keys)
            for _ in self.slots
        ]
        for slots, job in zip(self.slots, jobs, strict=True):
            slots.start(job, KVCacheLayout(self.rows, 0, self.rows, 0))
            for row in range(self.rows):
                slots.enqueue(row, row)
        self._decode(0)
        return jobs

    def _take(self, logits: np.ndarray) -> None:
        tables = np.zeros((self.tp_size * self.width, self.hidden), np.float32)
        tables[: self.vocab, : len(logits)] = logits.T
        names = np.repeat(np.arange(len(tables), dtype=np.float32)[:, None], self.hidden, 1)
        norm = np.full(self.hidden, self.hidden**-0.5, np.float32)
        units = np.eye(len(logits), self.hidden, dtype=np.float32)
        self._units = units[np.arange(self.rows) % len(logits)].reshape(-1)
        heads, embeddings = (np.split(table, self.tp_size) for table in (tables, names))
        for slots, head, table in zip(self.slots, heads, embeddings, strict=True):
            slots.take_weights([], TokenWeights(norm, head, table))

    def _decode(self, tokens: int) -> None:
        list(self._threads.map(lambda slots: slots.decode(tokens), self.slots))

    def _step(self) -> list[np.ndarray]:
        """One token; the inputs that follow on each rank."""
        for inputs in self._inputs:
            inputs[...] = self._units
        self._decode(1)
        return [inputs.reshape(self.rows, self.hidden).copy() for inputs in self._inputs]
