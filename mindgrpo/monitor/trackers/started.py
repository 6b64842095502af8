"""Starts the trackers' processes on rank 0, notices when one ends, and gives them time at the end of the run.

A process follows the run's files. Nothing here waits for one before the run's end.
"""

from __future__ import annotations

import atexit
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from mindgrpo.monitor.trackers.contract import label_of, processes_of
from mindgrpo.monitor.trackers.process import DONE, FAILED
from mindgrpo.processes.child import FunctionCall

FOLDER = "trackers"
# Where a run has failed or was stopped by a signal, somebody waits for its end.
SECONDS_AFTER_STOP = 5.0
SECONDS_IN_SILENCE = 2.0
SECONDS_BETWEEN_LOOKS = 0.02


class TrackerProcess:
    """Runs a tracker; `about` has the arguments of process.main other than the tracker and its folder."""

    def __init__(self, tracker: str, about: Mapping[str, Any]) -> None:
        self.label = label_of(tracker)
        self.folder = Path(about["directory"]) / FOLDER / self.label
        self._process = FunctionCall(
            "mindgrpo.monitor.trackers.process:main",
            {**about, "tracker": tracker, "folder": str(self.folder)},
            stdin=subprocess.PIPE,
        )
        assert self._process.stdin is not None
        self._pipe = self._process.stdin

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def ask_to_finish(self, is_done: bool) -> None:
        with suppress(OSError):
            self._pipe.write(DONE if is_done else FAILED)
            self._pipe.flush()

    def end(self) -> str | None:
        """Kills the process and what it started; returns why it failed, or None."""
        is_late = not self.has_ended
        failed = self._process.failure(0.0)
        with suppress(OSError):
            self._pipe.close()
        return "did not finish in time and was ended" if is_late else failed


class Trackers:
    """Runs a process for each tracker; `say` prints a line.

    A tracker that fails is reported once, and the run continues without it.
    """

    def __init__(
        self, trackers: Sequence[str], about: Mapping[str, Any], say: Callable[[str], None]
    ) -> None:
        self._say = say
        self._running: list[TrackerProcess] = []
        self._is_asked = False
        for tracker in processes_of(trackers):
            try:
                self._running.append(TrackerProcess(tracker, about))
            except OSError as error:
                self._warn(label_of(tracker), f"its process cannot be started ({error.strerror})")
        if self._running:
            atexit.register(self._close_failed)

    def check(self) -> None:
        """Reports trackers that have ended before the run."""
        for process in [one for one in self._running if one.has_ended]:
            self._end(process)

    def ask_to_finish(self, is_done: bool = True) -> None:
        """Tells them that the run has written everything, without waiting. Only the first call counts."""
        asked, self._is_asked = self._is_asked, True
        for process in () if asked else self._running:
            process.ask_to_finish(is_done)

    def close(self, seconds: float) -> None:
        """Gives all of them together `seconds` to send what is written, and ends them."""
        self.ask_to_finish(is_done=False)
        start = time.monotonic()
        until, tells_at = start + seconds, start + SECONDS_IN_SILENCE
        while (late := [one.label for one in self._running if not one.has_ended]) and (
            time.monotonic() < until
        ):
            if time.monotonic() > tells_at:
                self._say(f"  waiting up to {seconds:g} s for {', '.join(late)} ...")
                tells_at = until
            time.sleep(SECONDS_BETWEEN_LOOKS)
        for process in [*self._running]:
            self._end(process)
        atexit.unregister(self._close_failed)

    def _close_failed(self) -> None:
        self.close(SECONDS_AFTER_STOP)

    def _end(self, process: TrackerProcess) -> None:
        self._running.remove(process)
        failed = process.end()
        if failed is not None:
            self._warn(process.label, f"{failed}; see {process.folder / 'log.txt'}")

    def _warn(self, label: str, reason: str) -> None:
        self._say(f"  warning: tracker {label}: {reason}")
