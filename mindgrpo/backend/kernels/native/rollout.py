"""The generator's slots in C (native/rollout.h): the table that all its kernels read, and the kernels as cells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

from mindgrpo.backend.kernels.native.library import call_kernel, operation
from mindgrpo.backend.kernels.native.rollout_table import RolloutTable
from mindgrpo.backend.kernels.rollout import (
    GenerationBatch,
    KeptRow,
    KVCacheLayout,
    LocalModelShape,
    Memory,
    Slots,
)
from mindgrpo.backend.kernels.sampling_params import SamplingParams
from mindgrpo.backend.matmul_precision import packed_bytes

# native/logits.h: numbers before the candidates of a row, ranges of logits in a histogram, and rounds of them.
FIRST, BINS, ROUNDS = 6, 256, 4
# What the kernels fill in of each sample.
BY_SAMPLE = ("queue_sample", "queue_prefix", "sample_slot", "sample_prefix")


@dataclass(frozen=True)
class _Form:
    """What of a graph depends on how tokens are drawn."""

    columns: int
    has_nucleus: bool
    needs_scores: bool

    def serves(self, other: _Form, tp_size: int) -> bool:
        enough = self.columns >= other.columns
        if tp_size == 1:
            return enough
        nucleus = self.has_nucleus or not other.has_nucleus
        return enough and nucleus and (self.needs_scores or not other.needs_scores)


class _Kernel(nn.Cell):
    """One operation; its last input is `meta`, which begins with the entry's number."""

    def __init__(self, symbol: str, out_shape: Any, out_dtype: Any, meta: list[int]) -> None:
        super().__init__()
        self.run = operation(symbol, out_shape, out_dtype)
        self.meta = Tensor(meta, ms.int32)

    def construct(self, *inputs: Any) -> Any:
        return self.run(*inputs, self.meta)


def _float(*types: Any) -> Any:
    return ms.float32


def _two_floats(*types: Any) -> Any:
    return ms.float32, ms.float32


def _float_and_int(*types: Any) -> Any:
    return ms.float32, ms.int32


def _pair(x: Any, *others: Any) -> Any:
    return x, x


def _no_pair(*shapes: Any) -> Any:
    return [1], [1]


class NativeSlots(Slots):
    def __init__(
        self,
        model_shape: LocalModelShape,
        sampling: SamplingParams,
        rotary: np.ndarray,
        slots: int,
        prompt_rows: int,
        memory: Memory,
        num_parts: int | None = None,
    ) -> None:
        """`num_parts`: see NativeKernels."""
        self._num_parts = num_parts or 0
        self._model_shape, self._sampling, self._capacity = model_shape, sampling, slots
        self._has_seen = sampling.repetition_penalty != 1.0
        self._table = RolloutTable()
        self._number = self._table.number
        self.use(sampling)
        arrays = {
            "cache": memory.cache.view(np.uint8),
            "scratch": memory.scratch,
            "next": memory.inputs,
            "starts": memory.starts,
            "seen": memory.seen.view(np.uint8),
            "parked": np.zeros(0, np.float32) if memory.parked is None else memory.parked,
            "rotary": rotary,
            "above": np.zeros(2 * slots),
            "free_slots": np.zeros(slots, np.int32),
            "users": np.zeros(memory.starts.size // model_shape.hidden, np.int32),
            "start_prefix": np.zeros(prompt_rows, np.int32),
        }
        rows = dict.fromkeys(("sample", "slot", "prefix", "shared", "own"), slots)
        arrays |= {f"row_{name}": np.zeros(count, np.int32) for name, count in rows.items()}
        arrays |= {
            f"prompt_row_{name}": np.zeros(prompt_rows, np.int32) for name in ("prefix", "seen")
        }
        sizes = [packed_bytes(k, n, self._num_parts) for k, n in model_shape.matrices]
        room = memory.packed if memory.packed is not None else np.zeros(0, np.uint16)
        arrays["packed"] = room.view(np.uint8)
        arrays["packed_at"] = np.cumsum([0, *sizes])[:-1]
        self._packed = np.split(arrays["packed"], np.cumsum(sizes)[:-1])
        self._table["parts"] = self._num_parts
        self._table["cache_itemsize"] = memory.cache.itemsize
        for name, array in arrays.items():
            self._table[name] = array
        self.users = arrays["users"]

    def take_weights(self, matrices: Sequence[np.ndarray]) -> None:
        if not self._num_parts:
            return
        *layers, head = zip(matrices, self._packed, strict=True)
        num_parts = np.array([self._num_parts], np.int32)
        for matrix, packed in layers:
            call_kernel("bf16_pack", matrix, num_parts, packed)
        call_kernel("bf16_pack_turned", head[0], num_parts, head[1])

    def use(self, sampling: SamplingParams) -> None:
        if sampling.repetition_penalty != 1.0 and not self._has_seen:
            raise ValueError("these slots have no room for the tokens that a penalty has to know")
        self._sampling = sampling
        self._table["stops"] = np.array(sampling.stop_ids, np.int32)
        model_shape = self._model_shape
        vocab = model_shape.vocabulary
        numbers: dict[str, float] = {
            "layers": model_shape.layers,
            "hidden": model_shape.hidden,
            "inner": model_shape.inner,
            "queries": model_shape.heads.queries,
            "kv": model_shape.heads.kv,
            "dim": model_shape.heads.dim,
            "vocab": vocab.real,
            "first_token": vocab.first,
            "tp_size": model_shape.tp_size,
            "tp_rank": model_shape.tp_rank,
            "group": model_shape.group,
            "greedy": int(sampling.greedy),
            "top_k": self._top_k_of(sampling),
            "candidates": self._candidates_of(sampling),
            "min_tokens": sampling.min_tokens,
            "eps": model_shape.norm_eps,
            "scale": sampling.scale,
            "penalty": sampling.repetition_penalty,
            "top_p": 1.0 if sampling.greedy else sampling.top_p,
            "min_p": 0.0 if sampling.greedy else sampling.min_p,
        }
        for name, value in numbers.items():
            self._table[name] = value

    def _top_k_of(self, sampling: SamplingParams) -> int:
        vocab = self._model_shape.vocabulary.width * self._model_shape.tp_size
        return sampling.top_k if not sampling.greedy and 0 < sampling.top_k < vocab else 0

    def _candidates_of(self, sampling: SamplingParams) -> int:
        """Any of the k largest of all is among the k largest of its own rank."""
        return min(self._top_k_of(sampling), self._model_shape.vocabulary.width)

    def _form_of(self, sampling: SamplingParams) -> _Form:
        free = not sampling.greedy and not self._top_k_of(sampling)
        nucleus = free and sampling.top_p < 1.0
        columns = FIRST + (2 * self._candidates_of(sampling) or (BINS if nucleus else 0))
        return _Form(columns, nucleus, nucleus or (free and sampling.min_p > 0.0))

    def serves(self, made_with: SamplingParams) -> bool:
        made, wanted = self._form_of(made_with), self._form_of(self._sampling)
        return made.serves(wanted, self._model_shape.tp_size)

    def start(self, batch: GenerationBatch, layout: KVCacheLayout) -> None:
        table, heads = self._table, self._model_shape.heads
        positions = (
            layout.slots * layout.slot_size + layout.prefix_blocks * layout.prefix_block_size
        )
        numbers = {
            "slots": layout.slots,
            "slot_size": layout.slot_size,
            "prefix_block_size": layout.prefix_block_size,
            "layer_elements": 2 * positions * heads.kv * heads.dim,
            "longest": batch.tokens.shape[1],
            "num_free": layout.slots,
        }
        state = (
            "num_rows",
            "queue_head",
            "queue_tail",
            "prompt_rows",
            "prompt_starts",
            "steps",
            "row_steps",
        )
        for name, value in (dict.fromkeys(state, 0) | numbers).items():
            table[name] = value
        table["free_slots"][: layout.slots] = np.arange(layout.slots)[::-1]
        self.users[...] = 0
        self._take(batch, np.zeros(len(batch.limits), np.int32))
        table.check_complete()

    def resume(self, batch: GenerationBatch, rows: Sequence[KeptRow], known: np.ndarray) -> None:
        table, hidden = self._table, self._model_shape.hidden
        numbers = dict.fromkeys(("queue_head", "queue_tail", "steps", "row_steps", "num_free"), 0)
        numbers |= {"longest": batch.tokens.shape[1], "num_rows": len(rows)}
        for name, value in numbers.items():
            table[name] = value
        self._take(batch, known)
        self.users[...] = 0
        inputs, parked = (table[name].reshape(-1, hidden) for name in ("next", "parked"))
        for i, row in enumerate(rows):
            columns = {"sample": i, "slot": row.slot, "prefix": row.prefix}
            for name, value in (columns | {"shared": row.shared, "own": row.own}).items():
                table[f"row_{name}"][i] = value
            table["sample_slot"][i], table["sample_prefix"][i] = row.slot, row.prefix
            self.users[row.prefix] += 1
            inputs[i] = parked[row.slot]
        table.check_complete()

    def kept(self, batch: GenerationBatch) -> list[tuple[int, int]]:
        columns = (
            self._table[name][: len(batch.limits)] for name in ("sample_slot", "sample_prefix")
        )
        slots, prefixes = (column.tolist() for column in columns)
        return list(zip(slots, prefixes, strict=True))

    def _take(self, batch: GenerationBatch, first_drawn: np.ndarray) -> None:
        """The job's arrays, by sample."""
        count = len(batch.limits)
        lengths = np.array([len(prompt) for prompt in batch.prompts], np.int64)
        begins = np.concatenate([[0], np.cumsum(lengths)[:-1]])
        arrays = {
            "prompt_tokens": np.concatenate(batch.prompts).astype(np.int32),
            "prompt_at": begins[batch.prompt_of],
            "prompt_length": lengths[batch.prompt_of].astype(np.int32),
            "limit": batch.limits,
            "keys": batch.keys,
            "tokens": batch.tokens,
            "logps": batch.logps,
            "lengths": batch.lengths,
            "stopped": batch.stopped,
            "first_drawn": first_drawn,
            **{name: np.zeros(count, np.int32) for name in BY_SAMPLE},
        }
        for name, array in arrays.items():
            self._table[name] = array

    def enqueue(self, sample: int, prefix: int) -> None:
        tail = self._table["queue_tail"]
        self._table["queue_sample"][tail[0]] = sample
        self._table["queue_prefix"][tail[0]] = prefix
        self.users[prefix] += 1
        tail[0] += 1

    def set_prompt_rows(
        self, prefix_blocks: np.ndarray, seen: np.ndarray, start_prefixes: np.ndarray
    ) -> None:
        self._table["prompt_row_prefix"][: len(prefix_blocks)] = prefix_blocks
        self._table["prompt_row_seen"][: len(prefix_blocks)] = seen
        self._table["start_prefix"][: len(start_prefixes)] = start_prefixes
        self._table["prompt_rows"], self._table["prompt_starts"] = (
            len(prefix_blocks),
            len(start_prefixes),
        )

    @property
    def waiting(self) -> int:
        return int(self._table["queue_tail"][0] - self._table["queue_head"][0])

    @property
    def steps(self) -> tuple[int, int]:
        return int(self._table["steps"][0]), int(self._table["row_steps"][0])

    def begin(self) -> nn.Cell:
        shape = [self._capacity, self._model_shape.hidden]

        def inputs(*shapes: Any) -> Any:
            return shape

        return _Kernel("rollout_begin", inputs, _float, [self._number])

    def layer(self, number: int, is_prompt: bool, keeps_only: bool) -> nn.Cell:
        shapes = _no_pair if keeps_only else _pair
        meta = [self._number, number, int(is_prompt)]
        return _Kernel("rollout_layer", shapes, _two_floats, meta)

    def head(self) -> nn.Cell:
        columns = self._form_of(self._sampling).columns

        def shapes(x: Any, added: Any, norm: Any, table: Any, meta: Any) -> Any:
            return [x[0], table[0]], [x[0], columns]

        return _Kernel("rollout_head", shapes, _two_floats, [self._number])

    @property
    def num_truncation_rounds(self) -> int:
        if self._model_shape.tp_size == 1:
            return 0
        form = self._form_of(self._sampling)
        return (ROUNDS - 1) * form.has_nucleus + form.needs_scores

    def truncate(self, number: int) -> nn.Cell:
        if self._form_of(self._sampling).needs_scores and number == self.num_truncation_rounds - 1:
            return _Kernel("rollout_score", _two_a_row, _float, [self._number])
        return _Kernel("rollout_top_p", _bins_a_row, _float, [self._number, number + 1])

    def draw(self) -> nn.Cell:
        width = self._model_shape.hidden + 2

        def drawn(logits: Any, *others: Any) -> Any:
            return [logits[0], width]

        return _Kernel("rollout_draw", drawn, _float, [self._number])

    def commit(self) -> nn.Cell:
        def shapes(drawn: Any, meta: Any) -> Any:
            return [drawn[0], drawn[1] - 2], [1]

        return _Kernel("rollout_commit", shapes, _float_and_int, [self._number])


def _two_a_row(logits: Any, *others: Any) -> Any:
    return [logits[0], 2]


def _bins_a_row(logits: Any, *others: Any) -> Any:
    return [logits[0], BINS]
