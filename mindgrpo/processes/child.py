"""Starts a program, or a function of this package, in a process of its own; waits for it, ends it, says how it ended.

A child leads a session: a terminal's Ctrl-C does not reach it, and its group is what it has started.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from mindgrpo.errors import one_line
from mindgrpo.processes.linux import end_with_parent, kill_group

PACKAGE_FOLDER = Path(__file__).resolve().parents[1]
# Modules of the present folder must not replace those of the package and of the standard library.
CALL = (
    "import sys; sys.path[:] = [sys.argv[1], *filter(None, sys.path)]; "
    "from mindgrpo.processes.child import call; call(*sys.argv[2:])"
)
# A process that a driver holds may not even end when it is killed.
REAP_SECONDS = 10.0
TAIL_BYTES = 4096


class Child(subprocess.Popen[bytes]):
    """A program that runs. Raises OSError or SubprocessError where it cannot be started."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        *,
        prepare: Callable[[], object] | None = None,
        log: IO[bytes] | int | None = None,
        **options: Any,
    ) -> None:
        """Starts `command`; without `options`, which are Popen's, it has no input.

        `log` takes what it prints. `prepare` runs in the new process before the program, which then ends with this
        process; without it the program sees to that itself: a process that has threads cannot give it one.
        """
        parent = os.getpid()

        def enter() -> None:
            end_with_parent(parent)
            assert prepare is not None
            prepare()

        if log is not None:
            options |= {"stdout": log, "stderr": log}
        super().__init__(
            command,
            env=environment,
            stdin=options.pop("stdin", subprocess.DEVNULL),
            start_new_session=True,
            preexec_fn=enter if prepare else None,
            **options,
        )

    def wait_until(self, deadline: float) -> int | None:
        """Returns its status, negative for a signal; None where it still runs at `deadline`, by time.monotonic."""
        if self.poll() is None:
            descriptor = os.pidfd_open(self.pid)
            try:
                waiting = select.poll()
                waiting.register(descriptor, select.POLLIN)
                waiting.poll(max(0.0, 1000 * (deadline - time.monotonic())))
            finally:
                os.close(descriptor)
        return self.poll()

    def end(self, seconds: float = 0.0, number: int | None = None) -> int | None:
        """Kills it and its group if it has not ended within `seconds`; a signal `number` asks it to.

        Returns its status; None where it had to be killed.
        """
        if number is not None and self.poll() is None:
            self.send_signal(number)
        status = self.wait_until(time.monotonic() + seconds)
        kill_group(self.pid)
        with suppress(subprocess.TimeoutExpired):
            self.wait(REAP_SECONDS)
        return status


class FunctionCall(Child):
    """A process that calls a function of this package. What it writes to its standard error is kept."""

    def __init__(
        self,
        function: str,
        arguments: Mapping[str, Any],
        environment: Mapping[str, str] | None = None,
        ends_with_this: bool = True,
        **options: Any,
    ) -> None:
        """Calls `module:function` with the arguments, as JSON holds them. Raises OSError.

        Without `ends_with_this` the function has to see to its own end. `options` are Popen's.
        """
        self._errors = open(os.memfd_create("mindgrpo-stderr"), "rb")  # noqa: SIM115
        words = [str(os.getpid() if ends_with_this else 0), function, json.dumps(arguments)]
        command = [sys.executable, "-c", CALL, str(PACKAGE_FOLDER.parent), *words]
        outputs: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": self._errors}
        super().__init__(command, environment, **outputs | options)

    def failure(self, seconds: float) -> str | None:
        """Ends it after `seconds`; returns its own last line or how it ended, or None for a function that returned."""
        status = self.end(seconds)
        if status is None:
            return f"its process took more than {seconds:g} s"
        words = last_lines(self._errors.fileno())
        return (
            None
            if status == 0
            else one_line(words[0])
            if words
            else f"its process {describe_code(status)}"
        )


def call(parent: str, function: str, arguments: str) -> None:
    if parent != "0":
        end_with_parent(int(parent))
    module, _, name = function.partition(":")
    getattr(importlib.import_module(module), name)(**json.loads(arguments))


def describe_code(code: int) -> str:
    """Describes an exit status; `code` is negative for a process that a signal killed."""
    return f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"


def last_lines(descriptor: int, number: int = 1) -> list[str]:
    """Returns the last lines with something in them of a file that this process has open, at most `number`."""
    with open(f"/proc/self/fd/{descriptor}", "rb") as file:
        file.seek(max(0, os.fstat(descriptor).st_size - TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    return [line for line in lines if line.strip()][-number:]
