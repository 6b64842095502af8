"""One program in a locked-down process, with its time, memory and output bounded.

Says what came out and how it ended. Refuses to run anything where the kernel cannot lock it down; see
jail.py and kernel_filter.py for what that means.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

JAIL = Path(__file__).with_name("jail.py")
LONGEST_OUTPUT = 1 << 20
CHUNK = 1 << 16
NOT_LOCKED_DOWN = 97
# Threads of numerical libraries would be refused or cost memory for nothing.
ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "LC_ALL": "C.UTF-8"}


class SandboxUnavailable(RuntimeError):
    """The kernel does not lock processes down here."""


@dataclass(frozen=True)
class Ending:
    """`status` is the exit status, None where time or output ran out; `output` at most 1 MiB."""

    status: int | None
    output: bytes
    seconds: float


def run_program(code: str, standard_input: str, seconds: float, memory: int) -> Ending:
    """Runs Python source as a program. `memory` in bytes of address space."""
    return _run({"code": code}, standard_input.encode("utf-8", "replace"), seconds, memory)


def count_held(
    code: str, setup: str, claims: Sequence[str], seconds: float, memory: int
) -> tuple[int, Ending]:
    """How many of `claims` (statements such as asserts) hold after `code`; 0 if it does not get there."""
    # The program cannot know this in advance, so a lucky exit does not look like success.
    token = os.urandom(16).hex()
    order = {"code": code, "setup": setup, "claims": list(claims), "token": token}
    ending = _run(order, b"", seconds, memory)
    told = ending.output.decode("ascii", "replace").split()
    if ending.status == 0 and len(told) == 2 and told[0] == token and told[1].isdecimal():
        return min(int(told[1]), len(claims)), ending
    return 0, ending


def check_available(memory: int = 1 << 30) -> bool:
    """Whether reading is confined, too. Raises SandboxUnavailable where nothing can be locked down."""
    ending = _run({"code": "", "report": True}, b"", 20.0, memory)
    try:
        return bool(json.loads(ending.output)["confined"])
    except (ValueError, KeyError):
        raise SandboxUnavailable(
            f"a locked-down process could not be started (it ended with {ending.status})"
        ) from None


def _run(order: dict[str, Any], given: bytes, seconds: float, memory: int) -> Ending:
    started = time.monotonic()
    order |= {"seconds": seconds, "memory": memory, "parent": os.getpid()}
    orders, order_end = os.pipe()
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-B", "-X", "utf8", str(JAIL), str(orders)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=(orders,),
            cwd=empty_folder(),
            env=ENVIRONMENT,
            start_new_session=True,
        )
    finally:
        os.close(orders)
    try:
        return _converse(process, order_end, order, given, started, seconds)
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()


def empty_folder() -> Path:
    """One for ever, since no program can write into it: nothing to remove when a worker is killed."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "mindgrpo" / "empty"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SandboxUnavailable(
            f"the folder {folder} cannot be made ({error.strerror})"
        ) from error
    return folder


def _converse(
    process: subprocess.Popen[bytes],
    order_end: int,
    order: dict[str, Any],
    given: bytes,
    started: float,
    seconds: float,
) -> Ending:
    """Feeds the order and the input, takes the output, until it ends or has had its time."""
    assert process.stdin is not None and process.stdout is not None
    out = process.stdout.fileno()
    feeds = {
        order_end: memoryview(json.dumps(order).encode()),
        process.stdin.fileno(): memoryview(given),
    }
    output = bytearray()
    for descriptor in (*feeds, out):
        os.set_blocking(descriptor, False)
    input_end = process.stdin.fileno()
    open_ends = set(feeds)
    is_open = True
    while is_open and len(output) <= LONGEST_OUTPUT:
        left = started + seconds - time.monotonic()
        if left <= 0:
            break
        readable, writable, _ = select.select([out], list(open_ends), [], left)
        for end in writable:
            if not _feed(end, feeds):
                open_ends.discard(end)
                os.close(end) if end != input_end else process.stdin.close()
        if readable:
            piece = os.read(out, CHUNK)
            output += piece
            is_open = bool(piece)
    if order_end in open_ends:
        os.close(order_end)
    return _ended(process, bytes(output[:LONGEST_OUTPUT]), is_open, started, seconds)


def _feed(end: int, feeds: dict[int, memoryview]) -> bool:
    """Writes what fits; False when there is no more, or nobody reads."""
    rest = feeds[end]
    try:
        feeds[end] = rest[os.write(end, rest[:CHUNK]) :] if rest else rest
    except BlockingIOError:
        return True
    except OSError:
        return False
    return bool(feeds[end])


def _ended(
    process: subprocess.Popen[bytes], output: bytes, is_open: bool, started: float, seconds: float
) -> Ending:
    status = None
    if not is_open:
        try:
            status = process.wait(max(0.0, started + seconds - time.monotonic()))
        except subprocess.TimeoutExpired:
            status = None
    if status == NOT_LOCKED_DOWN:
        raise SandboxUnavailable("the kernel does not lock processes down here")
    return Ending(status, output, time.monotonic() - started)
