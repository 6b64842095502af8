"""Runs the doctor's programs on ranks with the launcher, as a run is; keeps their lines and the tails of their logs.

A rank writes a record when a check starts and one when it has ended, so that one that hangs or crashes is known by its
name and its ranks. The ranks' lines of one check become one line of the report. Needs no MindSpore.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from mindgrpo.launch.plan import CHECK, PACKAGE_FOLDER

Status = Literal["ok", "fails", "skipped"]
ENDED_REMEDY = (
    "the tails of the ranks' logs in the report say more; mend what fails above this line first"
)
# How long ranks may take to end when the deadline has come, and the launcher after them.
STOP_SECONDS, KILL_SECONDS = 5, 20.0
TAIL_LINES, TAIL_BYTES = 40, 1 << 14


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
            lines[section] = [fails(section, f"no rank reached it: {ending}", ENDED_REMEDY)]
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
        return fails(check, f"{who} did not end: {ending}", ENDED_REMEDY)
    first = row[0]
    assert first is not None
    return first


def _numbers(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (" ..." if len(ranks) > 8 else "")


@dataclass(frozen=True)
class JobEnd:
    """Says how a job ended; `status` None: at the deadline. `logs` are the last lines of each log, by file name."""

    status: int | None
    seconds: float
    deadline: float
    output: str
    logs: Mapping[str, str]

    @property
    def ending(self) -> str:
        """Says how it ended, where it did not end well; else ""."""
        if self.status is None:
            return f"not within {self.deadline:.0f} s, the deadline"
        if self.status == 0:
            return ""
        last = [row for row in self.output.splitlines() if row.startswith("mindgrpo:")]
        return f"the job ended with status {self.status}" + (f" ({last[-1]})" if last else "")


def run_job(
    num_ranks: int,
    command: Sequence[str],
    environment: Mapping[str, str],
    deadline: float,
    folder: Path,
    working_folder: Path | None = None,
) -> JobEnd:
    """Runs `command`, a program's path and its arguments, on `num_ranks` ranks of this host; logs go below `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    root = str(PACKAGE_FOLDER.parent)
    path = [word for word in environment.get("PYTHONPATH", "").split(os.pathsep) if word]
    ours = {
        **environment,
        "MINDGRPO_LOG_DIR": str(folder / "logs"),
        "MINDGRPO_STOP_SECONDS": str(STOP_SECONDS),
        "PYTHONPATH": os.pathsep.join(path if root in path else [root, *path]),
    }
    words = ["launch", "--ranks", str(num_ranks), "--max_restarts", "0", "--", *command]
    output = folder / "output.log"
    started = time.monotonic()
    with output.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-c", CHECK, *words],
            env=ours,
            cwd=working_folder,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        status = _wait(process, deadline)
    seconds = time.monotonic() - started
    return JobEnd(status, seconds, deadline, tail(output), _tails(folder / "logs"))


def _wait(process: subprocess.Popen[bytes], deadline: float) -> int | None:
    try:
        return process.wait(deadline)
    except subprocess.TimeoutExpired:
        return None
    finally:
        # At the deadline, and where the user stops the doctor: the launcher ends its ranks.
        if process.poll() is None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS + KILL_SECONDS)
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def tail(path: Path) -> str:
    """Returns the last lines of a file; empty where it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-TAIL_LINES:])


def _tails(logs: Path) -> dict[str, str]:
    return {path.name: tail(path) for path in sorted(logs.glob("*/*.log"))}
