"""The C kernels called as graphs call them, without MindSpore's graphs: right on random shapes, and refusing what is
not as they declare it, with a sentence instead of a wild pointer.

scripts/sanitize.sh runs these tests under AddressSanitizer and UndefinedBehaviorSanitizer.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from expert_calls import EXPERT_CALLS
from kernel_calls import CALLS as OTHER_CALLS
from kernel_calls import assert_refused, attention_inputs, filled, floats, one, wrong_calls
from numpy.random import default_rng
from tables import each_row

from mindgrpo.backend.kernels.native.library import FLAGS, call_kernel, library_path

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.skipif(library_path() is None, reason="no C compiler on this machine")

CALLS = OTHER_CALLS | EXPERT_CALLS


@each_row("symbol", CALLS)
def test_random_shapes_give_what_numpy_gives(symbol: str) -> None:
    for seed in range(12):
        CALLS[symbol](default_rng(seed)).run()


@each_row("symbol", CALLS)
def test_a_call_that_is_not_as_declared_is_refused(symbol: str) -> None:
    arrays = CALLS[symbol](default_rng(1)).arrays
    for wrong in wrong_calls(arrays):
        assert_refused(symbol, wrong)


@each_row("symbol", CALLS)
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
    queries, _, dim, _ = arrays[7]
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
    numbers = [np.array([1, 1, 2, 0], np.int32), np.ones(2, np.float32)]
    arrays = [*inputs, spans, np.zeros((1, 4), np.float32), *numbers, filled(4, 2), filled(4, 1)]
    assert_refused("attention", arrays, "span")


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
inputs += [np.zeros((1, 2 * dim), np.float32), np.array([1, 1, dim, 0], np.int32), np.ones(2, np.float32)]
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
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert len(lines) == 3
    for symbol, line in zip(("rms_norm_grad", "attention", "attention_grad"), lines, strict=True):
        start, _, rest = line.partition(" bytes: the memory of this machine is used up; ")
        assert start.startswith(f"kernel {symbol}: no memory for ") and rest
        assert int(start.rpartition(" ")[2]) > 1 << 20
