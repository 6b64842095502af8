"""A generator without layers, for the bench of drawing: logits are whatever the bench wants."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from mindgrpo.backend.contract import Backend
from mindgrpo.backend.kernels.rollout import (
    GenerationBatch,
    KVCacheLayout,
    LocalModelShape,
    Memory,
    TokenWeights,
)
from mindgrpo.backend.kernels.shapes import Heads, SamplingParams, Vocabulary
from mindgrpo.rollout.noise import ROLLOUT, sample_keys


class Drawing:
    """`rows` samples of `tokens` tokens each, which end at the same time."""

    def __init__(
        self, backend: Backend, vocab: int, rows: int, tokens: int, **sampling: Any
    ) -> None:
        self.rows, self.tokens = rows, tokens
        params = SamplingParams(max_tokens=tokens, **sampling)
        share = LocalModelShape(0, 1, 1, Heads(1, 1, 1), Vocabulary(0, vocab, vocab), 0.0, 1, 0)
        nothing = np.zeros(1, np.float32)
        inputs, starts = np.ones((2, rows), np.float32)
        memory = Memory(
            nothing, np.zeros(rows * (3 + max(4, vocab)), np.float32), inputs, starts, nothing
        )
        self.slots = backend.kernels.slots(share, params, np.zeros(2, np.float32), rows, 1, memory)
        # Every embedding is 1, so that the next logits are the same again.
        self.embeddings = np.ones((vocab, 1), np.float32)

    def seconds(self, logits: np.ndarray, number: int) -> float:
        """Of all tokens; `number` chooses the noise."""
        table = np.ascontiguousarray(logits.astype(np.float32)[:, None])
        self.slots.take_weights([], TokenWeights(np.ones(1, np.float32), table, self.embeddings))
        keys = sample_keys(0, ROLLOUT, number, range(self.rows))
        prompts = [np.zeros(1, np.int32)] * self.rows
        job = GenerationBatch.of(prompts, range(self.rows), [self.tokens] * self.rows, keys)
        self.slots.start(job, KVCacheLayout(self.rows, 0, self.rows, 0))
        for row in range(self.rows):
            self.slots.enqueue(row, row)
        self.slots.decode(0)
        started = time.perf_counter()
        left = self.slots.decode(self.tokens)
        assert left == 0
        return time.perf_counter() - started
