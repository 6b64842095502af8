"""The decoding graph without layers, for the bench of drawing: logits are whatever the bench wants."""

from __future__ import annotations

import time
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

from mindgrpo.backend.contract import Backend
from mindgrpo.backend.kernels.contract import Heads, Vocabulary
from mindgrpo.backend.kernels.rollout import (
    GenerationBatch,
    KVCacheLayout,
    LocalModelShape,
    Memory,
    Slots,
)
from mindgrpo.backend.kernels.sampling_params import SamplingParams
from mindgrpo.rollout.embedded.kv_cache import padded
from mindgrpo.rollout.noise import ROLLOUT, sample_keys


class _Step(nn.Cell):
    """(x [B, 1], table [V, 1]) -> (the next x, samples that are left int32 [1])."""

    def __init__(self, slots: Slots, vocab: int) -> None:
        super().__init__()
        self.head, self.draw, self.commit = slots.head(), slots.draw(), slots.commit()
        self.one, self.nothing = Tensor([1.0], ms.float32), Tensor([0.0], ms.float32)
        # Every embedding is 1, so that the next logits are the same again.
        self.embeddings = Tensor(np.ones((vocab, 1), np.float32))

    def construct(self, x: Any, table: Any) -> Any:
        logits, answer = self.head(x, x, self.one, table)
        stats = answer.expand_dims(0)
        return self.commit(self.draw(logits, stats, stats, self.embeddings))


class Drawing:
    """`rows` samples of `tokens` tokens each, which end at the same time."""

    def __init__(
        self, backend: Backend, vocab: int, rows: int, tokens: int, **sampling: Any
    ) -> None:
        self.rows, self.tokens = rows, tokens
        params = SamplingParams(max_tokens=tokens, **sampling)
        share = LocalModelShape(1, 1, 1, Heads(1, 1, 1), Vocabulary(0, vocab, vocab), 0.0, 1, 0)
        nothing = np.zeros(1, np.float32)
        inputs, starts = np.ones((2, rows), np.float32)
        memory = Memory(nothing, np.zeros(5 * padded(rows), np.float32), inputs, starts, nothing)
        self.slots = backend.kernels.slots(share, params, np.zeros(2, np.float32), rows, 1, memory)
        self.begin = backend.graph(self.slots.begin(), "begin")
        self.step = backend.graph(_Step(self.slots, vocab), "step")

    def seconds(self, logits: np.ndarray, number: int) -> float:
        """Of all tokens; `number` chooses the noise."""
        table = Tensor(logits.astype(np.float32)[:, None])
        keys = sample_keys(0, ROLLOUT, number, range(self.rows))
        prompts = [np.zeros(1, np.int32)] * self.rows
        job = GenerationBatch.of(prompts, range(self.rows), [self.tokens] * self.rows, keys)
        self.slots.start(job, KVCacheLayout(self.rows, 0, self.rows, 0))
        for row in range(self.rows):
            self.slots.enqueue(row, row)
        x = self.begin(Tensor([0], ms.int32))
        started = time.perf_counter()
        for _ in range(self.tokens):
            x, left = self.step(x, table)
        assert left.asnumpy()[0] == 0
        return time.perf_counter() - started
