"""The C kernels called as graphs call them, without MindSpore's graphs: right on random shapes, and refusing what is
not as they declare it, with a sentence instead of a wild pointer.

scripts/sanitize.sh runs these tests under AddressSanitizer and UndefinedBehaviorSanitizer.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import slots_by_hand
from kernel_calls import CALLS, KernelCall, attention_inputs, filled, floats, one, size
from numpy.random import Generator, default_rng

from mindgrpo.backend.kernels.contract import Heads, Vocabulary
from mindgrpo.backend.kernels.native.library import FLAGS, call_kernel, library_path
from mindgrpo.backend.kernels.native.rollout import NativeSlots
from mindgrpo.backend.kernels.native.rollout_table import RolloutTable
from mindgrpo.backend.kernels.rollout import GenerationBatch, KVCacheLayout, LocalModelShape, Memory
from mindgrpo.backend.kernels.sampling_params import SamplingParams
from mindgrpo.rollout.noise import ROLLOUT, sample_keys

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.skipif(library_path() is None, reason="no C compiler on this machine")

# Numbers of rows around the ones that vectors, blocks of rows and threads take at a time.
ROWS = (1, 3, 20, 66, 67, 100)


@pytest.mark.parametrize("symbol", CALLS)
def test_random_shapes_give_what_numpy_gives(symbol: str) -> None:
    for seed in range(12):
        CALLS[symbol](default_rng(seed)).run()


def wrong_calls(arrays: list[np.ndarray]) -> Iterator[list[np.ndarray]]:
    """One tensor too few and too many, and each tensor with another dtype and with a dim more."""
    yield arrays[:-1]
    yield [*arrays, one(0)]
    for index, array in enumerate(arrays):
        other = np.int32 if array.dtype == np.float32 else np.float32
        for wrong in (array.astype(other), array[None]):
            yield [*arrays[:index], wrong, *arrays[index + 1 :]]


def assert_refused(symbol: str, arrays: list[np.ndarray], match: str = "") -> None:
    with pytest.raises(RuntimeError, match=f"^kernel {symbol}: .*{match}"):
        call_kernel(symbol, *arrays)


@pytest.mark.parametrize("symbol", CALLS)
def test_a_call_that_is_not_as_declared_is_refused(symbol: str) -> None:
    arrays = CALLS[symbol](default_rng(1)).arrays
    for wrong in wrong_calls(arrays):
        assert_refused(symbol, wrong)


@pytest.mark.parametrize("symbol", CALLS)
def test_dims_that_do_not_fit_each_other_are_refused_or_harmless(symbol: str) -> None:
    for seed in range(3):
        arrays = CALLS[symbol](default_rng(seed)).arrays
        for index, array in enumerate(arrays):
            for dim in range(array.ndim):
                for change in (-1, 1):
                    shape = [n + change * (i == dim) for i, n in enumerate(array.shape)]
                    wrong = [*arrays[:index], np.ones(shape, array.dtype), *arrays[index + 1 :]]
                    try:
                        call_kernel(symbol, *wrong)
                    except RuntimeError as error:
                        assert str(error).startswith(f"kernel {symbol}: ")


def test_a_refusal_names_the_tensor_its_shape_and_the_declared_one() -> None:
    x, weight = floats(default_rng(0), 4, 8), floats(default_rng(0), 7)
    with pytest.raises(RuntimeError) as caught:
        call_kernel("rms_norm", x, weight, one(0), filled(4, 8))
    assert str(caught.value) == (
        "kernel rms_norm: tensor 1 is float32 [7], but must be weight f32[H] with H = 8, N = 4"
    )
    with pytest.raises(RuntimeError, match=r"was given 3 tensors, but takes 4: x f32\[N, H\], "):
        call_kernel("rms_norm", x, weight, one(0))


@pytest.mark.parametrize("position", [-1, 5])
def test_a_position_without_a_rotary_angle_is_refused(position: int) -> None:
    arrays = [*attention_inputs(default_rng(3))]
    rows, length = arrays[4].shape
    queries, _, dim = arrays[7]
    arrays[6] = np.zeros((5, 2 * dim), np.float32)
    arrays[4] = np.zeros_like(arrays[4])
    arrays[4][0, -1] = position
    outputs = [filled(rows * length, queries * dim), filled(rows * length, queries)]
    assert_refused("attention", [*arrays, *outputs], f"position {position} of token")


@pytest.mark.parametrize("span", [(0, -1, 2), (0, 9, 2), (-4, 2, 2), (1, 2, 5), (0, 0, -3)])
def test_a_span_that_leaves_its_cluster_is_refused(span: tuple[int, int, int]) -> None:
    spans = np.zeros((1, 4, 3), np.int32)
    spans[0, :, 2] = [0, 0, 2, 2]
    spans[0, 2:, :2] = (0, 2)
    spans[0, 2] = span
    inputs = [floats(default_rng(0), 4, 6), one(0), one(0), one(0), np.zeros((1, 4), np.int32)]
    numbers = [np.array([1, 1, 2], np.int32), np.ones(2, np.float32)]
    arrays = [*inputs, spans, np.zeros((1, 4), np.float32), *numbers, filled(4, 2), filled(4, 1)]
    assert_refused("attention", arrays, "span")


# -- the generator's kernels --------------------------------------------------------------------------------------


class Rollout:
    """A generator of one layer with random sizes, its weights, and two samples of each of three prompts."""

    def __init__(self, rng: Generator, rows: int = 6) -> None:
        kv, dim, hidden, inner = size(rng, 2), 2 * size(rng, 20), size(rng, 70), size(rng, 90)
        self.heads = Heads(kv * size(rng, 3), kv, dim)
        self.hidden, self.rows, vocab = hidden, rows, size(rng, 200)
        self.room = 16
        share = LocalModelShape(
            1, hidden, inner, self.heads, Vocabulary(0, vocab, vocab), 1e-6, 1, 0
        )
        positions = 2 * rows * self.room
        width = hidden + max(self.heads.width + max(hidden, kv * dim * 3), 2 * inner)
        self.memory = Memory(
            cache=np.zeros(2 * positions * kv * dim, np.float32),
            scratch=np.zeros(max(rows, 16) * width, np.float32),
            inputs=np.zeros(rows * hidden, np.float32),
            starts=np.zeros(rows * hidden, np.float32),
            seen=np.zeros(0, np.float32),
        )
        settings = SamplingParams(temperature=1.0)
        rotary = floats(rng, 2 * self.room, 2 * dim)
        self.slots = NativeSlots(share, settings, rotary, rows, 16, self.memory)
        self.table = self.slots._table
        mixed = self.heads.queries * dim
        self.nothing = one(0)
        self.norm, self.qkv = floats(rng, hidden), floats(rng, hidden, self.heads.width)
        self.out, self.head_table = floats(rng, mixed, hidden), floats(rng, vocab, hidden)
        self.gate_up, self.down = floats(rng, hidden, 2 * inner), floats(rng, inner, hidden)
        self.start(rng)

    def start(self, rng: Generator) -> None:
        prompts = [np.zeros(size(rng, self.room), np.int32) for _ in range(self.rows)]
        limits = [min(4, self.room)] * self.rows
        keys = rng.integers(0, 2**64, self.rows, np.uint64)
        job = GenerationBatch.of(prompts, range(self.rows), limits, keys)
        self.slots.start(job, KVCacheLayout(self.rows, self.room, self.rows, self.room))
        for row in range(self.rows):
            self.slots.enqueue(row, row)

    def layer(self, x: np.ndarray, is_prompt: bool) -> KernelCall:
        none = self.nothing
        attention = [x, none, self.norm, self.qkv, none, none, none, self.out]
        mlp = [none, self.norm, self.gate_up, self.down]
        return self.call(self.slots.layer(0, is_prompt, False), *attention, *mlp)

    def head(self, x: np.ndarray, added: np.ndarray) -> KernelCall:
        return self.call(self.slots.head(), x, added, self.norm, self.head_table)

    def call(self, cell: object, *inputs: np.ndarray) -> KernelCall:
        return KernelCall(*slots_by_hand.arrays_of(cell, *inputs))

    def steps(self, rng: Generator) -> Iterator[KernelCall]:
        """The calls of a rollout in their order, each of which has to run before the next is asked for."""
        prefixes = np.repeat(np.arange(3, dtype=np.int32) % self.rows, 4)
        self.slots.set_prompt_rows(
            prefixes, np.tile(np.arange(1, 5, dtype=np.int32), 3), np.zeros(1, np.int32)
        )
        yield self.layer(floats(rng, 16, self.hidden), True)
        begin = self.call(self.slots.begin(), np.zeros(1, np.int32))
        yield begin
        x = begin.outputs[0]
        for _ in range(3):
            layer = self.layer(x, False)
            yield layer
            head = self.head(*layer.outputs)
            yield head
            logits, stats = head.outputs
            draw = self.call(self.slots.draw(), logits, stats[None], stats[None], self.head_table)
            yield draw
            commit = self.call(self.slots.commit(), draw.outputs[0])
            yield commit
            x = commit.outputs[0]


@pytest.mark.parametrize("rows", ROWS)
def test_rollouts_of_any_number_of_rows_give_numpys_logits(rows: int) -> None:
    rng = default_rng(rows)
    made = Rollout(rng, rows)
    for call in made.steps(rng):
        call.run()
        if call.symbol == "rollout_head":
            x, added = (a.astype(np.float64) for a in call.inputs[:2])
            total = x + added
            normed = total / np.sqrt((total**2).mean(1, keepdims=True) + 1e-6) * made.norm
            running = int(made.table["num_rows"][0])
            expected = (normed @ made.head_table.T)[:running]
            np.testing.assert_allclose(call.outputs[0][:running], expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("tp_size", [1, 3])
def test_the_head_writes_within_what_it_was_given(rows: int, tp_size: int) -> None:
    ranks = slots_by_hand.Ranks(SamplingParams(top_k=5, top_p=0.9), 50, tp_size, rows, hidden=256)
    logits = floats(default_rng(0), rows, 50)
    keys = sample_keys(0, ROLLOUT, 0, range(rows))
    tokens, _, _ = ranks.draw(logits, keys, [np.ones(1, np.int32)] * rows)
    assert (np.argsort(-logits)[:, :5] == tokens[:, None]).any(1).all()


def test_every_call_of_a_rollout_that_is_not_as_declared_is_refused() -> None:
    rng = default_rng(2)
    seen = set()
    for call in Rollout(rng).steps(rng):
        for wrong in wrong_calls(call.arrays):
            assert_refused(call.symbol, wrong)
        for index, array in enumerate(call.arrays):
            if array.ndim < 2:
                continue
            wrong = [*call.arrays[:index], array[:, :-1].copy(), *call.arrays[index + 1 :]]
            assert_refused(call.symbol, wrong)
        call.run()
        seen.add(call.symbol)
    assert len(seen) == 5


@pytest.mark.parametrize(
    "name, value, match",
    [
        ("scratch", np.zeros(10, np.float32), "scratch has 10 elements, but needs"),
        ("cache", np.zeros(10, np.uint8), "cache has 10 elements, but needs"),
        ("row_own", np.zeros(5, np.int32), "row_own has 5 elements, but needs 6"),
        ("rotary", np.zeros(1, np.float32), "rotary has 1 elements, but needs"),
        ("num_free", 1, "6 rows and 1 free slots are not 6"),
        ("layers", 0, "layer 0"),
        ("slot_size", 4, "rooms"),
        ("row_prefix", np.full(6, 99, np.int32), "in prefix 99"),
        ("row_slot", np.full(6, -1, np.int32), "in slot -1"),
        ("row_own", np.full(6, 16, np.int32), "17 in slot"),
        ("hidden", 5, "H is"),
    ],
)
def test_a_table_that_does_not_hold_what_its_numbers_say_is_refused(
    name: str, value: int | np.ndarray, match: str
) -> None:
    made = Rollout(default_rng(4))
    begin = made.call(made.slots.begin(), np.zeros(1, np.int32))
    begin.run()
    made.table[name] = value
    call = made.layer(begin.outputs[0], False)
    assert_refused(call.symbol, call.arrays, match)


def test_a_layer_that_ranks_share_needs_their_group() -> None:
    made = Rollout(default_rng(7))
    begin = made.call(made.slots.begin(), np.zeros(1, np.int32))
    begin.run()
    made.table["tp_size"] = 2
    call = made.layer(begin.outputs[0], False)
    assert_refused(call.symbol, call.arrays, "knows no group")
    made.table["group"] = 12345
    assert_refused(call.symbol, call.arrays, "group's status is 1")


def test_a_number_that_no_generator_has_is_refused() -> None:
    made = Rollout(default_rng(5))
    call = made.call(made.slots.begin(), np.zeros(1, np.int32))
    for number in (-1, 1023, 1 << 30):
        call.inputs[-1][0] = number
        assert_refused(call.symbol, call.arrays, f"no generator {number}")


# -- the table ----------------------------------------------------------------------------------------------------


def test_a_table_takes_the_names_and_types_of_the_header_only() -> None:
    table = RolloutTable()
    with pytest.raises(KeyError):
        table["hiden"] = 3
    with pytest.raises(ValueError, match="cache"):
        table["cache"] = np.zeros(3)
    with pytest.raises(ValueError, match="cache"):
        table["cache"] = np.zeros((3, 4), np.float32)[:, ::2]
    with pytest.raises(RuntimeError, match="without a value: .*hidden.*top_p"):
        table.check_complete()
    table["hidden"] = 3
    assert table["hidden"] == 3


def test_a_field_that_nothing_fills_is_an_error_before_the_first_kernel() -> None:
    made = Rollout(default_rng(6))
    del made.table._values["stopped"]
    with pytest.raises(RuntimeError, match="without a value: stopped"):
        made.table.check_complete()


# -- memory -------------------------------------------------------------------------------------------------------

OUT_OF_MEMORY = """
import resource, sys
sys.path.insert(0, "tests")
import numpy as np
from kernel_calls import attention_inputs, filled, floats, one
from mindgrpo.backend.kernels.native.library import call_kernel
from mindgrpo.errors import UserError

rng = np.random.default_rng(0)
width, length, dim = 1 << 22, 2048, 256
x = floats(rng, 1, width)
norm = ("rms_norm_grad", [x, x[0], one(0), x, x, x.copy(), x[0].copy()])
spans = np.zeros((1, length, 3), np.int32)
inputs = [floats(rng, length, 3 * dim), one(0), one(0), one(0), np.zeros((1, length), np.int32), spans]
inputs += [np.zeros((1, 2 * dim), np.float32), np.array([1, 1, dim], np.int32), np.ones(2, np.float32)]
mixed, lse = filled(length, dim), filled(length, 1)
forward = ("attention", [*inputs, mixed, lse])
back = [inputs[0].copy(), one(0), one(0), one(0)]
backward = ("attention_grad", [*inputs, mixed, lse, mixed, *back])
call_kernel("square_sums", np.ones(1, np.float32), np.zeros(1))
row = one(1).reshape(1, 1)
call_kernel("rms_norm_grad", row, one(1), one(0), row, one(0), filled(1, 1), filled(1))  # starts the threads
pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * 4096 + (1 << 20),) * 2)
for symbol, arrays in (norm, forward, backward):
    try:
        call_kernel(symbol, *arrays)
        print("no error")
    except UserError as error:
        print(error)
"""


def test_memory_that_is_not_there_is_a_sentence_with_kernel_and_bytes() -> None:
    if any("sanitize" in flag for flag in FLAGS):
        pytest.skip("AddressSanitizer's own memory goes beyond any limit")
    command = [sys.executable, "-c", OUT_OF_MEMORY]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert len(lines) == 3
    for symbol, line in zip(("rms_norm_grad", "attention", "attention_grad"), lines, strict=True):
        start, _, rest = line.partition(" bytes: the memory of this machine is used up; ")
        assert start.startswith(f"kernel {symbol}: no memory for ") and rest
        assert int(start.rpartition(" ")[2]) > 1 << 20
