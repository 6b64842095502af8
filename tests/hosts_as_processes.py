"""Ranks of several hosts as plain forked processes of one machine, which meet on its loopback address.

Each host has its own board and memory, so that ranks of two reach each other by TCP only. Refuses to cut a line
between them: scripts/faults/two_hosts.py does, where it may make networks.
"""

from __future__ import annotations

import multiprocessing
import random
import socket
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ranks_as_processes import native

from mindgrpo.backend.cpu.far_group import far_group
from mindgrpo.backend.cpu.far_hosts import FarHosts
from mindgrpo.backend.cpu.host import Host
from mindgrpo.backend.cpu.placement import Placement
from mindgrpo.backend.cpu.shared_group import SharedGroup, shared_group
from mindgrpo.health.rank_health import RankHealth

WAIT_SECONDS = 40.0
TOKEN = b"a secret of this test"
SMALL_BUFFER = 1000


@dataclass
class Rank:
    placement: Placement
    host: Host
    far: FarHosts

    def group(self, *ranks: int) -> SharedGroup:
        if len({self.placement.host_of(rank) for rank in ranks}) == 1:
            return shared_group(self.host, ranks, SMALL_BUFFER)
        return far_group(self.far, self.host, ranks, SMALL_BUFFER)

    def world(self) -> SharedGroup:
        return self.group(*range(self.placement.world_size))


Work = Callable[..., Any]


def free_port() -> int:
    """Below the ephemeral range."""
    for port in random.sample(range(10000, 32000), 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("no free port")


def join(job: str, placement: Placement, status: Path | None = None) -> Rank:
    """`status`: the folder of this rank's host where its ranks tell of themselves."""
    here = placement.here
    health = RankHealth(placement.rank, placement.world_size, status)
    host = Host(job, placement.rank, placement.world_size, native(), health=health, ranks=here)
    return Rank(placement, host, FarHosts(placement, host, health))


def _rank(
    work: Work, job: str, placement: Placement, status: Path | None, results: Any, arguments: Any
) -> None:
    try:
        folder = None if status is None else status / f"host_{placement.host}"
        outcome = work(join(job, placement, folder), *arguments)
    except BaseException as error:
        outcome = error
    results.put((placement.rank, outcome))
    # What other ranks learn of this one's end they learn while it can still speak.
    time.sleep(0.3)


def run(
    sizes: tuple[int, int],
    work: Work,
    *arguments: Any,
    silent: int = 0,
    status: Path | None = None,
) -> dict[int, Any]:
    """`sizes`: hosts, and ranks on each. What `work(rank, *arguments)` returns or raises; `silent` ranks do not."""
    native()
    hosts, per_host = sizes
    port, job = free_port(), f"test-{uuid.uuid4().hex[:12]}"
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    processes = []
    for rank in range(hosts * per_host):
        master = ("127.0.0.1", port)
        placement = Placement(rank, hosts * per_host, per_host, master, TOKEN, 5.0)
        given = (work, job, placement, status, results, arguments)
        processes.append(context.Process(target=_rank, args=given))
    for process in processes:
        process.start()
    outcomes: dict[int, Any] = {}
    try:
        until = time.monotonic() + WAIT_SECONDS
        while len(outcomes) < len(processes) - silent:
            assert time.monotonic() < until, f"only ranks {sorted(outcomes)} came to an end"
            if results.empty():
                time.sleep(0.005)
                continue
            rank, outcome = results.get()
            outcomes[rank] = outcome
    finally:
        for process in processes:
            process.join(2.0)
            if process.is_alive():
                process.kill()
    return outcomes
