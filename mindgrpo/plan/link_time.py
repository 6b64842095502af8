"""Computes how long a reshard would take over given links: the busiest link's bytes over its bandwidth.

A link is a host's way to the other hosts. It carries its bandwidth in each direction at once, so that what a host
sends and what it receives do not add up. What moves inside a host takes no part in it, and has a bandwidth of its own
or counts as free. A lower bound of transport: refuses to guess latency, packing and what the network between hosts
shares.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mindgrpo.weight_sync.plan import Plan

GIGA = 10**9


@dataclass(frozen=True)
class Links:
    """Bandwidths in bytes a second and direction. `ranks_per_host` ranks, in rank order, share a host and its link."""

    bytes_per_s: float
    ranks_per_host: int = 1
    local_bytes_per_s: float | None = (
        None  # of each rank, to and from the others of its host; None: free
    )


@dataclass(frozen=True)
class Busiest:
    """`who` carries `num_bytes` in `direction` ("sends" or "receives") and needs `seconds` for it."""

    seconds: float
    who: str
    direction: str
    num_bytes: int


def busiest_link(plan: Plan, links: Links) -> Busiest:
    """Finds the slowest of all links between and inside hosts, which work concurrently."""
    source, target, sizes = plan.traffic()
    hosts = -(-plan.num_ranks // links.ranks_per_host)
    source_host, target_host = source // links.ranks_per_host, target // links.ranks_per_host
    leaves = source_host != target_host
    name = "rank" if links.ranks_per_host == 1 else "host"
    loads = [
        _most(name, "sends", source_host[leaves], sizes[leaves], hosts, links.bytes_per_s),
        _most(name, "receives", target_host[leaves], sizes[leaves], hosts, links.bytes_per_s),
    ]
    if links.local_bytes_per_s is not None:
        stays, speed = ~leaves, links.local_bytes_per_s
        loads += [
            _most("rank", "sends", source[stays], sizes[stays], plan.num_ranks, speed),
            _most("rank", "receives", target[stays], sizes[stays], plan.num_ranks, speed),
        ]
    return max(loads, key=lambda one: one.seconds)


def _most(
    name: str,
    direction: str,
    places: NDArray[np.int32],
    sizes: NDArray[np.int64],
    num_places: int,
    bytes_per_s: float,
) -> Busiest:
    totals = np.zeros(num_places, np.int64)
    np.add.at(totals, places, sizes)
    busiest = int(totals.argmax())
    num_bytes = int(totals[busiest])
    return Busiest(num_bytes / bytes_per_s, f"{name} {busiest}", direction, num_bytes)
