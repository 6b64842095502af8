"""Shows a run in the output of a notebook's cell: how far it is, what it is doing, and a row for each step."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

NUM_ROWS = 20
BAR_WIDTH = 40


def in_notebook() -> bool:
    """Returns whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and getattr(ipython.get_ipython(), "kernel", None) is not None


class NotebookProgress:
    """Shows the newest rows, in one place of the output that changes.

    Any thread may call it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows: deque[Mapping[str, str]] = deque(maxlen=NUM_ROWS)
        self._step, self._num_steps, self._doing = 0, 0, ""
        self._started, self._seconds = time.monotonic(), deque[float](maxlen=NUM_ROWS)
        self._handle: Any = None
        self._is_over = False

    def step(self, step: int, num_steps: int, cells: Mapping[str, str]) -> None:
        """Adds the row of step number `step`, from 1, of `num_steps`: words by the name of their column."""
        with self._lock:
            now = time.monotonic()
            self._seconds.append(now - self._started)
            self._step, self._num_steps, self._started, self._doing = step, num_steps, now, ""
            self._rows.append({"step": str(step), **cells})
            self._show()

    def live(self, text: str) -> None:
        """Says what the run is doing; empty: nothing that takes long."""
        with self._lock:
            if text != self._doing:
                self._doing = text
                self._show()

    def end(self) -> None:
        """Shows how far the run got; nothing changes afterwards."""
        with self._lock:
            self._doing, self._is_over = "", True
            if self._handle is not None:
                self._handle.update(self._drawn())

    def _show(self) -> None:
        if self._is_over:
            return
        from IPython.display import display

        shown = self._drawn()
        if self._handle is None:
            self._handle = display(shown, display_id=True)
        else:
            self._handle.update(shown)

    def _drawn(self) -> Any:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        whole = Table.grid(padding=(0, 2))
        words = self._doing.strip()
        if self._num_steps:
            # The first step compiles.
            later = list(self._seconds)[1:] or list(self._seconds)
            left = (self._num_steps - self._step) * sum(later) / len(later)
            done = f"step {self._step} of {self._num_steps}"
            about = f"about {left:.0f} s left" if left and not self._is_over else ""
            bar = ProgressBar(self._num_steps, self._step, width=BAR_WIDTH)
            whole.add_row(bar, Text("  ".join(filter(None, [done, words or about]))))
        else:
            whole.add_row(Text(words))
        if not self._rows:
            return whole
        names = list(dict.fromkeys(name for row in self._rows for name in row))
        table = Table(*names)
        for row in self._rows:
            table.add_row(*(Text(row.get(name, "")) for name in names))
        both = Table.grid()
        both.add_row(whole)
        both.add_row(table)
        return both
