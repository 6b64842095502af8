"""Ends a run before its last step for a signal or when its time is up; all ranks agree where a phase begins.

A signal only leaves a wish, since a rank that stopped by itself would leave the others waiting; the second signal
ends the process at once. Under a launcher it is the launcher that ends it: schedulers signal every process of a job,
and a rank then hears of one signal twice. In a session such as a notebook's, the second one ends the run at once, and
the process never.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

from mindgrpo.backend.contract import Backend
from mindgrpo.errors import is_interactive
from mindgrpo.processes.linux import STOPPING

Handler = Callable[[int, FrameType | None], object]


class Stop(Exception):
    """Raised on all ranks alike; `status` is what the program is to end with."""

    def __init__(self, reason: str, status: int) -> None:
        super().__init__(reason)
        self.reason, self.status = reason, status


class Interrupted(KeyboardInterrupt):
    """Ends a run, and not the process, where somebody has pressed Ctrl-C or a notebook's stop button."""

    def _render_traceback_(self) -> list[str]:
        """Returns the lines that IPython shows, in a notebook too."""
        return [f"mindgrpo: {self}"]


class Stopping:
    """Decides when to stop; `started` and `max_seconds` are in seconds since the epoch and since `started`."""

    def __init__(self, backend: Backend, started: float, max_seconds: float | None) -> None:
        self._backend, self._world, self._rank = backend, backend.world, backend.rank
        self._started, self._max_seconds = started, max_seconds
        self._received = 0
        self._heard: list[signal.Signals] = []

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Takes signals over, where Python lets it: in the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        # Whoever started this may have wanted it to outlive its terminal.
        heard = [number for number in STOPPING if signal.getsignal(number) is not signal.SIG_IGN]
        earlier = {number: signal.signal(number, self._receive) for number in heard}
        self._heard = heard
        try:
            yield
        finally:
            self._heard = []
            for number, handler in earlier.items():
                signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received = self._received or self._backend.health.signal_of_launcher() or number
        # Without Python, which a long graph may keep from running.
        has_launcher = self._backend.health.folder is not None
        second: signal.Handlers | Handler = signal.SIG_IGN if has_launcher else signal.SIG_DFL
        if is_interactive():
            second = signal.default_int_handler
        signal.signal(number, second)
        if self._rank == 0:
            name = _name(self._received)
            words = f"  {name}: the run ends after this phase; a second one ends it at once\n"
            os.write(1, words.encode())

    def check(self) -> None:
        """Raises Stop, where a phase begins, if any rank has received a signal."""
        if not self._received:
            # Compiling a graph puts MindSpore's handler there, which turns SIGINT into SIGTERM.
            for number in self._heard:
                signal.signal(number, self._receive)
        received = max(self._world.gather_objects(self._received))
        if received:
            reason = _name(received) if is_interactive() else f"{_name(received)} was received"
            raise Stop(reason, 128 + received)

    def check_time(self) -> None:
        """Raises Stop, where a step has ended, for a signal, or when the run's time is up by the first rank's clock."""
        self.check()
        if self._max_seconds is None:
            return
        passed = self._world.gather_objects(time.time() - self._started)[0]
        if passed >= self._max_seconds:
            raise Stop(
                f"rl_config.max_seconds {self._max_seconds:g} have passed ({passed:.0f} s since the launch)",
                0,
            )


def _name(number: int) -> str:
    # MindSpore makes SIGTERM of the SIGINT of a stop button while it computes.
    return "interrupted" if is_interactive() else signal.Signals(number).name
