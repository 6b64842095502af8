"""Continuous batching over the backend's slots: two graphs, one that fills prompts' entries and one that decodes.

A prompt is computed once for all its samples; a slot that becomes free takes the next sample inside the graph. Refuses
to know what a request is and to decide when weights are fresh: engine.py does.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

from mindgrpo.backend.contract import Backend, Pool
from mindgrpo.backend.kernels.rollout import (
    Job,
    Memory,
    Partition,
    Rules,
    Share,
    Slots,
)
from mindgrpo.models.rotary import rotary_table
from mindgrpo.models.shard import Shard
from mindgrpo.rollout.embedded.kv_cache import Footprint, Room
from mindgrpo.rollout.sampling_params import SamplingSettings
from mindgrpo.rollout.stats import RolloutStats

# Tokens that one call of the decoding graph makes; a call costs as much as two thirds of a token of a small model.
DECODE_STEPS = 8


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
        self.keeps_only = keeps_only
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
        self.attend = slots.attend(index - shard.layers.start, is_prompt, keeps_only)
        self.mlp = slots.mlp(is_prompt)
        self.total = shard.group.sum_cell()

    def construct(self, x: Any, added: Any) -> Any:
        x, added = self.attend(
            x, added, self.norm_in, self.qkv, self.bias, self.q_norm, self.k_norm, self.out
        )
        if self.keeps_only:
            return x, added
        x, added = self.mlp(
            x, self.total(added), self.out_bias, self.norm_mlp, self.gate_up, self.down
        )
        return x, self.total(added)


class _Prompts(nn.Cell):
    """tokens int32 [N], -1 where there is none: keys and values of prompts, and first inputs, into their entries."""

    def __init__(self, shard: Shard, slots: Slots) -> None:
        super().__init__()
        self.table = shard["model.embed_tokens.weight"]
        self.embed = shard.kernels.embedding(shard.first_token)
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
        self.head_table = shard.head_table
        self.table = shard["model.embed_tokens.weight"]
        self.head = slots.head()
        self.narrow = nn.CellList([slots.narrow(i) for i in range(slots.num_narrowings)])
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
            logits, pieces = self.head(x, added, self.norm, self.head_table)
            pieces = self.gather(pieces)
            answer = pieces
            for narrow in self.narrow:
                answer = self.gather(narrow(logits, pieces, answer))
            drawn = self.draw(logits, pieces, answer, self.table)
            x, left = self.commit(self.total(drawn))
        return left


class SlotDecoder:
    """Runs jobs through the slots that the backend's kernels keep."""

    def __init__(
        self,
        shard: Shard,
        backend: Backend,
        settings: SamplingSettings,
        room: Room,
    ) -> None:
        self._room = room
        share = _share(shard)
        heads = (share.heads.queries, share.heads.kv, share.heads.dim)
        penalised = settings.repetition_penalty != 1.0
        footprint = Footprint.of(
            room,
            share.layers,
            share.hidden,
            share.inner,
            heads,
            share.vocabulary.width if penalised else 0,
        )
        cache = backend.pool(footprint.num_bytes)
        self.pools: list[Pool] = [cache]
        memory = _views(cache, footprint)
        rotary = rotary_table(shard.config, room.max_prompt + room.max_tokens)
        slots = shard.kernels.slots(
            share, settings.rules(), rotary, room.slots, room.prompt_rows, memory
        )
        self._slots = slots
        self._prompts = backend.graph(_Prompts(shard, slots), "prompts")
        self._shard, self._backend = shard, backend
        self._decoders: list[tuple[Rules, Any]] = []
        self._decode = self._decoder_for(settings.rules())
        self._ticket = Tensor([0], ms.int32)

    def _decoder_for(self, rules: Rules) -> Any:
        """A graph that is there already, wherever one can draw by `rules`: the numbers in them are no part of it."""
        self._slots.use(rules)
        for made_with, graph in self._decoders:
            if self._slots.serves(made_with):
                return graph
        graph = self._backend.graph(_Decode(self._shard, self._slots, DECODE_STEPS), "decode")
        self._decoders.append((rules, graph))
        return graph

    def run(self, job: Job, settings: SamplingSettings) -> RolloutStats:
        self._decode = self._decoder_for(settings.rules())
        lengths = [len(prompt) for prompt in job.prompts]
        groups = np.bincount(job.prompt_of, minlength=len(job.prompts))
        partition = self._room.partition(lengths, groups.tolist(), int(job.limits.max()))
        self._slots.start(job, partition)
        waiting = deque(_by_prompt(job.prompt_of, len(job.prompts)))
        prompt_tokens = 0
        left = 1
        while left or waiting:
            if self._slots.waiting < partition.slots:
                prompt_tokens += self._bring_prompts(job, partition, waiting)
            left = int(self._decode(self._ticket).asnumpy()[0])
        steps, rows = self._slots.steps
        return RolloutStats(int(job.lengths.sum()), rows, steps * partition.slots, prompt_tokens)

    def _bring_prompts(
        self, job: Job, partition: Partition, waiting: deque[tuple[int, list[int]]]
    ) -> int:
        """Puts prompts into the entries that are free and their samples into the queue; prompt tokens computed."""
        free = np.flatnonzero(self._slots.users[: partition.entries] == 0)
        brought: list[tuple[int, np.ndarray]] = []
        for entry in free[: len(waiting)].tolist():
            index, samples = waiting.popleft()
            brought.append((entry, job.prompts[index]))
            for sample in samples:
                self._slots.enqueue(sample, entry)
        if not brought:
            return 0
        self._fill(brought)
        return sum(len(prompt) for _, prompt in brought)

    def _fill(self, brought: list[tuple[int, np.ndarray]]) -> None:
        entries = np.concatenate([np.full(len(p) - 1, entry, np.int32) for entry, p in brought])
        seen = np.concatenate([np.arange(1, len(p), dtype=np.int32) for _, p in brought])
        tokens = np.concatenate([p[:-1] for _, p in brought] + [[p[-1] for _, p in brought]])
        starts = np.array([entry for entry, _ in brought], np.int32)
        size, keys = self._room.prompt_rows, len(entries)
        for begin in range(0, len(tokens), size):
            end = min(begin + size, len(tokens))
            rows = slice(begin, min(end, keys))
            self._slots.set_prompt_rows(
                entries[rows], seen[rows], starts[max(0, begin - keys) : max(0, end - keys)]
            )
            given = np.full(size, -1, np.int32)
            given[: end - begin] = tokens[begin:end]
            self._prompts(Tensor(given)).asnumpy()


def _share(shard: Shard) -> Share:
    config, first = shard.config, f"model.layers.{shard.layers.start}."
    return Share(
        len(shard.layers),
        config.hidden_size,
        shard[first + "mlp.down_proj.weight"].shape[0],
        shard.heads(),
        shard.vocabulary(),
        config.rms_norm_eps,
        shard.group.size,
        shard.group.index,
    )


def _views(pool: Pool, footprint: Footprint) -> Memory:
    offset, views = 0, []
    for size in footprint.sizes:
        views.append(pool.view(offset, (size,)))
        offset += size
    return Memory(*views)


def _by_prompt(prompt_of: np.ndarray, num_prompts: int) -> list[tuple[int, list[int]]]:
    """(prompt, its samples) in the order of the prompts."""
    samples: list[list[int]] = [[] for _ in range(num_prompts)]
    for sample, prompt in enumerate(prompt_of.tolist()):
        samples[prompt].append(sample)
    return list(enumerate(samples))
