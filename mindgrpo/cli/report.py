"""Writes a page about one run, or about two side by side: `python -m mindgrpo report`.

The page is one HTML file that needs no network: curves, the samples of steps, held-out answers, configuration. A run
writes its own when it ends (monitor_config.report); this writes it again, or for a run that goes on or was killed.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from mindgrpo.cli.arguments import Arguments
from mindgrpo.cli.arguments import path as path_of
from mindgrpo.errors import UserError
from mindgrpo.report.write import write_report


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = Arguments(prog="mindgrpo report", description="Writes a page about one or two runs.")
    text = "the folder of a run, as output/latest; two are shown side by side"
    parser.add_argument("runs", nargs="+", type=path_of, metavar="RUN", help=text)
    text = "default: report.html, or report_vs_NAME.html for two, in the first run's folder"
    parser.add_argument("--output", type=path_of, help=text)
    return parser.parse_args(list(argv))


def main(argv: Sequence[str]) -> None:
    """Prints the page's path. Raises UserError."""
    flags = arguments(argv)
    if len(flags.runs) > 2:
        raise UserError(f"{len(flags.runs)} runs are named; a page shows one run, or two.")
    page = write_report(flags.runs, flags.output)
    print(f"{page} ({page.stat().st_size / 1e6:.1f} MB)")
