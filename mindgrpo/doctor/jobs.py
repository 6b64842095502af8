"""Starts a program on ranks with the launcher, as a run is, ends it at a deadline, and keeps the tails of its logs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mindgrpo.launch.plan import CHECK, PACKAGE_FOLDER

# How long ranks may take to end when the deadline has come, and the launcher after them.
STOP_SECONDS, KILL_SECONDS = 5, 20.0
TAIL_LINES, TAIL_BYTES = 40, 1 << 14


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
