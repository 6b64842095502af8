"""Writes a page about one run, or about two side by side: `python -m mindgrpo report`.

The page is one HTML file that needs no network: curves, the samples of steps, held-out answers, configuration. A run
writes its own when it ends (monitor_config.report); this writes it again, or for a run that is under way or was killed.
"""

from __future__ import annotations

from collections.abc import Sequence

from mindgrpo.cli.arguments import Arguments
from mindgrpo.cli.arguments import path as path_of
from mindgrpo.errors import UserError
from mindgrpo.report.write import write_report


def parser() -> Arguments:
    flags = Arguments(prog="mindgrpo report")
    text = "the folder of a run, as output/latest; two are shown side by side"
    flags.add_argument("runs", nargs="+", type=path_of, metavar="RUN", help=text)
    text = "default: report.html, or report_vs_NAME.html for two, in the first run's folder"
    flags.add_argument("--output", type=path_of, metavar="FILE.html", help=text)
    return flags


def main(argv: Sequence[str]) -> None:
    flags = parser().parse_args(list(argv))
    if len(flags.runs) > 2:
        raise UserError(f"{len(flags.runs)} runs are named; a page shows one run, or two.")
    page = write_report(flags.runs, flags.output)
    print(f"{page} ({page.stat().st_size / 1e6:.1f} MB)")
