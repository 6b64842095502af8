"""The generator in plain operations: every slot has a whole cache, and the groups of free slots are refilled in Python.

What every device has, and what faster kernels are held to. Computes all slots at every step, in use or not; a prompt's
samples enter together, so that it is computed once. Refuses to be clever.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
from mindspore import Tensor

from mindgrpo.backend.contract import Backend, Pool
from mindgrpo.backend.kernels.rollout import Job
from mindgrpo.models.shard import Shard
from mindgrpo.rollout.embedded.cells import Decode, Prefill
from mindgrpo.rollout.embedded.kv_cache import FLOAT_BYTES, Footprint, Room
from mindgrpo.rollout.noise import gumbel, position_keys
from mindgrpo.rollout.sampling_params import SamplingSettings
from mindgrpo.rollout.stats import RolloutStats

PREFILL_TOKENS = 1024
IDLE = -1


class PlainDecoder:
    """Runs jobs through `room.slots` slots, each with a cache for the longest prompt and completion."""

    def __init__(
        self, shard: Shard, backend: Backend, settings: SamplingSettings, room: Room
    ) -> None:
        self._shard, self._settings, self._room = shard, settings, room
        self._length = room.max_prompt + room.max_tokens
        self._prompts_at_once = max(
            1, min(room.slots // room.group, PREFILL_TOKENS // room.max_prompt)
        )
        shape = (room.slots * shard.kv_heads * self._length, shard.config.head_dim)
        size = shape[0] * shape[1]
        count = 2 * len(shard.layers)
        heads = (shard.query_heads, shard.kv_heads, shard.config.head_dim)
        footprint = Footprint.plain(room, len(shard.layers), heads)
        cache = backend.pool(footprint.num_bytes)
        self.pools: list[Pool] = [cache]
        parts = [
            backend.parameter(cache.view(i * size, shape), f"cache{i}", False) for i in range(count)
        ]
        caches = list(zip(parts[::2], parts[1::2], strict=True))
        self._seen: np.ndarray | None = None
        seen = None
        if settings.repetition_penalty != 1.0:
            # Apart from the cache, as the host writes it.
            self._seen_pool = backend.pool(room.slots * shard.local_vocab * FLOAT_BYTES)
            self.pools.append(self._seen_pool)
            self._seen = self._seen_pool.view(0, (room.slots, shard.local_vocab))
            seen = backend.parameter(self._seen, "seen", False)

        def decoder(settings: SamplingSettings) -> Any:
            cell = Decode(shard, caches, room.slots, self._length, settings, seen)
            return backend.graph(cell, "decode")

        self._decoder, self._decoders = decoder, {settings: decoder(settings)}
        self._prefill = backend.graph(Prefill(shard, caches, room.max_prompt), "prompts")

    def run(self, job: Job, settings: SamplingSettings) -> RolloutStats:
        """Numbers of the settings are part of a graph here: other settings are another graph."""
        if settings.repetition_penalty != 1.0 and self._seen is None:
            raise ValueError("this generator has no room for the tokens that a penalty has to know")
        if settings not in self._decoders:
            self._decoders[settings] = self._decoder(settings)
        self._settings, self._decode = settings, self._decoders[settings]
        slots = self._room.slots
        self._sample = np.full(slots, IDLE)
        self._tokens, self._positions = np.zeros(slots, np.int32), np.zeros(slots, np.int32)
        waiting = deque(self._groups(job))
        steps = prompt_tokens = 0
        while waiting or (self._sample != IDLE).any():
            prompt_tokens += self._admit(job, waiting)
            self._step(job)
            steps += 1
        rows = steps * slots
        return RolloutStats(int(job.lengths.sum()), rows, rows, prompt_tokens)

    def _groups(self, job: Job) -> list[list[int]]:
        """Samples that enter together: of one prompt, and no more than the prompt graph copies it to."""
        most = min(self._room.slots, self._room.group)
        groups: list[list[int]] = []
        for prompt in range(len(job.prompts)):
            samples = np.flatnonzero(job.prompt_of == prompt).tolist()
            groups += [samples[i : i + most] for i in range(0, len(samples), most)]
        return groups

    def _admit(self, job: Job, waiting: deque[list[int]]) -> int:
        """Gives free slots to the groups that fit; tokens of their prompts."""
        free = np.flatnonzero(self._sample == IDLE).tolist()
        taken: list[tuple[np.ndarray, list[int]]] = []
        while waiting and len(waiting[0]) <= len(free):
            samples = waiting.popleft()
            prompt = job.prompts[job.prompt_of[samples[0]]]
            slots, free = free[: len(samples)], free[len(samples) :]
            taken.append((prompt, slots))
            self._sample[slots] = samples
            self._tokens[slots], self._positions[slots] = prompt[-1], len(prompt) - 1
        for start in range(0, len(taken), self._prompts_at_once):
            self._fill(taken[start : start + self._prompts_at_once])
        self._mark_seen(taken)
        return sum(len(prompt) for prompt, _ in taken)

    def _fill(self, part: list[tuple[np.ndarray, list[int]]]) -> None:
        at_once, room = self._prompts_at_once, self._room
        tokens = np.zeros((at_once, room.max_prompt), np.int32)
        for index, (prompt, _) in enumerate(part):
            tokens[index, : len(prompt)] = prompt
        pairs = [(index, slot) for index, (_, slots) in enumerate(part) for slot in slots]
        # A short part writes its last slot several times: the same bytes, and no other shape to compile.
        pairs += [pairs[-1]] * (at_once * room.group - len(pairs))
        source = np.array([index for index, _ in pairs], np.int32)
        rows = self._cache_rows(np.array([slot for _, slot in pairs], np.int64))
        self._prefill(Tensor(tokens), Tensor(source), Tensor(rows))

    def _cache_rows(self, slots: np.ndarray) -> np.ndarray:
        kv = self._shard.kv_heads
        heads = slots[:, None] * kv + np.arange(kv)
        rows = heads[:, :, None] * self._length + np.arange(self._room.max_prompt)
        return rows.reshape(-1).astype(np.int32)

    def _mark_seen(self, taken: list[tuple[np.ndarray, list[int]]]) -> None:
        if self._seen is None or not taken:
            return
        self._seen_pool.pull()
        first, count = self._shard.first_token, self._shard.local_vocab
        for prompt, slots in taken:
            marks = np.zeros(count, np.float32)
            marks[prompt[(prompt >= first) & (prompt < first + count)] - first] = 1.0
            self._seen[slots] = marks
        self._seen_pool.push()

    def _noise(self, job: Job, busy: np.ndarray) -> np.ndarray:
        """float32 [slots, local vocabulary] for the next tokens of the samples in slots `busy`."""
        if self._settings.temperature == 0:
            return np.zeros((self._room.slots, 1), np.float32)
        shard, samples = self._shard, self._sample[busy]
        noise = np.zeros((self._room.slots, shard.local_vocab), np.float32)
        keys = position_keys(job.keys[samples], job.lengths[samples])
        noise[busy] = gumbel(keys, shard.first_token, shard.local_vocab)
        return noise

    def _step(self, job: Job) -> None:
        busy = np.flatnonzero(self._sample != IDLE)
        samples = self._sample[busy]
        made = job.lengths[samples]
        banned = np.zeros(self._room.slots, np.float32)
        banned[busy] = made < self._settings.min_tokens
        inputs = (self._tokens, self._positions, self._noise(job, busy), banned)
        drawn, logps = (out.asnumpy() for out in self._decode(*map(Tensor, inputs)))
        job.tokens[samples, made], job.logps[samples, made] = drawn[busy], logps[busy]
        job.lengths[samples] += 1
        job.stopped[samples] = np.isin(drawn[busy], self._settings.stop_ids)
        ended = (job.stopped[samples] > 0) | (job.lengths[samples] == job.limits[samples])
        self._tokens[busy] = drawn[busy]
        self._positions[busy[~ended]] += 1
        self._sample[busy[ended]] = IDLE
