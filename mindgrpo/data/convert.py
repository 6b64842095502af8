"""Converts any data set to a MindRecord, after a check that every rendered prompt fits.

Reads, renders and writes row by row, keeps their order, and counts what it drops and cuts. A conversion that does not
end well leaves no file behind.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from mindgrpo.data.examples import Example
from mindgrpo.data.mindrecord import check_target, write_mindrecord
from mindgrpo.data.prompts import PromptForm
from mindgrpo.data.sources import Examples

# The whole question, where the prompt asks a shortened one.
WHOLE_COLUMN = "full_question"
Advance = Callable[[int], None]
Progress = Callable[[int], AbstractContextManager[Advance]]


@dataclass
class ConversionReport:
    target: Path
    rows: int = 0
    kept: int = 0
    dropped: int = 0
    cut: int = 0
    longest: int = 0
    read_from: dict[str, None] = field(default_factory=dict)

    def __str__(self) -> str:
        return (
            f"{self.kept} of {self.rows} rows kept, {self.dropped} dropped and {self.cut} cut (too long), the longest "
            f"prompt has {self.longest} tokens; written to {self.target}"
            f"{''.join(f'; {text}' for text in self.read_from)}"
        )


def convert(
    examples: Examples,
    target: str | Path,
    form: PromptForm,
    *,
    source: str,
    overwrite: bool = False,
    progress: Progress,
) -> ConversionReport:
    """Writes the examples that fit to `target` and counts the others. Raises UserError.

    `source` names the data in messages. `progress(rows)` gives a function that gets the number of rows done since.
    """
    written = Path(target)
    check_target(written, overwrite)
    report = ConversionReport(written, rows=len(examples))
    with progress(len(examples)) as advance:
        write_mindrecord(written, fitting(examples, form, report, advance), source)
    return report


@contextmanager
def progress_bar(total: int) -> Iterator[Advance]:
    """Shows a bar where standard error is a terminal; yields a function that gets how many more rows are done."""
    if not sys.stderr.isatty():
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = ("rows", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("rows", total=total)
        yield lambda count: bar.advance(task, count)


def fitting(
    examples: Examples, form: PromptForm, report: ConversionReport, advance: Advance
) -> Iterator[Example]:
    for example in examples:
        report.read_from |= dict.fromkeys(filter(None, [example.read_from]))
        fitted = form.fit(example)
        if fitted is None:
            report.dropped += 1
        else:
            report.kept += 1
            report.cut += fitted.is_cut
            report.longest = max(report.longest, len(fitted.ids))
            yield with_whole_question(fitted.example, example) if fitted.is_cut else example
        advance(1)


def with_whole_question(cut: Example, whole: Example) -> Example:
    if cut.question == whole.question:
        return cut
    return replace(cut, columns={**whole.columns, WHOLE_COLUMN: whole.question})
