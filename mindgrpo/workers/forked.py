"""Answers tasks in processes forked from a worker, which has the user's code loaded.

One that hangs, dies or eats memory costs its own task. The more of them hang or sleep, the more are waited for at a
time, so that a round takes little longer than one deadline, or one sleep. What a process remembers ends with it.
"""

from __future__ import annotations

import faulthandler
import os
import re
import resource
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from selectors import EVENT_READ, EVENT_WRITE, PollSelector
from typing import Any

from mindgrpo.processes.fork import AnsweringChannel, Channel, end_forked, fork
from mindgrpo.processes.linux import TimeUsed, memory_of
from mindgrpo.user_code import PACKAGE
from mindgrpo.workers.protocol import (
    EXIT,
    MEMORY,
    TIMEOUT,
    CallFailure,
    Task,
    from_message,
    to_message,
)

TICK_SECONDS = 0.05
# When no task is answered for PATIENCE_SECONDS, GROWTH times as many may be waited for. Less patience would ask all
# at once where each only computes for long, and then all would be late.
PATIENCE_SECONDS, GROWTH, MOST_AT_ONCE = 0.5, 8, 512
# A task that needed a core for less than this share of its time slept, and lets GROWTH more be waited for.
SLEEPING_SHARE = 0.1
# Those that are late are asked where they hang, and have so long to answer.
TRACEBACK_SECONDS = 0.5
# A process that takes in nothing for so long is left to its deadline.
SEND_SECONDS = 1.0
LONGEST_LINE = 1 << 22
TRACEBACK_SIGNAL = signal.SIGUSR2
FRAME = re.compile(r'File "([^"]+)", line (\d+) in (\S+)\n')


@dataclass(eq=False)
class ForkedProcess:
    """`index` is that of the task being answered, None between tasks; `memory` bytes when last seen."""

    pid: int
    channel: Channel
    session: int
    index: int | None = None
    closes: bool = False
    started: float = 0.0
    deadline: float = 0.0
    memory: int = 0

    def location(self, until: float) -> str:
        """Returns the innermost line of the traceback, which comes bit by bit, that is not this package's."""
        channel = self.channel
        while wait([channel.connection], max(0.0, until - time.monotonic())) and channel.read():
            for file, line, function in FRAME.findall(channel.text.decode("utf-8", "replace")):
                if not file.startswith(f"{PACKAGE}{os.sep}"):
                    return f", in {function} at {file}:{line}"
        return ""


class ForkedProcesses:
    """Calls `answer` in forked processes, which have `memory` bytes together, and `report`s answers by their index."""

    def __init__(
        self, answer: Callable[[Any], Any], report: Callable[[int, Any], None], memory: int
    ) -> None:
        self._answer, self._report, self._memory = answer, report, memory
        self._by_session: dict[int, ForkedProcess] = {}
        self._busy: dict[socket.socket, ForkedProcess] = {}
        self._waiting: deque[tuple[int, Task, float]] = deque()
        self._least = self._at_first = self._allowed = 2 * len(os.sched_getaffinity(0))
        self._last_answer, self._baseline = 0.0, 0
        # Each process has a descriptor here.
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

    @property
    def is_busy(self) -> bool:
        return bool(self._busy or self._waiting)

    def add(self, tasks: Mapping[int, Task], deadline: float) -> None:
        """Takes in tasks by index, beside those that are not answered; each may take `deadline` seconds."""
        self._baseline = memory_of(os.getpid())
        if not self.is_busy:
            self._allowed = self._at_first
            self._last_answer = time.monotonic()
        self._waiting.extend((index, task, deadline) for index, task in tasks.items())
        self._start_waiting()

    def advance(self, rank: AnsweringChannel) -> bool:
        """Reports the answers that come within a tick, and starts tasks in their place.

        Returns whether `rank` can be read, which is waited for without end where nothing is being answered.
        """
        with PollSelector() as selector:
            for connection in self._busy:
                selector.register(connection, EVENT_READ)
            selector.register(rank.connection, EVENT_READ | (EVENT_WRITE if rank.unsent else 0))
            ready = selector.select(TICK_SECONDS if self._busy else None)
        events = {key.fileobj: events for key, events in ready}
        of_rank = events.pop(rank.connection, 0)
        if of_rank & EVENT_WRITE:
            rank.send_more()
        for channel in events:
            self._collect(self._busy[channel])  # type: ignore[index]
        now = time.monotonic()
        self._stop_late(now)
        self._stop_largest()
        if events:
            self._last_answer = now
        elif self._waiting and now - self._last_answer > PATIENCE_SECONDS:
            self._allowed = min(GROWTH * self._allowed, MOST_AT_ONCE)
            self._last_answer = now
        self._start_waiting()
        return bool(of_rank & EVENT_READ)

    def _start_waiting(self) -> None:
        while self._waiting and len(self._busy) < self._allowed:
            self._begin(*self._waiting.popleft())

    def _begin(self, index: int, task: Task, deadline: float) -> None:
        assert task.session is not None
        process = self._by_session.get(task.session)
        if task.opens:
            if process is not None:
                self._end(process)
            try:
                process = self._fork(task.session, task.content)
            except OSError as error:
                failure = CallFailure(EXIT, f"its process could not be started: {error}")
                return self._report(index, failure)
        elif process is None:
            return self._report(index, CallFailure(EXIT, "its process had ended before"))
        else:
            process.channel.drop()
            process.channel.send(task.content, SEND_SECONDS)
        process.index, process.closes = index, task.closes
        process.started, process.deadline = time.monotonic(), deadline
        self._busy[process.channel.connection] = process

    def _fork(self, session: int, content: Any) -> ForkedProcess:
        ours, theirs = socket.socketpair()
        closing = [ours, *(other.channel.connection for other in self._by_session.values())]
        pid = fork(lambda: self._serve(content, theirs), closing)
        theirs.close()
        process = ForkedProcess(pid, Channel(ours, LONGEST_LINE), session)
        self._by_session[session] = process
        return process

    def _serve(self, content: Any, connection: socket.socket) -> None:
        """Answers the first task and those that come on `connection`."""
        # Writes where it hangs, even from inside a C function.
        faulthandler.register(TRACEBACK_SIGNAL, file=connection.fileno(), all_threads=False)
        channel = AnsweringChannel(connection)
        with suppress(EOFError):
            while True:
                before = TimeUsed.read()
                message = to_message(self._answer(content))
                channel.send({**message, "slept": has_slept(before, TimeUsed.read())})
                content = channel.receive()

    def _collect(self, process: ForkedProcess) -> None:
        # A process that the user's code has started may hold the channel open, so its end is not waited for.
        is_open = process.channel.read()
        try:
            message = process.channel.take()
            if message is None and is_open:
                return
            message = message or {}
            answer, slept = from_message(message), message.get("slept") is True
        except (ValueError, KeyError, TypeError):
            return self._stop(process, None)
        index = process.index
        assert index is not None
        del self._busy[process.channel.connection]
        process.index, process.memory = None, self._used_by(process)
        self._learn(slept, process.memory)
        if process.closes:
            self._end(process)
        self._report(index, answer)

    def _learn(self, slept: bool, memory: int) -> None:
        """Takes how a task went: as many are begun at a time as tasks like it leave cores and memory for."""
        at_once = self._at_first + (GROWTH if slept else -GROWTH)
        most = min(MOST_AT_ONCE, self._memory // max(1, memory))
        self._at_first = max(self._least, min(at_once, most))
        self._allowed = max(self._allowed, self._at_first)

    def _end(self, process: ForkedProcess) -> str:
        """Kills it with what it started; returns how it ended."""
        how = end_forked(process.pid)
        del self._by_session[process.session]
        self._busy.pop(process.channel.connection, None)
        process.channel.close()
        return how

    def _stop(self, process: ForkedProcess, failure: CallFailure | None) -> None:
        """Ends it for `failure`; None where it has ended by itself."""
        how = self._end(process)
        if process.index is not None:
            self._report(process.index, failure or CallFailure(EXIT, f"its process {how}"))

    def _stop_late(self, now: float) -> None:
        late = [p for p in self._busy.values() if now - p.started > p.deadline]
        for process in late:
            os.kill(process.pid, TRACEBACK_SIGNAL)
        for process in late:
            where = process.location(now + TRACEBACK_SECONDS)
            message = f"no answer within {process.deadline:g} s{where}{hint_at(running_threads())}"
            self._stop(process, CallFailure(TIMEOUT, message))

    def _used_by(self, process: ForkedProcess) -> int:
        """Returns the bytes beyond what the worker has itself."""
        return max(0, memory_of(process.pid) - self._baseline)

    def _stop_largest(self) -> None:
        """Holds all of them together to what one worker may have."""
        for process in self._busy.values():
            process.memory = self._used_by(process)
        by_size = sorted(self._by_session.values(), key=lambda process: process.memory)
        while sum(process.memory for process in by_size) > self._memory:
            failure = CallFailure(MEMORY, too_much_memory(self._memory))
            self._stop(by_size.pop(), failure)


def has_slept(before: TimeUsed, after: TimeUsed) -> bool:
    """Returns whether a task hardly needed a core; one that started processes did, as they may have waited for it."""
    computed = after.computed - before.computed
    is_idle = computed < SLEEPING_SHARE * (after.now - before.now)
    return is_idle and after.children == before.children


def running_threads() -> list[str]:
    """Returns the names of Python's threads in this process beside the present one: a forked process has none."""
    own = threading.current_thread()
    return [thread.name for thread in threading.enumerate() if thread is not own]


def hint_at(threads: Sequence[str]) -> str:
    """Says what may be missing in a process that was forked from one with `threads`; "" where there are none."""
    if not threads:
        return ""
    return (
        f" (importing it starts the thread {threads[0]}, which does not run in the process of a call; start threads "
        "in the first call instead)"
    )


def too_much_memory(num_bytes: int) -> str:
    """Says that a process, or several together, used more than `num_bytes`."""
    return f"more than reward_config.memory, {num_bytes >> 20} MiB"
