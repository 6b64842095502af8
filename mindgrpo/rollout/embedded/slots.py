"""Continuous batching over the backend's slots, in calls that fill prompts' prefix blocks and calls that decode.

A prompt is computed once for all its samples; a slot that becomes free takes the next sample inside the call. Samples
whose keys are still in the cache continue without their prompt: a turn that follows decodes what was written in
between, as many tokens a step as there are rows, where its keys would else be computed again as a prompt; the cheaper
of the two by an estimate is done. Rows that no sample needs check drafts (drafts.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from mindgrpo.algorithm.image_tokens import ImageFeatures
from mindgrpo.backend.contract import Backend, HostArrays, Pool
from mindgrpo.backend.dtypes import ITEM_BYTES
from mindgrpo.backend.kernels.rollout import (
    GenerationBatch,
    KeptRow,
    KVCacheLayout,
    LayerWeights,
    LocalModelShape,
    Memory,
    TokenWeights,
)
from mindgrpo.backend.kernels.shapes import SamplingParams
from mindgrpo.models.rotary import PositionAngles, rotary_table
from mindgrpo.models.shard import Shard, cached_heads, local_inner, local_latents
from mindgrpo.rollout.embedded.drafts import FREE_ROWS, DraftHistory, Drafts
from mindgrpo.rollout.embedded.kv_cache import KVCacheConfig, KVCacheSizes
from mindgrpo.rollout.engine import RolloutStats
from mindgrpo.weights.expert_files import BIAS

# A decode step of fewer rows takes as long as one of so many, and a row of it as long as a token of a prompt
# (scripts/bench/conversations.py).
FULL_STEP_ROWS = 32
# Tokens that one call makes of every slot, at most: in between, signals are handled and progress is shown.
DECODE_STEPS = 8
# Drafts pay for their rows, of at most drafts.FREE_ROWS in a step, if so many tokens a check are right, and for the
# host's time if a step reads so many bytes of weights (scripts/bench/drafts.py).
LEAST_RIGHT, LEAST_WEIGHTS = 0.25, 32 << 20


@dataclass(frozen=True)
class KeptSample:
    """`context` int32 [n] is its prompt and everything behind it; its last token has no keys yet."""

    row: KeptRow
    context: np.ndarray


@dataclass(frozen=True)
class ResumedBatch:
    """`batch` as kernels take it: columns count from a sample's first token, and those before `known` are known."""

    batch: GenerationBatch
    rows: list[KeptRow]
    known: np.ndarray

    def give(self, target: GenerationBatch) -> None:
        """Copies what was drawn to the batch that was asked for."""
        for i, known in enumerate(self.known.tolist()):
            count = int(self.batch.lengths[i]) - known
            for name in ("tokens", "logps"):
                drawn = getattr(self.batch, name)[i, known : known + count]
                getattr(target, name)[i, :count] = drawn
            target.lengths[i], target.stopped[i] = count, self.batch.stopped[i]


def resumed(
    kept: Mapping[int, KeptSample], batch: GenerationBatch, slot_size: int, most_rows: int = 0
) -> ResumedBatch | None:
    """Returns None unless every sample of the batch continues from its keys, has room, and that is the cheaper way.

    A decode step has a row a sample, or `most_rows` for what is known of them.
    """
    rows: list[KeptRow] = []
    for i, sample in enumerate(batch.samples):
        one, prompt = kept.get(sample), batch.prompts[batch.prompt_of[i]]
        if one is None or not np.array_equal(prompt[: len(one.context)], one.context):
            return None
        rows.append(one.row)
    if not rows:
        return None
    lengths = np.array([len(batch.prompts[at]) for at in batch.prompt_of])
    known = lengths - np.array([row.shared + 1 for row in rows])
    limits = (known + batch.limits).astype(np.int32)
    own = np.array([row.own for row in rows])
    waiting = known - own
    if most_rows:
        steps, computed = -(-int(waiting.sum()) // most_rows), int(waiting.sum())
    else:
        steps, computed = int(waiting.max()), int(waiting.max()) * len(rows)
    if limits.max() > slot_size or max(computed, steps * FULL_STEP_ROWS) > lengths.sum():
        return None
    prompts = [batch.prompts[at] for at in batch.prompt_of]
    made = GenerationBatch.of(
        prompts,
        range(len(rows)),
        limits.tolist(),
        batch.keys,
        batch.samples,
        batch.records_routes,
    )
    for i, prompt in enumerate(prompts):
        made.tokens[i, own[i] : known[i]] = prompt[lengths[i] - (known[i] - own[i]) :]
    return ResumedBatch(made, rows, known.astype(np.int32))


def fits(batch: GenerationBatch, layout: KVCacheLayout) -> bool:
    """Returns whether every sample had a slot, and every prompt a prefix block, that no other one took later."""
    return len(batch.limits) <= layout.slots and len(batch.prompts) <= layout.prefix_blocks


def kept_after(
    batch: GenerationBatch, rows: list[KeptRow], target: GenerationBatch
) -> dict[int, KeptSample]:
    """Returns the kept samples by number, after `rows` have drawn `target`, with `own` counted anew."""
    samples = {}
    for i, sample in enumerate(batch.samples):
        prompt = batch.prompts[batch.prompt_of[i]]
        context = np.concatenate([prompt, target.tokens[i, : target.lengths[i]]])
        row, shared = rows[i], rows[i].shared
        own = len(context) - shared - 1
        samples[sample] = KeptSample(KeptRow(row.slot, row.prefix, shared, own), context)
    return samples


class SlotDecoder:
    """Runs jobs through the slots that the backend's kernels keep."""

    def __init__(
        self,
        shard: Shard,
        backend: Backend,
        sampling: SamplingParams,
        cache_config: KVCacheConfig,
        images: ImageFeatures | None = None,
    ) -> None:
        self._cache_config = cache_config
        self._images = images
        if images is not None:
            self._angles = PositionAngles(shard.config, cache_config.max_prompt)
        model_shape = _model_shape(shard)
        penalised = sampling.repetition_penalty != 1.0
        # What a slot has seen is known for one of its tokens at a time.
        self._most_rows = 0 if penalised else cache_config.rows
        self._drafts: Drafts | None = None
        self._history: DraftHistory | None = None
        if not penalised and self._may_draft(shard):
            self._history = DraftHistory(cache_config.draft_history)
        sizes = KVCacheSizes.of(cache_config, model_shape, penalised)
        cache = backend.pool(sizes.cache, dtype=backend.compute_dtype)
        work = backend.pool(sum(sizes.beside_cache))
        self.pools: list[Pool] = [cache, work]
        # What it keeps of the weights beside them.
        self.weight_pools: list[Pool] = []
        kernels = shard.kernels
        packed_bytes = sum(model_shape.packed_sizes(kernels.num_parts, kernels.head_parts))
        if packed_bytes:
            size = packed_bytes // ITEM_BYTES["bfloat16"]
            self.weight_pools.append(backend.pool(size, dtype="bfloat16"))
        self._shard, self._sizes = shard, sizes
        self._model_shape, self._sampling = model_shape, sampling
        self._progress = partial(backend.health.progress, "samples")
        # Called between decode steps.
        self.report: Callable[[], None] = lambda: None
        # By number of its prompt in the batch, the experts of all tokens of it but the last one.
        self._prompt_routes: dict[int, np.ndarray] = {}
        # By number, the samples that may continue from their keys, in slots of `_kept_slot_size`.
        self._kept: dict[int, KeptSample] = {}
        self._kept_slot_size = 0

    @cached_property
    def _slots(self) -> Any:
        """Returns the kernels, once there are weights for them."""
        cache, work = self.pools
        # Kernels that keep slots are the host's: its memory is the device's.
        with cache.on_host() as memory_of_cache, work.on_host() as memory_of_work:
            keys_and_values = memory_of_cache.view(0, (self._sizes.cache,))
            scratch, inputs, starts, seen, parked = _views(memory_of_work, self._sizes.beside_cache)
            memory = Memory(keys_and_values, scratch, inputs, starts, seen, None, parked)
        for pool in self.weight_pools:
            with pool.on_host() as memory_of_packed:
                size = pool.num_bytes // pool.itemsize
                memory = replace(memory, packed=memory_of_packed.view(0, (size,)))
        config, own = self._shard.config, self._cache_config
        nope_dim = None if config.latent is None else config.latent.rank
        rotary = rotary_table(config, own.max_prompt + own.max_tokens, nope_dim=nope_dim)
        return self._shard.kernels.slots(
            self._model_shape, self._sampling, rotary, own.slots, own.prompt_rows, memory
        )

    def _may_draft(self, shard: Shard) -> bool:
        if self._cache_config.draft_rows != "auto":
            return self._cache_config.draft_rows > 0
        # Each row has experts of its own, whose weights are read for it alone.
        return shard.config.moe is None and shard.weights.pool.num_bytes >= LEAST_WEIGHTS

    def weights_changed(self) -> None:
        """Registers the changed weights and forgets kept keys; to be called before it generates with them."""
        self._kept = {}
        with self._shard.weights.on_host() as arrays:
            layers = [_layer_weights(self._shard, i, arrays.tensors) for i in self._shard.layers]
            self._slots.take_weights(layers, _token_weights(self._shard, arrays.tensors))

    def run(self, batch: GenerationBatch, sampling: SamplingParams) -> RolloutStats:
        self._slots.use(sampling)
        again = resumed(self._kept, batch, self._kept_slot_size, self._most_rows)
        if again is not None:
            return self._resume(again, batch)
        self._kept = {}
        if self._history is not None:
            self._drafts = Drafts(batch, self._history, LEAST_RIGHT)
        lengths = [len(prompt) for prompt in batch.prompts]
        groups = np.bincount(batch.prompt_of, minlength=len(batch.prompts))
        # Samples that continue stay in their slots, where there is one for each.
        stays = self._cache_config.goes_on and len(batch.limits) <= self._cache_config.slots
        longest = sampling.max_tokens if stays else int(batch.limits.max())
        layout = self._cache_config.partition(lengths, groups.tolist(), longest)
        self._slots.start(batch, layout)
        waiting = deque(_by_prompt(batch.prompt_of, len(batch.prompts)))
        prompt_tokens = 0
        left = 1
        while left or waiting:
            if self._slots.waiting < layout.slots:
                prompt_tokens += self._bring_prompts(batch, layout, waiting)
            left = self._decode_some(batch, sum(len(samples) for samples in waiting))
        if self._drafts is not None:
            self._drafts.end()
        if batch.records_routes:
            batch.arrays["routes"] = [
                (self._prompt_routes[prompt], self._slots.routes(i, 0, length))
                for i, (prompt, length) in enumerate(
                    zip(batch.prompt_of.tolist(), batch.lengths.tolist(), strict=True)
                )
            ]
            self._prompt_routes = {}
        if stays and fits(batch, layout):
            at = zip(self._slots.kept(batch), batch.prompt_of, strict=True)
            rows = [KeptRow(slot, prefix, lengths[p] - 1, 0) for (slot, prefix), p in at]
            self._kept, self._kept_slot_size = kept_after(batch, rows, batch), layout.slot_size
        return self._stats(batch, layout.slots, prompt_tokens)

    def _resume(self, again: ResumedBatch, batch: GenerationBatch) -> RolloutStats:
        self._slots.resume(again.batch, again.rows, again.known)
        if self._history is not None:
            self._drafts = Drafts(again.batch, self._history, LEAST_RIGHT, again.known)
        while self._decode_some(batch, 0):
            pass
        again.give(batch)
        if batch.records_routes:
            batch.arrays["routes"] = [
                (self._slots.routes(i, row.own, int(again.batch.lengths[i])),)
                for i, row in enumerate(again.rows)
            ]
        # The others' slots are as they were.
        self._kept = {**self._kept, **kept_after(again.batch, again.rows, batch)}
        return self._stats(batch, len(again.rows), 0)

    def _decode_some(self, batch: GenerationBatch, num_waiting: int) -> int:
        """Decodes, and returns the samples that are left, but for those that wait for their prompts."""
        guesses = self._guesses()
        if guesses:
            right = self._slots.counts[-1]
            left = self._slots.decode(1, guesses)
            self._checked(guesses, self._slots.counts[-1] - right)
        else:
            ran = len(self._slots.running)
            left = self._slots.decode(DECODE_STEPS)
            if self._drafts is not None:
                self._drafts.passed(ran * DECODE_STEPS)
        self._progress(len(batch.limits) - left - num_waiting, len(batch.limits))
        self.report()
        return left

    def _guesses(self) -> list[list[int]]:
        """Returns guesses of each running sample, where a step has rows for them; [] where it has not."""
        drafts, running = self._drafts, self._slots.running.tolist()
        most = FREE_ROWS if self._cache_config.draft_rows == "auto" else self._most_rows
        free = most - len(running)
        if drafts is None or drafts.is_pausing or free < 1 or not running:
            return []
        drafts.index()
        return drafts.guesses(running, free)

    def _checked(self, guesses: Sequence[Sequence[int]], right: int) -> None:
        checks = sum(map(bool, guesses))
        if self._drafts is not None and checks:
            self._drafts.checked(checks, right)

    def _stats(self, batch: GenerationBatch, slots: int, prompt_tokens: int) -> RolloutStats:
        steps, rows, drafted, accepted = self._slots.counts
        tokens, places = int(batch.lengths.sum()), max(rows, steps * slots)
        return RolloutStats(tokens, rows, places, prompt_tokens, steps, drafted, accepted)

    def _bring_prompts(
        self, batch: GenerationBatch, layout: KVCacheLayout, waiting: deque[tuple[int, list[int]]]
    ) -> int:
        """Puts prompts into free prefix blocks and their samples into the queue; returns the prompt tokens computed."""
        free = np.flatnonzero(self._slots.users[: layout.prefix_blocks] == 0)
        brought: list[tuple[int, np.ndarray]] = []
        indices: list[int] = []
        for prefix in free[: len(waiting)].tolist():
            index, samples = waiting.popleft()
            indices.append(index)
            prompt = batch.prompts[index]
            brought.append((prefix, prompt))
            if self._images is not None:
                self._slots.shifts[prefix] = self._images.table.positions(prompt)[1] - len(prompt)
            for sample in samples:
                self._slots.enqueue(sample, prefix)
        if not brought:
            return 0
        routes = self._fill(brought, batch.records_routes)
        if routes is not None:
            ends = np.cumsum([len(prompt) - 1 for _, prompt in brought])
            self._prompt_routes |= zip(indices, np.split(routes, ends[:-1]), strict=True)
        return sum(len(prompt) for _, prompt in brought)

    def _fill(
        self, brought: list[tuple[int, np.ndarray]], records_routes: bool
    ) -> np.ndarray | None:
        """Computes prompts; returns the experts of all but the last tokens, one prompt after the other, if asked."""
        recorded: list[np.ndarray] = []
        prefix_blocks = np.concatenate(
            [np.full(len(p) - 1, prefix, np.int32) for prefix, p in brought]
        )
        seen = np.concatenate([np.arange(1, len(p), dtype=np.int32) for _, p in brought])
        tokens = np.concatenate([p[:-1] for _, p in brought] + [[p[-1] for _, p in brought]])
        starts = np.array([prefix for prefix, _ in brought], np.int32)
        angles = features = None
        if self._images is not None:
            positions = [self._images.table.positions(p)[0][:-1] for _, p in brought]
            angles = self._angles.of(np.concatenate(positions))
        size, keys = self._cache_config.prompt_rows, len(prefix_blocks)
        for begin in range(0, len(tokens), size):
            end = min(begin + size, len(tokens))
            rows = slice(begin, min(end, keys))
            first_inputs = starts[max(0, begin - keys) : max(0, end - keys)]
            own = tokens[begin:end]
            if self._images is not None:
                features = self._images.rows(own[own < 0])
            of_rows = None if angles is None else angles[rows]
            arrays = prefix_blocks[rows], seen[rows], first_inputs, of_rows, features
            self._slots.fill(own, *arrays)
            if records_routes:
                recorded.append(self._slots.prompt_routes())
        return np.concatenate(recorded) if records_routes else None


def _layer_weights(shard: Shard, index: int, tensors: Mapping[str, np.ndarray]) -> LayerWeights:
    layer, norms = f"model.layers.{index}.", shard.config.family.norms
    attention = layer + "self_attn."

    def in_float32(key: str) -> np.ndarray | None:
        return tensors[key].astype(np.float32, copy=False) if key in tensors else None

    def norm(name: str) -> np.ndarray:
        return tensors[f"{layer}{name}.weight"].astype(np.float32, copy=False)

    has_experts = shard.config.layers[index].has_experts
    bias = in_float32(f"{layer}mlp.{BIAS}")
    of_hidden = "qkv_proj.weight" if shard.config.latent is None else "qkv_a_proj.weight"
    mlp = layer + ("mlp.experts." if has_experts else "mlp.")
    return LayerWeights(
        norm(str(norms.attention_in)),
        tensors[attention + of_hidden],
        in_float32(attention + "qkv_proj.bias"),
        in_float32(attention + "q_norm.weight"),
        in_float32(attention + "k_norm.weight"),
        tensors[attention + "o_proj.weight"],
        in_float32(attention + "o_proj.bias"),
        norm(str(norms.mlp_in)),
        tensors[mlp + "gate_up_proj.weight"],
        tensors[mlp + "down_proj.weight"],
        in_float32(layer + "mlp.gate.weight"),
        # Added as the router of models/moe.py does.
        None if bias is None else bias[0] + bias[1] + bias[2],
        tensors.get(layer + "mlp.shared_experts.gate_up_proj.weight"),
        tensors.get(layer + "mlp.shared_experts.down_proj.weight"),
        in_float32(attention + "kv_a_layernorm.weight"),
        in_float32(attention + "q_a_layernorm.weight"),
        tensors.get(attention + "q_b_proj.weight"),
        in_float32(attention + "kv_b_proj.weight"),
    )


def _token_weights(shard: Shard, tensors: Mapping[str, np.ndarray]) -> TokenWeights:
    norm = tensors["model.norm.weight"].astype(np.float32, copy=False)
    return TokenWeights(norm, tensors[shard.head_key], tensors["model.embed_tokens.weight"])


def _model_shape(shard: Shard) -> LocalModelShape:
    config = shard.config
    return LocalModelShape(
        len(shard.layers),
        config.hidden_size,
        local_inner(config, shard.group.size),
        cached_heads(config, shard.group.size),
        shard.vocabulary(),
        config.rms_norm_eps,
        shard.group.size,
        shard.group.index,
        shard.group.kernel_id,
        shard.leaves,
        shard.experts(),
        local_latents(config),
    )


def _views(memory: HostArrays, sizes: Sequence[int]) -> Iterator[np.ndarray]:
    offset = 0
    for size in sizes:
        yield memory.view(offset, (size,))
        offset += size


def _by_prompt(prompt_of: np.ndarray, num_prompts: int) -> list[tuple[int, list[int]]]:
    """Returns (prompt, its samples) in the order of the prompts."""
    samples: list[list[int]] = [[] for _ in range(num_prompts)]
    for sample, prompt in enumerate(prompt_of.tolist()):
        samples[prompt].append(sample)
    return list(enumerate(samples))
