"""The generator in plain operations: every slot has a full cache, and groups of free slots are refilled in Python.

What every device has, and what faster kernels are held to. Computes all slots at every step, in use or not; a prompt's
samples enter together, so that it is computed once. A call makes one token of every slot, so that a device may launch
its kernels as one, and reads caches to one of a few lengths, as the longest sample needs; the host chooses the token
among the candidates that the graph gives (sampling.py).

The cache of a layer is one array [slots * K * S, D]; row (slot * K + head) * S + position. `B` slots, `S` cache
length; other letters as in models/decoder.py.
"""

from __future__ import annotations

from collections import deque
from functools import cache, partial
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from mindgrpo.backend.contract import DECODE, Backend, Pool
from mindgrpo.backend.dtypes import Dtype
from mindgrpo.backend.kernels.rollout import GenerationBatch
from mindgrpo.backend.kernels.shapes import NEVER, SamplingParams
from mindgrpo.models.decoder import Embedding, Head, Layer, Rotary
from mindgrpo.models.shard import Shard
from mindgrpo.rollout.embedded.kv_cache import KVCacheConfig, KVCacheSizes, read_length
from mindgrpo.rollout.embedded.sampling import Candidates, Drawn, draw
from mindgrpo.rollout.engine import RolloutStats
from mindgrpo.rollout.noise import position_keys

IDLE = -1


class Decode(nn.Cell):
    """(tokens int32 [B], positions int32 [B], keys int32 [B, 2], banned float32 [B]) -> the candidates of every slot's
    next token, as sampling.Candidates gives them.

    `keys` are the noise's, the lower and the upper half of each. The same call again gives the same: what it writes to
    the cache is a function of its inputs.
    """

    def __init__(
        self,
        shard: Shard,
        caches: list[tuple[Parameter, Parameter]],
        slots: int,
        length: int,
        read: int,
        sampling: SamplingParams,
        seen: Parameter | None,
        takes_all: bool = False,
    ) -> None:
        """`read` of a slot's `length` positions are read; `takes_all` as in sampling.Candidates."""
        super().__init__()
        heads = shard.attended_heads()
        attends = [shard.kernels.cached_attention(heads, *cache, read) for cache in caches]
        self.embed = Embedding(shard)
        self.layers = _layers(shard, attends)
        self.head = Head(shard)
        first, vocabulary, group = shard.first_token, shard.local_vocab, shard.group
        self.candidates = Candidates(sampling, vocabulary, first, group, shard.kernels, takes_all)
        rotary = Rotary(shard, length)
        self.rotary_of = rotary.of_layer
        self.tables = tuple(Tensor(table) for table in rotary.tables)
        self.angles = shard.kernels.cached_angles(heads)
        self.order = Tensor([list(range(length))], ms.int32)
        starts = np.arange(slots * shard.kv_heads, dtype=np.int32) * length
        self.row_starts = Tensor(starts.reshape(slots, shard.kv_heads))
        self.penalises = seen is not None
        self.seen = seen
        self.ids = Tensor([list(range(first, first + vocabulary))], ms.int32)

    def construct(self, tokens: Any, positions: Any, keys: Any, banned: Any) -> Any:
        at = ops.expand_dims(positions, 1)
        past = (self.order <= at).astype(ms.float32)
        mask = ops.expand_dims((past - 1.0) * -NEVER, 1)
        rows = (self.row_starts + at).reshape(-1)
        angles = []
        for table in self.tables:
            angles.append(self.angles(ops.expand_dims(ops.gather(table, positions, 0), 1)))
        x = self.embed(tokens)
        added = x
        for i in range(len(self.layers)):
            x, added = self.layers[i](x, added, (mask, angles[self.rotary_of[i]], rows))
        logits = self.head(x + added)
        seen = logits
        if self.penalises:
            fresh = ops.equal(ops.expand_dims(tokens, 1), self.ids).astype(ms.float32)
            seen = ops.assign(self.seen, ops.maximum(self.seen, fresh))
        return self.candidates(logits, keys, banned, seen)


class Prefill(nn.Cell):
    """Writes keys and values of prompts [P, T] into the cache.

    `source` int32 [C] says which prompt each of C slots gets; `cache_rows` int32 [C * K * T] where it goes.
    """

    def __init__(
        self, shard: Shard, caches: list[tuple[Parameter, Parameter]], length: int
    ) -> None:
        super().__init__()
        attends = [
            shard.kernels.prefill_attention(shard.attended_heads(), *cache) for cache in caches
        ]
        self.embed = Embedding(shard)
        self.layers = _layers(shard, attends)
        rotary = Rotary(shard, length)
        self.rotary_of = rotary.of_layer
        self.tables = tuple(Tensor(table[:, None, :]) for table in rotary.tables)
        causal = np.tril(np.ones((1, 1, length, length), np.float32))
        self.mask = Tensor((causal - 1.0) * np.float32(-NEVER))

    def construct(self, tokens: Any, source: Any, cache_rows: Any) -> Any:
        angles = []
        for table in self.tables:
            angles.append(ops.tile(table, (tokens.shape[0], 1, 1)))
        x = self.embed(tokens.reshape(-1))
        added = x
        for i in range(len(self.layers)):
            context = (self.mask, angles[self.rotary_of[i]], source, cache_rows)
            x, added = self.layers[i](x, added, context)
        # What follows the last keys and values is no part of any result, so the compiler leaves it out.
        return source


class MarkSeen(nn.Cell):
    """(marks float32 [B, V], fresh float32 [B, 1]) -> anything; slots with fresh 1 have seen exactly their marks."""

    def __init__(self, seen: Parameter) -> None:
        super().__init__()
        self.seen = seen

    def construct(self, marks: Any, fresh: Any) -> Any:
        return ops.assign(self.seen, ops.where(fresh > 0, marks, self.seen))


def _layers(shard: Shard, attends: list[nn.Cell]) -> nn.CellList:
    shard = shard.sharing_cells()
    pairs = zip(shard.layers, attends, strict=True)
    return nn.CellList([Layer(shard, index, attend) for index, attend in pairs])


class PlainDecoder:
    """Runs jobs through `cache_config.slots` slots, each with a cache for the longest prompt and completion."""

    def __init__(
        self, shard: Shard, backend: Backend, sampling: SamplingParams, cache_config: KVCacheConfig
    ) -> None:
        self._shard, self._sampling, self._cache_config = shard, sampling, cache_config
        self._progress = partial(backend.health.progress, "samples")
        self._length = cache_config.max_prompt + cache_config.max_tokens
        self._prompts_at_once = cache_config.prompts_at_once
        shape = (cache_config.slots * shard.kv_heads * self._length, shard.config.head_dim)
        size = shape[0] * shape[1]
        count = 2 * len(shard.layers)
        sizes = KVCacheSizes.plain(cache_config, len(shard.layers), shard.heads())
        # Processors have no operations that attend in bfloat16.
        dtype: Dtype = "float32" if backend.shares_memory else backend.compute_dtype
        pool = backend.pool(sizes.cache, dtype=dtype)
        self.pools: list[Pool] = [pool]
        self.weight_pools: list[Pool] = []
        buffers = [pool.parameter(f"cache{i}", i * size, shape) for i in range(count)]
        caches = list(zip(buffers[::2], buffers[1::2], strict=True))
        self._mark: Any = None
        seen = None
        if sampling.repetition_penalty != 1.0:
            room = (cache_config.slots, shard.local_vocab)
            self.pools.append(backend.pool(room[0] * room[1]))
            seen = self.pools[-1].parameter("seen", 0, room)
            self._mark = backend.graph(MarkSeen(seen), "prompts' tokens")

        def decoder(read: int, sampling: SamplingParams, takes_all: bool) -> Any:
            room = (cache_config.slots, self._length, read)
            cell = Decode(shard, caches, *room, sampling, seen, takes_all)
            return backend.graph(cell, DECODE)

        # One for each length and sampling, and one more for tokens that are no candidates.
        self._decoder = cache(decoder)
        self._prefill = backend.graph(Prefill(shard, caches, cache_config.max_prompt), "prompts")

    def weights_changed(self) -> None:
        """Does nothing: it reads the weights themselves."""

    def run(self, batch: GenerationBatch, sampling: SamplingParams) -> RolloutStats:
        """Runs the job; the sampling's numbers are part of a graph, so other sampling compiles another one."""
        if sampling.repetition_penalty != 1.0 and self._mark is None:
            raise ValueError("this generator has no room for the tokens that a penalty has to know")
        self._sampling = sampling
        slots = self._cache_config.slots
        self._sample = np.full(slots, IDLE)
        self._tokens, self._positions = np.zeros(slots, np.int32), np.zeros(slots, np.int32)
        waiting = deque(self._groups(batch))
        steps = prompt_tokens = 0
        while waiting or (self._sample != IDLE).any():
            prompt_tokens += self._admit(batch, waiting)
            self._decode_some(batch)
            steps += 1
            left = sum(map(len, waiting)) + int((self._sample != IDLE).sum())
            self._progress(len(batch.limits) - left, len(batch.limits))
        rows = steps * slots
        return RolloutStats(int(batch.lengths.sum()), rows, rows, prompt_tokens)

    def _groups(self, batch: GenerationBatch) -> list[list[int]]:
        """Returns samples that enter together: of one prompt, and no more than the prompt graph copies it to."""
        most = min(self._cache_config.slots, self._cache_config.group)
        groups: list[list[int]] = []
        for prompt in range(len(batch.prompts)):
            samples = np.flatnonzero(batch.prompt_of == prompt).tolist()
            groups += [samples[i : i + most] for i in range(0, len(samples), most)]
        return groups

    def _admit(self, batch: GenerationBatch, waiting: deque[list[int]]) -> int:
        """Gives free slots to the groups that fit; returns the tokens of their prompts."""
        free = np.flatnonzero(self._sample == IDLE).tolist()
        taken: list[tuple[np.ndarray, list[int]]] = []
        while waiting and len(waiting[0]) <= len(free):
            samples = waiting.popleft()
            prompt = batch.prompts[batch.prompt_of[samples[0]]]
            slots, free = free[: len(samples)], free[len(samples) :]
            taken.append((prompt, slots))
            self._sample[slots] = samples
            self._tokens[slots], self._positions[slots] = prompt[-1], len(prompt) - 1
        for start in range(0, len(taken), self._prompts_at_once):
            self._fill(taken[start : start + self._prompts_at_once])
        self._mark_seen(taken)
        return sum(len(prompt) for prompt, _ in taken)

    def _fill(self, part: list[tuple[np.ndarray, list[int]]]) -> None:
        at_once, cache_config = self._prompts_at_once, self._cache_config
        tokens = np.zeros((at_once, cache_config.max_prompt), np.int32)
        for index, (prompt, _) in enumerate(part):
            tokens[index, : len(prompt)] = prompt
        pairs = [(index, slot) for index, (_, slots) in enumerate(part) for slot in slots]
        # A short part writes its last slot several times: the same bytes, and no other shape to compile.
        pairs += [pairs[-1]] * (at_once * cache_config.group - len(pairs))
        source = np.array([index for index, _ in pairs], np.int32)
        rows = self._cache_rows(np.array([slot for _, slot in pairs], np.int64))
        self._prefill(Tensor(tokens), Tensor(source), Tensor(rows))

    def _cache_rows(self, slots: np.ndarray) -> np.ndarray:
        kv = self._shard.kv_heads
        heads = slots[:, None] * kv + np.arange(kv)
        rows = heads[:, :, None] * self._length + np.arange(self._cache_config.max_prompt)
        return rows.reshape(-1).astype(np.int32)

    def _mark_seen(self, taken: list[tuple[np.ndarray, list[int]]]) -> None:
        if self._mark is None or not taken:
            return
        first, count = self._shard.first_token, self._shard.local_vocab
        marks = np.zeros((self._cache_config.slots, count), np.float32)
        fresh = np.zeros((self._cache_config.slots, 1), np.float32)
        for prompt, slots in taken:
            own = prompt[(prompt >= first) & (prompt < first + count)] - first
            marks[np.array(slots)[:, None], own] = 1.0
            fresh[slots] = 1.0
        self._mark(Tensor(marks), Tensor(fresh))

    def _decode_some(self, batch: GenerationBatch) -> None:
        """Draws the next token of all samples in slots."""
        slots, busy = self._cache_config.slots, np.flatnonzero(self._sample != IDLE)
        samples = self._sample[busy]
        made = batch.lengths[samples]
        banned = np.zeros(slots, np.float32)
        banned[busy] = made < self._sampling.min_tokens
        keys = np.zeros(slots, np.uint64)
        keys[busy] = position_keys(batch.keys[samples], made)
        drawn = self._draw(keys, banned, takes_all=False)
        if not drawn.is_complete[busy].all():
            drawn = self._draw(keys, banned, takes_all=True)
        batch.tokens[samples, made] = drawn.tokens[busy]
        batch.logps[samples, made] = drawn.logps[busy]
        batch.lengths[samples] += 1
        batch.stopped[samples] = np.isin(drawn.tokens[busy], self._sampling.stop_ids)
        ended = (batch.stopped[samples] > 0) | (batch.lengths[samples] == batch.limits[samples])
        self._tokens[busy] = drawn.tokens[busy]
        self._positions[busy[~ended]] += 1
        # What ends frees its slot.
        self._sample[busy[ended]] = IDLE

    def _draw(self, keys: np.ndarray, banned: np.ndarray, takes_all: bool) -> Drawn:
        inputs = (self._tokens, self._positions, keys.view(np.int32).reshape(-1, 2), banned)
        last = int(self._positions[self._sample != IDLE].max())
        # What is needed for few tokens is compiled once.
        read = self._length if takes_all else read_length(self._length, last)
        columns = self._decoder(read, self._sampling, takes_all)(*map(Tensor, inputs))
        return draw(self._sampling, columns.asnumpy(), keys, self._shard.local_vocab)
