"""What a worker process does for environments: a forked process for each, which lives from its reset to its end.

One that hangs, dies or eats memory costs its own conversation. The more of them hang, the more are waited for at a
time, so that a round takes little longer than one deadline.
"""

from __future__ import annotations

import faulthandler
import json
import os
import pickle
import resource
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any

from mindgrpo.environments.contract import Closing, Observation, Opening, Question, Result
from mindgrpo.environments.episode import serve_episode
from mindgrpo.environments.load import load_environment
from mindgrpo.health.processes import end_with_parent
from mindgrpo.rewards.call import Signature
from mindgrpo.rewards.outcome import EXIT, MEMORY, TIMEOUT, Failure
from mindgrpo.rewards.workers import isolated, processes
from mindgrpo.rewards.workers.isolated import Child, where_it_hangs

# A process that takes in nothing for so long is ended.
SEND_SECONDS = 1.0
LONGEST_LINE = 1 << 22
NOBODY = -1

Report = Callable[[int, Any], None]


@dataclass(frozen=True)
class Round:
    """`questions` are (sample, question); a question may take `deadline` seconds, all processes `memory` bytes."""

    questions: Sequence[tuple[int, Question]]
    deadline: float
    memory: int


@dataclass(kw_only=True)
class Process(Child):
    """An environment's. `index` is that of the question being answered, or NOBODY; `memory` bytes when last seen."""

    channel: socket.socket
    sample: int
    memory: int = 0
    is_closing: bool = False


class EnvironmentHost:
    """Of the class that `text` (rl_config.environment) names."""

    signature = Signature([], [], False, True, False)

    def __init__(self, text: str) -> None:
        self._class = load_environment(text)
        self._processes: dict[int, Process] = {}  # by sample
        self._baseline = processes.memory_of(os.getpid())
        # Each has a descriptor here.
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

    def serve(self, task: Round, report: Report) -> None:
        """Reports each question's outcome as it comes: an Observation in JSON, or a Failure."""
        _Serving(self, task, report).run()

    def start(self, sample: int) -> Process:
        """Raises OSError where there can be no further process."""
        worker = os.getpid()
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            try:
                end_with_parent(worker)
                os.setpgid(0, 0)
                ours.close()
                for other in self._processes.values():
                    other.channel.close()
                # Writes where it hangs, even from inside a C function.
                faulthandler.register(
                    isolated.TRACEBACK_SIGNAL, file=theirs.fileno(), all_threads=False
                )
                serve_episode(self._class, theirs)
            finally:
                os._exit(0)
        theirs.close()
        ours.settimeout(SEND_SECONDS)
        made = Process(pid, ours.fileno(), NOBODY, 0.0, channel=ours, sample=sample)
        self._processes[sample] = made
        return made

    def process_of(self, sample: int) -> Process | None:
        return self._processes.get(sample)

    def all_processes(self) -> list[Process]:
        return list(self._processes.values())

    def used_by(self, process: Process) -> int:
        """Bytes beyond what the worker has itself."""
        return max(0, processes.memory_of(process.pid) - self._baseline)

    def end(self, process: Process) -> str:
        """Kills it with what it started; how it ended."""
        processes.kill_group(process.pid)
        del self._processes[process.sample]
        process.channel.close()
        return processes.how_it_ended(os.waitpid(process.pid, 0)[1])


class _Serving:
    """One round: at most so many questions are being answered at a time, more if none of them gets an answer."""

    def __init__(self, host: EnvironmentHost, task: Round, report: Report) -> None:
        self._host, self._task, self._report = host, task, report
        self._busy: dict[int, Process] = {}  # by descriptor
        self._allowed = 2 * len(os.sched_getaffinity(0))

    def run(self) -> None:
        waiting = deque(range(len(self._task.questions)))
        last_end = time.monotonic()
        while waiting or self._busy:
            while waiting and len(self._busy) < self._allowed:
                self._begin(waiting.popleft())
            ready = wait(list(self._busy), isolated.TICK_SECONDS)
            for descriptor in ready:
                self._collect(self._busy[descriptor])  # type: ignore[index]
            now = time.monotonic()
            self._stop_late(now)
            self._stop_largest()
            if ready:
                last_end = now
            elif waiting and now - last_end > isolated.PATIENCE_SECONDS:
                more = isolated.GROWTH * self._allowed
                self._allowed, last_end = min(more, isolated.MOST_AT_ONCE), now

    def _begin(self, index: int) -> None:
        sample, question = self._task.questions[index]
        process = self._host.process_of(sample)
        if isinstance(question, Opening):
            if process is not None:
                self._host.end(process)
            try:
                process = self._host.start(sample)
            except OSError as error:
                self._report(index, Failure(EXIT, f"its process could not be started: {error}"))
                return
        if process is None:
            self._report(index, Failure(EXIT, "its process had ended before"))
            return
        self._ask(process, index, question)

    def _ask(self, process: Process, index: int, question: Question) -> None:
        process.index, process.started = index, time.monotonic()
        process.is_closing = isinstance(question, Closing)
        process.text.clear()
        # What is not taken in, or by nobody, is found by what is read or by the deadline.
        with suppress(OSError):
            process.channel.sendall(pickle.dumps(question))
        self._busy[process.descriptor] = process

    def _collect(self, process: Process) -> None:
        try:
            is_open = process.read()
        except OSError:
            is_open = False
        if is_open and not process.text.endswith(b"\n") and len(process.text) < LONGEST_LINE:
            return
        result = _result_in(process.text)
        if result is None:
            self._stop(process, None)
            return
        del self._busy[process.descriptor]
        process.memory = self._host.used_by(process)
        if process.index != NOBODY:
            outcome = result if isinstance(result, Failure) else result.as_json()
            self._report(process.index, outcome)
        process.index = NOBODY
        if process.is_closing:
            self._host.end(process)
        elif isinstance(result, Failure) or result.is_done:
            # The conversation does not wait for it.
            self._ask(process, NOBODY, Closing())

    def _stop(self, process: Process, failure: Failure | None) -> None:
        """Ends it; without a `failure` it ended by itself."""
        self._busy.pop(process.descriptor, None)
        how = self._host.end(process)
        if process.index != NOBODY:
            self._report(process.index, failure or Failure(EXIT, f"its process {how}"))

    def _stop_late(self, now: float) -> None:
        deadline = self._task.deadline
        late = [process for process in self._busy.values() if now - process.started > deadline]
        for process in late:
            os.kill(process.pid, isolated.TRACEBACK_SIGNAL)
        for process in late:
            where = where_it_hangs(process, now + isolated.ANSWER_SECONDS)
            self._stop(process, Failure(TIMEOUT, f"no answer within {deadline:g} s{where}"))

    def _stop_largest(self) -> None:
        """Holds all of them together to what one worker may have."""
        for process in self._busy.values():
            process.memory = self._host.used_by(process)
        by_size = sorted(self._host.all_processes(), key=lambda process: process.memory)
        while sum(process.memory for process in by_size) > self._task.memory:
            message = f"more than reward_config.memory, {self._task.memory >> 20} MiB"
            self._stop(by_size.pop(), Failure(MEMORY, message))


def _result_in(line: bytes | bytearray) -> Result | None:
    """None where it is no answer: the user's code may have written it."""
    try:
        message = json.loads(line)
        if "failed" in message:
            kind, text = message["failed"]
            return Failure(str(kind), str(text))
        return Observation.from_json(message["value"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
