"""The backend's slots driven kernel by kernel, by ranks that stand side by side in one process: for tests alone.

A rank's logits are whatever a test wants: the inputs are unit vectors that pass the norm unchanged, so that a column
of the head's table holds one row's logits. Sums and gatherings are numpy's, and a kernel is called as a graph would
call it, without one to compile. Refuses layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn

from mindgrpo.backend.kernels.contract import Heads, Vocabulary
from mindgrpo.backend.kernels.native.library import call_kernel
from mindgrpo.backend.kernels.native.rollout import NativeSlots
from mindgrpo.backend.kernels.rollout import (
    GenerationBatch,
    KVCacheLayout,
    LocalModelShape,
    Memory,
)
from mindgrpo.backend.kernels.sampling_params import SamplingParams

TYPES = {ms.float32: np.float32, ms.int32: np.int32}
HIDDEN = 256  # its root is a power of two: a unit vector's norm is exact


def arrays_of(cell: Any, *inputs: np.ndarray) -> tuple[str, list[np.ndarray], list[np.ndarray]]:
    """Symbol, inputs and fresh outputs of a cell that is one operation of the C library."""
    symbol = cell.run.func.rpartition(":")[2]
    arrays = [np.ascontiguousarray(x) for x in (*inputs, cell.meta.asnumpy())]
    shapes: Any = cell.run.out_shape(*(list(x.shape) for x in arrays))
    types: Any = cell.run.out_dtype(*(None for _ in arrays))
    if not isinstance(types, tuple):
        shapes, types = (shapes,), (types,)
    # What a graph's memory holds before is anything at all.
    outputs = [np.full(s, 77, TYPES[t]) for s, t in zip(shapes, types, strict=True)]
    return symbol, arrays, outputs


def call(cell: nn.Cell, *inputs: np.ndarray) -> list[np.ndarray]:
    """The outputs of a cell that is one operation of the C library."""
    symbol, arrays, outputs = arrays_of(cell, *inputs)
    call_kernel(symbol, *arrays, *outputs)
    return outputs


class Ranks:
    """`tp_size` ranks that share a vocabulary, with slots for `rows` rows and kernels made for `settings`.

    `hidden` is 4 to an integer power, see HIDDEN.
    """

    def __init__(
        self, settings: SamplingParams, vocab: int, tp_size: int, rows: int, hidden: int = HIDDEN
    ) -> None:
        self.vocab, self.tp_size, self.rows, self.hidden = vocab, tp_size, rows, hidden
        self.width = -(-vocab // tp_size)
        self.slots = [self._slots(settings, rank) for rank in range(tp_size)]
        self.heads = [slots.head() for slots in self.slots]
        self.rounds = [
            [slots.truncate(i) for slots in self.slots]
            for i in range(self.slots[0].num_truncation_rounds)
        ]

    def _slots(self, settings: SamplingParams, rank: int) -> NativeSlots:
        first = self.width * rank
        real = min(self.width, max(0, self.vocab - first))
        share = LocalModelShape(
            layers=1,
            hidden=self.hidden,
            inner=1,
            heads=Heads(1, 1, 1),
            vocabulary=Vocabulary(first, self.width, real),
            norm_eps=0.0,
            tp_size=self.tp_size,
            tp_rank=rank,
        )
        seen = np.zeros(self.rows * self.width // 4 + 1, np.float32)
        inputs, starts = np.zeros((2, self.rows * self.hidden), np.float32)
        scratch = np.zeros(self.rows * (2 * self.hidden + 3), np.float32)
        memory = Memory(np.zeros(1, np.float32), scratch, inputs, starts, seen)
        rotary = np.zeros(2, np.float32)
        return NativeSlots(share, settings, rotary, self.rows, 1, memory)

    def draw(
        self,
        logits: np.ndarray,
        keys: np.ndarray,
        prompts: Sequence[np.ndarray],
        settings: SamplingParams | None = None,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """By the settings that the kernels were made with, or by others in the same kernels.

        Row i has logits[i % n] of logits float32 [n, vocabulary], n at most `hidden`, and keys[i] (uint64) for its
        noise. Gives the first token (int32) and log-prob of each row on the first rank, and the embeddings
        [rows, hidden] that follow. The embedding of token t is t everywhere.
        """
        if settings is not None:
            for slots in self.slots:
                slots.use(settings)
        jobs = self._start(keys, prompts, 2)
        x = self._step(logits)
        for job, inputs in zip(jobs[1:], x[1:], strict=True):
            np.testing.assert_array_equal(job.tokens, jobs[0].tokens)
            np.testing.assert_array_equal(inputs, x[0])
        return jobs[0].tokens[:, 0], jobs[0].logps[:, 0], x[0]

    def draw_many(self, logits: np.ndarray, keys: np.ndarray, num_tokens: int) -> np.ndarray:
        """int32 [rows, num_tokens] on the first rank, every token of a row from the same logits."""
        jobs = self._start(keys, [np.ones(1, np.int32)] * self.rows, num_tokens)
        for _ in range(num_tokens):
            self._step(logits)
        return jobs[0].tokens

    def _start(
        self, keys: np.ndarray, prompts: Sequence[np.ndarray], longest: int
    ) -> list[GenerationBatch]:
        jobs = [
            GenerationBatch.of(prompts, range(self.rows), [longest] * self.rows, keys)
            for _ in self.slots
        ]
        for slots, job in zip(self.slots, jobs, strict=True):
            slots.start(job, KVCacheLayout(self.rows, 0, self.rows, 0))
            for row in range(self.rows):
                slots.enqueue(row, row)
            call(slots.begin(), np.zeros(1, np.int32))
        return jobs

    def _step(self, logits: np.ndarray) -> list[np.ndarray]:
        """The kernels after the layers, each on all ranks before the next; the inputs that follow on each rank."""
        tables = np.zeros((self.tp_size * self.width, self.hidden), np.float32)
        tables[: self.vocab, : len(logits)] = logits.T
        names = np.repeat(np.arange(len(tables), dtype=np.float32)[:, None], self.hidden, 1)
        units = np.eye(len(logits), self.hidden, dtype=np.float32)[
            np.arange(self.rows) % len(logits)
        ]
        norm = np.full(self.hidden, self.hidden**-0.5, np.float32)
        outputs = [
            call(head, units, np.zeros_like(units), norm, table)
            for head, table in zip(self.heads, np.split(tables, self.tp_size), strict=True)
        ]
        local = [logits for logits, _ in outputs]
        stats = answer = np.stack([stats for _, stats in outputs])
        for round_cells in self.rounds:
            answers = [
                call(truncate, logits, stats, answer)[0]
                for truncate, logits in zip(round_cells, local, strict=True)
            ]
            answer = np.stack(answers)
        drawn = [
            call(slots.draw(), logits, stats, answer, table)[0]
            for slots, logits, table in zip(
                self.slots, local, np.split(names, self.tp_size), strict=True
            )
        ]
        return [call(slots.commit(), np.sum(drawn, axis=0))[0] for slots in self.slots]
