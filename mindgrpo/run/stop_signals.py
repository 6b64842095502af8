"""Ends a run early for a signal or when its time is up; all ranks agree on it at the start of a phase.

A signal handler only records the request, because a rank that stopped alone would leave the others waiting. A second
signal ends the process at once; under a launcher that is left to the launcher, because schedulers signal every process
of a job and a rank then gets one signal twice. In an interactive session, such as a notebook, a second signal ends the
run at once, but never the process.
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
    """Raised on all ranks alike to stop the run; `status` is the program's exit status."""

    def __init__(self, reason: str, status: int) -> None:
        super().__init__(reason)
        self.reason, self.status = reason, status


class Interrupted(KeyboardInterrupt):
    """Ends a run, but not the process, after Ctrl-C or a notebook's stop button."""

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
        """Installs signal handlers inside the block, if in the main thread, where Python allows it."""
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
        """Raises Stop if any rank has received a signal. Collective, at the start of a phase."""
        if not self._received:
            # Compiling a graph puts MindSpore's handler there, which turns SIGINT into SIGTERM.
            for number in self._heard:
                signal.signal(number, self._receive)
        received = max(self._world.gather_objects(self._received))
        if received:
            reason = _name(received) if is_interactive() else f"{_name(received)} was received"
            raise Stop(reason, 128 + received)

    def check_time(self) -> None:
        """Raises Stop for a signal, or if the run's time is up by rank 0's clock. Collective, at the end of a step."""
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
