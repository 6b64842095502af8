"""Checks on all ranks together what a run moves: values between ranks, and weights to the generator and the host.

Measures the device's rates, too, by which `plan` divides its counts: those that are reached, so that shares of a peak
are 1.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import mindspore as ms
import numpy as np
import psutil
from mindspore import Tensor, nn, ops

from mindgrpo.backend.contract import Backend
from mindgrpo.backend.dtypes import mindspore_dtype
from mindgrpo.backend.targets import Target
from mindgrpo.doctor.jobs import CheckLine, Starts, fails, ok, skipped
from mindgrpo.models.decoder_config import DecoderConfig, decoder_config
from mindgrpo.models.parameters import num_parameters, parameter_specs
from mindgrpo.parallel.mesh import Mesh
from mindgrpo.parallel.sharding import Layout
from mindgrpo.weight_sync.execute import Resharder
from mindgrpo.weight_sync.plan import plan_reshard
from mindgrpo.weights.checksum import host_sums
from mindgrpo.weights.local_weights import Weights
from mindgrpo.weights.pretrained import fill_random

COUNT, LARGE_BYTES, CALLS, KERNELS = 257, 16 << 20, 10, 300
MIB = 1 << 20
# Elements of sums whose bits are compared: gathered and added in one order, or in shares.
SUMS = (1, COUNT, 10**6)
REMEDY = (
    "compare the ranks' logs in the archive; set HCCL_IF_IP or HCCL_SOCKET_IFNAME if ranks do not reach each other, "
    "and ask hccn_tool -i NUMBER -link -g for each device's link"
)
HEAD_DIM, MAX_LAYERS = 64, 32
SYNC_REMEDY = "see sums and links; the generator would draw by other weights than the trainer's"
OFFLOAD, RELEASED = "offload to the host and back", "memory of weights that are released"
OFFLOAD_REMEDY = "set context.max_device_memory so that nothing leaves the device; send the archive"
Seen = tuple[bool, str, dict[str, Any]]


def whole_numbers(backend: Backend, rank: int) -> np.ndarray:
    """Returns those of a rank, whose sums over up to 256 ranks are exact in 16 bits, too."""
    return ((np.arange(COUNT) + rank) % max(2, min(4, 256 // backend.world_size))).astype("f4")


def _sums(backend: Backend) -> Seen:
    ranks, graph = range(backend.world_size), backend.graph(backend.world.sum_cell(), "sum")
    everyone = [whole_numbers(backend, rank) for rank in ranks]
    own = Tensor(everyone[backend.rank], mindspore_dtype(backend.compute_dtype))
    total = graph(own).asnumpy().astype("f4")
    seconds = _timed(backend, lambda: [graph(own) for _ in range(CALLS)]) / CALLS
    figures = _rates(collective_us=1e6 * seconds)
    return np.array_equal(total, sum(everyone)), f"{COUNT} {backend.compute_dtype}", figures


def _same_bits(backend: Backend) -> Seen:
    """Sums numbers whose sum depends on the order; all ranks have to have rank 0's bits of it."""
    ranks, graph = range(backend.world_size), backend.graph(backend.world.sum_cell(), "sum")
    wrong = []
    for count in SUMS:
        drawn = [np.random.default_rng(rank).normal(size=count).astype("f4") for rank in ranks]
        total = graph(Tensor(drawn[backend.rank])).asnumpy()
        digests = backend.world.gather_objects(hashlib.sha256(total.tobytes()).hexdigest())
        is_far = np.abs(total - sum(drawn)).max() > 1e-5 * len(ranks)
        if is_far or digests[backend.rank] != digests[0]:
            wrong.append(count)
    return not wrong, f"float32 of {', '.join(map(str, SUMS))} numbers", {}


def _links(backend: Backend) -> Seen:
    """Times a message from each rank of an even number to the next."""
    peer, shape = backend.rank ^ 1, (LARGE_BYTES // 4,)
    numbers = np.resize(whole_numbers(backend, 0), shape)
    values = Tensor(numbers, mindspore_dtype(backend.compute_dtype))
    link = backend.link(peer, shape) if peer < backend.world_size else None

    def move() -> Any:
        if link is not None:
            return link.exchange(*((None, shape) if backend.rank % 2 else (values, None)))()

    arrived = move()
    moved, seconds = values.itemsize * shape[0], _timed(backend, move)
    is_right = arrived is None or np.array_equal(arrived.asnumpy().astype("f4"), numbers)
    figures = _rates(link_GB_per_s=moved / seconds / 1e9, link_share=1.0)
    return is_right, _rate(moved, seconds), figures


def _large_sums(backend: Backend) -> Seen:
    graph, size = backend.graph(backend.world.sum_cell(), "large sum"), backend.world_size
    values = Tensor(np.full(LARGE_BYTES // 4, backend.rank + 1.0, np.float32))
    total = graph(values).asnumpy()  # compiles and connects
    seconds = _timed(backend, lambda: graph(values))
    is_right = bool((total == size * (size + 1) / 2).all())
    return is_right, _rate(LARGE_BYTES, seconds), {"bytes": LARGE_BYTES, "seconds": seconds}


# In one order on all ranks; each says whether what arrived is what was sent.
TRANSFERS: dict[str, Callable[[Backend], Seen]] = {
    "sums": _sums,
    "same bits of sums": _same_bits,
    "links": _links,
    "large sums": _large_sums,
}


def _rates(**rates: float) -> dict[str, Any]:
    return {"roofline": {key: float(f"{value:.4g}") for key, value in rates.items()}}


def communication_lines(backend: Backend, target: Target, starts: Starts) -> Iterator[CheckLine]:
    """Checks every kind of transfer of a run with known values."""
    for name, check in TRANSFERS.items():
        starts(name)
        is_right, seen, figures = check(backend)
        seen = f"{seen}, {backend.world_size} ranks ({backend.name})"
        yield _compared(name, seen, is_right, REMEDY, figures, backend)


def model_of(num_ranks: int, num_bytes: int, itemsize: int) -> DecoderConfig:
    """Makes a decoder that `num_ranks` ranks can cut, of about `num_bytes`."""
    heads = num_ranks * math.ceil(8 / num_ranks)
    shapes = {
        "model_type": "qwen2",
        "vocab_size": 512 * num_ranks,
        "hidden_size": heads * HEAD_DIM,
        "intermediate_size": 4 * heads * HEAD_DIM,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
    }
    one, two = (
        num_parameters(decoder_config(shapes | {"num_hidden_layers": n}, "doctor")) for n in (1, 2)
    )
    wanted = 1 + (num_bytes / itemsize - one) / (two - one)
    layers = max(1, min(MAX_LAYERS, round(wanted)))
    return decoder_config(shapes | {"num_hidden_layers": layers}, "doctor")


def _weights(model: DecoderConfig, mesh: Mesh, backend: Backend) -> Weights:
    layout = Layout.of(mesh, parameter_specs(model))
    return Weights(layout, backend.rank, backend, dtype=backend.compute_dtype)


def _timed(backend: Backend, run: Callable[[], object]) -> float:
    """Measures the seconds of the slowest rank: all begin together."""
    backend.world.barrier()
    started = time.perf_counter()
    run()
    backend.synchronize()
    return max(backend.world.gather_objects(time.perf_counter() - started))


def weight_lines(backend: Backend, target: Target, starts: Starts) -> Iterator[CheckLine]:
    """Times what moves a run's weights, bit for bit; all ranks together, and all yield the same lines.

    The model is large enough for a device's links, small enough for a test's.
    """
    num_bytes = (24 if target.keeps_weights_on_host else 1024) << 20
    starts("weight sync")
    model = model_of(backend.world_size, num_bytes, 2 if backend.compute_dtype != "float32" else 4)
    source = _weights(model, Mesh(1, backend.world_size), backend)
    fill_random(source, seed=0)
    if backend.world_size == 1:
        yield skipped("weight sync", "one rank has nothing to send; give --ranks 2 or more")
    else:
        yield _synced(model, source, backend)
    starts(OFFLOAD)
    yield _offloaded(source, backend)
    starts(RELEASED)
    yield _released(source, backend, target)


def _synced(model: DecoderConfig, source: Weights, backend: Backend) -> CheckLine:
    target = _weights(model, Mesh(backend.world_size, 1), backend)
    target.pool.load()
    plan = plan_reshard(source.layout, target.layout, source.pool.itemsize)
    resharder = Resharder(plan, source, target, backend)
    resharder.run()
    seconds = _timed(backend, resharder.run)
    expected = _weights(model, Mesh(backend.world_size, 1), backend)
    fill_random(expected, seed=0)
    same = host_sums(target) == host_sums(expected)
    for weights in (target, expected):
        weights.pool.release()
    layouts = f"{source.layout.mesh} -> {target.layout.mesh}"
    seen = f"{layouts}, {backend.compute_dtype}: {_rate(plan.bytes_moved, seconds)} between ranks, same bits"
    figures = {"bytes": plan.bytes_moved, "seconds": seconds}
    return _compared("weight sync", seen, same, SYNC_REMEDY, figures, backend)


class _First(nn.Cell):
    """Refers to a parameter, as graphs do to weights that leave the device."""

    def __init__(self, parameter: Any) -> None:
        super().__init__()
        self.parameter = parameter

    def construct(self, factor: Any) -> Any:
        return self.parameter.reshape(-1)[:1].astype("float32") * factor


def used_bytes(target: Target) -> int:
    """Returns what MindSpore has allocated on the device; of processors, what this process has in memory."""
    if target.device == "Ascend":
        return int(ms.runtime.memory_allocated())
    return int(psutil.Process().memory_info().rss)


def _released(weights: Weights, backend: Backend, target: Target) -> CheckLine:
    """Measures whether weights that a compiled graph refers to leave memory that can be used again."""
    largest = max(weights.parameters.values(), key=lambda own: own.size)
    backend.graph(_First(largest), "first")(Tensor([1.0], ms.float32)).asnumpy()
    full = used_bytes(target)
    weights.pool.release()
    backend.make_room()
    left, wanted = used_bytes(target), weights.num_bytes
    seen = f"{(full - left) / 2**20:.0f} of {wanted / 2**20:.0f} MiB came back"
    figures, is_right = {"before": full, "after": left}, full - left >= 0.9 * wanted
    return _compared(RELEASED, seen, is_right, OFFLOAD_REMEDY, figures, backend)


def _offloaded(weights: Weights, backend: Backend) -> CheckLine:
    before = host_sums(weights)
    away = _timed(backend, weights.pool.offload)
    back = _timed(backend, weights.pool.load)
    same, each = host_sums(weights) == before, weights.num_bytes
    seen = f"a rank's {_rate(each, away)} away, {_rate(each, back)} back, same bits"
    figures = _rates(host_copy_GB_per_s=each / max(away, back) / 1e9)
    return _compared(OFFLOAD, seen, same, OFFLOAD_REMEDY, figures, backend)


def _compared(
    check: str, seen: str, same: bool, remedy: str, figures: Mapping[str, Any], backend: Backend
) -> CheckLine:
    """Says which ranks did not get what they should; `same`: this one did. All ranks make the same line."""
    wrong = [rank for rank, own in enumerate(backend.world.gather_objects(same)) if not own]
    if wrong:
        return fails(check, f"{seen}; not on ranks {wrong}", remedy, **figures)
    return ok(check, seen, **figures)


def _rate(num_bytes: int, seconds: float) -> str:
    return f"{num_bytes / 2**20:.1f} MiB in {seconds:.4f} s ({num_bytes / seconds / 1e9:.2f} GB/s)"


class _Chain(nn.Cell):
    """Multiplies x by `factor` so many times, a kernel each."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def construct(self, x: Any, factor: Any) -> Any:
        for _ in range(self.count):
            x = x * factor
        return x


def seconds_of(call: Callable[[], object], backend: Backend, calls: int = CALLS) -> float:
    """Returns the seconds of a call after the first."""
    call()
    backend.synchronize()
    started = time.perf_counter()
    for _ in range(calls):
        call()
    backend.synchronize()
    return (time.perf_counter() - started) / calls


def rate_lines(backend: Backend, target: Target, starts: Starts) -> Iterator[CheckLine]:
    """Measures the rates of one device."""
    starts("rates")
    is_small = target.keeps_weights_on_host
    side, size = (512, 16 * MIB) if is_small else (4096, 256 * MIB)
    rates = {"matmul_share": 1.0, "memory_share": 1.0}
    for dtype in {"float32", backend.compute_dtype}:
        key = "float32_tflops" if dtype == "float32" else "matmul_tflops"
        square = Tensor(np.ones((side, side), np.float32)).astype(mindspore_dtype(dtype))
        rates[key] = 2e-12 * side**3 / seconds_of(partial(ops.matmul, square, square), backend)
    large, one = Tensor(np.ones(size // 4, np.float32)), Tensor([1.0], ms.float32)
    single = backend.graph(_Chain(1), "one kernel")
    rates["memory_GB_per_s"] = 2e-9 * size / seconds_of(lambda: single(large, one), backend)
    chain, few = backend.graph(_Chain(KERNELS), "many kernels"), Tensor([1.0, 1.0])
    started = time.perf_counter()
    chain(few, one).asnumpy()
    rates["compile_ms"] = 1e3 * (time.perf_counter() - started) / KERNELS
    rates["launch_us"] = 1e6 * seconds_of(lambda: chain(few, one), backend) / KERNELS
    rates["call_us"] = 1e6 * seconds_of(lambda: ops.mul(few, one), backend, KERNELS)
    rates["sync_us"] = 1e6 * seconds_of(lambda: single(few, one).asnumpy(), backend)
    # An operation that NPUs leave to their AI CPU.
    bits = Tensor(np.arange(MIB, dtype=np.int32))
    shift = seconds_of(lambda: ops.bitwise_right_shift(bits, 3), backend)
    rates["slow_ns"] = 1e9 * shift / MIB
    rounded = {key: float(f"{value:.4g}") for key, value in rates.items()}
    yield ok("rates", ", ".join(f"{key} {own:g}" for key, own in rounded.items()), roofline=rounded)
