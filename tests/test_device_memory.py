"""What a device gives back of its memory and says of it: MindSpore's own allocator on CPU, and stand-ins for an NPU.

Does not prove that an NPU's allocator does the same, nor what its drivers and HCCL keep for themselves.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mindspore as ms
import numpy as np
import psutil
import pytest
from mindspore import Tensor, mint, nn
from small_runs import make_inputs, run

from mindgrpo.backend.device import backend as device_backend
from mindgrpo.backend.device.ascend import Ascend
from mindgrpo.backend.device.backend import DeviceBackend
from mindgrpo.backend.device.hardware import Hardware
from mindgrpo.backend.device.host_cpu import HostCpu
from mindgrpo.backend.dtypes import Dtype, mindspore_dtype
from mindgrpo.config import load_config
from mindgrpo.grpo.device_plan import phase_needs
from mindgrpo.grpo.run_plan import plan_run
from mindgrpo.memory.residency import Residency
from mindgrpo.models.decoder_config import read_config
from mindgrpo.monitor.metrics import read_metrics
from mindgrpo.rollout.embedded import plain

MIB = 1 << 20
LARGE = 256 * MIB


def rss() -> int:
    gc.collect()
    return psutil.Process().memory_info().rss


class Pooled(HostCpu):
    """The processors with memory of MindSpore's own allocator, as a device has, which hands out again what it gets."""

    give_up = Hardware.give_up

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
    backend = DeviceBackend(Pooled(), {})
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


class Sized(HostCpu):
    """A device that knows its size once it was opened, as an NPU does."""

    def __init__(self, calls: list[str]) -> None:
        super().__init__()
        self.calls = calls

    def open(self, world_size: int) -> None:
        self.calls.append("open")

    @property
    def memory_bytes(self) -> int | None:
        self.calls.append("size")
        return 64 << 30 if {"open", "connect"} <= {*self.calls} else None


def test_the_size_of_the_memory_is_read_after_the_ranks_are_connected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(device_backend, "init", lambda name: calls.append("connect"))
    monkeypatch.setattr(device_backend, "get_rank", lambda: 0)
    monkeypatch.setattr(device_backend, "get_group_size", lambda: 2)
    backend = DeviceBackend(Sized(calls), {"MS_WORKER_NUM": "2"})
    assert calls == ["open", "connect", "size"]
    assert backend.device_memory_bytes == 64 << 30


def test_an_npu_is_used_before_it_is_asked_for_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[bool] = []

    def zeros(self: Ascend, shape: Sequence[int], dtype: Dtype) -> Tensor:
        used.append(True)
        return Tensor(np.zeros(shape, np.float32))

    def properties(device: int) -> SimpleNamespace:
        return SimpleNamespace(total_memory=64 << 30 if used else 0)

    monkeypatch.setattr(Ascend, "zeros", zeros)
    monkeypatch.setattr(ms.hal, "get_device_properties", properties)
    assert Ascend().memory_bytes == 64 << 30


# -- what was measured -----------------------------------------------------------------------------------------------


def test_metrics_have_the_peak_that_the_device_measured_beside_the_planned_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = iter(range(1, 1000))
    monkeypatch.setattr(plain, "DECODE_STEPS", 2)
    monkeypatch.setattr(HostCpu, "take_peak", lambda self: next(counted) * MIB, raising=False)
    make_inputs(tmp_path)
    words = ("--context.backend", "device", "--rl_config.max_steps", "2")
    first, second = read_metrics(run(tmp_path, tmp_path / "run", *words) / "metrics.jsonl")
    for row in (first, second):
        measured = [
            row[f"memory/device_peak/{phase}"] for phase in ("reshard", "rollout", "update")
        ]
        # In the order of the phases, each by a reading of its own.
        assert measured == sorted(measured) and len({*measured}) == 3
        assert all(size % MIB == 0 for size in measured)
    assert second["memory/device_peak/update"] > first["memory/device_peak/update"]
    config = load_config(tmp_path / "run" / "config_resolved.yaml", []).config
    plan = plan_run(config, read_config(config.actor_config.load), 1)
    (update,) = (need for need in phase_needs(plan) if need.phase == "update")
    assert second["memory/device_peak_planned/update"] >= update.total > 0


def test_an_npus_peak_is_counted_anew_in_every_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = SimpleNamespace(peak=0, now=0)

    def allocate(size: int) -> None:
        pool.now += size
        pool.peak = max(pool.peak, pool.now)

    monkeypatch.setattr(ms.runtime, "max_memory_allocated", lambda: pool.peak)
    monkeypatch.setattr(ms.runtime, "memory_allocated", lambda: pool.now)
    monkeypatch.setattr(ms.runtime, "reset_max_memory_allocated", lambda: setattr(pool, "peak", 0))
    residency = Residency(take_peak=Ascend().take_peak)
    for phase, sizes in (("update", (900, -800)), ("rollout", ()), ("reference", (50, -50))):
        residency.activate(phase)
        for size in sizes:
            allocate(size)
    assert residency.peaks() == {"update": 900, "rollout": 100, "reference": 150}
