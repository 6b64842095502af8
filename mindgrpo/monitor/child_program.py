"""Runs functions of this package in processes beside a rank, so that the memory they use does not stay with the rank.

As a program it is such a process: `python -m mindgrpo.monitor.child_program PARENT module:function JSON`.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import mindgrpo
from mindgrpo.health.processes import end_with_parent


def start_program(
    function: str, arguments: dict[str, Any], **options: Any
) -> subprocess.Popen[bytes]:
    """Calls `module:function` with the arguments, as JSON holds them, in a process that ends with this one.

    `options` are those of Popen; without any it has no input, its standard error is a pipe, and the environment is
    this process's.
    """
    package = str(Path(mindgrpo.__file__).parents[1])
    environment = options.pop("env", os.environ)
    path = os.pathsep.join(filter(None, [package, environment.get("PYTHONPATH")]))
    words = [str(os.getpid()), function, json.dumps(arguments)]
    return subprocess.Popen(
        [sys.executable, "-m", "mindgrpo.monitor.child_program", *words],
        stdin=options.pop("stdin", subprocess.DEVNULL),
        stdout=subprocess.DEVNULL,
        stderr=options.pop("stderr", subprocess.PIPE),
        env={**environment, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"},
        **options,
    )


def end_program(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


def wait_for_program(process: subprocess.Popen[bytes], seconds: float) -> str | None:
    """Returns why it failed, in its own last line, or None; ends it after `seconds`."""
    try:
        _, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        end_program(process)
        return f"its process took more than {seconds:g} s"
    if process.returncode == 0:
        return None
    lines = errors.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"its process ended with status {process.returncode}"


if __name__ == "__main__":
    end_with_parent(int(sys.argv[1]))
    module, _, name = sys.argv[2].partition(":")
    getattr(importlib.import_module(module), name)(**json.loads(sys.argv[3]))
