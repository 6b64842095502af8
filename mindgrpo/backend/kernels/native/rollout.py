"""The generator's slots in C (native/rollout.h): the table entry that all its kernels read, and the kernels as cells.

Refuses to allocate what a phase could want back: caches and scratch are views that the caller owns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

from mindgrpo.backend.kernels.native.library import operation
from mindgrpo.backend.kernels.native.rollout_table import RolloutTable
from mindgrpo.backend.kernels.rollout import (
    Job,
    Memory,
    Partition,
    Rules,
    Share,
    Slots,
)

# native/logits.h: numbers before the candidates of a row, ranges of logits in a histogram, and rounds of them.
FIRST, BINS, ROUNDS = 6, 256, 4


@dataclass(frozen=True)
class _Form:
    """What of a graph depends on how tokens are drawn."""

    columns: int
    has_nucleus: bool
    needs_scores: bool

    def serves(self, other: _Form, ways: int) -> bool:
        enough = self.columns >= other.columns
        if ways == 1:
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
        share: Share,
        rules: Rules,
        rotary: np.ndarray,
        slots: int,
        prompt_rows: int,
        memory: Memory,
    ) -> None:
        self._share, self._rules, self._capacity = share, rules, slots
        self._has_seen = rules.penalty != 1.0
        self._table = RolloutTable()
        self._number = self._table.number
        self.use(rules)
        arrays = {
            "cache": memory.cache,
            "scratch": memory.scratch,
            "next": memory.inputs,
            "starts": memory.starts,
            "seen": memory.seen.view(np.uint8),
            "rotary": rotary,
            "above": np.zeros(2 * slots),
            "free_slots": np.zeros(slots, np.int32),
            "users": np.zeros(memory.starts.size // share.hidden, np.int32),
            "start_entry": np.zeros(prompt_rows, np.int32),
        }
        rows = dict.fromkeys(("sample", "slot", "entry", "shared", "own"), slots)
        arrays |= {f"row_{name}": np.zeros(count, np.int32) for name, count in rows.items()}
        arrays |= {
            f"prompt_row_{name}": np.zeros(prompt_rows, np.int32) for name in ("entry", "seen")
        }
        for name, array in arrays.items():
            self._table[name] = array
        self.users = arrays["users"]

    def use(self, rules: Rules) -> None:
        if rules.penalty != 1.0 and not self._has_seen:
            raise ValueError("these slots have no room for the tokens that a penalty has to know")
        self._rules = rules
        self._table["stops"] = np.array(rules.stop_ids, np.int32)
        share = self._share
        vocab = share.vocabulary
        numbers: dict[str, float] = {
            "layers": share.layers,
            "hidden": share.hidden,
            "inner": share.inner,
            "queries": share.heads.queries,
            "kv": share.heads.kv,
            "dim": share.heads.dim,
            "vocab": vocab.real,
            "first_token": vocab.first,
            "ways": share.ways,
            "index": share.index,
            "greedy": int(rules.greedy),
            "top_k": self._top_k_of(rules),
            "candidates": self._candidates_of(rules),
            "min_tokens": rules.min_tokens,
            "eps": share.norm_eps,
            "scale": rules.scale,
            "penalty": rules.penalty,
            "top_p": 1.0 if rules.greedy else rules.top_p,
            "min_p": 0.0 if rules.greedy else rules.min_p,
        }
        for name, value in numbers.items():
            self._table[name] = value

    def _top_k_of(self, rules: Rules) -> int:
        vocab = self._share.vocabulary
        return 0 if rules.greedy or rules.top_k >= vocab.width * self._share.ways else rules.top_k

    def _candidates_of(self, rules: Rules) -> int:
        """Any of the k largest of all is among the k largest of its own rank."""
        return min(self._top_k_of(rules), self._share.vocabulary.width)

    def _form_of(self, rules: Rules) -> _Form:
        free = not rules.greedy and not self._top_k_of(rules)
        nucleus = free and rules.top_p < 1.0
        columns = FIRST + (2 * self._candidates_of(rules) or (BINS if nucleus else 0))
        return _Form(columns, nucleus, nucleus or (free and rules.min_p > 0.0))

    def serves(self, made_with: Rules) -> bool:
        made, wanted = self._form_of(made_with), self._form_of(self._rules)
        return made.serves(wanted, self._share.ways)

    def start(self, job: Job, partition: Partition) -> None:
        table, heads = self._table, self._share.heads
        positions = partition.slots * partition.slot_room + partition.entries * partition.entry_room
        numbers = {
            "slots": partition.slots,
            "slot_room": partition.slot_room,
            "entry_room": partition.entry_room,
            "layer_floats": 2 * positions * heads.kv * heads.dim,
            "longest": job.tokens.shape[1],
            "num_free": partition.slots,
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
        table["free_slots"][: partition.slots] = np.arange(partition.slots)[::-1]
        self.users[...] = 0
        lengths = np.array([len(prompt) for prompt in job.prompts], np.int64)
        begins = np.concatenate([[0], np.cumsum(lengths)[:-1]])
        arrays = {
            "prompt_tokens": np.concatenate(job.prompts).astype(np.int32),
            "prompt_at": begins[job.prompt_of],
            "prompt_length": lengths[job.prompt_of].astype(np.int32),
            "limit": job.limits,
            "keys": job.keys,
            "tokens": job.tokens,
            "logps": job.logps,
            "lengths": job.lengths,
            "stopped": job.stopped,
            "queue_sample": np.zeros(len(job.limits), np.int32),
            "queue_entry": np.zeros(len(job.limits), np.int32),
        }
        for name, array in arrays.items():
            table[name] = array
        table.check_complete()

    def enqueue(self, sample: int, entry: int) -> None:
        tail = self._table["queue_tail"]
        self._table["queue_sample"][tail[0]] = sample
        self._table["queue_entry"][tail[0]] = entry
        self.users[entry] += 1
        tail[0] += 1

    def set_prompt_rows(
        self, entries: np.ndarray, seen: np.ndarray, start_entries: np.ndarray
    ) -> None:
        self._table["prompt_row_entry"][: len(entries)] = entries
        self._table["prompt_row_seen"][: len(entries)] = seen
        self._table["start_entry"][: len(start_entries)] = start_entries
        self._table["prompt_rows"], self._table["prompt_starts"] = len(entries), len(start_entries)

    @property
    def waiting(self) -> int:
        return int(self._table["queue_tail"][0] - self._table["queue_head"][0])

    @property
    def steps(self) -> tuple[int, int]:
        return int(self._table["steps"][0]), int(self._table["row_steps"][0])

    def begin(self) -> nn.Cell:
        shape = [self._capacity, self._share.hidden]

        def inputs(*shapes: Any) -> Any:
            return shape

        return _Kernel("rollout_begin", inputs, _float, [self._number])

    def attend(self, layer: int, is_prompt: bool, keeps_only: bool) -> nn.Cell:
        shapes = _no_pair if keeps_only else _pair
        meta = [self._number, layer, int(is_prompt)]
        return _Kernel("rollout_attend", shapes, _two_floats, meta)

    def mlp(self, is_prompt: bool) -> nn.Cell:
        return _Kernel("rollout_mlp", _pair, _two_floats, [self._number, 0, int(is_prompt)])

    def head(self) -> nn.Cell:
        columns = self._form_of(self._rules).columns

        def shapes(x: Any, added: Any, norm: Any, table: Any, meta: Any) -> Any:
            return [x[0], table[0]], [x[0], columns]

        return _Kernel("rollout_head", shapes, _two_floats, [self._number])

    @property
    def num_narrowings(self) -> int:
        if self._share.ways == 1:
            return 0
        form = self._form_of(self._rules)
        return (ROUNDS - 1) * form.has_nucleus + form.needs_scores

    def narrow(self, number: int) -> nn.Cell:
        if self._form_of(self._rules).needs_scores and number == self.num_narrowings - 1:
            return _Kernel("rollout_score", _two_a_row, _float, [self._number])
        return _Kernel("rollout_narrow", _bins_a_row, _float, [self._number, number + 1])

    def draw(self) -> nn.Cell:
        width = self._share.hidden + 2

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
