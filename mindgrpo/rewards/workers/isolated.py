"""Scores samples each in a process of its own, forked from a worker that has the function loaded.

One that hangs, dies or eats memory costs its own sample. The more of them hang, the more run beside
each other, so that the whole takes little longer than one deadline. What a forked function remembers
ends with its process.
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait

from mindgrpo.health.processes import end_with_parent
from mindgrpo.rewards.outcome import EXIT, MEMORY, TIMEOUT, Failure, Outcome, from_json, to_json
from mindgrpo.rewards.workers import processes

TICK_SECONDS = 0.05
# When no process has ended for PATIENCE_SECONDS, GROWTH times as many may run. Less patience would run all
# at once where each only computes for long, and then all would be late.
PATIENCE_SECONDS, GROWTH, MOST_AT_ONCE = 0.5, 8, 512
# Those that are late are asked where they hang, and have so long to answer.
ANSWER_SECONDS = 0.5
TRACEBACK_SIGNAL = signal.SIGUSR2
FRAME = re.compile(r'File "([^"]+)", line (\d+) in (\S+)\n')
OWN_FOLDER = os.path.dirname(os.path.dirname(__file__))


@dataclass
class Child:
    """A forked process; `text` is what it has written so far: a traceback, its outcome in JSON, or nothing."""

    pid: int
    descriptor: int
    index: int
    started: float
    text: bytearray = field(default_factory=bytearray)

    def read(self) -> bool:
        """Return False at the end."""
        chunk = os.read(self.descriptor, 1 << 16)
        self.text += chunk
        return bool(chunk)


class IsolatedScoring:
    """`score` runs in the forked process; `report` gets each sample's outcome as it comes."""

    def __init__(
        self,
        score: Callable[[int], Outcome],
        report: Callable[[int, Outcome], None],
        deadline: float,
        memory: int,
    ) -> None:
        self._score, self._report = score, report
        self._deadline, self._memory = deadline, memory
        self._running: dict[int, Child] = {}  # by descriptor
        self._allowed = 2 * len(os.sched_getaffinity(0))
        self._baseline = processes.memory_of(os.getpid())

    def run(self, indices: Sequence[int]) -> None:
        waiting = deque(indices)
        last_end = time.monotonic()
        while waiting or self._running:
            while waiting and len(self._running) < self._allowed:
                self._start(waiting.popleft())
            ready = wait(list(self._running), TICK_SECONDS)
            for descriptor in ready:
                self._collect(self._running[descriptor])  # type: ignore[index]
            now = time.monotonic()
            self._stop_late(now)
            self._stop_largest()
            if ready:
                last_end = now
            elif waiting and now - last_end > PATIENCE_SECONDS:
                self._allowed, last_end = min(GROWTH * self._allowed, MOST_AT_ONCE), now

    def _start(self, index: int) -> None:
        worker = os.getpid()
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                end_with_parent(worker)
                os.setpgid(0, 0)
                # Writes where it hangs, even from inside a C function.
                faulthandler.register(TRACEBACK_SIGNAL, file=write_end, all_threads=False)
                text = json.dumps(to_json(self._score(index))).encode() + b"\n"
                while text:
                    text = text[os.write(write_end, text) :]
            finally:
                os._exit(0)
        os.close(write_end)
        self._running[read_end] = Child(pid, read_end, index, time.monotonic())

    def _collect(self, child: Child) -> None:
        # A process that the function has started may hold the pipe open, so its end is not waited for.
        if child.read() and not child.text.endswith(b"\n"):
            return
        how = processes.how_it_ended(self._end(child))
        try:
            self._report(child.index, from_json(json.loads(child.text)))
        except (ValueError, KeyError, TypeError):
            self._report(child.index, Failure(EXIT, f"the process {how}"))

    def _end(self, child: Child) -> int:
        processes.kill_group(child.pid)
        del self._running[child.descriptor]
        os.close(child.descriptor)
        return os.waitpid(child.pid, 0)[1]

    def _stop_late(self, now: float) -> None:
        late = [c for c in self._running.values() if now - c.started > self._deadline]
        for child in late:
            os.kill(child.pid, TRACEBACK_SIGNAL)
        for child in late:
            where = where_it_hangs(child, now + ANSWER_SECONDS)
            self._stop(child, Failure(TIMEOUT, f"no answer within {self._deadline:g} s{where}"))

    def _stop(self, child: Child, failure: Failure) -> None:
        self._end(child)
        self._report(child.index, failure)

    def _stop_largest(self) -> None:
        """Hold all of them together to what one worker may have."""
        used = {
            c: processes.memory_of(self._running[c].pid) - self._baseline for c in self._running
        }
        while sum(max(0, num_bytes) for num_bytes in used.values()) > self._memory:
            largest = max(used, key=lambda descriptor: used[descriptor])
            del used[largest]
            message = f"more than reward_config.memory, {self._memory >> 20} MiB"
            self._stop(self._running[largest], Failure(MEMORY, message))


def where_it_hangs(child: Child, until: float) -> str:
    """Return the innermost line of the traceback, which comes bit by bit, that is not this package's."""
    while wait([child.descriptor], max(0.0, until - time.monotonic())) and child.read():
        for file, line, function in FRAME.findall(child.text.decode("utf-8", "replace")):
            if not file.startswith(OWN_FOLDER):
                return f", in {function} at {file}:{line}"
    return ""
