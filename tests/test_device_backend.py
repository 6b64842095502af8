"""The backend for devices, on CPU in one process: memory that is the device's own, and what is computed there.

Held equal to the backend of shared memory. What ranks do together is in test_distributed.py, runs in
test_device_runs.py; does not prove anything of Ascend.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import psutil
import pytest
from mindspore import Parameter, Tensor, nn
from small_generators import (
    CONFIG,
    LAYOUT,
    SETTINGS,
    VERSION,
    assert_same,
    generator_with,
    requests_of,
    room_of,
    run,
)
from test_lora import raw_of

from mindgrpo.backend.connect import connect
from mindgrpo.backend.contract import Backend, ReleasedMemory
from mindgrpo.backend.cpu.backend import CpuBackend
from mindgrpo.backend.device.host_cpu import HostCpuBackend
from mindgrpo.backend.dtypes import Dtype
from mindgrpo.backend.kernels.contract import Kernels
from mindgrpo.backend.kernels.shapes import SamplingParams
from mindgrpo.backend.targets import choose_target
from mindgrpo.memory.residency import Location, Residency
from mindgrpo.models.decoder_config import decoder_config
from mindgrpo.models.lora import TARGETS, LoraSettings, adapter_specs, fill_adapters, merge
from mindgrpo.models.parameters import parameter_specs
from mindgrpo.parallel.mesh import Mesh
from mindgrpo.parallel.sharding import Layout
from mindgrpo.rollout.embedded.engine import EmbeddedEngine
from mindgrpo.weight_sync.execute import Resharder
from mindgrpo.weight_sync.plan import plan_reshard
from mindgrpo.weight_sync.transfer import mix
from mindgrpo.weights import checksum
from mindgrpo.weights.checksum import PartSums, host_sums
from mindgrpo.weights.local_weights import Weights
from mindgrpo.weights.pretrained import fill_random

MIB = 1 << 20


@pytest.fixture(scope="module")
def device() -> Backend:
    return connect(choose_target("CPU", "device"), {})


@pytest.fixture(scope="module")
def host() -> Backend:
    return CpuBackend({})


def bits(count: int, seed: int = 0) -> np.ndarray:
    """Random bits as float32, -0.0 and numbers that are none among them."""
    return np.random.default_rng(seed).integers(0, 2**32, count, dtype=np.uint32).view(np.float32)


class Doubled(nn.Cell):
    def __init__(self, parameter: Parameter) -> None:
        super().__init__()
        self.parameter = parameter

    def construct(self, x: Tensor) -> Tensor:
        return self.parameter * x


TWO = Tensor([2.0])


def test_the_devices_memory_is_not_the_hosts(device: Backend) -> None:
    pool = device.pool(8)
    parameter = pool.parameter("own", 0, (8,))
    before = device.host_device_bytes
    with pool.on_host(write=True) as memory:
        memory.view(0, (8,))[...] = 3.0
    with pool.on_host() as memory:
        memory.view(0, (8,))[...] = 9.0
    np.testing.assert_array_equal(parameter.asnumpy(), 3.0)
    # Down and up to write, and down to read.
    assert device.host_device_bytes - before == 3 * 32


def test_what_leaves_the_device_comes_back_bit_for_bit_and_is_counted(device: Backend) -> None:
    pool = device.pool(600)
    parameters = [pool.parameter(f"p{i}", 200 * i, (20, 10)) for i in range(3)]
    values = bits(600)
    with pool.on_host(write=True) as memory:
        memory.view(0, (600,))[...] = values
    before = device.host_device_bytes
    for _ in range(2):
        pool.offload()
        with pool.on_host() as memory:
            assert memory.view(0, (600,)).tobytes() == values.tobytes()
        pool.load()
    assert device.host_device_bytes - before == 4 * pool.num_bytes
    assert b"".join(p.asnumpy().tobytes() for p in parameters) == values.tobytes()


def test_a_graph_sees_a_parameter_that_was_away_and_refuses_one_that_is_away(
    device: Backend,
) -> None:
    pool = device.pool(8)
    graph = device.graph(Doubled(pool.parameter("away", 0, (8,))), "doubled")
    with pytest.raises(ReleasedMemory, match="'doubled' uses away, whose memory is released"):
        graph(TWO)
    for number in (1.0, 5.0):
        with pool.on_host(write=True) as memory:
            memory.view(0, (8,))[...] = number
        np.testing.assert_array_equal(graph(TWO).asnumpy(), 2 * number)
        pool.offload()
        with pytest.raises(ReleasedMemory, match="on the host"):
            graph(TWO)
        pool.load()
        np.testing.assert_array_equal(graph(TWO).asnumpy(), 2 * number)
    pool.release()
    with pytest.raises(ReleasedMemory):
        graph(TWO)
    with pytest.raises(ReleasedMemory), pool.on_host():
        pass
    pool.load()
    np.testing.assert_array_equal(graph(TWO).asnumpy(), 0.0)


def test_only_the_graph_that_decodes_has_the_phase_of_decoding(
    device: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In another phase than these two, MindSpore looks for the compiled graph at every call."""
    made: dict[str, nn.Cell] = {}
    real = type(device).graph

    def recording(self: Backend, cell: nn.Cell, name: str) -> Any:
        made[name] = cell
        return real(self, cell, name)

    monkeypatch.setattr(type(device), "graph", recording)
    settings = SamplingParams(max_tokens=SETTINGS.max_tokens, repetition_penalty=1.1)
    engine = EmbeddedEngine(CONFIG, LAYOUT, device, settings, room_of(16, 4))
    for memory in chain(*engine.pools.values()):
        memory.load()
    engine.publish(lambda: fill_random(engine.weights, seed=1), VERSION)
    run(engine, requests_of())
    pool = device.pool(8)
    cell = Doubled(pool.parameter("own", 0, (8,)))
    pool.load()
    device.graph(cell, "doubled")(TWO)
    assert "prefill" in cell.phase_cache
    phases = {name: cell.phase for name, cell in made.items()}
    assert phases.pop("decode") == "increment"
    assert set(phases) == {"prompts", "prompts' tokens", "doubled"}
    assert set(phases.values()) == {"prefill"}


def test_released_memory_goes_back_to_the_system(device: Backend) -> None:
    size = 64 * MIB
    pool = device.pool(size // 4)
    graph = device.graph(Doubled(pool.parameter("large", 0, (size // 4,))), "doubled")
    with pool.on_host(write=True) as memory:
        memory.view(0, (size // 4,))[...] = 1.0
    graph(TWO)
    gc.collect()
    before = psutil.Process().memory_info().rss
    pool.release()
    gc.collect()
    assert before - psutil.Process().memory_info().rss >= size - 4 * MIB


class Unreachable(HostCpuBackend):
    def _transfer(self, *_: Any) -> None:
        raise RuntimeError("the link is down")


def test_a_rank_that_has_caught_a_failed_exchange_waits_for_nobody() -> None:
    backend = Unreachable({})
    with pytest.raises(RuntimeError, match="the link is down"):
        backend.exchange({}, {1: [backend.zeros((1,), "float32")]})
    assert backend.health.heartbeats()[0].waits_since == 0.0


def test_a_graph_of_fewer_inputs_does_not_take_any_from_one_that_was_compiled_before(
    device: Backend,
) -> None:
    """As the sums of a layer's weights: a stage has fewer beside its layers than the generator."""

    class Total(nn.Cell):
        def construct(self, *inputs: Tensor) -> Tensor:
            total = inputs[0]
            for x in inputs[1:]:
                total = total + x
            return total

    graph = device.graph(Total(), "total")
    for count in (1, 3, 2, 3, 1, 2):
        assert graph(*[Tensor(np.ones(1, np.float32))] * count).asnumpy() == count


def test_a_range_has_one_parameter_that_is_there_before_the_memory(device: Backend) -> None:
    pool = device.pool(16)
    pool.parameter("one", 0, (8,))
    with pytest.raises(ValueError, match="two would lie on one"):
        pool.parameter("two", 4, (8,))
    pool.load()
    with pytest.raises(ValueError, match="comes too late"):
        pool.parameter("three", 8, (8,))


def test_roles_stay_on_the_device_while_there_is_room_and_leave_for_those_that_need_it(
    device: Backend,
) -> None:
    def residency(budget: int | None) -> Residency:
        made = Residency(budget, keeps=True)
        for name, mib in (("policy", 2), ("optimizer", 4), ("reference", 2)):
            pool = device.pool(mib * MIB // 4)
            pool.parameter(name, 0, (mib * MIB // 4,))
            made.register(name, [pool], rebuilt=False, filled=True)
        return made

    roomy, tight = residency(None), residency(6 * MIB)
    for phase in ("update", "reference", "update"):
        roomy.activate(phase)
        tight.activate(phase)
        assert tight.device_bytes <= 6 * MIB
    assert {role.location for role in roomy.roles.values()} == {Location.DEVICE}
    assert roomy.ledger.transfer_bytes == 0
    assert tight.roles["reference"].location is Location.HOST
    assert tight.ledger.transfer_bytes > 0


@pytest.fixture
def generators(device: Backend, host: Backend) -> Iterator[tuple[EmbeddedEngine, EmbeddedEngine]]:
    settings = SamplingParams(
        temperature=0.8,
        max_tokens=SETTINGS.max_tokens,
        stop_ids=SETTINGS.stop_ids,
        repetition_penalty=1.2,
        min_tokens=2,
        top_p=0.9,
    )
    weights = Weights(LAYOUT, 0, host)
    fill_random(weights, seed=1, scale=0.25)
    expected = generator_with(weights, host, Kernels(), settings)
    made = EmbeddedEngine(CONFIG, LAYOUT, device, settings, room_of(16, 4))
    yield made, expected


def test_completions_are_those_of_the_host_also_after_the_memory_was_given_up(
    generators: tuple[EmbeddedEngine, EmbeddedEngine],
) -> None:
    made, expected = generators
    residency = Residency(1 << 40)
    for name, pools in made.pools.items():
        residency.register(name, pools, rebuilt=True, filled=False)
    for step in range(2):
        residency.activate("rollout")
        made.publish(lambda: fill_random(made.weights, seed=1, scale=0.25), VERSION)
        assert_same(run(made, requests_of(), step), run(expected, requests_of(), step))
        residency.activate("reference")
        made.sleep()
    assert all(role.location is Location.RELEASED for role in residency.roles.values())


def test_a_reshard_on_one_rank_keeps_every_bit(device: Backend) -> None:
    source, target = Weights(LAYOUT, 0, device), Weights(LAYOUT, 0, device)
    with source.on_host(write=True) as memory:
        for number, run_of in enumerate(memory.flat_buffers):
            run_of[...] = bits(run_of.size, number)
    target.pool.load()
    before = device.host_device_bytes
    Resharder(plan_reshard(LAYOUT, LAYOUT), source, target, device).run()
    assert device.host_device_bytes == before
    assert host_sums(target) == host_sums(source)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_sums_of_weights_are_those_that_the_host_computes(
    device: Backend, dtype: Dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, sums, copied = Weights(LAYOUT, 0, device, dtype=dtype), PartSums(device), []
    fill_random(weights, seed=4)
    expected, read = host_sums(weights), Tensor.asnumpy
    assert sums.of(weights) == expected
    compiled = len(device.compile_log.entries)
    monkeypatch.setattr(Tensor, "asnumpy", lambda x: copied.append(x) or read(x))
    assert sums.of(weights) == expected
    assert len(copied) == 1 and len(device.compile_log.entries) == compiled
    monkeypatch.setattr(checksum, "DEVICE_ELEMENTS", 700)
    assert PartSums(device).of(weights) == expected
    outside = LAYOUT.mesh.size
    assert PartSums(device).of(Weights(LAYOUT, outside, device, dtype=dtype)) == {}


WITH_EXPERTS = Layout.of(
    Mesh(1, 1), parameter_specs(decoder_config(raw_of("qwen3_moe") | {"vocab_size": 7}, "here"))
)


@pytest.mark.parametrize("layout", [LAYOUT, WITH_EXPERTS], ids=["dense", "experts"])
def test_adapters_are_merged_and_references_mixed_as_on_the_host(
    device: Backend, host: Backend, layout: Layout
) -> None:
    lora = LoraSettings(3, 6.0, TARGETS)
    small = replace(layout, specs=adapter_specs(layout.specs, lora))
    results = []
    for backend in (device, host):
        weights, adapters = Weights(layout, 0, backend), Weights(small, 0, backend, "adapters")
        other = Weights(layout, 0, backend, "other")
        fill_random(weights, seed=1)
        fill_random(other, seed=2)
        fill_adapters(adapters, seed=3)
        with adapters.on_host(write=True) as memory:
            for part in memory.hf_views.values():
                part += 0.01
        counted = backend.host_device_bytes
        merge(weights, adapters, lora, backend.kernels)
        mix(weights, other, 0.3)
        backend.synchronize()
        assert backend.host_device_bytes == counted
        with weights.on_host() as memory:
            results.append({name: part.copy() for name, part in memory.hf_views.items()})
    for name, part in results[0].items():
        np.testing.assert_allclose(part, results[1][name], rtol=0, atol=1e-6, err_msg=name)


def test_weights_on_a_device_have_no_arrays_outside_of_on_host(device: Backend) -> None:
    with pytest.raises(ValueError, match="use on_host"):
        assert Weights(LAYOUT, 0, device).arrays


def test_a_device_of_the_host_has_no_limit_or_profile_of_its_own() -> None:
    backend = HostCpuBackend({})
    assert backend.device_memory_bytes is None
    with backend.device_mark("anything"):
        assert not backend.has_device_profile
