"""One line of the doctor's report on devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["ok", "fails", "skipped"]


@dataclass(frozen=True)
class Line:
    """What was looked at, what was seen, and a remedy in a sentence where that fails; `seen` has a skip's reason.

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


def ok(check: str, seen: str, **figures: Any) -> Line:
    return Line("ok", check, seen, figures=figures)


def fails(check: str, seen: str, remedy: str, **figures: Any) -> Line:
    return Line("fails", check, seen, remedy, figures)


def skipped(check: str, reason: str) -> Line:
    return Line("skipped", check, reason)
