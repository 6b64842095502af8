"""Times what moves a run's weights, bit for bit: from the trainer's layout to the generator's, to the host and back."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator

from mindgrpo.backend.contract import Backend
from mindgrpo.doctor.probes.line import Line, fails, ok, skipped
from mindgrpo.models.decoder_config import DecoderConfig, decoder_config
from mindgrpo.models.parameters import num_parameters, parameter_specs
from mindgrpo.parallel.mesh import Mesh
from mindgrpo.parallel.sharding import Layout
from mindgrpo.weight_sync.execute import Resharder
from mindgrpo.weight_sync.plan import plan_reshard
from mindgrpo.weights.checksum import host_sums
from mindgrpo.weights.local_weights import Weights
from mindgrpo.weights.pretrained import fill_random

HEAD_DIM, MAX_LAYERS = 64, 32
SYNC_REMEDY = (
    "see the lines of communication; the generator would draw by other weights than the trainer's"
)
OFFLOAD_REMEDY = (
    "set context.max_device_memory so that nothing leaves the device, and send this report"
)


def model_of(num_ranks: int, num_bytes: int, itemsize: int) -> DecoderConfig:
    """A decoder that `num_ranks` ranks can cut, of about `num_bytes`."""
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
    layout = Layout(mesh, parameter_specs(model), (range(model.num_hidden_layers),))
    return Weights(layout, backend.rank, backend, dtype=backend.compute_dtype)


def _timed(backend: Backend, run: Callable[[], object]) -> float:
    """Seconds of the slowest rank: all begin together."""
    backend.world.barrier()
    started = time.perf_counter()
    run()
    backend.synchronize()
    return max(backend.world.gather_objects(time.perf_counter() - started))


def weight_lines(backend: Backend, num_bytes: int, starts: Callable[[str], None]) -> Iterator[Line]:
    """Of a model of about `num_bytes`; all ranks together, and all yield the same lines."""
    starts("weight sync")
    model = model_of(backend.world_size, num_bytes, 2 if backend.compute_dtype != "float32" else 4)
    source = _weights(model, Mesh(1, backend.world_size), backend)
    fill_random(source, seed=0)
    if backend.world_size == 1:
        yield skipped("weight sync", "one rank has nothing to send; give --ranks 2 or more")
    else:
        yield _synced(model, source, backend)
    starts("offload to the host and back")
    yield _offloaded(source, backend)


def _synced(model: DecoderConfig, source: Weights, backend: Backend) -> Line:
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
    wrong = [rank for rank, own in enumerate(backend.world.gather_objects(same)) if not own]
    layouts = f"{source.layout.mesh} -> {target.layout.mesh}"
    seen = f"{layouts}, {backend.compute_dtype}: {_rate(plan.bytes_moved, seconds)} between ranks"
    figures = {"bytes": plan.bytes_moved, "seconds": seconds}
    if wrong:
        return fails("weight sync", f"{seen}; ranks {wrong} got other bits", SYNC_REMEDY, **figures)
    return ok("weight sync", f"{seen}, bit for bit", **figures)


def _offloaded(weights: Weights, backend: Backend) -> Line:
    before = host_sums(weights)
    away = _timed(backend, weights.pool.offload)
    back = _timed(backend, weights.pool.load)
    same = host_sums(weights) == before
    wrong = [rank for rank, own in enumerate(backend.world.gather_objects(same)) if not own]
    check, each = "offload to the host and back", weights.num_bytes
    seen = f"a rank's {_rate(each, away)} away, {_rate(each, back)} back"
    figures = {"bytes": each, "seconds_away": away, "seconds_back": back}
    if wrong:
        return fails(check, f"{seen}; ranks {wrong} got other bits", OFFLOAD_REMEDY, **figures)
    return ok(check, f"{seen}, bit for bit", **figures)


def _rate(num_bytes: int, seconds: float) -> str:
    return f"{num_bytes / 2**20:.1f} MiB in {seconds:.4f} s ({num_bytes / seconds / 1e9:.2f} GB/s)"
