"""A group with members on several hosts: its way from host to host, for the C library to take.

The hosts form a chain in the group's order, joined by their first members. Refuses a group that comes back to a host
after it was on another: its sum could not be added in member order.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence

from mindgrpo.backend.cpu.far_hosts import FarHosts
from mindgrpo.backend.cpu.host import Host
from mindgrpo.backend.cpu.placement import Placement
from mindgrpo.backend.cpu.shared_group import NativeGroup
from mindgrpo.errors import UserError


class Chain:
    """See shared_group.Way. Keeps the lines open: the C library knows them by number."""

    def __init__(self, far: FarHosts, ranks: Sequence[int]) -> None:
        ranks_by_host = by_host(far.placement, ranks)
        hosts = list(ranks_by_host)
        here = hosts.index(far.placement.host)
        self.here = ranks_by_host[far.placement.host]
        self.first = ranks.index(self.here[0])
        self._lines: list[socket.socket] = []
        self.before = self.after = -1
        if far.placement.rank == self.here[0]:
            purpose = "group-" + "_".join(map(str, ranks))
            if here > 0:
                self.before = self._open(far, ranks_by_host[hosts[here - 1]][0], purpose)
            if here + 1 < len(hosts):
                self.after = self._open(far, ranks_by_host[hosts[here + 1]][0], purpose)

    def _open(self, far: FarHosts, rank: int, purpose: str) -> int:
        line = far.network.line(rank, purpose, far.check)
        self._lines.append(line)
        return line.fileno()


def by_host(placement: Placement, ranks: Sequence[int]) -> dict[int, list[int]]:
    """The members on each host, in the group's order. Raises ValueError where a host's are not together."""
    ranks_by_host: dict[int, list[int]] = {}
    for rank in ranks:
        host = placement.host_of(rank)
        if host in ranks_by_host and host != next(reversed(ranks_by_host)):
            raise ValueError(
                f"the members of group {tuple(ranks)} on one host do not follow each other"
            )
        ranks_by_host.setdefault(host, []).append(rank)
    return ranks_by_host


def far_group(far: FarHosts, host: Host, ranks: Sequence[int], buffer_bytes: int) -> NativeGroup:
    chain = Chain(far, ranks)
    return NativeGroup(host, ranks, buffer_bytes, chain.here, chain)


def check_library(host: Host) -> None:
    """Raises UserError."""
    if host.library is None:
        raise UserError(
            "ranks of several hosts need the C kernels, but there is no C compiler here or MINDGRPO_NATIVE is 0; "
            "install gcc on every host and unset MINDGRPO_NATIVE."
        )
