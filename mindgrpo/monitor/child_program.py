"""Programs of this package that a rank runs beside itself: what they take of memory does not stay with the rank."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import mindgrpo


def environment_of_programs() -> dict[str, str]:
    """This process's, with this package to import from where it was imported here."""
    package = str(Path(mindgrpo.__file__).parents[1])
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}


def start_program(module: str, words: Sequence[str]) -> subprocess.Popen[bytes]:
    """`python -m module --parent PID words`; the program ends with this process, see health/processes.py."""
    return subprocess.Popen(
        [sys.executable, "-m", module, "--parent", str(os.getpid()), *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=environment_of_programs(),
    )


def end_program(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


def wait_for_program(process: subprocess.Popen[bytes], seconds: float) -> str | None:
    """Why it failed, in its own last line; None where it did not. Ends it after `seconds`."""
    try:
        _, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        end_program(process)
        return f"its process took more than {seconds:g} s"
    if process.returncode == 0:
        return None
    lines = errors.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"its process ended with status {process.returncode}"
