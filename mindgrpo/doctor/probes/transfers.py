"""Checks on all ranks together what a run moves: values between ranks, and weights to the generator and the host.

Measures the device's rates, too, by which `plan` divides its counts: those that are reached, so that shares of a peak
are 1.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from mindgrpo.backend.contract import Backend
from mindgrpo.backend.dtypes import ITEM_BYTES, mindspore_dtype
from mindgrpo.backend.targets import Target
from mindgrpo.doctor.jobs import CheckLine, Starts, fails, ok, skipped
from mindgrpo.models.decoder_config import DecoderConfig, decoder_config
from mindgrpo.models.parameters import num_parameters, parameter_specs
from mindgrpo.monitor.host_memory import process_rss
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
OFFLOAD_REMEDY = "set context.max_device_memory so that nothing leaves the device; send the archive"
# Whether this rank got what it should, what was seen, and figures.
Seen = tuple[bool, str, dict[str, Any]]


def _timed(backend: Backend, run: Callable[[], object], calls: int = 1) -> float:
    """Measures the seconds of a call on the slowest rank: all begin together."""
    backend.synchronize()
    backend.world.barrier()
    started = time.perf_counter()
    for _ in range(calls):
        run()
    backend.synchronize()
    return max(backend.world.gather_objects(time.perf_counter() - started)) / calls


def _rate(num_bytes: int, seconds: float) -> str:
    return f"{num_bytes / MIB:.1f} MiB in {seconds:.4f} s ({num_bytes / seconds / 1e9:.2f} GB/s)"


def _rates(**rates: float) -> dict[str, Any]:
    return {"roofline": {key: float(f"{value:.4g}") for key, value in rates.items()}}


def _line(check: str, seen: Seen, remedy: str, backend: Backend) -> CheckLine:
    """Says which ranks did not get what they should. All ranks make the same line."""
    is_right, words, figures = seen
    wrong = [rank for rank, own in enumerate(backend.world.gather_objects(is_right)) if not own]
    if wrong:
        return fails(check, f"{words}; not on ranks {wrong}", remedy, **figures)
    return ok(check, words, **figures)


# -- between ranks ------------------------------------------------------------------------------------------------


def whole_numbers(backend: Backend, rank: int) -> np.ndarray:
    """Returns those of a rank, whose sums over up to 256 ranks are exact in 16 bits, too."""
    return ((np.arange(COUNT) + rank) % max(2, min(4, 256 // backend.world_size))).astype("f4")


def _sums(backend: Backend) -> Seen:
    ranks, graph = range(backend.world_size), backend.graph(backend.world.sum_cell(), "sum")
    everyone = [whole_numbers(backend, rank) for rank in ranks]
    own = Tensor(everyone[backend.rank], mindspore_dtype(backend.compute_dtype))
    total = graph(own).asnumpy().astype("f4")
    seconds = _timed(backend, lambda: graph(own), CALLS)
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


def communication_lines(backend: Backend, target: Target, starts: Starts) -> Iterator[CheckLine]:
    """Checks every kind of transfer of a run with known values."""
    for name, check in TRANSFERS.items():
        starts(name)
        is_right, words, figures = check(backend)
        words += f", {backend.world_size} ranks ({backend.name})"
        yield _line(name, (is_right, words, figures), REMEDY, backend)


# -- of weights ---------------------------------------------------------------------------------------------------


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

    def with_layers(count: int) -> DecoderConfig:
        return decoder_config(shapes | {"num_hidden_layers": count}, "doctor")

    one, two = (num_parameters(with_layers(count)) for count in (1, 2))
    wanted = 1 + (num_bytes / itemsize - one) / (two - one)
    return with_layers(max(1, min(MAX_LAYERS, round(wanted))))


def weight_lines(backend: Backend, target: Target, starts: Starts) -> Iterator[CheckLine]:
    """Times what moves a run's weights, bit for bit; all ranks together, and all yield the same lines.

    The model is large enough for a device's links, small enough for a test's.
    """
    num_bytes = (24 if target.keeps_weights_on_host else 1024) << 20
    size = backend.world_size

    def weights(mesh: Mesh, is_filled: bool = True) -> Weights:
        layout = Layout.of(mesh, parameter_specs(model))
        made = Weights(layout, backend.rank, backend, dtype=backend.compute_dtype)
        fill_random(made, seed=0) if is_filled else made.pool.load()
        return made

    def sync() -> Seen:
        other = weights(Mesh(size, 1), is_filled=False)
        plan = plan_reshard(source.layout, other.layout, source.pool.itemsize)
        resharder = Resharder(plan, source, other, backend)
        resharder.run()
        seconds = _timed(backend, resharder.run)
        expected = weights(Mesh(size, 1))
        same = host_sums(other) == host_sums(expected)
        for made in (other, expected):
            made.pool.release()
        layouts = f"{source.layout.mesh} -> {other.layout.mesh}, {backend.compute_dtype}"
        words = f"{layouts}: {_rate(plan.bytes_moved, seconds)} between ranks, same bits"
        return same, words, {"bytes": plan.bytes_moved, "seconds": seconds}

    starts("weight sync")
    model = model_of(size, num_bytes, ITEM_BYTES[backend.compute_dtype])
    source = weights(Mesh(1, size))
    if size == 1:
        yield skipped("weight sync", "one rank has nothing to send; give --ranks 2 or more")
    else:
        yield _line("weight sync", sync(), SYNC_REMEDY, backend)
    last = {
        "offload to the host and back": _offloaded,
        "memory of weights that are released": _released,
    }
    for name, check in last.items():
        starts(name)
        yield _line(name, check(source, backend, target), OFFLOAD_REMEDY, backend)


def _offloaded(weights: Weights, backend: Backend, target: Target) -> Seen:
    before = host_sums(weights)
    away = _timed(backend, weights.pool.offload)
    back = _timed(backend, weights.pool.load)
    same, each = host_sums(weights) == before, weights.num_bytes
    words = f"a rank's {_rate(each, away)} away, {_rate(each, back)} back, same bits"
    return same, words, _rates(host_copy_GB_per_s=each / max(away, back) / 1e9)


class _First(nn.Cell):
    """Refers to a parameter, as graphs do to weights that leave the device."""

    def __init__(self, parameter: Any) -> None:
        super().__init__()
        self.parameter = parameter

    def construct(self, factor: Any) -> Any:
        return self.parameter.reshape(-1)[:1].astype("float32") * factor


def _released(weights: Weights, backend: Backend, target: Target) -> Seen:
    """Measures whether weights that a compiled graph refers to leave memory that can be used again."""
    used = ms.runtime.memory_allocated if target.device == "Ascend" else process_rss
    largest = max(weights.parameters.values(), key=lambda own: own.size)
    backend.graph(_First(largest), "first")(Tensor([1.0], ms.float32)).asnumpy()
    full = used()
    weights.pool.release()
    backend.make_room()
    left, wanted = used(), weights.num_bytes
    words = f"{(full - left) / MIB:.0f} of {wanted / MIB:.0f} MiB came back"
    return full - left >= 0.9 * wanted, words, {"before": full, "after": left}


# -- rates --------------------------------------------------------------------------------------------------------


class _Chain(nn.Cell):
    """Multiplies x by `factor` so many times, a kernel each."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def construct(self, x: Any, factor: Any) -> Any:
        for _ in range(self.count):
            x = x * factor
        return x


def rate_lines(backend: Backend, target: Target, starts: Starts) -> Iterator[CheckLine]:
    """Measures the rates of one device."""

    def seconds_of(call: Callable[[], object], calls: int = CALLS) -> float:
        call()
        return _timed(backend, call, calls)

    starts("rates")
    is_small = target.keeps_weights_on_host
    side, size = (512, 16 * MIB) if is_small else (4096, 256 * MIB)
    rates = {"matmul_share": 1.0, "memory_share": 1.0}
    for dtype in {"float32", backend.compute_dtype}:
        key = "float32_tflops" if dtype == "float32" else "matmul_tflops"
        square = Tensor(np.ones((side, side), np.float32)).astype(mindspore_dtype(dtype))
        rates[key] = 2e-12 * side**3 / seconds_of(partial(ops.matmul, square, square))
    large, one = Tensor(np.ones(size // 4, np.float32)), Tensor([1.0], ms.float32)
    single = backend.graph(_Chain(1), "one kernel")
    rates["memory_GB_per_s"] = 2e-9 * size / seconds_of(lambda: single(large, one))
    chain, few = backend.graph(_Chain(KERNELS), "many kernels"), Tensor([1.0, 1.0])
    rates["compile_ms"] = 1e3 * _timed(backend, lambda: chain(few, one).asnumpy()) / KERNELS
    rates["launch_us"] = 1e6 * seconds_of(lambda: chain(few, one)) / KERNELS
    rates["call_us"] = 1e6 * seconds_of(lambda: ops.mul(few, one), KERNELS)
    rates["sync_us"] = 1e6 * seconds_of(lambda: single(few, one).asnumpy())
    # An operation that NPUs leave to their AI CPU.
    bits = Tensor(np.arange(MIB, dtype=np.int32))
    rates["slow_ns"] = 1e9 * seconds_of(lambda: ops.bitwise_right_shift(bits, 3)) / MIB
    figures = _rates(**rates)
    words = ", ".join(f"{key} {own:g}" for key, own in figures["roofline"].items())
    yield ok("rates", words, **figures)
