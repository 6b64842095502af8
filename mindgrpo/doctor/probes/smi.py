"""Reads what `npu-smi info` prints: the driver's version, the chips with their memory, the processes that hold it.

Two lines a chip, the second with the bus id, then a table of processes. Tables of the generations differ in columns
(910A has memory and HBM, 910B an HBM column, A3 two chips an NPU with a physical id each), but not in this.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_VERSION = re.compile(r"npu-smi\s+\S+\s+Version:\s*(\S+)")
_NAME = re.compile(r"^\|\s*(\d+)\s+(\S+)\s*\|\s*(\S+)\s*\|")
_CHIP = re.compile(r"^\|\s*(\d+)\s+(\S+)?\s*\|\s*[0-9A-Fa-f]{4}:\S+\s*\|(.*)\|\s*$")
_MEMORY = re.compile(r"(\d+)\s*/\s*(\d+)")
_PROCESS = re.compile(r"^\|\s*(\d+)\s+(\d+)\s*\|\s*(\d+)\s*\|\s*(.*?)\s*\|\s*(\d+)\s*\|\s*$")


@dataclass(frozen=True)
class Holder:
    """A process that holds `mib` MiB of a chip's memory; its name is not always shown."""

    pid: int
    name: str
    mib: int

    def __str__(self) -> str:
        return f"{self.pid} ({self.name or 'no name shown'}, {self.mib} MiB)"


@dataclass(frozen=True)
class Chip:
    """Number `index` of this host, counted over all chips in the order of the table."""

    index: int
    npu: int
    chip: int
    name: str
    health: str
    used_mib: int
    total_mib: int
    holders: tuple[Holder, ...]

    @property
    def free_mib(self) -> int:
        return self.total_mib - self.used_mib


@dataclass(frozen=True)
class SmiTable:
    version: str
    chips: tuple[Chip, ...]


def read_smi(text: str) -> SmiTable:
    """Raises ValueError for a text that names no version or no chip."""
    version = _VERSION.search(text)
    if version is None:
        raise ValueError("it names no version")
    holders: dict[tuple[int, int], list[Holder]] = {}
    for line in text.splitlines():
        process = _PROCESS.match(line)
        if process:
            npu, chip, pid, name, mib = process.groups()
            holders.setdefault((int(npu), int(chip)), []).append(Holder(int(pid), name, int(mib)))
    chips: list[Chip] = []
    named: tuple[int, str, str] | None = None
    for line in text.splitlines():
        second = _CHIP.match(line)
        if second and named is not None:
            npu, name, health = named
            chip = int(second[1])
            # Of several pairs the last one is the memory that models are in; an absent kind is 0 / 0.
            pairs = [(int(used), int(total)) for used, total in _MEMORY.findall(second[3])]
            used, total = next((pair for pair in reversed(pairs) if pair[1]), (0, 0))
            own = tuple(holders.get((npu, chip), ()))
            chips.append(Chip(len(chips), npu, chip, name, health, used, total, own))
            named = None
            continue
        first = _NAME.match(line)
        if first:
            named = int(first[1]), first[2], first[3]
    if not chips:
        raise ValueError("it lists no device")
    return SmiTable(version[1], tuple(chips))
