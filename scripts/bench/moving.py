"""What the benches of reshard and swap share: their options, a model laid out on ranks, and memcpy beside them.

Refuses to move weights itself.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import launching
import numpy as np
from work import read_work

from mindgrpo.backend.contract import Backend
from mindgrpo.models.decoder_config import DecoderConfig, decoder_config, read_config
from mindgrpo.models.parameters import parameter_specs
from mindgrpo.parallel.mesh import Mesh
from mindgrpo.parallel.sharding import Layout


def options(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--compute_dtype", default="float32")
    parser.add_argument("--work", type=Path, default=launching.HERE / "work_500mb.json")
    parser.add_argument("--model", type=Path, help="a Hugging Face directory, instead of --work")
    parser.add_argument("--train", type=launching.degrees, default=(1, 4, 2), help="dp,tp,pp")
    parser.add_argument("--infer", type=launching.degrees, default=(2, 4), help="dp,tp")
    parser.add_argument("--repeats", type=int, default=7)
    return parser.parse_args()


def num_ranks(given: argparse.Namespace) -> int:
    return int(max(np.prod(given.train), np.prod(given.infer)))


def model_of(given: argparse.Namespace) -> DecoderConfig:
    if given.model is not None:
        return read_config(given.model)
    return decoder_config(read_work(given.work).model, "the work file's model")


def layout(model: DecoderConfig, degrees: tuple[int, ...]) -> Layout:
    mesh = Mesh(*degrees)
    return Layout.of(mesh, parameter_specs(model))


class Alternating:
    """Runs things in turn on all ranks together; the median seconds of each, the first turn not counted."""

    def __init__(self, backend: Backend, repeats: int) -> None:
        self._backend, self._repeats = backend, repeats

    def medians(
        self, **things: tuple[Callable[[], object], Callable[[], object]]
    ) -> dict[str, float]:
        """Each thing is (what is done before, what is timed)."""
        seconds: dict[str, list[float]] = {name: [] for name in things}
        for _ in range(self._repeats + 1):
            for name, (prepare, run) in things.items():
                prepare()
                self._backend.world.barrier()
                started = time.perf_counter()
                run()
                self._backend.world.barrier()
                seconds[name].append(time.perf_counter() - started)
        return {name: statistics.median(values[1:]) for name, values in seconds.items()}


class Memcpy:
    """`num_bytes` on each rank, from one block of memory to another, as numpy copies them."""

    def __init__(self, backend: Backend, num_bytes: int) -> None:
        self._pools = backend.pool(num_bytes // 4), backend.pool(num_bytes // 4)
        with self._pools[0].on_host() as source, self._pools[1].on_host() as target:
            self.source, self.target = (p.view(0, (num_bytes // 4,)) for p in (source, target))
        self.source[...] = 1.0

    def run(self) -> None:
        np.copyto(self.target, self.source)

    def give_up_target(self) -> None:
        self._pools[1].release()


def nothing() -> None:
    """Nothing is done before."""
