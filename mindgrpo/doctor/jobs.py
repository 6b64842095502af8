"""Runs the doctor's programs on ranks with the launcher, as a run is; keeps their lines.

A rank writes a record when a check starts and one when it has ended, so that one that hangs or crashes is known by its
name and its ranks. The ranks' lines of one check become one line of the report. Needs no MindSpore.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from mindgrpo.backend.targets import log_variables
from mindgrpo.launch.plan import PACKAGE_FOLDER, RUN_VERB
from mindgrpo.processes.child import Child, describe_code

Status = Literal["ok", "fails", "skipped"]
ENDED_REMEDY = "the ranks' logs in the archive say more; mend what fails above this line first"
# How long ranks may take to end when the deadline has come, and the launcher after them.
STOP_SECONDS, KILL_SECONDS = 5, 20.0
# On this signal a rank writes the stacks of its threads to its log.
STACKS, STACK_SECONDS = signal.SIGUSR1, 2.0


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


# Hears of each check before it is made, so that one that does not end is known by its name and figures.
Starts = Callable[..., None]


class Records:
    """Writes the records of rank `rank` into `folder`."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._path, self.check = folder / f"rank_{rank}.jsonl", "start of the ranks"

    def starts(self, check: str, **figures: Any) -> None:
        self.check = check
        self._write({"starts": check, "figures": figures})

    def ends(self, line: CheckLine) -> None:
        self._write({"line": asdict(line)})

    def _write(self, record: dict[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record | {"pid": os.getpid()}) + "\n")


def read_records(folder: Path, num_ranks: int) -> list[list[dict[str, Any]]]:
    """Reads the records by rank, in the order of writing; a line that a crash cut off is left out."""
    by_rank: list[list[dict[str, Any]]] = [[] for _ in range(num_ranks)]
    for rank, own in enumerate(by_rank):
        path = folder / f"rank_{rank}.jsonl"
        for row in path.read_text(errors="replace").splitlines() if path.exists() else ():
            with suppress(ValueError):
                own.append(json.loads(row))
    return by_rank


def merged(by_rank: Sequence[Sequence[dict[str, Any]]], ending: str) -> list[CheckLine]:
    """Merges the ranks' lines of a job. `ending` says how it ended where it did not end well; else ""."""
    checks: dict[str, list[CheckLine | None]] = {}
    for rank, records in enumerate(by_rank):
        for record in records:
            line = CheckLine(**record["line"]) if "line" in record else None
            row = checks.setdefault(line.check if line else record["starts"], [None] * len(by_rank))
            row[rank] = line or row[rank]
    lines = [_one(check, row, ending) for check, row in checks.items()]
    if ending and not any(line.status == "fails" for line in lines):
        check = "end of the ranks" if lines else "start of the ranks"
        lines.append(fails(check, ending, ENDED_REMEDY))
    return lines


def _one(check: str, row: Sequence[CheckLine | None], ending: str) -> CheckLine:
    failed = [(rank, line) for rank, line in enumerate(row) if line and line.status == "fails"]
    if failed:
        worst = failed[0][1]
        several = "; ".join(f"rank {rank}: {line.seen}" for rank, line in failed[:4])
        more = f"; and {len(failed) - 4} more ranks" if len(failed) > 4 else ""
        return replace(worst, seen=worst.seen if len(row) == 1 else several + more)
    if missing := [rank for rank, line in enumerate(row) if line is None]:
        return fails(check, f"ranks {missing} did not end: {ending}", ENDED_REMEDY)
    return next(filter(None, row))


@dataclass(frozen=True)
class JobEnd:
    """Says how a job ended; `status` None: at the deadline."""

    status: int | None
    seconds: float
    deadline: float
    output: str
    # The last lines of the device's own logs that say ERROR.
    device_errors: Sequence[str] = ()

    @property
    def ending(self) -> str:
        """Says how it ended, where it did not end well; else ""."""
        if self.status is None:
            return f"not within {self.deadline:.0f} s, the deadline"
        if self.status == 0:
            return ""
        last = [row for row in self.output.splitlines() if row.startswith("mindgrpo:")]
        return f"the job {describe_code(self.status)}" + (f" ({last[-1]})" if last else "")


def run_job(
    num_ranks: int,
    command: Sequence[str],
    environment: Mapping[str, str],
    deadline: float,
    folder: Path,
    working_folder: Path | None = None,
) -> JobEnd:
    """Runs `command`, a program's path and its arguments, on `num_ranks` ranks of this host; logs go below `folder`.

    At the deadline, ranks that have records there write their stacks to their logs before they are ended.
    """
    folder.mkdir(parents=True, exist_ok=True)
    root = str(PACKAGE_FOLDER.parent)
    path = [word for word in environment.get("PYTHONPATH", "").split(os.pathsep) if word]
    ours = {
        **environment,
        **log_variables(folder / "device"),
        "MINDGRPO_LOG_DIR": str(folder / "logs"),
        "MINDGRPO_STOP_SECONDS": str(STOP_SECONDS),
        "PYTHONPATH": os.pathsep.join(path if root in path else [root, *path]),
    }
    words = ["launch", "--ranks", str(num_ranks), "--max_restarts", "0", "--", *command]
    output = folder / "output.log"
    started = time.monotonic()
    with output.open("ab") as file:
        process = Child([sys.executable, *RUN_VERB, *words], ours, log=file, cwd=working_folder)
        try:
            status = process.wait_until(time.monotonic() + deadline)
            if status is None:
                for own in read_records(folder, len([*folder.glob("rank_*.jsonl")])):
                    with suppress(ProcessLookupError):
                        os.kill(own[-1]["pid"], STACKS)
                time.sleep(STACK_SECONDS)
        finally:
            # At the deadline, and where the user stops the doctor: the launcher ends its ranks.
            process.end(STOP_SECONDS + KILL_SECONDS, signal.SIGTERM)
    text = output.read_text(encoding="utf-8", errors="replace")
    errors = [
        row
        for path in sorted((folder / "device").rglob("*.log"))
        for row in path.read_text(encoding="utf-8", errors="replace").splitlines()
        if "[ERROR]" in row
    ]
    return JobEnd(status, time.monotonic() - started, deadline, text, errors[-40:])
