"""Runs the cells of a notebook in a kernel, and presses its stop button where a cell asks for it.

As a program it stores the outputs: `python tests/notebook_kernel.py NOTEBOOK`.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

# A cell with this tag is interrupted once its output has a row of a second step.
STOPPED = "stopped"
SECOND_STEP = re.compile(r"step 2 of|^│ 2 ", re.MULTILINE)
LONGEST_CELL = 300  # seconds


class Kernel(NotebookClient):
    """`notebook` gets the outputs; files are found from `folder`."""

    def __init__(self, notebook: nbformat.NotebookNode, folder: Path) -> None:
        resources = {"metadata": {"path": str(folder)}}
        super().__init__(notebook, timeout=LONGEST_CELL, resources=resources, coalesce_streams=True)
        self.record_timing = self._has_stopped = False

    def process_message(self, msg: dict[str, Any], cell: Any, cell_index: int) -> Any:
        """Hears of every output as it comes."""
        shown = msg["content"].get("data", {}).get("text/plain", "")
        tags = cell["metadata"].get("tags", [])
        if STOPPED in tags and not self._has_stopped and SECOND_STEP.search(shown):
            self._has_stopped = True
            os.kill(self.km.provisioner.pid, signal.SIGINT)
        return super().process_message(msg, cell, cell_index)


if __name__ == "__main__":
    path = Path(sys.argv[1])
    read = nbformat.read(path, as_version=4)
    Kernel(read, path.parent).execute()
    nbformat.write(read, path)
