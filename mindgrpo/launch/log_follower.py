"""Copies what is appended to log files to standard output while a job runs, also across files that move aside.

On a terminal it shows below them, in place, what the job is doing.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from io import FileIO
from pathlib import Path

from mindgrpo.health.heartbeat import CLEAR

POLL_SECONDS = 0.1
CHUNK_BYTES = 1 << 16
# Of MindSpore's cluster: the launcher has them written (options.py), and nobody else needs them.
HIDDEN = (b"[WARNING] DISTRIBUTED(", b"[INFO] DISTRIBUTED(")


class FollowedFile:
    """Reads a file that grows. One that is renamed or removed is read to its end before the next of its name."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: FileIO | None = None

    def read(self) -> bytes:
        """Reads up to CHUNK_BYTES more; empty for nothing new."""
        try:
            self._file = self._file or FileIO(self._path)
        except OSError:
            return b""
        # Asked before reading: what is written until the file moves aside is then part of what is read.
        moved = self._has_moved(self._file.fileno())
        chunk = self._file.read(CHUNK_BYTES)
        if not chunk and moved:
            self.close()
            return self.read()
        return chunk or b""

    def _has_moved(self, descriptor: int) -> bool:
        """Says whether there is another file of that name by now."""
        try:
            return not os.path.samestat(os.stat(self._path), os.fstat(descriptor))
        except OSError:
            return False

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class Screen:
    """Leaves lines that begin as HIDDEN does out of one file's text; holds back a part of a line that may be one."""

    def __init__(self) -> None:
        self._held = b""
        self._inside_line = False

    def pass_on(self, chunk: bytes) -> bytes:
        lines = (self._held + chunk).splitlines(keepends=True)
        shown = [] if not self._inside_line else lines[:1]
        lines = lines[len(shown) :]
        self._held = b""
        if lines and not lines[-1].endswith(b"\n") and _may_be_hidden(lines[-1]):
            self._held = lines.pop()
        shown += [line for line in lines if not line.startswith(HIDDEN)]
        self._inside_line = bool(lines or shown) and not (lines or shown)[-1].endswith(b"\n")
        return b"".join(shown)

    def rest(self) -> bytes:
        return b"" if self._held.startswith(HIDDEN) else self._held


def _may_be_hidden(start: bytes) -> bool:
    return start.startswith(HIDDEN) or any(hidden.startswith(start) for hidden in HIDDEN)


class LogFollower(threading.Thread):
    """Copies in a thread: a terminal that is held (Ctrl-S) must not hold up the launcher."""

    def __init__(
        self, paths: Sequence[Path], output: int = 1, doing: Callable[[], str] = lambda: ""
    ) -> None:
        """Takes `doing`, which describes what the job is doing for a terminal; empty for nothing."""
        super().__init__(name="log follower", daemon=True)
        self._files = {FollowedFile(path): Screen() for path in paths}
        self._output = output
        self._doing, self._is_terminal = doing, os.isatty(output)
        self._shown, self._ends_line = "", True
        self._ended = threading.Event()

    def finish(self) -> None:
        """Copies what is there by now, and ends; `join` waits for it."""
        self._ended.set()

    def run(self) -> None:
        try:
            while not self._ended.wait(POLL_SECONDS):
                self._copy()
                if self._is_terminal and self._ends_line:
                    self._show(self._doing())
            self._copy()
            self._show("")
            for screen in self._files.values():
                self._write(screen.rest())
        except OSError:
            pass  # nobody reads standard output any more; the job continues
        finally:
            for file in self._files:
                file.close()

    def _copy(self) -> None:
        for file, screen in self._files.items():
            while chunk := file.read():
                self._write(screen.pass_on(chunk))

    def _show(self, text: str) -> None:
        """Shows a line in place of the one that is shown."""
        text = text[: shutil.get_terminal_size().columns - 1]
        if text != self._shown:
            self._put(f"{CLEAR}{text}".encode())
            self._shown = text

    def _write(self, chunk: bytes) -> None:
        if chunk:
            self._show("")
            self._ends_line = chunk.endswith(b"\n")
            self._put(chunk)

    def _put(self, chunk: bytes) -> None:
        while chunk:
            try:
                chunk = chunk[os.write(self._output, chunk) :]
            except BlockingIOError:
                time.sleep(POLL_SECONDS)
