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
    Job,
    Memory,
    Partition,
    Share,
)
from mindgrpo.rollout.sampling_params import SamplingSettings

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
    """`ways` ranks that share a vocabulary; slots for up to HIDDEN rows."""

    def __init__(self, settings: SamplingSettings, vocab: int, ways: int, rows: int) -> None:
        self.vocab, self.ways, self.rows = vocab, ways, rows
        self.width = -(-vocab // ways)
        self.slots = [self._slots(settings, rank) for rank in range(ways)]

    def _slots(self, settings: SamplingSettings, rank: int) -> NativeSlots:
        first = self.width * rank
        real = min(self.width, max(0, self.vocab - first))
        share = Share(
            layers=1,
            hidden=HIDDEN,
            inner=1,
            heads=Heads(1, 1, 1),
            vocabulary=Vocabulary(first, self.width, real),
            norm_eps=0.0,
            ways=self.ways,
            index=rank,
        )
        seen = np.zeros(self.rows * self.width // 4 + 1, np.float32)
        inputs, starts = np.zeros((2, self.rows * HIDDEN), np.float32)
        scratch = np.zeros(self.rows * (2 * HIDDEN + 3), np.float32)
        memory = Memory(np.zeros(1, np.float32), scratch, inputs, starts, seen)
        rotary = np.zeros(2, np.float32)
        return NativeSlots(share, settings.rules(), rotary, self.rows, 1, memory)

    def draw(
        self,
        logits: np.ndarray,
        uniforms: np.ndarray,
        prompts: Sequence[np.ndarray],
        settings: SamplingSettings | None = None,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """By the settings that the kernels were made with, or by others in the same kernels.

        First tokens (int32) and log-probs of each row on the first rank, and the embeddings [rows, HIDDEN] that
        follow. The embedding of token t is t everywhere."""
        tables = np.zeros((self.ways * self.width, HIDDEN), np.float32)
        tables[: self.vocab, : len(logits)] = logits.T
        names = np.repeat(np.arange(self.ways * self.width, dtype=np.float32)[:, None], HIDDEN, 1)
        jobs = [
            Job.of(prompts, range(self.rows), [2] * self.rows, np.repeat(uniforms[:, None], 2, 1))
            for _ in self.slots
        ]
        for slots, job in zip(self.slots, jobs, strict=True):
            slots.start(job, Partition(self.rows, 0, self.rows, 0))
            for row in range(self.rows):
                slots.enqueue(row, row)
            call(slots.begin(), np.zeros(1, np.int32))
        parts = [slice(r * self.width, (r + 1) * self.width) for r in range(self.ways)]
        given = [(slots, tables[part]) for slots, part in zip(self.slots, parts, strict=True)]
        cells = [(s.head(), [s.narrow(i) for i in range(s.num_narrowings)]) for s in self.slots]
        for slots in self.slots:
            if settings is not None:
                slots.use(settings.rules())
        units, nothing = np.eye(self.rows, HIDDEN, dtype=np.float32), np.zeros((self.rows, HIDDEN))
        norm = np.full(HIDDEN, HIDDEN**-0.5, np.float32)
        heads = [
            call(head, units, nothing.astype(np.float32), norm, table)
            for (head, _), (_, table) in zip(cells, given, strict=True)
        ]
        pieces = answer = np.stack([pieces for _, pieces in heads])
        for number in range(len(cells[0][1])):
            found = [
                call(narrow[number], logits, pieces, answer)[0]
                for (_, narrow), (logits, _) in zip(cells, heads, strict=True)
            ]
            answer = np.stack(found)
        drawn = [
            call(slots.draw(), logits, pieces, answer, names[part])[0]
            for slots, (logits, _), part in zip(self.slots, heads, parts, strict=True)
        ]
        x = [call(slots.commit(), np.sum(drawn, axis=0))[0] for slots in self.slots]
        for job, inputs in zip(jobs[1:], x[1:], strict=True):
            np.testing.assert_array_equal(job.tokens, jobs[0].tokens)
            np.testing.assert_array_equal(inputs, x[0])
        return jobs[0].tokens[:, 0], jobs[0].logps[:, 0], x[0]
