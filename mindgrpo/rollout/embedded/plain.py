"""The generator in plain operations: slots read pages of a cache, and groups of free slots are refilled in Python.

What every device has, and what faster kernels are held to. Computes all slots at every step, in use or not; a prompt's
samples enter together, so that it is computed and stored once. A call makes one token of every slot, so that a device
may launch its kernels as one, and reads slots to one of a few lengths, as the longest sample needs; the host chooses
the token among the candidates that the graph gives (sampling.py).

The cache of a layer is one array [pages * K * P, D]; row (page * K + head) * P + position, of pages of P positions.
Which slot has which pages is an input of each call, so nothing is compiled anew for it. `B` slots, `S` positions that a
slot reads; other letters as in models/decoder.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from mindgrpo.algorithm.image_tokens import AXES, ImageFeatures
from mindgrpo.backend.contract import DECODE, Backend, Pool
from mindgrpo.backend.dtypes import Dtype
from mindgrpo.backend.kernels.rollout import GenerationBatch
from mindgrpo.backend.kernels.shapes import NEVER, SamplingParams
from mindgrpo.models.decoder import Embedding, Head, Layer, Rotary
from mindgrpo.models.rotary import PositionAngles
from mindgrpo.models.shard import Shard, routing
from mindgrpo.rollout.embedded.drafts import DraftHistory, Drafts
from mindgrpo.rollout.embedded.kv_cache import KVCacheConfig, KVCacheSizes, read_length
from mindgrpo.rollout.embedded.pages import SPARE, PageTable
from mindgrpo.rollout.embedded.sampling import Candidates, Drawn, draw
from mindgrpo.rollout.engine import RolloutStats
from mindgrpo.rollout.noise import position_keys

IDLE = -1
# Idle rows are computed anyway, so that a guess costs the host's time alone.
LEAST_RIGHT = 1 / 8


class Decode(nn.Cell):
    """(tokens int32 [B], positions int32 [B], cache_rows int32 [B K], pages int32 [B K, S / P], keys int32 [B, 2],
    banned float32 [B]) -> the candidates of every slot's next token, as sampling.Candidates gives them.

    Of models that see images, `turned` int32 [B] follow, the positions of rotary embeddings.

    A token's keys and values go to `cache_rows`, and it sees what `pages` have up to its position. `keys` are the
    noise's, the lower and the upper half of each. The same call again gives the same: what it writes to the cache is a
    function of its inputs. If it `records_routes`, the tokens' experts int32 [layers, B, K] follow.
    """

    def __init__(
        self,
        shard: Shard,
        caches: list[tuple[Parameter, Parameter]],
        read: int,
        sampling: SamplingParams,
        seen: Parameter | None,
        takes_all: bool = False,
        records_routes: bool = False,
    ) -> None:
        """`read` positions of each slot are read; `takes_all` as in sampling.Candidates."""
        super().__init__()
        self.records_routes = records_routes
        self.recorded = _recorded(shard, records_routes)
        heads = shard.cached_heads()
        attends = [shard.kernels.cached_attention(heads, *cache) for cache in caches]
        self.embed = Embedding(shard)
        self.layers = _layers(shard, attends)
        self.head = Head(shard)
        first, vocabulary, group = shard.first_token, shard.local_vocab, shard.group
        self.candidates = Candidates(sampling, vocabulary, first, group, shard.kernels, takes_all)
        rotary = Rotary(shard, read, is_cached=True)
        self.rotary_of = rotary.of_layer
        self.tables = tuple(Tensor(table) for table in rotary.tables)
        self.angles = shard.kernels.cached_angles(heads)
        self.order = Tensor([list(range(read))], ms.int32)
        self.kv, self.read = heads.kv, read
        self.penalises, self.is_tied = seen is not None, shard.config.tie_word_embeddings
        self.seen = seen
        self.ids = Tensor([list(range(first, first + vocabulary))], ms.int32)

    def construct(
        self,
        tokens: Any,
        positions: Any,
        cache_rows: Any,
        pages: Any,
        keys: Any,
        banned: Any,
        turned: Any = None,
    ) -> Any:
        if turned is None:
            turned = positions
        past = ops.cast(self.order <= ops.expand_dims(positions, 1), ms.float32)
        mask = ops.expand_dims((past - 1.0) * -NEVER, 1)
        if self.kv > 1:
            mask = ops.tile(mask, (1, self.kv, 1)).reshape(-1, 1, self.read)
        angles = []
        for table in self.tables:
            angles.append(self.angles(ops.expand_dims(ops.gather(table, turned, 0), 1)))
        # Of a tied table that is read both before and behind writes to the cache, MindSpore would make a copy.
        table = ops.stop_gradient(self.head.table)
        x = self.embed.rows(tokens, table if self.is_tied else self.embed.table)
        added, routes = x, []
        for i in range(len(self.layers)):
            context = (mask, angles[self.rotary_of[i]], cache_rows, pages)
            made = self.layers[i](x, added, context)
            x, added = made[0], made[1]
            if self.recorded[i]:
                routes.append(made[2][0])
        logits = self.head.logits(x + added, table)
        seen = logits
        if self.penalises:
            fresh = ops.cast(ops.equal(ops.expand_dims(tokens, 1), self.ids), ms.float32)
            seen = ops.assign(self.seen, ops.maximum(self.seen, fresh))
        candidates = self.candidates(logits, keys, banned, seen)
        if self.records_routes:
            return candidates, ops.stack(routes)
        return candidates


class Prefill(nn.Cell):
    """Writes keys and values of prompts int32 [N / T, T] into the cache: rows `source` int32 [C] of [N K, D], token by
    token, go to `cache_rows` int32 [C]. If it `records_routes`, it returns the tokens' experts int32 [layers, N, K].

    Of models that see images, angles float32 [N, 1, 2 D] and features [N, H] follow, as in decoder.StageInputs.
    """

    def __init__(
        self,
        shard: Shard,
        caches: list[tuple[Parameter, Parameter]],
        length: int,
        records_routes: bool = False,
    ) -> None:
        super().__init__()
        self.records_routes = records_routes
        self.recorded = _recorded(shard, records_routes)
        attends = [
            shard.kernels.prefill_attention(shard.cached_heads(), *cache) for cache in caches
        ]
        self.embed = Embedding(shard)
        self.layers = _layers(shard, attends)
        rotary = Rotary(shard, length, is_cached=True)
        self.rotary_of = rotary.of_layer
        self.tables = tuple(Tensor(table[:, None, :]) for table in rotary.tables)
        causal = np.tril(np.ones((1, 1, length, length), np.float32))
        self.mask = Tensor((causal - 1.0) * np.float32(-NEVER))

    def construct(
        self, tokens: Any, source: Any, cache_rows: Any, turns: Any = None, features: Any = None
    ) -> Any:
        if turns is None:
            angles = []
            for table in self.tables:
                angles.append(ops.tile(table, (tokens.shape[0], 1, 1)))
            x = self.embed(tokens.reshape(-1))
        else:
            angles = [turns]
            x = self.embed.with_features(tokens.reshape(-1), features)
        added, routes = x, []
        for i in range(len(self.layers)):
            context = (self.mask, angles[self.rotary_of[i]], source, cache_rows)
            made = self.layers[i](x, added, context)
            x, added = made[0], made[1]
            if self.recorded[i]:
                routes.append(made[2][0])
        if self.records_routes:
            return ops.stack(routes)
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
    layers = [Layer(shard, index, attend, chooses=True, is_cached=True) for index, attend in pairs]
    return nn.CellList(layers)


def _recorded(shard: Shard, records_routes: bool) -> tuple[bool, ...]:
    """Returns whether the experts of each of the shard's layers are recorded."""
    return tuple(records_routes and shard.config.layers[i].has_experts for i in shard.layers)


@dataclass
class DecodeRows:
    """What the rows of a step compute, int [rows] each: the `column` of a `sample` (IDLE: nothing) in `slot`, from the
    `token` before it at `position`; tokens `ahead` of the sample's own row are guessed.
    """

    sample: np.ndarray
    slot: np.ndarray
    token: np.ndarray
    position: np.ndarray
    column: np.ndarray
    ahead: np.ndarray

    @classmethod
    def idle(cls, count: int, slots: int) -> DecodeRows:
        """Makes rows that compute nothing for any of the slots; their keys and values go to the spare page."""
        token, position, column, ahead = (np.zeros(count, np.int32) for _ in range(4))
        return cls(np.full(count, IDLE), np.full(count, slots), token, position, column, ahead)


class PlainDecoder:
    """Runs jobs through `cache_config.slots` slots, with as many samples at a time as have pages."""

    def __init__(
        self,
        shard: Shard,
        backend: Backend,
        sampling: SamplingParams,
        cache_config: KVCacheConfig,
        images: ImageFeatures | None = None,
    ) -> None:
        self._shard, self._sampling, self._cache_config = shard, sampling, cache_config
        self._images = images
        if images is not None:
            self._angles = PositionAngles(shard.config, cache_config.max_prompt)
        self._progress = partial(backend.health.progress, "samples")
        # Called between decode steps.
        self.report: Callable[[], None] = lambda: None
        # A penalty counts what a slot has seen, which a wrong guess is no part of.
        can_draft = cache_config.draft_rows != 0 and sampling.repetition_penalty == 1.0
        self._rows = cache_config.rows if can_draft else cache_config.slots
        self._history = DraftHistory(cache_config.draft_history) if can_draft else None
        self._length = cache_config.longest
        self._prompts_at_once = cache_config.prompts_at_once
        self._kv_heads = (heads := shard.cached_heads()).kv
        rows = cache_config.pages * cache_config.page_size * heads.kv
        shape = (rows, heads.dim)
        size = shape[0] * shape[1]
        count = 2 * len(shard.layers)
        sizes = KVCacheSizes.plain(cache_config, len(shard.layers), heads)
        # Processors have no operations that attend in bfloat16.
        dtype: Dtype = "float32" if backend.shares_memory else backend.compute_dtype
        pool = backend.pool(sizes.cache, dtype=dtype)
        self.pools: list[Pool] = [pool]
        self.weight_pools: list[Pool] = []
        buffers = [pool.parameter(f"cache{i}", i * size, shape) for i in range(count)]
        caches = list(zip(buffers[::2], buffers[1::2], strict=True))
        seen = None
        if sampling.repetition_penalty != 1.0:
            room = (cache_config.slots, shard.local_vocab)
            self.pools.append(backend.pool(room[0] * room[1]))
            seen = self.pools[-1].parameter("seen", 0, room)

        def decoder(read: int, sampling: SamplingParams, takes_all: bool, records: bool) -> Any:
            cell = Decode(shard, caches, read, sampling, seen, takes_all, records)
            return backend.graph(cell, DECODE)

        def mark() -> Any:
            return backend.graph(MarkSeen(seen), "prompts' tokens")

        def prefill(records: bool) -> Any:
            return backend.graph(
                Prefill(shard, caches, cache_config.max_prompt, records), "prompts"
            )

        # One for each length and sampling, and one more for tokens that are no candidates.
        self._decoder, self._prefill = cache(decoder), cache(prefill)
        self._mark = None if seen is None else cache(mark)

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
        # What is added to positions behind a prompt with images.
        self._shifts = np.zeros(slots + 1, np.int32)
        self._drafts = None
        if self._history is not None:
            self._drafts = Drafts(batch, self._history, LEAST_RIGHT)
        self._pages = PageTable(self._cache_config, self._kv_heads)
        self._routes = _Routes(self._shard, batch)
        waiting = deque(self._groups(batch))
        steps = prompt_tokens = self._drafted = self._accepted = 0
        while waiting or (self._sample != IDLE).any():
            prompt_tokens += self._admit(batch, waiting)
            self._decode_some(batch)
            steps += 1
            left = sum(map(len, waiting)) + int((self._sample != IDLE).sum())
            self._progress(len(batch.limits) - left, len(batch.limits))
            self.report()
        self._routes.give(batch)
        if self._drafts is not None:
            self._drafts.end()
        rows = steps * self._rows
        tokens = int(batch.lengths.sum())
        return RolloutStats(tokens, rows, rows, prompt_tokens, steps, self._drafted, self._accepted)

    def _groups(self, batch: GenerationBatch) -> list[list[int]]:
        """Returns samples that enter together: of one prompt, and no more than the prompt graph copies it to."""
        most = min(self._cache_config.slots, self._cache_config.group)
        groups: list[list[int]] = []
        for prompt in range(len(batch.prompts)):
            samples = np.flatnonzero(batch.prompt_of == prompt).tolist()
            groups += [samples[i : i + most] for i in range(0, len(samples), most)]
        return groups

    def _admit(self, batch: GenerationBatch, waiting: deque[list[int]]) -> int:
        """Gives free slots and pages to the groups that fit; returns the tokens of their prompts."""
        free = np.flatnonzero(self._sample == IDLE).tolist()
        taken: list[tuple[np.ndarray, list[int]]] = []
        while waiting and len(waiting[0]) <= len(free):
            prompt = batch.prompts[batch.prompt_of[waiting[0][0]]]
            limits = batch.limits[waiting[0]].tolist()
            if not self._pages.has_room(len(prompt), limits):
                break
            samples = waiting.popleft()
            slots, free = free[: len(samples)], free[len(samples) :]
            self._pages.enter(slots, len(prompt), limits)
            taken.append((prompt, slots))
            self._sample[slots] = samples
            self._tokens[slots], self._positions[slots] = prompt[-1], len(prompt) - 1
            if self._images is not None:
                self._shifts[slots] = self._images.table.positions(prompt)[1] - len(prompt)
        for start in range(0, len(taken), self._prompts_at_once):
            self._fill(taken[start : start + self._prompts_at_once])
        self._mark_seen(taken)
        return sum(len(prompt) for prompt, _ in taken)

    def _fill(self, part: list[tuple[np.ndarray, list[int]]]) -> None:
        longest = self._cache_config.max_prompt
        tokens = np.zeros((self._prompts_at_once, longest), np.int32)
        # What a short part leaves over writes a row to the spare page again and again: no other shape to compile.
        count = self._cache_config.prompt_copies * self._kv_heads
        source, rows = np.zeros(count, np.int32), np.full(count, SPARE, np.int32)
        end = 0
        for index, (prompt, slots) in enumerate(part):
            tokens[index, : len(prompt)] = prompt
            copies = self._pages.prompt_copies(index, longest, len(prompt), slots)
            begin, end = end, end + len(copies[0])
            source[begin:end], rows[begin:end] = copies
        inputs = [tokens, source, rows]
        if self._images is not None:
            positions = np.zeros((*tokens.shape, AXES), np.int32)
            for index, (prompt, _) in enumerate(part):
                positions[index, : len(prompt)] = self._images.table.positions(prompt)[0]
            angles = self._angles.of(positions)
            inputs.append(angles.reshape(tokens.size, 1, -1))
            inputs.append(self._images.rows(tokens.reshape(-1)))
        made = self._prefill(self._routes.are_wanted)(*map(Tensor, inputs))
        if self._routes.are_wanted:
            samples = [int(self._sample[slots[0]]) for _, slots in part]
            self._routes.take_prompts(made.asnumpy(), samples, longest)

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
        self._mark()(Tensor(marks), Tensor(fresh))

    def _decode_some(self, batch: GenerationBatch) -> None:
        """Draws the next tokens of all samples in slots: one each, and one more for each guess that is right."""
        rows = self._deal(batch)
        used = np.flatnonzero(rows.sample != IDLE)
        samples, columns = rows.sample[used], rows.column[used]
        banned = np.zeros(len(rows.sample), np.float32)
        banned[used] = columns < self._sampling.min_tokens
        keys = np.zeros(len(rows.sample), np.uint64)
        keys[used] = position_keys(batch.keys[samples], columns)
        drawn, routes = self._draw(rows, keys, banned, takes_all=False)
        if not drawn.is_complete[used].all():
            drawn, routes = self._draw(rows, keys, banned, takes_all=True)
        own = used[rows.ahead[used] == 0]
        goes_on = self._take(batch, rows, own, drawn, routes)
        accepted = 0
        for ahead in range(1, int(rows.ahead.max()) + 1):
            at = used[rows.ahead[used] == ahead]
            slots = rows.slot[at]
            kept = at[goes_on[slots] & (rows.token[at] == self._tokens[slots])]
            goes_on = self._take(batch, rows, kept, drawn, routes)
            accepted += len(kept)
        if self._drafts is None:
            return
        if len(used) > len(own):
            self._drafts.checked(int((rows.ahead == 1).sum()), accepted)
            self._drafted += len(used) - len(own)
            self._accepted += accepted
        elif self._drafts.is_pausing:
            self._drafts.passed(len(own))

    def _deal(self, batch: GenerationBatch) -> DecodeRows:
        """Gives each sample its own row, and idle rows to guesses of what it says next."""
        slots, count = self._cache_config.slots, self._rows
        busy = np.flatnonzero(self._sample != IDLE)
        rows = DecodeRows.idle(count, slots)
        rows.sample[busy], rows.slot[busy] = self._sample[busy], busy
        rows.token[busy], rows.position[busy] = self._tokens[busy], self._positions[busy]
        rows.column[busy] = batch.lengths[self._sample[busy]]
        if self._drafts is None or self._drafts.is_pausing or len(busy) == count:
            return rows
        idle = np.flatnonzero(rows.sample == IDLE)
        guesses = self._drafts.guesses(self._sample[busy].tolist(), len(idle))
        counts = np.array([*map(len, guesses)])
        own, row_of = idle[: counts.sum()], np.repeat(busy, counts)
        if len(own):
            rows.ahead[own] = ahead = np.concatenate([np.arange(1, count + 1) for count in counts])
            rows.token[own] = [token for tokens in guesses for token in tokens]
            rows.sample[own], rows.slot[own] = self._sample[row_of], row_of
            rows.position[own] = rows.position[row_of] + ahead
            rows.column[own] = rows.column[row_of] + ahead
        return rows

    def _take(
        self,
        batch: GenerationBatch,
        rows: DecodeRows,
        at: np.ndarray,
        drawn: Drawn,
        routes: np.ndarray | None,
    ) -> np.ndarray:
        """Takes what the rows `at` have drawn, one of a sample; returns bool [slots], whose samples of these go on."""
        slots, samples, columns = rows.slot[at], rows.sample[at], rows.column[at]
        tokens = drawn.tokens[at]
        if routes is not None:
            self._routes.take(routes[:, at], samples, columns)
        batch.tokens[samples, columns], batch.logps[samples, columns] = tokens, drawn.logps[at]
        batch.lengths[samples] = columns + 1
        batch.stopped[samples] = np.isin(tokens, self._sampling.stop_ids)
        ended = (batch.stopped[samples] > 0) | (batch.lengths[samples] == batch.limits[samples])
        self._tokens[slots] = tokens
        self._positions[slots] = np.where(ended, 0, rows.position[at] + 1)
        # What ends frees its slot and its pages.
        self._sample[slots[ended]] = IDLE
        self._pages.leave(slots[ended].tolist())
        goes_on = np.zeros(self._cache_config.slots, bool)
        goes_on[slots[~ended]] = True
        return goes_on

    def _draw(
        self, rows: DecodeRows, keys: np.ndarray, banned: np.ndarray, takes_all: bool
    ) -> tuple[Drawn, np.ndarray | None]:
        """Returns what was drawn, and the experts [layers, rows, K] of what was computed for it, if wanted."""
        # What is needed for few tokens is compiled once.
        last = int(rows.position.max())
        read = self._length if takes_all else read_length(self._length, last)
        places = self._pages.cache_rows(rows.slot, rows.position)
        halves = keys.view(np.int32).reshape(-1, 2)
        pages = self._pages.pages(rows.slot, read)
        inputs = [rows.token, rows.position, places, pages, halves, banned]
        if self._images is not None:
            inputs.append(np.maximum(rows.position + self._shifts[rows.slot], 0))
        records = self._routes.are_wanted
        made = self._decoder(read, self._sampling, takes_all, records)(*map(Tensor, inputs))
        if self._drafts is not None:
            self._drafts.index()
        columns, routes = made if records else (made, None)
        drawn = draw(self._sampling, columns.asnumpy(), keys, self._shard.local_vocab)
        return drawn, None if routes is None else routes.asnumpy()


class _Routes:
    """The experts of a job's tokens, if it wants them: of prompts by their number, of samples by number and column."""

    def __init__(self, shard: Shard, batch: GenerationBatch) -> None:
        self._batch, moe = batch, shard.config.moe
        self.are_wanted = batch.records_routes and moe is not None
        if moe is None or not self.are_wanted:
            return
        self._dtype = routing(moe).dtype
        layers = sum(kind.has_experts for kind in shard.config.layers)
        self._of_samples = np.zeros((*batch.tokens.shape, layers, moe.per_token), self._dtype)
        self._of_prompts: dict[int, np.ndarray] = {}

    def take_prompts(self, routes: np.ndarray, samples: list[int], length: int) -> None:
        """Takes `routes` [layers, N, K] of prompts of `length` tokens each, whose first samples are `samples`."""
        for index, sample in enumerate(samples):
            prompt = int(self._batch.prompt_of[sample])
            end = len(self._batch.prompts[prompt]) - 1
            own = routes[:, index * length :][:, :end]
            self._of_prompts[prompt] = np.moveaxis(own, 0, 1).astype(self._dtype)

    def take(self, routes: np.ndarray, samples: np.ndarray, columns: np.ndarray) -> None:
        self._of_samples[samples, columns] = np.moveaxis(routes, 0, 1)

    def give(self, batch: GenerationBatch) -> None:
        if self.are_wanted:
            batch.arrays["routes"] = [
                (self._of_prompts[prompt], self._of_samples[i, :length].copy())
                for i, (prompt, length) in enumerate(
                    zip(batch.prompt_of.tolist(), batch.lengths.tolist(), strict=True)
                )
            ]
