"""Tracks and moves each role's memory pools: on the device, offloaded to the host, or released.

Every pool of the backend is registered here under a role. A phase lists the roles that it needs on the device
(`PHASES`); other roles leave the device first, or stay while there is room. Roles that are rebuilt in each step are
released, and come back as zeros; all others are offloaded to the host.

Device memory is added up by phase. A run's memory plan and the memory of a running rank use the same kind of table, so
that they can be compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from mindgrpo.backend.contract import Pool
from mindgrpo.backend.dtypes import Dtype
from mindgrpo.backend.host_memory import SparePages
from mindgrpo.errors import UserError

REFERENCE = "reference"
# The vision encoder, which is on the device in phase "images" alone.
VISION = "vision"
# The roles that each phase needs on the device; roles that a run does not have are left out of its table. The phase of
# a reward model has the name of its role, and needs it alone.
# adapters_copy are adapters in the generator's layout, before they are merged into its weights; reference_copy is the
# policy in the reference's layout, before the two are mixed. master_weights exist if the policy's weights are 16-bit.
PHASES: Mapping[str, tuple[str, ...]] = {
    "reshard": ("policy", "generator", "adapters_copy"),
    "rollout": ("generator", "kv_cache"),
    "images": (VISION,),
    REFERENCE: (REFERENCE,),
    "old_logps": ("policy",),
    "values": ("critic",),
    "update_critic": ("critic", "critic_gradients", "critic_optimizer", "critic_master_weights"),
    "update": ("policy", "gradients", "optimizer", "master_weights"),
    "sync_reference": ("policy", "reference", "reference_copy"),
}
_REWARD_MODEL = "reward_model_"
# Roles that are released after their phase and rebuilt; all others are offloaded to the host.
REBUILT = frozenset(
    (
        *("gradients", "critic_gradients", "generator", "kv_cache"),
        *("adapters_copy", "reference_copy"),
    )
)
MIB = 2**20


def reward_model_role(name: str) -> str:
    """Returns the role, and the phase, of the reward model `name`."""
    return _REWARD_MODEL + name


def needed_in(phase: str) -> tuple[str, ...]:
    """Returns the roles that a phase needs on the device."""
    return PHASES.get(phase, (phase,))


@dataclass(frozen=True)
class PhaseMemory:
    """Device memory of one phase, in bytes by role."""

    phase: str
    by_role: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.by_role.values())

    def __str__(self) -> str:
        roles = " + ".join(f"{role} {size / MIB:.1f}" for role, size in self.by_role.items())
        return f"{self.phase:<15}{self.total / MIB:>10.1f} MiB a rank = {roles}"


def by_phase(by_role: Mapping[str, int]) -> list[PhaseMemory]:
    """Returns the memory of each phase, for a run whose roles take `by_role` bytes."""
    reward_models = [role for role in by_role if role.startswith(_REWARD_MODEL)]
    first, second, *others = PHASES
    return [
        PhaseMemory(phase, {role: by_role[role] for role in needed_in(phase) if role in by_role})
        for phase in (first, second, *reward_models, *others)
    ]


def check_budget(rows: Sequence[PhaseMemory], budget: int | None) -> None:
    """Raises UserError if a phase needs more bytes than `budget` (context.max_device_memory; None: no limit)."""
    for row in rows:
        if budget is not None and row.total > budget:
            roles = ", ".join(f"{name} {size / MIB:.1f} MiB" for name, size in row.by_role.items())
            raise UserError(
                f"Phase {row.phase} needs {row.total / MIB:.1f} MiB on the device ({roles}), but "
                f"context.max_device_memory allows {budget / MIB:.1f} MiB; raise it, or raise "
                "parallel_config.model_parallel or pipeline_stage, or lower generate_config.max_num_seqs."
            )


class CountedPool(Pool):
    """A pool for memory plans, which has a size but no memory; its parameters are None."""

    def __init__(
        self, num_bytes: int, dtype: Dtype = "float32", is_host_memory: bool = False
    ) -> None:
        self.num_bytes, self.dtype, self.is_host_memory = num_bytes, dtype, is_host_memory

    def parameter(self, name: str, offset: int, shape: Sequence[int]) -> Any:
        return None

    def on_host(self, write: bool = False) -> Any:
        raise ValueError("memory that is only counted cannot be read")

    def offload(self) -> None: ...

    def load(self) -> None: ...

    def release(self) -> None: ...


class Location(Enum):
    RELEASED = "released"
    DEVICE = "device"
    HOST = "host"


@dataclass
class Role:
    """Pools that move together. `rebuilt`: their contents are discarded after the phases that need them.

    `host_only` pools are in host memory on every device, and never move.
    """

    name: str
    pools: tuple[Pool, ...]
    rebuilt: bool
    location: Location
    host_only: bool = False

    @property
    def num_bytes(self) -> int:
        return sum(pool.num_bytes for pool in self.pools)


@dataclass
class Ledger:
    """Peaks of device memory by phase, in bytes, and total bytes and seconds of device-host transfers.

    `peak_by_phase` counts roles; `measured_by_phase` counts all allocations, if the device reports them.
    """

    peak_by_phase: dict[str, int] = field(default_factory=dict)
    measured_by_phase: dict[str, int] = field(default_factory=dict)
    transfer_seconds: float = 0.0
    transfer_bytes: int = 0


class Residency:
    """Moves roles so that each phase has those that it needs on the device.

    `budget_bytes` limits a phase's device memory. With `keeps`, roles that a phase does not need stay on the device if
    the budget allows it, which avoids copies. `reserved` is the memory of each phase's graphs, in bytes, which roles
    that merely stay must leave free. `take_peak` is contract.Backend.take_device_peak.
    """

    def __init__(
        self,
        budget_bytes: int | None = None,
        keeps: bool = False,
        reserved: Mapping[str, int] | None = None,
        take_peak: Callable[[], int | None] = lambda: None,
    ) -> None:
        self.roles: dict[str, Role] = {}
        self.phase = ""
        self.ledger = Ledger()
        self._budget, self._keeps = budget_bytes, keeps
        self._reserved, self._take_peak = reserved or {}, take_peak
        self._spare = SparePages()

    def register(self, name: str, pools: Sequence[Pool], rebuilt: bool, filled: bool) -> None:
        """Registers device pools as role `name`. `filled`: they stay on the device, with contents worth keeping."""
        location = Location.DEVICE if filled else Location.RELEASED
        for pool in pools:
            if rebuilt:
                pool.take_turns(self._spare, not filled)
            if filled:
                pool.load()
        self.roles[name] = Role(name, tuple(pools), rebuilt, location)

    def add(self, pools_by_role: Mapping[str, Sequence[Pool]]) -> None:
        """Registers the device pools of several roles, as filled unless they are in REBUILT."""
        for name, pools in pools_by_role.items():
            if pools:
                self.register(name, pools, name in REBUILT, filled=name not in REBUILT)

    def register_host(self, name: str, pools: Sequence[Pool]) -> None:
        """Registers pools of host memory as role `name`."""
        self.roles[name] = Role(name, tuple(pools), False, Location.HOST, host_only=True)

    @contextmanager
    def temporary_host(self, name: str, pools: Sequence[Pool]) -> Iterator[None]:
        """Context manager that registers pools of host memory as role `name`, and releases them on exit."""
        self.register_host(name, pools)
        try:
            yield
        finally:
            for pool in self.roles.pop(name).pools:
                pool.release()

    def table(self) -> list[PhaseMemory]:
        """Returns the device memory of each phase on this rank."""
        on_device = [role for role in self.roles.values() if not role.host_only]
        return by_phase({role.name: role.num_bytes for role in on_device})

    def check_budget(self) -> None:
        """Raises UserError if any phase needs more than the budget."""
        check_budget(self.table(), self._budget)

    @property
    def device_bytes(self) -> int:
        return sum(r.num_bytes for r in self.roles.values() if r.location is Location.DEVICE)

    @property
    def host_bytes(self) -> int:
        return sum(r.num_bytes for r in self.roles.values() if r.location is Location.HOST)

    def activate(self, phase: str) -> None:
        """Moves the roles of `phase` to the device, and others off it unless they may stay.

        Raises UserError, before anything moves, if the phase exceeds the budget.
        """
        check_budget([row for row in self.table() if row.phase == phase], self._budget)
        self._measure()
        self.phase = phase
        needed = needed_in(phase)
        moving = [role for role in self.roles.values() if not role.host_only]
        started = time.perf_counter()
        for role in moving:
            if role.name not in needed and role.location is Location.DEVICE and not self._fits():
                self._deactivate(role)
        for role in moving:
            if role.name in needed:
                self._bring(role)
        if not all(
            pool.is_host_memory for role in moving if role.name in needed for pool in role.pools
        ):
            # Another process, such as vLLM's, may need the memory now.
            self._spare.give_up()
        self.ledger.transfer_seconds += time.perf_counter() - started
        peak = self.ledger.peak_by_phase.get(phase, 0)
        self.ledger.peak_by_phase[phase] = max(self.device_bytes, peak)

    def peaks(self) -> dict[str, int]:
        """Returns the peak of device memory by phase so far: measured, or that of roles if the device reports none."""
        self._measure()
        return self.ledger.peak_by_phase | self.ledger.measured_by_phase

    def planned_peaks(self) -> dict[str, int]:
        """Returns the expected peak by phase: all roles on the device, even those that merely stayed, and graphs."""
        planned = self.ledger.peak_by_phase
        return {phase: size + self._reserved.get(phase, 0) for phase, size in planned.items()}

    def _measure(self) -> None:
        """Attributes the peak of allocations since the last call to the current phase."""
        peak = self._take_peak()
        if peak is not None and self.phase:
            measured = self.ledger.measured_by_phase
            measured[self.phase] = max(peak, measured.get(self.phase, 0))

    def _fits(self) -> bool:
        """Returns whether all roles on the device may stay there, together with those of the phase."""
        if not self._keeps:
            return False
        needed = needed_in(self.phase)
        roles = [role for role in self.roles.values() if not role.host_only]
        wanted = sum(
            role.num_bytes
            for role in roles
            if role.name in needed or role.location is Location.DEVICE
        )
        reserved = self._reserved.get(self.phase, 0)
        return self._budget is None or wanted + reserved <= self._budget

    def _deactivate(self, role: Role) -> None:
        for pool in role.pools:
            if role.rebuilt:
                pool.release()
            else:
                pool.offload()
                self.ledger.transfer_bytes += pool.num_bytes
        role.location = Location.RELEASED if role.rebuilt else Location.HOST

    def _bring(self, role: Role) -> None:
        for pool in role.pools:
            pool.load()
            if role.location is Location.HOST:
                self.ledger.transfer_bytes += pool.num_bytes
        role.location = Location.DEVICE
