"""Receives the signals that end a job."""

from __future__ import annotations

import os
import select
import signal
from types import FrameType

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Signals:
    """Wakes the launcher for a signal to end, whose numbers are in `received`, and for the end of a child.

    Signals that this process was started to ignore do not count (SIGHUP under nohup, SIGINT in a script's background),
    nor does the second SIGTERM of a scheduler (`has_scheduler`): Slurm sends one to preempt a job and another to
    queue it again, and kills what has not ended in time.
    """

    def __init__(self, has_scheduler: bool = False) -> None:
        self.received: list[int] = []
        self._has_scheduler = has_scheduler
        self._reader, writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in STOPPING:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._receive)
        # With a handler of its own the end of a child writes to the pipe too.
        signal.signal(signal.SIGCHLD, lambda number, frame: None)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        is_repeated = number == signal.SIGTERM and number in self.received
        if not (is_repeated and self._has_scheduler):
            self.received.append(number)

    def wait(self, seconds: float) -> None:
        """Returns earlier where a signal has come or a child has ended."""
        if select.select([self._reader], [], [], seconds)[0]:
            os.read(self._reader, 4096)
