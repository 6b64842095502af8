"""What a device gives back of its memory and says of it: MindSpore's own allocator on CPU, and stand-ins for an NPU.

Does not prove that an NPU's allocator does the same, nor what its drivers and HCCL keep for themselves.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mindspore as ms
import numpy as np
import psutil
import pytest
from mindspore import Tensor, mint, nn
from small_generators import CONFIG, LAYOUT

from mindgrpo.backend.device import backend as device_backend
from mindgrpo.backend.device.ascend import AscendBackend
from mindgrpo.backend.device.backend import DeviceBackend
from mindgrpo.backend.device.host_cpu import HostCpuBackend
from mindgrpo.backend.dtypes import Dtype, mindspore_dtype
from mindgrpo.memory.residency import Residency
from mindgrpo.models.parameters import parameter_specs
from mindgrpo.parallel.sharding import Box
from mindgrpo.weights.local_weights import Weights

MIB = 1 << 20
LARGE = 256 * MIB


def rss() -> int:
    gc.collect()
    return psutil.Process().memory_info().rss


class Pooled(HostCpuBackend):
    """The processors with memory of MindSpore's own allocator, as a device has, which hands out again what it gets."""

    give_up = DeviceBackend.give_up

    def zeros(self, shape: Sequence[int], dtype: Dtype) -> Tensor:
        zeros = mint.zeros(tuple(shape), dtype=mindspore_dtype(dtype))
        zeros.reshape(-1)[:1].asnumpy()
        return zeros


class FirstRow(nn.Cell):
    def __init__(self, parameter: Any) -> None:
        super().__init__()
        self.parameter = parameter

    def construct(self, x: Any) -> Any:
        return self.parameter[:1] * x


def test_memory_that_a_graph_still_refers_to_is_given_back_and_used_again() -> None:
    backend = Pooled({})
    pool = backend.pool(LARGE // 4)
    graph = backend.graph(FirstRow(pool.parameter("large", 0, (LARGE // 4,))), "first row")
    pool.load()
    graph(Tensor([2.0])).asnumpy()
    once = rss()
    for leave in (pool.release, pool.offload, pool.release):
        leave()
        pool.load()
        # The graph has not run again: with its old memory there would be two.
        assert rss() - once < LARGE // 2
        np.testing.assert_array_equal(graph(Tensor([2.0])).asnumpy(), [0.0])


# -- the size of the device's memory ---------------------------------------------------------------------------------


class Sized(HostCpuBackend):
    """A device that knows its size once it was opened, as an NPU does."""

    def __init__(self, calls: list[str], environment: dict[str, str]) -> None:
        self.calls = calls
        super().__init__(environment)

    def _open(self) -> None:
        self.calls.append("open")

    def _memory_bytes(self) -> int | None:
        self.calls.append("size")
        return 64 << 30 if {"open", "connect"} <= {*self.calls} else None


def test_the_size_of_the_memory_is_read_after_the_ranks_are_connected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(device_backend, "init", lambda name: calls.append("connect"))
    monkeypatch.setattr(device_backend, "get_rank", lambda: 0)
    monkeypatch.setattr(device_backend, "get_group_size", lambda: 2)
    backend = Sized(calls, {"MS_WORKER_NUM": "2"})
    assert calls == ["open", "connect", "size"]
    assert backend.device_memory_bytes == 64 << 30


def test_an_npu_is_used_before_it_is_asked_for_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[bool] = []

    def zeros(self: AscendBackend, shape: Sequence[int], dtype: Dtype) -> Tensor:
        used.append(True)
        return Tensor(np.zeros(shape, np.float32))

    def properties(device: int) -> SimpleNamespace:
        return SimpleNamespace(total_memory=64 << 30 if used else 0)

    monkeypatch.setattr(AscendBackend, "zeros", zeros)
    monkeypatch.setattr(ms.hal, "get_device_properties", properties)
    assert AscendBackend({}).device_memory_bytes == 64 << 30


def test_an_npus_peak_is_counted_anew_in_every_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = SimpleNamespace(peak=0, now=0)

    def allocate(size: int) -> None:
        pool.now += size
        pool.peak = max(pool.peak, pool.now)

    monkeypatch.setattr(ms.runtime, "max_memory_allocated", lambda: pool.peak)
    monkeypatch.setattr(ms.runtime, "memory_allocated", lambda: pool.now)
    monkeypatch.setattr(ms.runtime, "reset_max_memory_allocated", lambda: setattr(pool, "peak", 0))
    monkeypatch.setattr(AscendBackend, "_memory_bytes", lambda self: None)
    residency = Residency(take_peak=AscendBackend({}).take_device_peak)
    for phase, sizes in (("update", (900, -800)), ("rollout", ()), ("reference", (50, -50))):
        residency.activate(phase)
        for size in sizes:
            allocate(size)
    assert residency.peaks() == {"update": 900, "rollout": 100, "reference": 150}


# -- writing in place ------------------------------------------------------------------------------------------------


def patterns(dtype: Dtype) -> np.ndarray:
    """Bits of every kind of number: subnormals, zeros of both signs, infinities, NaNs with payloads."""
    if dtype == "float32":
        some = np.random.default_rng(0).integers(0, 2**32, 1 << 16, dtype=np.uint32)
        return np.concatenate([some, np.arange(1, 2000), [0x80000000, 0x7F800001, 0xFFC12345]])
    return np.arange(1 << 16)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_parts_are_written_in_place_bit_for_bit_and_nothing_beside_them(dtype: Dtype) -> None:
    weights = Weights(LAYOUT, 0, HostCpuBackend({}), dtype=dtype)
    weights.pool.load()
    unsigned = np.uint32 if dtype == "float32" else np.uint16
    signed = np.int32 if dtype == "float32" else np.int16
    known = patterns(dtype).astype(unsigned)
    before = {key: parameter.data_ptr() for key, parameter in weights.parameters.items()}
    # One matrix of several side by side, one that is whole, and a vector.
    names = [f"model.layers.0.{own}.weight" for own in ("self_attn.k_proj", "mlp.down_proj")]
    names.append("model.norm.weight")
    written, expected = [], {key: 0 for key in before}
    for number, name in enumerate(names):
        region = weights.region(name)
        values = np.resize(np.roll(known, 7 * number), region.shape)
        tensor = Tensor(values.view(signed)).view(mindspore_dtype(dtype))
        written.append((region, tensor))
        whole = np.zeros(weights.parameters[region.key].shape, unsigned)
        whole[region.slices] = values
        expected[region.key] = whole
    weights.set_parts(written)
    kind = ms.int32 if dtype == "float32" else ms.int16
    for key, parameter in weights.parameters.items():
        bits = parameter.view(kind).asnumpy().view(unsigned)
        np.testing.assert_array_equal(bits, expected[key], err_msg=key)
    assert {key: parameter.data_ptr() for key, parameter in weights.parameters.items()} == before


def test_a_part_is_written_without_a_copy_of_the_tensor_that_it_belongs_to() -> None:
    config = replace(CONFIG, vocab_size=1 << 20)
    layout = replace(LAYOUT, specs=parameter_specs(config))
    weights = Weights(layout, 0, HostCpuBackend({}))
    weights.pool.load()
    name = "model.embed_tokens.weight"
    box = Box((7, 0), (9, config.hidden_size))
    size = 4 * config.vocab_size * config.hidden_size

    def write(number: float) -> None:
        values = Tensor(np.full(box.shape, number, np.float32))
        weights.set_parts([(weights.region(name, box), values)])
        assert weights.part(name)[8, 3:4].asnumpy() == number

    write(1.0)
    # The kernel's mark of the most that was resident, which it forgets on demand.
    Path("/proc/self/clear_refs").write_text("5")
    before = rss()
    write(2.0)
    status = Path("/proc/self/status").read_text()
    (most,) = (int(line.split()[1]) << 10 for line in status.splitlines() if "VmHWM" in line)
    assert most - before < size // 4
