"""The page of a run as a notebook shows it: in the output of a cell, in a frame of its own."""

from __future__ import annotations

import html
from dataclasses import dataclass
from pathlib import Path

# A notebook keeps what it shows.
LARGEST_SHOWN = 4_000_000
HEIGHT = 800  # pixels


@dataclass(frozen=True, repr=False)
class ReportFrame:
    """The page at `path`. In a notebook, the last expression of a cell or `display(report)` shows it."""

    path: Path

    def __repr__(self) -> str:
        return f"report: {self.path}"

    def _repr_html_(self) -> str:
        """Returns the page in a frame, in which its scripts run and reach nothing of the notebook; a link to a page of
        more than 4 MB."""
        if self.path.stat().st_size > LARGEST_SHOWN:
            address, shown = self.path.absolute().as_uri(), html.escape(str(self.path))
            return f'<a href="{html.escape(address)}">{shown}</a>'
        page = html.escape(self.path.read_text(encoding="utf-8"))
        return (
            f'<iframe srcdoc="{page}" sandbox="allow-scripts" width="100%" height="{HEIGHT}" '
            'style="border: 0"></iframe>'
        )
