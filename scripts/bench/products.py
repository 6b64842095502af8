"""GFLOP/s of float32 products by shape, orientation and threads, with this project's C code and with a peer's.

products.py [--threads 1,2] [--peer PYTHON] prints a table, and at the end one JSON line. A product of [m, k] and [k, n]
is timed in three orientations: x w, x w^T and x^T w, and x w with k summed in 8 leaves. PYTHON is an interpreter with
torch, such as that of peers/setup.sh; its figures are of torch.matmul. The best of several repeats counts.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

SHAPES = (
    (2048, 1536, 576),
    (2048, 576, 1536),
    (2048, 576, 576),
    (6144, 256, 256),
    (2048, 1024, 1024),
    (1024, 3072, 1024),
    (128, 1024, 1024),
    (64, 1536, 576),
    (32, 1536, 576),
    (8, 1536, 576),
    (1, 1536, 576),
)
KINDS = ("x w", "x w^T", "x^T w", "x w, 8 leaves")


def rate(flops: float, product: Callable[[], Any]) -> float:
    """GFLOP/s of the fastest call in about half a second, three calls at least."""
    best, end, calls = float("inf"), time.perf_counter() + 0.5, 0
    while time.perf_counter() < end or calls < 3:
        started = time.perf_counter()
        product()
        best, calls = min(best, time.perf_counter() - started), calls + 1
    return round(flops / best / 1e9, 1)


def own_rates(m: int, n: int, k: int) -> list[float]:
    import numpy as np

    from mindgrpo.backend.kernels.native.library import call_kernel

    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(shape, np.float32) for shape in ((m, k), (k, n)))
    x_turned, w_turned = np.ascontiguousarray(x.T), np.ascontiguousarray(w.T)
    y, one, leaves = np.empty((m, n), np.float32), *(np.array([0, i], np.int32) for i in (1, 8))
    calls: tuple[tuple[str, Any, Any, Any], ...] = (
        ("product", x, w, one),
        ("product_turned", x, w_turned, one),
        ("product_gradient", x_turned, w, one),
        ("product", x, w, leaves),
    )
    return [rate(2.0 * m * n * k, partial(call_kernel, *call, y)) for call in calls]


def peer_rates(m: int, n: int, k: int) -> list[float]:
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    x, w = torch.randn(m, k), torch.randn(k, n)
    x_turned, w_turned = x.t().contiguous(), w.t().contiguous()
    products = (lambda: x @ w, lambda: x @ w_turned.t(), lambda: x_turned.t() @ w)
    return [rate(2.0 * m * n * k, product) for product in products]


def measured(python: str, who: str, threads: int) -> list[list[float]]:
    """The rates of all shapes, of a process of its own."""
    root = str(Path(__file__).resolve().parents[2])
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    if who == "own":
        environment["PYTHONPATH"] = root
    words = [python, __file__, "--measure", who]
    done = subprocess.run(words, env=environment, stdout=subprocess.PIPE, check=True)
    rates: list[list[float]] = json.loads(done.stdout.splitlines()[-1])
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--peer", metavar="PYTHON", help="an interpreter with torch")
    parser.add_argument("--measure", choices=("own", "peer"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        of = own_rates if given.measure == "own" else peer_rates
        print(json.dumps([of(*shape) for shape in SHAPES]))
        return
    result: dict[str, Any] = {"bench": "products", "shapes": SHAPES, "kinds": KINDS}
    print(f"| threads | m x n x k | {' | '.join(KINDS)} | of the peer's, the lowest |")
    print("| --- | --- |" + " --- |" * (len(KINDS) + 1))
    for threads in map(int, given.threads.split(",")):
        own = measured(sys.executable, "own", threads)
        peer = measured(given.peer, "peer", threads) if given.peer else [[] for _ in SHAPES]
        result[f"own_{threads}"], result[f"peer_{threads}"] = own, peer
        for shape, rates, others in zip(SHAPES, own, peer, strict=True):
            share = min((r / other for r, other in zip(rates, others)), default=None)  # noqa: B905
            texts = [f"{r:g}" for r in rates]
            for kind, other in enumerate(others):
                texts[kind] += f" ({other:g})"
            of_peer = "" if share is None else f"{share:.2f}"
            print(
                f"| {threads} | {' x '.join(map(str, shape))} | {' | '.join(texts)} | {of_peer} |"
            )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
