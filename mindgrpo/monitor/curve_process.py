"""Draws a run's picture in a process of its own, now and then: what drawing takes would stay with the rank.

Each picture reads all steps anew and leaves objects in circles behind: in the rank's own process that was 0.1 MB of
memory a step, and a quarter of the time of a small step.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from mindgrpo.monitor.child_program import end_program, start_program, wait_for_program

SECONDS_BETWEEN_PICTURES = 30.0
LONGEST_DRAWING = 60.0


class CurveProcess:
    """One drawing at a time; the first one may start SECONDS_BETWEEN_PICTURES after this was made."""

    def __init__(self, metrics: Path, picture: Path) -> None:
        self._metrics, self._picture = metrics, picture
        self._process: subprocess.Popen[bytes] | None = None
        self._started = time.monotonic()

    def draw_sometimes(self, before: Mapping[str, float | None]) -> None:
        """Starts a drawing where the last one has ended and began long enough ago; does not wait for it."""
        if self._process is not None and self._process.poll() is not None:
            self._close()
        if self._process is None and time.monotonic() - self._started >= SECONDS_BETWEEN_PICTURES:
            self._start(before)

    def draw_last(self, before: Mapping[str, float | None]) -> str | None:
        """Draws what is there now and waits for it; a sentence where that failed."""
        self._close()
        why = wait_for_program(self._start(before), LONGEST_DRAWING)
        return None if why is None else f"{self._picture} was not drawn: {why}"

    def _close(self) -> None:
        if self._process is not None:
            end_program(self._process)
            self._process = None

    def _start(self, before: Mapping[str, float | None]) -> subprocess.Popen[bytes]:
        self._started = time.monotonic()
        words = ["--before", json.dumps(dict(before)), str(self._metrics), str(self._picture)]
        self._process = start_program("mindgrpo.monitor.curve", words)
        return self._process
