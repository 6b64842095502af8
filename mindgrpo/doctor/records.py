"""Defines a line of the doctor's report, keeps the lines of every rank in a file, and merges them into one per check.

A rank writes a record when a check starts and one when it has ended, so that one that hangs or crashes is known by its
name and its ranks. Needs no MindSpore.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

Status = Literal["ok", "fails", "skipped"]
ENDED_REMEDY = (
    "the tails of the ranks' logs in the report say more; mend what fails above this line first"
)


@dataclass(frozen=True)
class CheckLine:
    """Says what was looked at, what was seen (a skip's reason), and a remedy in a sentence where that fails.

    `figures` are what was measured, for programs that read the report.
    """

    status: Status
    check: str
    seen: str
    remedy: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        remedy = f"  ->  {self.remedy}" if self.remedy else ""
        return f"{self.status:<7}  {self.check}: {self.seen}{remedy}"


def ok(check: str, seen: str, **figures: Any) -> CheckLine:
    return CheckLine("ok", check, seen, figures=figures)


def fails(check: str, seen: str, remedy: str, **figures: Any) -> CheckLine:
    return CheckLine("fails", check, seen, remedy, figures)


def skipped(check: str, reason: str) -> CheckLine:
    return CheckLine("skipped", check, reason)


class Records:
    """Writes the records of rank `rank` into `folder`."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._path = folder / f"rank_{rank}.jsonl"
        self.section, self.check = "", ""

    def starts(self, check: str) -> None:
        self.check = check
        self._write({"starts": check})

    def ends(self, line: CheckLine) -> None:
        self._write({"line": asdict(line)})

    def _write(self, record: dict[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record | {"section": self.section}) + "\n")


def read_records(folder: Path, num_ranks: int) -> list[list[dict[str, Any]]]:
    """Reads the records by rank, in the order of writing; a line that a crash cut off is left out."""
    by_rank: list[list[dict[str, Any]]] = []
    for rank in range(num_ranks):
        own: list[dict[str, Any]] = []
        with suppress(OSError):
            text = (folder / f"rank_{rank}.jsonl").read_text(encoding="utf-8", errors="replace")
            for row in text.splitlines():
                with suppress(ValueError):
                    own.append(json.loads(row))
        by_rank.append(own)
    return by_rank


def merged(
    by_rank: Sequence[Sequence[dict[str, Any]]], sections: Sequence[str], ending: str
) -> dict[str, list[CheckLine]]:
    """Merges the ranks' lines, by section. `ending` says how the job ended where it did not end well; else ""."""
    lines: dict[str, list[CheckLine]] = {section: [] for section in sections}
    broke = False
    for section in sections:
        checks: dict[str, list[CheckLine | None]] = {}
        for rank, records in enumerate(by_rank):
            for record in records:
                if record.get("section") != section:
                    continue
                line = CheckLine(**record["line"]) if "line" in record else None
                name = line.check if line else str(record["starts"])
                row = checks.setdefault(name, [None] * len(by_rank))
                row[rank] = line or row[rank]
        lines[section] = [_one(check, row, ending) for check, row in checks.items()]
        if not checks and not broke:
            lines[section] = [fails(section, f"no rank came to it: {ending}", ENDED_REMEDY)]
        elif not checks:
            lines[section] = [skipped(section, "the ranks ended before it")]
        broke = broke or any(line.status == "fails" for line in lines[section])
    if ending and not broke:
        lines[sections[-1]].append(fails(f"end of {sections[-1]}", ending, ENDED_REMEDY))
    return lines


def _one(check: str, row: Sequence[CheckLine | None], ending: str) -> CheckLine:
    failed = [(rank, line) for rank, line in enumerate(row) if line and line.status == "fails"]
    if failed:
        remedy, figures = failed[0][1].remedy, failed[0][1].figures
        several = "; ".join(f"rank {rank}: {line.seen}" for rank, line in failed[:4])
        more = f"; and {len(failed) - 4} more ranks" if len(failed) > 4 else ""
        seen = failed[0][1].seen if len(row) == 1 else several + more
        return CheckLine("fails", check, seen, remedy, figures)
    missing = [rank for rank, line in enumerate(row) if line is None]
    if missing:
        who = "it" if len(row) == 1 else f"rank{'s' * (len(missing) > 1)} {_numbers(missing)}"
        return fails(check, f"{who} did not come to its end: {ending}", ENDED_REMEDY)
    first = row[0]
    assert first is not None
    return first


def _numbers(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (" ..." if len(ranks) > 8 else "")
