"""Continuous batching over the backend's slots: two graphs, one that fills prompts' prefix blocks and one that decodes.

A prompt is computed once for all its samples; a slot that becomes free takes the next sample inside the graph.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

from mindgrpo.backend.contract import Backend, HostArrays, Pool
from mindgrpo.backend.dtypes import ITEM_BYTES
from mindgrpo.backend.kernels.rollout import (
    GenerationBatch,
    KeptRow,
    KVCacheLayout,
    LocalModelShape,
    Memory,
    Slots,
)
from mindgrpo.backend.kernels.sampling_params import SamplingParams
from mindgrpo.models.rotary import rotary_table
from mindgrpo.models.shard import Shard
from mindgrpo.rollout.embedded.kept import KeptSample, ResumedBatch, fits, kept_after, resumed
from mindgrpo.rollout.embedded.kv_cache import KVCacheConfig, KVCacheSizes
from mindgrpo.rollout.stats import RolloutStats

# Tokens that one call of the decoding graph makes, at most; a call costs two thirds of what a small model's token does.
DECODE_STEPS = 8
# Layers that it computes, but for one token at least: those of a large model hide the cost of a call, and take long to
# compile.
DECODE_LAYERS = 64
# Of a layer, as LocalModelShape.matrices has them.
MATRICES = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")


class _Layer(nn.Cell):
    """(x, what is to be added to it) -> the same after one layer."""

    def __init__(
        self, shard: Shard, slots: Slots, index: int, is_prompt: bool, keeps_only: bool
    ) -> None:
        super().__init__()
        prefix, norms = f"model.layers.{index}.", shard.config.family.norms
        name = prefix + "self_attn."
        heads = shard.heads()
        nothing = Tensor([0.0], ms.float32)
        self.float32 = shard.float32()
        self.norm_in = shard[f"{prefix}{norms.attention_in}.weight"]
        self.qkv = shard[name + "qkv_proj.weight"]
        self.bias = shard[name + "qkv_proj.bias"] if heads.has_bias else nothing
        normed = heads.norm_eps is not None
        self.q_norm = shard[name + "q_norm.weight"] if normed else nothing
        self.k_norm = shard[name + "k_norm.weight"] if normed else nothing
        self.out = nothing if keeps_only else shard[name + "o_proj.weight"]
        out_bias = shard.get(name + "o_proj.bias")
        self.out_bias = nothing if out_bias is None else out_bias
        self.norm_mlp = shard[f"{prefix}{norms.mlp_in}.weight"]
        self.gate_up = shard[prefix + "mlp.gate_up_proj.weight"]
        self.down = shard[prefix + "mlp.down_proj.weight"]
        self.run = slots.layer(index - shard.layers.start, is_prompt, keeps_only)

    def construct(self, x: Any, added: Any) -> Any:
        return self.run(
            x,
            added,
            self.float32(self.norm_in),
            self.qkv,
            self.float32(self.bias),
            self.float32(self.q_norm),
            self.float32(self.k_norm),
            self.out,
            self.float32(self.out_bias),
            self.float32(self.norm_mlp),
            self.gate_up,
            self.down,
        )


class _Prompts(nn.Cell):
    """tokens int32 [N], -1 where there is none: keys and values of prompts, and first inputs, to prefix blocks."""

    def __init__(self, shard: Shard, slots: Slots) -> None:
        super().__init__()
        self.table = shard["model.embed_tokens.weight"]
        self.embed = shard.embedding()
        self.total = shard.group.sum_cell()
        last = shard.layers.stop - 1
        self.layers = nn.CellList(
            [_Layer(shard, slots, index, True, index == last) for index in shard.layers]
        )
        self.nothing = Tensor([0.0], ms.float32)

    def construct(self, tokens: Any) -> Any:
        x = self.total(self.embed(tokens, self.table))
        added = self.nothing
        for layer in self.layers:
            x, added = layer(x, added)
        return x


class _Decode(nn.Cell):
    """(anything) -> samples that are running or waiting int32 [1], after some tokens of every slot."""

    def __init__(self, shard: Shard, slots: Slots, steps: int) -> None:
        super().__init__()
        self.steps = steps
        self.begin = slots.begin()
        self.layers = nn.CellList(
            [_Layer(shard, slots, index, False, False) for index in shard.layers]
        )
        self.norm = shard["model.norm.weight"]
        self.float32 = shard.float32()
        self.head_table = shard.head_table
        self.table = shard["model.embed_tokens.weight"]
        self.head = slots.head()
        self.truncate = nn.CellList([slots.truncate(i) for i in range(slots.num_truncation_rounds)])
        self.draw = slots.draw()
        self.commit = slots.commit()
        self.gather = shard.group.gather_cell()
        self.total = shard.group.sum_cell()
        self.nothing = Tensor([0.0], ms.float32)

    def construct(self, ticket: Any) -> Any:
        x = self.begin(ticket)
        left = ticket
        for _ in range(self.steps):
            added = self.nothing
            for layer in self.layers:
                x, added = layer(x, added)
            logits, stats = self.head(x, added, self.float32(self.norm), self.head_table)
            stats = self.gather(stats)
            answer = stats
            for truncate in self.truncate:
                answer = self.gather(truncate(logits, stats, answer))
            drawn = self.draw(logits, stats, answer, self.table)
            x, left = self.commit(self.total(drawn))
        return left


class SlotDecoder:
    """Runs jobs through the slots that the backend's kernels keep."""

    def __init__(
        self,
        shard: Shard,
        backend: Backend,
        sampling: SamplingParams,
        cache_config: KVCacheConfig,
    ) -> None:
        self._cache_config = cache_config
        model_shape = _model_shape(shard)
        heads = (model_shape.heads.queries, model_shape.heads.kv, model_shape.heads.dim)
        penalised = sampling.repetition_penalty != 1.0
        sizes = KVCacheSizes.of(
            cache_config,
            model_shape.layers,
            model_shape.hidden,
            model_shape.inner,
            heads,
            model_shape.vocabulary.width if penalised else 0,
        )
        cache = backend.pool(sizes.cache, dtype=backend.compute_dtype)
        work = backend.pool(sum(sizes.beside_cache))
        self.pools: list[Pool] = [cache, work]
        # What it keeps of the weights beside them.
        self.weight_pools: list[Pool] = []
        # Kernels that keep slots are the host's: its memory is the device's.
        with cache.on_host() as memory_of_cache, work.on_host() as memory_of_work:
            keys_and_values = memory_of_cache.view(0, (sizes.cache,))
            scratch, inputs, starts, seen, parked = _views(memory_of_work, sizes.beside_cache)
            memory = Memory(keys_and_values, scratch, inputs, starts, seen, None, parked)
        packed_bytes = model_shape.packed_bytes(shard.kernels.num_parts)
        if packed_bytes:
            size = packed_bytes // ITEM_BYTES["bfloat16"]
            packed = backend.pool(size, dtype="bfloat16")
            self.weight_pools.append(packed)
            with packed.on_host() as memory_of_packed:
                memory = replace(memory, packed=memory_of_packed.view(0, (size,)))
        rotary = rotary_table(shard.config, cache_config.max_prompt + cache_config.max_tokens)
        slots = shard.kernels.slots(
            model_shape, sampling, rotary, cache_config.slots, cache_config.prompt_rows, memory
        )
        self._slots = slots
        self._prompts = backend.graph(_Prompts(shard.sharing_cells(), slots), "prompts")
        self._shard, self._backend = shard, backend
        self._progress = partial(backend.health.progress, "samples")
        self._decoders: list[tuple[SamplingParams, Any]] = []
        self._decode = self._decoder_for(sampling)
        self._ticket = Tensor([0], ms.int32)
        # By number, the samples that may go on from their keys, in slots of `_kept_slot_size`.
        self._kept: dict[int, KeptSample] = {}
        self._kept_slot_size = 0

    def weights_changed(self) -> None:
        """Has to be called before it generates with other weights."""
        self._kept = {}
        if not self.weight_pools:
            return
        keys = [
            f"model.layers.{index}.{name}.weight"
            for index in self._shard.layers
            for name in MATRICES
        ]
        with self._shard.weights.on_host() as arrays:
            matrices = [arrays.tensors[key] for key in (*keys, self._shard.head_key)]
            self._slots.take_weights(matrices)

    def _decoder_for(self, sampling: SamplingParams) -> Any:
        """A graph that is there already, wherever one can draw by `sampling`: the numbers in them are no part of it."""
        self._slots.use(sampling)
        for made_with, graph in self._decoders:
            if self._slots.serves(made_with):
                return graph
        steps = max(1, min(DECODE_STEPS, DECODE_LAYERS // len(self._shard.layers)))
        decode = _Decode(self._shard.sharing_cells(), self._slots, steps)
        graph = self._backend.graph(decode, "decode")
        self._decoders.append((sampling, graph))
        return graph

    def run(self, batch: GenerationBatch, sampling: SamplingParams) -> RolloutStats:
        self._decode = self._decoder_for(sampling)
        again = resumed(self._kept, batch, self._kept_slot_size)
        self._kept = {}
        if again is not None:
            return self._resume(again, batch)
        lengths = [len(prompt) for prompt in batch.prompts]
        groups = np.bincount(batch.prompt_of, minlength=len(batch.prompts))
        # What goes on stays in its slot, where there is one for each.
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
        if stays and fits(batch, layout):
            at = zip(self._slots.kept(batch), batch.prompt_of, strict=True)
            rows = [KeptRow(slot, prefix, lengths[p] - 1, 0) for (slot, prefix), p in at]
            self._kept, self._kept_slot_size = kept_after(batch, rows, batch), layout.slot_size
        return self._stats(batch, layout.slots, prompt_tokens)

    def _resume(self, again: ResumedBatch, batch: GenerationBatch) -> RolloutStats:
        self._slots.resume(again.batch, again.rows, again.known)
        while self._decode_some(batch, 0):
            pass
        again.give(batch)
        self._kept = kept_after(again.batch, again.rows, batch)
        return self._stats(batch, len(again.rows), 0)

    def _decode_some(self, batch: GenerationBatch, num_waiting: int) -> int:
        """Samples that are left, but for those that wait for their prompts."""
        left = int(self._decode(self._ticket).asnumpy()[0])
        self._progress(len(batch.limits) - left - num_waiting, len(batch.limits))
        return left

    def _stats(self, batch: GenerationBatch, slots: int, prompt_tokens: int) -> RolloutStats:
        steps, rows = self._slots.steps
        return RolloutStats(int(batch.lengths.sum()), rows, steps * slots, prompt_tokens)

    def _bring_prompts(
        self, batch: GenerationBatch, layout: KVCacheLayout, waiting: deque[tuple[int, list[int]]]
    ) -> int:
        """Puts prompts into free prefix blocks and their samples into the queue; gives the prompt tokens computed."""
        free = np.flatnonzero(self._slots.users[: layout.prefix_blocks] == 0)
        brought: list[tuple[int, np.ndarray]] = []
        for prefix in free[: len(waiting)].tolist():
            index, samples = waiting.popleft()
            brought.append((prefix, batch.prompts[index]))
            for sample in samples:
                self._slots.enqueue(sample, prefix)
        if not brought:
            return 0
        self._fill(brought)
        return sum(len(prompt) for _, prompt in brought)

    def _fill(self, brought: list[tuple[int, np.ndarray]]) -> None:
        prefix_blocks = np.concatenate(
            [np.full(len(p) - 1, prefix, np.int32) for prefix, p in brought]
        )
        seen = np.concatenate([np.arange(1, len(p), dtype=np.int32) for _, p in brought])
        tokens = np.concatenate([p[:-1] for _, p in brought] + [[p[-1] for _, p in brought]])
        starts = np.array([prefix for prefix, _ in brought], np.int32)
        size, keys = self._cache_config.prompt_rows, len(prefix_blocks)
        for begin in range(0, len(tokens), size):
            end = min(begin + size, len(tokens))
            rows = slice(begin, min(end, keys))
            self._slots.set_prompt_rows(
                prefix_blocks[rows], seen[rows], starts[max(0, begin - keys) : max(0, end - keys)]
            )
            padded_tokens = np.full(size, -1, np.int32)
            padded_tokens[: end - begin] = tokens[begin:end]
            self._prompts(Tensor(padded_tokens)).asnumpy()


def _model_shape(shard: Shard) -> LocalModelShape:
    config, first = shard.config, f"model.layers.{shard.layers.start}."
    return LocalModelShape(
        len(shard.layers),
        config.hidden_size,
        shard[first + "mlp.down_proj.weight"].shape[0],
        shard.heads(),
        shard.vocabulary(),
        config.rms_norm_eps,
        shard.group.size,
        shard.group.index,
        shard.group.kernel_id,
    )


def _views(memory: HostArrays, sizes: Sequence[int]) -> Iterator[np.ndarray]:
    offset = 0
    for size in sizes:
        yield memory.view(offset, (size,))
        offset += size


def _by_prompt(prompt_of: np.ndarray, num_prompts: int) -> list[tuple[int, list[int]]]:
    """(prompt, its samples) in the order of the prompts."""
    samples: list[list[int]] = [[] for _ in range(num_prompts)]
    for sample, prompt in enumerate(prompt_of.tolist()):
        samples[prompt].append(sample)
    return list(enumerate(samples))
