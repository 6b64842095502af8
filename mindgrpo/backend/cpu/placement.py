"""Which ranks share a host, as the launcher tells it; hosts are equal in size and their ranks follow each other.

What is on one machine and not told to be one host is treated as far apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from mindgrpo.errors import UserError

TOKEN_KEY = "MINDGRPO_JOB_TOKEN"
DEADLINE_KEY = "MINDGRPO_UNREACHABLE_SECONDS"
SHORTEST_TOKEN = 16
DEFAULT_SECONDS = 20.0
SHORTEST_SECONDS, LONGEST_SECONDS = 3.0, 3600.0


@dataclass(frozen=True)
class Placement:
    """`master` is where rank 0 awaits the others. `deadline`: seconds after which a silent host counts as lost."""

    rank: int
    world_size: int
    per_host: int
    master: tuple[str, int] = ("", 0)
    token: bytes = b""
    deadline: float = DEFAULT_SECONDS

    @property
    def num_hosts(self) -> int:
        return self.world_size // self.per_host

    def host_of(self, rank: int) -> int:
        return rank // self.per_host

    @cached_property
    def host(self) -> int:
        return self.host_of(self.rank)

    def ranks_of(self, host: int) -> range:
        return range(host * self.per_host, (host + 1) * self.per_host)

    @cached_property
    def here(self) -> range:
        return self.ranks_of(self.host)

    @property
    def leads(self) -> bool:
        """The first rank of a host speaks for it."""
        return self.rank == self.here[0]

    def leaders(self) -> range:
        return range(0, self.world_size, self.per_host)


def placement_of(environment: Mapping[str, str], rank: int, world_size: int) -> Placement:
    """Reads what the launcher and msrun set. Raises UserError."""
    num_local = environment.get("MINDGRPO_RANKS_PER_HOST") or environment.get("MS_LOCAL_WORKER_NUM")
    if num_local is None and environment.get("DEVICE_ID", str(rank)) != str(rank):
        raise UserError(
            f"msrun numbers this process rank {rank} and device {environment['DEVICE_ID']}, so it was started for "
            "several hosts, but nothing tells how they meet; start it with mindgrpo launch --hosts."
        )
    per_host = int(num_local or world_size)
    if world_size % per_host:
        raise UserError(
            f"{world_size} ranks cannot be {per_host} on each host: hosts have equally many; start so many with "
            "mindgrpo launch --ranks N --hosts H that H divides N."
        )
    if per_host == world_size:
        return Placement(rank, world_size, world_size)
    return Placement(
        rank,
        world_size,
        per_host,
        _master(environment),
        _token(environment),
        _deadline(environment),
    )


def _master(environment: Mapping[str, str]) -> tuple[str, int]:
    """msrun's scheduler has the port that was told, the ranks have the next one."""
    host, port = environment.get("MS_SCHED_HOST", ""), environment.get("MS_SCHED_PORT", "")
    if not host or not port.isdecimal():
        raise UserError(
            f"MS_SCHED_HOST is '{host}' and MS_SCHED_PORT is '{port}', but ranks of several hosts meet there; "
            "start them with mindgrpo launch --hosts, which has msrun set both."
        )
    return host, int(port) + 1


def _token(environment: Mapping[str, str]) -> bytes:
    token = environment.get(TOKEN_KEY, "")
    if len(token) < SHORTEST_TOKEN:
        raise UserError(
            f"{TOKEN_KEY} has {len(token)} characters, but ranks of several hosts know each other by a secret of at "
            f"least {SHORTEST_TOKEN}; set the same on every host, such as from openssl rand -hex 16."
        )
    return token.encode()


def _deadline(environment: Mapping[str, str]) -> float:
    text = environment.get(DEADLINE_KEY, "")
    try:
        seconds = float(text or DEFAULT_SECONDS)
    except ValueError:
        seconds = 0.0
    if not SHORTEST_SECONDS <= seconds <= LONGEST_SECONDS:
        raise UserError(
            f"{DEADLINE_KEY} is '{text}', but must be a number of seconds from {SHORTEST_SECONDS:.0f} to "
            f"{LONGEST_SECONDS:.0f}, after which a silent host counts as unreachable; correct or unset it."
        )
    return seconds
