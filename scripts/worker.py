"""Runs a program as one rank and writes down how it ended, for launch.sh.

Refuses to change what the program sees: its arguments, `__main__`, `__file__` and the folder first
on the import path are those of `python PROGRAM ARGUMENTS`.
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from pathlib import Path


def exit_status(ending: BaseException) -> int:
    if isinstance(ending, KeyboardInterrupt):
        return 130
    if not isinstance(ending, SystemExit):
        return 1
    if ending.code is None:
        return 0
    # What is not a number is a message, and Python ends with 1 after printing it.
    return ending.code if isinstance(ending.code, int) else 1


def run(program: str, arguments: list[str]) -> None:
    sys.argv = [program, *arguments]
    sys.path[0] = str(Path(program).resolve().parent)
    runpy.run_path(program, run_name="__main__")


def main() -> None:
    _, program, *arguments = sys.argv
    if os.environ.get("MS_ROLE") == "MS_SCHED":
        run(program, arguments)
        return
    record = Path(os.environ["MINDGRPO_STATUS_DIR"]) / f"rank_{os.environ.get('RANK_ID', '0')}"
    record.write_text(f"pid {os.getpid()}\n")
    status = 0
    try:
        run(program, arguments)
    except BaseException as ending:
        status = exit_status(ending)
        raise
    finally:
        with record.open("a") as lines:
            lines.write(f"status {status} {time.time():.6f}\n")


if __name__ == "__main__":
    main()
