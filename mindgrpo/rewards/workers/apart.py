"""Scores samples each in a process of its own, forked from a worker that has the function ready.

One that hangs, dies or eats memory costs its own sample. The more of them hang, the more run beside
each other, so that the whole takes little longer than one deadline. Refuses to keep what a forked
function remembers: its changes end with its process.
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import select
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from mindgrpo.rewards.outcome import (
    EXIT,
    MEMORY,
    TIMEOUT,
    Failure,
    from_json,
    to_json,
)
from mindgrpo.rewards.workers import processes

TICK = 0.05
# When nothing has ended for so long, so many times as many may run.
PATIENCE, GROWTH = 0.2, 4
# Of those that are late so many are asked where they are, and have so long to tell.
NUM_ASKED, TELLING_SECONDS = 8, 0.5
MOST_AT_ONCE = 512
# What finding out a process's memory takes, generously.
LOOK_SECONDS = 0.001
PLACE_SIGNAL = signal.SIGUSR2
PLACE = re.compile(r'File "([^"]+)", line (\d+) in (\S+)\n')
OWN_FOLDER = os.path.dirname(os.path.dirname(__file__))


@dataclass
class Child:
    pid: int
    descriptor: int
    sample: int
    started: float
    said: bytearray = field(default_factory=bytearray)


class Apart:
    """`score` runs in the child; `report` is told each sample's outcome as it comes."""

    def __init__(
        self,
        score: Callable[[int], float | None | Failure],
        report: Callable[[int, float | None | Failure], None],
        deadline: float,
        memory: int,
    ) -> None:
        self._score, self._report = score, report
        self._deadline, self._memory = deadline, memory
        self._running: dict[int, Child] = {}  # by descriptor
        self._allowed = 2 * len(os.sched_getaffinity(0))
        self._baseline = processes.memory_of(os.getpid())

    def run(self, samples: Sequence[int]) -> None:
        waiting = deque(samples)
        last_end = next_look = time.monotonic()
        while waiting or self._running:
            while waiting and len(self._running) < self._allowed:
                self._start(waiting.popleft())
            ready, _, _ = select.select(list(self._running), [], [], TICK)
            for descriptor in ready:
                self._collect(self._running[descriptor])
            now = time.monotonic()
            self._stop_overdue(now)
            if now >= next_look:
                self._stop_eaters()
                next_look = now + TICK + LOOK_SECONDS * len(self._running)
            if ready:
                last_end = now
            elif waiting and now - last_end > PATIENCE:
                self._allowed, last_end = min(GROWTH * self._allowed, MOST_AT_ONCE), now

    def _start(self, sample: int) -> None:
        parent = os.getpid()
        mine, theirs = os.pipe()
        pid = os.fork()
        if pid == 0:
            self._be_child(parent, theirs, sample)
        os.close(theirs)
        self._running[mine] = Child(pid, mine, sample, time.monotonic())

    def _be_child(self, parent: int, descriptor: int, sample: int) -> None:
        try:
            processes.end_with_parent(parent)
            os.setpgid(0, 0)
            # Tells the place where it hangs, even from inside a C function.
            faulthandler.register(PLACE_SIGNAL, file=descriptor, all_threads=False)
            outcome = self._score(sample)
            text = json.dumps(to_json(outcome)).encode() + b"\n"
            while text:
                text = text[os.write(descriptor, text) :]
        finally:
            os._exit(0)

    def _collect(self, child: Child) -> None:
        piece = os.read(child.descriptor, 1 << 16)
        child.said += piece
        # A process that the function has started may hold the pipe open, so its end is not waited for.
        if piece and not child.said.endswith(b"\n"):
            return
        status = self._end(child)
        try:
            outcome = from_json(json.loads(child.said))
        except (ValueError, KeyError, TypeError):
            how = processes.how_it_ended(status)
            self._report(child.sample, Failure(EXIT, f"the process {how}"))
            return
        self._report(child.sample, outcome)

    def _end(self, child: Child) -> int:
        processes.kill_group(child.pid)
        del self._running[child.descriptor]
        os.close(child.descriptor)
        return os.waitpid(child.pid, 0)[1]

    def _stop_overdue(self, now: float) -> None:
        overdue = [c for c in self._running.values() if now - c.started > self._deadline]
        asked = overdue[:NUM_ASKED]
        for child in asked:
            with suppress(ProcessLookupError):
                os.kill(child.pid, PLACE_SIGNAL)
        until = time.monotonic() + TELLING_SECONDS
        for child in overdue:
            left = max(0.0, until - time.monotonic())
            place = self._place(child, left) if child in asked else ""
            self._end(child)
            message = f"no answer within {self._deadline:g} s{place}"
            self._report(child.sample, Failure(TIMEOUT, message))

    def _place(self, child: Child, seconds: float) -> str:
        """Where it was asked to say it is, which comes in pieces: the innermost line that is the user's."""
        until = time.monotonic() + seconds
        frames: list[tuple[str, str, str]] = []
        while not frames:
            left = max(0.0, until - time.monotonic())
            if not select.select([child.descriptor], [], [], left)[0]:
                return ""
            piece = os.read(child.descriptor, 1 << 16)
            if not piece:
                return ""
            child.said += piece
            said = child.said.decode("utf-8", "replace")
            frames = [found for found in PLACE.findall(said) if not found[0].startswith(OWN_FOLDER)]
        return f", in {frames[0][2]} at {frames[0][0]}:{frames[0][1]}"

    def _stop_eaters(self) -> None:
        """All of them together may have what one worker may."""
        used = {
            c.descriptor: processes.memory_of(c.pid) - self._baseline
            for c in self._running.values()
        }
        while sum(max(0, held) for held in used.values()) > self._memory:
            largest = max(used, key=lambda descriptor: used[descriptor])
            del used[largest]
            child = self._running[largest]
            self._end(child)
            message = f"more than reward_config.memory, {self._memory >> 20} MiB"
            self._report(child.sample, Failure(MEMORY, message))
