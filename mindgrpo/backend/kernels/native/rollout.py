"""Decoding slots of the generator in C (native/rollout.h): the table that all its kernels read, and their calls.

The names, types and offsets of the table's fields are read from the compiled library (ROLLOUT_FIELDS in rollout.h), so
that each field is declared only once.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from itertools import chain
from math import prod
from typing import NamedTuple

import numpy as np

from mindgrpo.backend.kernels.native.library import call_kernel, library
from mindgrpo.backend.kernels.rollout import (
    GenerationBatch,
    KeptRow,
    KVCacheLayout,
    LayerWeights,
    LocalExperts,
    LocalLatents,
    LocalModelShape,
    Memory,
    TokenWeights,
)
from mindgrpo.backend.kernels.shapes import Routing, SamplingParams

# The numpy dtypes of the C types in rollout.h.
DTYPES = {
    "int64_t": np.int64,
    "int32_t": np.int32,
    "uint64_t": np.uint64,
    "uint16_t": np.uint16,
    "uint8_t": np.uint8,
    "float": np.float32,
    "double": np.float64,
}
# From native/logits.h: the number of statistics before the candidates of a row, and the bins of a logits histogram.
FIRST, BINS = 4, 256
NOTHING = np.zeros(1, np.float32)
# Of a batch's decode steps: how many, their rows, and guesses that were computed and that were right.
COUNTS = ("steps", "row_steps", "drafted", "accepted")
# Per-sample fields that the kernels fill in.
BY_SAMPLE = ("queue_sample", "queue_prefix", "sample_slot", "sample_prefix")


class _CField(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("type", ctypes.c_char_p),
        ("is_array", ctypes.c_int64),
        ("offset", ctypes.c_int64),
    )


class _Field(NamedTuple):
    dtype: np.dtype
    is_array: bool
    offset: int


def _read_fields(native: ctypes.CDLL) -> tuple[dict[str, _Field], int]:
    """Returns the table's fields by name, and its size in bytes."""
    described = ctypes.pointer(_CField.in_dll(native, "rollout_fields"))
    fields: dict[str, _Field] = {}
    for index in range(1000):
        one = described[index]
        if one.name is None:
            return fields, one.offset
        dtype = np.dtype(DTYPES[one.type.decode()])
        fields[one.name.decode()] = _Field(dtype, bool(one.is_array), one.offset)
    raise RuntimeError("rollout_fields of native/rollout.c has no end")


class RolloutTable:
    """The C table of one generator, registered with the library under `number` for the lifetime of this object.

    `table[name] = value` stores a number, or the address and size of an array, which is kept alive. Raises KeyError for
    a name that is not in rollout.h, and ValueError for an array of another dtype or one that is not contiguous.
    """

    def __init__(self) -> None:
        native = library()
        if native is None:
            raise RuntimeError("the C kernels are not there: no C compiler was found, or it failed")
        self._fields, num_bytes = _read_fields(native)
        self._memory = np.zeros(num_bytes, np.uint8)
        self._values: dict[str, np.ndarray] = {}
        native.rollout_register.argtypes = [ctypes.c_void_p]
        self.number = int(native.rollout_register(self._memory.ctypes.data))
        if self.number < 0:
            raise RuntimeError("more generators at once than native/rollout.c has room for")
        weakref.finalize(self, _forget, native, self.number, self._memory)

    def __setitem__(self, name: str, value: float | np.ndarray) -> None:
        field = self._fields[name]
        if not field.is_array:
            self._values[name] = self._memory[field.offset :][: field.dtype.itemsize].view(
                field.dtype
            )
            self._values[name][0] = value
            return
        if (
            not isinstance(value, np.ndarray)
            or value.dtype != field.dtype
            or not value.flags.c_contiguous
        ):
            raise ValueError(
                f"{name} is an array of {field.dtype} without gaps in native/rollout.h, not {value!r:.80}"
            )
        self._memory[field.offset :][:16].view(np.int64)[:] = value.ctypes.data, value.size
        self._values[name] = value

    def __getitem__(self, name: str) -> np.ndarray:
        """Returns the array of a field, or an array [1] that holds its number."""
        return self._values[name]

    def check_complete(self) -> None:
        """Raises RuntimeError if a field of rollout.h was never set."""
        if missing := self._fields.keys() - self._values.keys():
            raise RuntimeError(
                f"native/rollout.h has fields without a value: {', '.join(sorted(missing))}"
            )


def _forget(native: ctypes.CDLL, number: int, memory: np.ndarray) -> None:
    """Unregisters a table; takes its `memory` as an argument so that it is not freed earlier."""
    native.rollout_forget(number)


def _expert_numbers(experts: LocalExperts | None) -> dict[str, float]:
    if experts is None:
        experts = LocalExperts(Routing(0, 0), 0, 0, 0, ())
    routing = experts.routing
    return {
        "experts": routing.num_experts,
        "routed": routing.per_token,
        "is_sigmoid": int(routing.is_sigmoid),
        "renormalises": int(routing.renormalise),
        "scaling": routing.scaling,
        "groups": routing.groups,
        "groups_taken": routing.groups_taken,
        "first_expert": experts.first,
        "local_experts": experts.count,
        "expert_group": experts.group,
        "expert_inner": experts.inner,
        "expert_layers": len(experts.layers),
        "shared_inner": experts.shared_inner,
    }


def _latent_numbers(latents: LocalLatents | None) -> dict[str, float]:
    if latents is None:
        latents = LocalLatents(0, 0, 0, 0, 0, False, 0.0)
    return {
        "latent_rank": latents.rank,
        "query_rank": latents.query_rank,
        "nope_dim": latents.nope_dim,
        "rope_dim": latents.rope_dim,
        "value": latents.value,
        "is_interleaved": int(latents.is_interleaved),
        "latent_eps": latents.eps,
    }


# The fields of LayerWeights before this index, those without the MLP, are the same for dense and expert layers.
OF_ALL_LAYERS = LayerWeights._fields.index("gate_up")


class Slots:
    """Decodes samples in parallel slots (continuous batching). All ranks of the tp group must make the same calls.

    `users` int32 [prefix blocks] counts the running and waiting samples of each prefix block; blocks with 0 are free.
    `shifts` int32 [prefix blocks] are added to the positions behind the prompt of a block (M-RoPE), 0 for text.
    Dimensions of weights: H hidden size, W width of the qkv projection, D head dim, Q query heads, I MLP size, V
    vocabulary shard; X local experts of MLP size J, E all experts, S shared expert's MLP size; C and A ranks of the
    key-value and query latents, with up-projections of width Z and U.
    """

    def __init__(
        self,
        model_shape: LocalModelShape,
        sampling: SamplingParams,
        rotary: np.ndarray,
        slots: int,
        prompt_rows: int,
        memory: Memory,
        part_counts: tuple[int | None, int | None] = (None, None),
    ) -> None:
        """Allocates the table. `part_counts` are `num_parts` and `head_parts` of NativeKernels."""
        self._num_parts, self._head_parts = (count or 0 for count in part_counts)
        max_rows = memory.inputs.size // model_shape.hidden
        self._model_shape, self._max_rows = model_shape, max_rows
        self._has_seen = sampling.repetition_penalty != 1.0
        self._table = RolloutTable()
        self._number = np.array([self._table.number], np.int32)
        # Kept alive, since the table has their addresses.
        self._weights: list[np.ndarray] = []
        self.use(sampling)
        num_weights = model_shape.layers * len(LayerWeights._fields) + len(TokenWeights._fields)
        arrays = {
            "cache": memory.cache.view(np.uint8),
            "scratch": memory.scratch,
            "next": memory.inputs,
            "starts": memory.starts,
            "seen": memory.seen.view(np.uint8),
            "parked": np.zeros(0, np.float32) if memory.parked is None else memory.parked,
            "rotary": rotary,
            "weights": np.zeros(num_weights, np.int64),
            "above": np.zeros(2 * max_rows),
            "guessed": np.zeros(0, np.int32),
            "free_slots": np.zeros(slots, np.int32),
            "users": np.zeros(memory.starts.size // model_shape.hidden, np.int32),
            "start_prefix": np.zeros(prompt_rows, np.int32),
            "prefix_shift": np.zeros(memory.starts.size // model_shape.hidden, np.int32),
            "prompt_angles": np.zeros(0, np.float32),
            "prompt_features": np.zeros(0, np.float32),
        }
        rows = [f"row_{name}" for name in ("sample", "slot", "prefix", "shared", "own", "token")]
        rows += ["num_guessed", "num_ahead"]
        arrays |= {name: np.zeros(max_rows, np.int32) for name in rows}
        arrays |= {
            f"prompt_row_{name}": np.zeros(prompt_rows, np.int32) for name in ("prefix", "seen")
        }
        layers = range(model_shape.layers)
        counts = [0, *(len(model_shape.matrices_of(layer)) for layer in layers)]
        arrays["first_matrix"] = np.cumsum(counts)
        arrays["expert_layer"] = np.full(model_shape.layers, -1, np.int32)
        arrays["expert_layer"][list(model_shape.expert_layers)] = range(
            len(model_shape.expert_layers)
        )
        experts = model_shape.experts
        # The shape of a token's routes: layers with experts, experts per token.
        self._routed = (len(experts.layers), experts.routing.per_token) if experts else (0, 0)
        self._route_dtype = experts.routing.dtype if experts else np.dtype(np.uint8)
        arrays["prompt_routes"] = np.zeros(prompt_rows * prod(self._routed), np.uint16)
        sizes = model_shape.packed_sizes(*part_counts)
        room = memory.packed if memory.packed is not None else np.zeros(0, np.uint16)
        arrays["packed"] = room.view(np.uint8)
        arrays["packed_at"] = np.cumsum([0, *sizes])[:-1]
        self._packed = np.split(arrays["packed"], np.cumsum(sizes)[:-1])
        self._table["parts"] = self._num_parts
        self._table["head_parts"] = self._head_parts
        self._table["itemsize"] = memory.cache.itemsize
        for name, array in arrays.items():
            self._table[name] = array
        self.users, self.shifts = arrays["users"], arrays["prefix_shift"]

    def take_weights(self, layers: Sequence[LayerWeights], token: TokenWeights) -> None:
        """Registers the weights, which are read in place; call it again whenever they have changed."""
        self._weights = []
        for index, weights in enumerate(layers):
            named = weights._asdict().items()
            own = {name: NOTHING if array is None else array for name, array in named}
            meta = np.array([*self._number, index], np.int32)

            def give(
                kernel: str, *names: str, own: dict[str, np.ndarray] = own, meta: np.ndarray = meta
            ) -> None:
                call_kernel(kernel, *(own[name] for name in names), meta)

            mlp, has_experts = ("gate_up", "down"), weights.router is not None
            dense = [NOTHING if has_experts else own[name] for name in mlp]
            call_kernel("rollout_layer_weights", *list(own.values())[:OF_ALL_LAYERS], *dense, meta)
            if has_experts:
                give("rollout_expert_weights", "router", "router_bias", *mlp)
            if weights.shared_down is not None:
                give("rollout_shared_weights", "shared_gate_up", "shared_down")
            if weights.latent_up is not None:
                latents = "latent_norm", "query_norm", "query_up", "latent_up"
                give("rollout_latent_weights", *latents)
            self._weights += own.values()
        call_kernel("rollout_token_weights", *token, self._number)
        self._weights += token
        if not self._num_parts:
            return
        *packed_layers, packed_head = self._packed
        matrices = [matrix for weights in layers for matrix in weights.matrices]
        *of_layers, _ = self._model_shape.matrices
        sums = [np.array([self._num_parts, m], np.int32) for _, _, m in of_layers]
        for matrix, own_sum, packed in zip(matrices, sums, packed_layers, strict=True):
            call_kernel("product_pack", matrix, own_sum, packed)
        of_head = np.array([self._head_parts, 1], np.int32)
        call_kernel("product_pack_turned", token.head, of_head, packed_head)

    def use(self, sampling: SamplingParams) -> None:
        """Sets the sampling parameters from the next batch on.

        Raises ValueError for a repetition penalty if the slots were made without one.
        """
        if sampling.repetition_penalty != 1.0 and not self._has_seen:
            raise ValueError("these slots have no room for the tokens that a penalty has to know")
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
            "vocab_rows": vocab.width,
            "first_token": vocab.first,
            "leaves": model_shape.leaves,
            "vocab_leaves": vocab.leaves,
            "tp_size": model_shape.tp_size,
            "tp_rank": model_shape.tp_rank,
            "group": model_shape.group,
            "greedy": int(sampling.greedy),
            "top_k": self._top_k_of(sampling),
            "candidates": self._candidates_of(sampling),
            "min_tokens": sampling.min_tokens,
            "eps": model_shape.norm_eps,
            "score_scale": model_shape.heads.scale,
            "scale": sampling.scale,
            "penalty": sampling.repetition_penalty,
            "top_p": 1.0 if sampling.greedy else sampling.top_p,
            "min_p": 0.0 if sampling.greedy else sampling.min_p,
        }
        numbers |= _expert_numbers(model_shape.experts) | _latent_numbers(model_shape.latents)
        for name, value in numbers.items():
            self._table[name] = value
        columns = FIRST + max(2 * self._candidates_of(sampling), BINS) + 2 * vocab.leaves
        a_row = (1 + model_shape.tp_size) * (columns + BINS) + model_shape.hidden + 2
        self._table["max_rows"] = self._max_rows
        self._table["stats"] = np.empty(self._max_rows * a_row, np.float32)

    def _top_k_of(self, sampling: SamplingParams) -> int:
        vocab = self._model_shape.vocabulary.width * self._model_shape.tp_size
        return sampling.top_k if not sampling.greedy and 0 < sampling.top_k < vocab else 0

    def _candidates_of(self, sampling: SamplingParams) -> int:
        """Returns the number of top-k candidates of each rank: the global top k are among the ranks' local top k."""
        return min(self._top_k_of(sampling), self._model_shape.vocabulary.width)

    def start(self, batch: GenerationBatch, layout: KVCacheLayout) -> None:
        """Starts a batch with all slots and prefix blocks free, and the KV cache divided according to `layout`."""
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
            *COUNTS,
        )
        for name, value in (dict.fromkeys(state, 0) | numbers).items():
            table[name] = value
        table["free_slots"][: layout.slots] = np.arange(layout.slots)[::-1]
        self.users[...] = 0
        self._take(batch, np.zeros(len(batch.limits), np.int32))
        table.check_complete()

    def resume(self, batch: GenerationBatch, rows: Sequence[KeptRow], known: np.ndarray) -> None:
        """Continues ended samples from their KV cache, without a queue or prefill.

        Columns of `batch.tokens` and `limits` count from a sample's first token in its slot: columns from `own` up to
        `known` int32 [samples] are given tokens that are not in the cache yet.
        """
        table, hidden = self._table, self._model_shape.hidden
        numbers = dict.fromkeys(("queue_head", "queue_tail", "num_free", *COUNTS), 0)
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
        """Returns the (slot, prefix block) of each sample; valid once all have ended."""
        columns = (
            self._table[name][: len(batch.limits)] for name in ("sample_slot", "sample_prefix")
        )
        slots, prefixes = (column.tolist() for column in columns)
        return list(zip(slots, prefixes, strict=True))

    def _take(self, batch: GenerationBatch, first_drawn: np.ndarray) -> None:
        """Stores the batch's per-sample arrays in the table; `first_drawn` int32 [samples]."""
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
            "routes": np.zeros(
                batch.records_routes * batch.tokens.size * prod(self._routed), np.uint16
            ),
            **{name: np.zeros(count, np.int32) for name in BY_SAMPLE},
        }
        for name, array in arrays.items():
            self._table[name] = array

    def enqueue(self, sample: int, prefix: int) -> None:
        """Queues the sample for the next free slot; its prompt must be in prefix block `prefix` by then."""
        tail = self._table["queue_tail"]
        self._table["queue_sample"][tail[0]] = sample
        self._table["queue_prefix"][tail[0]] = prefix
        self.users[prefix] += 1
        tail[0] += 1

    def fill(
        self,
        tokens: np.ndarray,
        prefix_blocks: np.ndarray,
        seen: np.ndarray,
        start_prefixes: np.ndarray,
        angles: np.ndarray | None = None,
        features: np.ndarray | None = None,
    ) -> None:
        """Prefills `tokens` int32 [n + m] of prompts.

        The first n write their keys and values to `prefix_blocks` int32 [n], and attend to `seen` int32 [n] keys,
        their own included. The other m are last tokens of prompts, the first inputs of the samples of prefix blocks
        `start_prefixes` int32 [m]. `angles` float32 [n, 2 D] are rotary angles in the place of positions, and
        `features` float32 [k, H] the embeddings of the k tokens below 0, in order.
        """
        table = self._table
        for name, array in (("prompt_angles", angles), ("prompt_features", features)):
            table[name] = np.zeros(0, np.float32) if array is None else np.ascontiguousarray(array)
        table["prompt_row_prefix"][: len(prefix_blocks)] = prefix_blocks
        table["prompt_row_seen"][: len(prefix_blocks)] = seen
        table["start_prefix"][: len(start_prefixes)] = start_prefixes
        table["prompt_rows"], table["prompt_starts"] = len(prefix_blocks), len(start_prefixes)
        call_kernel("rollout_prompts", tokens, self._number)

    def prompt_routes(self) -> np.ndarray:
        """Returns the routes of the first n tokens of the last `fill`, if recorded: expert ids, uint8 or uint16
        [n, layers with experts, experts per token]."""
        rows = self._table["prompt_routes"].reshape(-1, *self._routed)
        return rows[: int(self._table["prompt_rows"][0])].astype(self._route_dtype)

    def routes(self, sample: int, begin: int, end: int) -> np.ndarray:
        """Returns the routes of the sample's tokens `begin` to `end`, expert ids [end - begin, layers with experts,
        experts per token]; token 0 is the sample's first input."""
        longest = int(self._table["longest"][0])
        rows = self._table["routes"].reshape(-1, longest, *self._routed)
        return rows[sample, begin:end].astype(self._route_dtype)

    def decode(self, steps: int, guesses: Sequence[Sequence[int]] = ()) -> int:
        """Runs up to `steps` decode steps, of a token in every slot; waiting samples take over slots that become free.

        `guesses` are tokens that may follow in the first step, a sequence for each of the `running` samples: as far as
        they are right, their step draws what would follow them too. Returns the number of samples that are still
        running or waiting.
        """
        if guesses:
            self._table["num_guessed"][: len(guesses)] = [len(tokens) for tokens in guesses]
            self._table["guessed"] = np.array([*chain(*guesses)], np.int32)
        left = np.zeros(1, np.int32)
        call_kernel("rollout_decode", np.array([*self._number, steps], np.int32), left)
        return int(left[0])

    @property
    def waiting(self) -> int:
        """Returns the number of samples that are waiting for a slot."""
        return int(self._table["queue_tail"][0] - self._table["queue_head"][0])

    @property
    def running(self) -> np.ndarray:
        """Returns the numbers of the samples that have slots, int32 [n], in the order of their rows."""
        return self._table["row_sample"][: int(self._table["num_rows"][0])].copy()

    @property
    def counts(self) -> tuple[int, ...]:
        """Returns the batch's number of non-empty decode steps, the total of rows that they computed, and of guesses
        those that were computed and those that were right."""
        return tuple(int(self._table[name][0]) for name in COUNTS)
