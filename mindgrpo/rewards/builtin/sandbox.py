"""Programs and their judges as isolated processes, with their time, memory and output bounded.

A program that is compared by its output is one process; assertions take two: the completion's program, and
the judge that calls it. What they write goes to files in memory, so that nothing has to be read while they run.
"""

from __future__ import annotations

import compileall
import functools
import marshal
import os
import select
import site
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mindgrpo.rewards.builtin.isolation import (
    SANDBOXED,
    Isolation,
    IsolationUnavailable,
    bubblewrap,
    landlock_and_seccomp,
    memory_file,
)

MAX_OUTPUT_BYTES = 1 << 20
# Bubblewrap comes first: its processes do not see one another at all.
METHODS: dict[str, Callable[[], Isolation]] = {
    "bubblewrap": bubblewrap,
    "mindgrpo[code]": landlock_and_seccomp,
}
TRIAL = """
import os
def refused(action):
    try:
        action()
    except OSError:
        return True
def fork():
    if os.fork() == 0:
        os._exit(0)
if all(map(refused, [fork, lambda: open('/etc/passwd'), lambda: open('/proc/self/environ')])):
    print('isolated')
"""


@dataclass(frozen=True)
class Ending:
    """`status` is the exit status, None where time ran out; `output` at most 1 MiB."""

    status: int | None
    output: bytes


def run_program(
    code: str, standard_input: str, seconds: float, memory: int, isolation: Isolation | None = None
) -> Ending:
    """Run Python source as a program. `memory` is bytes of address space. Raises IsolationUnavailable."""
    deadline = time.monotonic() + seconds
    program_input, output = memory_file(standard_input.encode("utf-8", "replace")), memory_file()
    order = {"code": code, "seconds": seconds, "memory": memory}
    processes = []
    try:
        isolation = isolation or find_isolation()
        processes += [start(isolation, "run", order, [], program_input, output)]
        status = wait(processes[0], deadline)
        printed = os.pread(output, MAX_OUTPUT_BYTES, 0)
    finally:
        end(processes)
        os.close(program_input)
        os.close(output)
    return Ending(status, printed)


def judge_assertions(
    code: str, setup: str, assertions: Sequence[str], seconds: float, memory: int
) -> str:
    """Return a letter for each assertion that was reached: p passed, f failed, u unjudgeable.

    `setup` is run before each assertion, in the judge's process; `code` in one of its own, once.
    """
    deadline, isolation = time.monotonic() + seconds, find_isolation()
    limits = {"seconds": seconds, "memory": memory}
    order = {"setup": setup, "assertions": list(assertions), **limits}
    questions, asks = os.pipe()
    replies, answers = os.pipe()
    verdicts = memory_file()
    processes = []
    try:
        nothing = subprocess.DEVNULL
        pipes = [questions, answers]
        processes += [start(isolation, "answer", {"code": code, **limits}, pipes, nothing, nothing)]
        processes += [start(isolation, "judge", order, [asks, replies], nothing, verdicts)]
        # The judge hears that the program has ended only if nobody else holds its pipes.
        while pipes:
            os.close(pipes.pop())
        wait(processes[1], deadline)
        return os.pread(verdicts, len(assertions), 0).decode("ascii")
    finally:
        end(processes)
        for descriptor in (*pipes, asks, replies, verdicts):
            os.close(descriptor)


def start(
    isolation: Isolation,
    role: str,
    order: dict[str, Any],
    pipes: Sequence[int],
    stdin: int,
    stdout: int,
) -> subprocess.Popen[bytes]:
    """See sandboxed/__main__.py for roles."""
    # Python starts twice as fast without `site`, which reads configuration that nobody needs here.
    packages = [path for path in sys.path if path in site.getsitepackages()]
    order |= {"output": MAX_OUTPUT_BYTES, "path": packages}
    order_file = memory_file(marshal.dumps(order))
    python = [sys.executable, "-I", "-S", "-B", "-X", "utf8", str(SANDBOXED)]
    numbers = [order_file, *pipes]
    try:
        return isolation.start([*python, role, *map(str, numbers)], numbers, stdin, stdout)
    except (OSError, subprocess.SubprocessError) as error:
        raise IsolationUnavailable(f"a process could not be started ({error})") from error
    finally:
        os.close(order_file)


def wait(process: subprocess.Popen[bytes], deadline: float) -> int | None:
    """Return the exit status, or None where the process still runs at `deadline`."""
    descriptor = os.pidfd_open(process.pid)
    try:
        waiting = select.poll()
        waiting.register(descriptor, select.POLLIN)
        waiting.poll(max(0.0, 1000 * (deadline - time.monotonic())))
    finally:
        os.close(descriptor)
    return process.poll()


def end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.kill()
        process.wait()


@functools.cache
def find_isolation() -> Isolation:
    """Return the first method that works here, tried with a program. Raises IsolationUnavailable."""
    # Processes are started with nowhere to keep compiled modules.
    compileall.compile_dir(SANDBOXED, quiet=2)
    reasons = []
    for name, make in METHODS.items():
        try:
            isolation = make()
            ending = run_program(TRIAL, "", 20.0, 1 << 30, isolation)
            if ending.output == b"isolated\n":
                return isolation
            reasons.append(f"{name}: its trial ended with status {ending.status}")
        except IsolationUnavailable as error:
            reasons.append(f"{name}: {error}")
    raise IsolationUnavailable("; ".join(reasons))
