"""Adds up device memory by phase: which roles a phase needs on the device, and how many bytes they take. Pure.

The plan of a run and the memory of a rank at work are tables of this one kind, so they can be compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mindgrpo.errors import UserError

# What each phase needs on the device; roles that a run does not have are left out of its table. The copies are
# adapters in the generator's layout before they are added to its weights, and the policy in the reference's layout
# before the two are mixed. Master weights are the optimizer's own, where the policy's are of a narrower dtype.
PHASES: Mapping[str, tuple[str, ...]] = {
    "reshard": ("policy", "generator", "adapters_copy"),
    "rollout": ("generator", "kv_cache"),
    "reference": ("reference",),
    "old_logps": ("policy",),
    "update": ("policy", "gradients", "optimizer", "master_weights"),
    "sync_reference": ("policy", "reference", "reference_copy"),
}
MIB = 2**20


@dataclass(frozen=True)
class PhaseMemory:
    """Bytes on the device in one phase, by role."""

    phase: str
    by_role: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.by_role.values())

    def __str__(self) -> str:
        roles = " + ".join(f"{role} {size / MIB:.1f}" for role, size in self.by_role.items())
        return f"{self.phase:<15}{self.total / MIB:>10.1f} MiB a rank = {roles}"


def by_phase(by_role: Mapping[str, int]) -> list[PhaseMemory]:
    """Returns the table of a run whose roles take `by_role` bytes each."""
    return [
        PhaseMemory(phase, {role: by_role[role] for role in roles if role in by_role})
        for phase, roles in PHASES.items()
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
