"""Checks on all ranks together what a run moves: values between ranks, and weights to the generator and the host."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator

import numpy as np
from mindspore import Tensor

from mindgrpo.backend.contract import Backend
from mindgrpo.backend.dtypes import mindspore_dtype
from mindgrpo.backend.targets import Target
from mindgrpo.doctor.jobs import CheckLine, fails, ok, skipped
from mindgrpo.models.decoder_config import DecoderConfig, decoder_config
from mindgrpo.models.parameters import num_parameters, parameter_specs
from mindgrpo.parallel.mesh import Mesh
from mindgrpo.parallel.sharding import Layout
from mindgrpo.weight_sync.execute import Resharder
from mindgrpo.weight_sync.plan import plan_reshard
from mindgrpo.weights.checksum import host_sums
from mindgrpo.weights.local_weights import Weights
from mindgrpo.weights.pretrained import fill_random

COUNT = 257
LARGE_BYTES = 16 << 20
REMEDY = (
    "compare the ranks' logs in this report; set HCCL_IF_IP or HCCL_SOCKET_IFNAME if ranks do not reach each other, "
    "and ask hccn_tool -i NUMBER -link -g for each device's link"
)
Check = Callable[[], str]
HEAD_DIM, MAX_LAYERS = 64, 32
SYNC_REMEDY = (
    "see the lines of communication; the generator would draw by other weights than the trainer's"
)
OFFLOAD = "offload to the host and back"
OFFLOAD_REMEDY = (
    "set context.max_device_memory so that nothing leaves the device, and send this report"
)


class Differs(Exception):
    """Says that what arrived is not what was sent."""


def _expect(name: str, arrived: np.ndarray, wanted: np.ndarray) -> None:
    wrong = np.flatnonzero(arrived.astype(np.float32).reshape(-1) != wanted.reshape(-1))
    if arrived.shape != wanted.shape or wrong.size:
        raise Differs(f"{name}: {wrong.size} of {wanted.size} values are others than were sent")


def _own(rank: int, size: int) -> np.ndarray:
    """Returns whole numbers whose sums over `size` ranks, up to 256 of them, are exact in 16 bits, too."""
    return ((np.arange(COUNT) + rank) % max(2, min(4, 256 // size))).astype(np.float32)


def transfers(backend: Backend) -> list[tuple[str, Check]]:
    """Lists (name, what makes it and says what was seen), in one order on all ranks; the checks raise Differs."""
    world, size, rank = backend.world, backend.world_size, backend.rank
    own = Tensor(_own(rank, size), mindspore_dtype(backend.compute_dtype))

    def reduce() -> str:
        total = backend.graph(world.sum_cell(), "all-reduce")(own)
        wanted = np.sum([_own(r, size) for r in range(size)], axis=0)
        _expect("sums", total.asnumpy(), wanted)
        return f"{COUNT} {backend.compute_dtype} over {size} ranks"

    def gather() -> str:
        rows = backend.graph(world.gather_cell(), "all-gather")(own)
        _expect("rows", rows.asnumpy(), np.stack([_own(r, size) for r in range(size)]))
        return f"{COUNT} {backend.compute_dtype} of {size} ranks"

    def send() -> str:
        following, previous = (rank + 1) % size, (rank - 1) % size
        arrived = backend.exchange({following: own}, {previous: (COUNT,)}, backend.compute_dtype)
        _expect("values", arrived[previous].asnumpy(), _own(previous, size))
        return f"{COUNT} {backend.compute_dtype} from each rank to the next"

    def objects() -> str:
        everyone = world.gather_objects({"rank": rank, "text": "x" * (1000 + rank)})
        if [one["rank"] for one in everyone] != list(range(size)):
            raise Differs(f"objects of ranks {[one['rank'] for one in everyone]} arrived")
        return f"Python's objects of {size} ranks"

    def large() -> str:
        large_values = Tensor(np.full(LARGE_BYTES // 4, rank + 1.0, np.float32))
        graph = backend.graph(world.sum_cell(), "large all-reduce")
        graph(large_values).asnumpy()  # the first call compiles and connects
        world.barrier()
        started = time.perf_counter()
        total = graph(large_values).asnumpy()
        seconds = time.perf_counter() - started
        _expect("sums", total[:COUNT], np.full(COUNT, size * (size + 1) / 2, np.float32))
        return f"{LARGE_BYTES >> 20} MiB in {seconds:.4f} s, {LARGE_BYTES / seconds / 1e9:.2f} GB/s"

    return [
        ("all-reduce", reduce),
        ("all-gather", gather),
        ("send and receive", send),
        ("objects", objects),
        ("large all-reduce", large),
    ]


def communication_lines(backend: Backend, starts: Callable[[str], None]) -> Iterator[CheckLine]:
    """Checks every kind of transfer of a run with known values.

    `starts` hears of each check before it is made, so that one that does not end is known by its name.
    """
    if backend.world_size == 1:
        yield skipped("transfers between ranks", "there is one rank; give --ranks 2 or more")
        return
    for name, check in transfers(backend):
        starts(name)
        try:
            yield ok(name, f"{check()} ({backend.name})")
        except Differs as error:
            yield fails(name, str(error), REMEDY)


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


def weight_lines(
    backend: Backend, target: Target, starts: Callable[[str], None]
) -> Iterator[CheckLine]:
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
    seen = f"{layouts}, {backend.compute_dtype}: {_rate(plan.bytes_moved, seconds)} between ranks"
    figures = {"bytes": plan.bytes_moved, "seconds": seconds}
    return _compared("weight sync", seen, same, SYNC_REMEDY, figures, backend)


def _offloaded(weights: Weights, backend: Backend) -> CheckLine:
    before = host_sums(weights)
    away = _timed(backend, weights.pool.offload)
    back = _timed(backend, weights.pool.load)
    same, each = host_sums(weights) == before, weights.num_bytes
    seen = f"a rank's {_rate(each, away)} away, {_rate(each, back)} back"
    figures = {"bytes": each, "seconds_away": away, "seconds_back": back}
    return _compared(OFFLOAD, seen, same, OFFLOAD_REMEDY, figures, backend)


def _compared(
    check: str, seen: str, same: bool, remedy: str, figures: dict[str, float], backend: Backend
) -> CheckLine:
    """Says which ranks got other bits than were sent; `same`: this one did not."""
    wrong = [rank for rank, own in enumerate(backend.world.gather_objects(same)) if not own]
    if wrong:
        return fails(check, f"{seen}; ranks {wrong} got other bits", remedy, **figures)
    return ok(check, f"{seen}, bit for bit", **figures)


def _rate(num_bytes: int, seconds: float) -> str:
    return f"{num_bytes / 2**20:.1f} MiB in {seconds:.4f} s ({num_bytes / seconds / 1e9:.2f} GB/s)"
