"""The only owner of where weights are: on the device, on the host, or nowhere.

A phase says which roles it needs on the device; the others leave before those arrive. The ledger counts bytes by
role, the peak of each phase and the seconds that transfers took. Refuses a phase that would exceed the budget,
before anything moves, and to bring back what was released as if it were still valid.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from mindgrpo.backend.contract import Pool
from mindgrpo.errors import UserError


class Place(Enum):
    ABSENT = "absent"
    ON_DEVICE = "on device"
    ON_HOST = "on host"


@dataclass
class Role:
    """`rebuilt`: its bytes are worth nothing outside its phases, so leaving means being released."""

    name: str
    pools: tuple[Pool, ...]
    rebuilt: bool
    place: Place = Place.ABSENT

    @property
    def num_bytes(self) -> int:
        return sum(pool.num_bytes for pool in self.pools)


@dataclass
class Ledger:
    peak_by_phase: dict[str, int] = field(default_factory=dict)
    transfer_seconds: float = 0.0
    transfer_bytes: int = 0


# What each phase needs on the device; a role that a run does not have is passed over.
PHASES: Mapping[str, tuple[str, ...]] = {
    "reshard": ("policy", "generator"),
    "rollout": ("generator", "kv_cache"),
    "reference": ("reference",),
    "old_logps": ("policy",),
    "update": ("policy", "gradients", "optimizer"),
    "sync_reference": ("policy", "reference"),
}


class Residency:
    def __init__(self, budget_bytes: int | None = None) -> None:
        self.roles: dict[str, Role] = {}
        self.phase = ""
        self.ledger = Ledger()
        self._budget = budget_bytes

    def own(self, name: str, pools: Sequence[Pool], rebuilt: bool, filled: bool) -> None:
        """`filled`: its bytes are on the device now and are worth keeping."""
        place = Place.ON_DEVICE if filled else Place.ABSENT
        self.roles[name] = Role(name, tuple(pools), rebuilt, place)

    def table(self) -> list[tuple[str, int, dict[str, int]]]:
        """(phase, bytes, bytes by role) of the phases that this run's roles can need."""
        rows = []
        for phase, names in PHASES.items():
            held = {name: self.roles[name].num_bytes for name in names if name in self.roles}
            rows.append((phase, sum(held.values()), held))
        return rows

    def check_budget(self) -> None:
        """Raises UserError if any phase needs more than the budget."""
        for phase, _, _ in self.table():
            self._check(phase)

    def _check(self, phase: str) -> None:
        if self._budget is None:
            return
        rows = {row[0]: row for row in self.table()}
        _, needed, held = rows[phase]
        if needed > self._budget:
            parts = ", ".join(f"{name} {size / 2**20:.1f} MiB" for name, size in held.items())
            raise UserError(
                f"Phase {phase} needs {needed / 2**20:.1f} MiB on the device ({parts}), but "
                f"context.max_device_memory allows {self._budget / 2**20:.1f} MiB; raise it, or raise "
                "parallel_config.model_parallel or pipeline_stage, or lower generate_config.max_num_seqs."
            )

    def enter(self, phase: str) -> None:
        """Moves roles so that exactly those of `phase` are on the device."""
        self._check(phase)
        self.phase = phase
        needed = [name for name in PHASES[phase] if name in self.roles]
        started = time.perf_counter()
        for role in self.roles.values():
            if role.name not in needed:
                self._send_away(role)
        for name in needed:
            self._bring(self.roles[name])
        self.ledger.transfer_seconds += time.perf_counter() - started
        used = sum(r.num_bytes for r in self.roles.values() if r.place is Place.ON_DEVICE)
        self.ledger.peak_by_phase[phase] = max(used, self.ledger.peak_by_phase.get(phase, 0))

    def _send_away(self, role: Role) -> None:
        if role.place is not Place.ON_DEVICE:
            return
        for pool in role.pools:
            if role.rebuilt:
                pool.release()
            else:
                pool.offload()
                self.ledger.transfer_bytes += pool.num_bytes
        role.place = Place.ABSENT if role.rebuilt else Place.ON_HOST

    def _bring(self, role: Role) -> None:
        if role.place is Place.ON_HOST:
            for pool in role.pools:
                pool.load()
                self.ledger.transfer_bytes += pool.num_bytes
        role.place = Place.ON_DEVICE
