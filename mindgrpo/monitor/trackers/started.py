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

FOLDER, PROCESS = "trackers", "mindgrpo.monitor.trackers.process:main"
# Where a run has failed or was stopped by a signal, somebody waits for its end.
SECONDS_AFTER_STOP = 5.0
SECONDS_IN_SILENCE = 2.0
SECONDS_BETWEEN_LOOKS = 0.02


class Trackers:
    """Runs a process for each tracker; `say` prints a line.

    A tracker that fails is reported once, and the run continues without it.
    """

    def __init__(
        self, trackers: Sequence[str], about: Mapping[str, Any], say: Callable[[str], None]
    ) -> None:
        """Starts them; `about` has the arguments of process.main other than the tracker and its folder."""
        self._say, self._is_asked = say, False
        self._folder = Path(about.get("directory", "")) / FOLDER
        self._running: list[tuple[str, FunctionCall]] = []
        for tracker in processes_of(trackers):
            label = label_of(tracker)
            arguments = {**about, "tracker": tracker, "folder": str(self._folder / label)}
            try:
                process = FunctionCall(PROCESS, arguments, stdin=subprocess.PIPE)
            except OSError as error:
                self._warn(label, f"its process cannot be started ({error.strerror})")
            else:
                self._running.append((label, process))
        if self._running:
            atexit.register(self._close_failed)

    def check(self) -> None:
        """Reports trackers that have ended before the run."""
        self._end([one for one in self._running if one[1].poll() is not None])

    def ask_to_finish(self, is_done: bool = True) -> None:
        """Tells them that the run has written everything, without waiting. Only the first call counts."""
        asked, self._is_asked = self._is_asked, True
        for _, process in () if asked else self._running:
            assert process.stdin is not None
            with suppress(OSError):
                process.stdin.write(DONE if is_done else FAILED)
                process.stdin.flush()

    def close(self, seconds: float) -> None:
        """Gives all of them together `seconds` to send what is written, and ends them."""
        self.ask_to_finish(is_done=False)
        start = time.monotonic()
        until, tells_at = start + seconds, start + SECONDS_IN_SILENCE
        while (late := [label for label, process in self._running if process.poll() is None]) and (
            time.monotonic() < until
        ):
            if time.monotonic() > tells_at:
                self._say(f"  waiting up to {seconds:g} s for {', '.join(late)} ...")
                tells_at = until
            time.sleep(SECONDS_BETWEEN_LOOKS)
        self._end([*self._running])
        atexit.unregister(self._close_failed)

    def _close_failed(self) -> None:
        self.close(SECONDS_AFTER_STOP)

    def _end(self, ended: Sequence[tuple[str, FunctionCall]]) -> None:
        """Kills them with what they started, and reports those that failed."""
        for label, process in ended:
            self._running.remove((label, process))
            is_late = process.poll() is None
            failed = process.failure(0.0)
            assert process.stdin is not None
            with suppress(OSError):
                process.stdin.close()
            failed = "did not finish in time and was ended" if is_late else failed
            if failed is not None:
                self._warn(label, f"{failed}; see {self._folder / label / 'log.txt'}")

    def _warn(self, label: str, reason: str) -> None:
        self._say(f"  warning: tracker {label}: {reason}")
