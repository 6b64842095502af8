"""The fenced blocks of a page of Markdown, their commands, and the marks of those that no test runs."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MARK = re.compile(r"<!-- not run: (\S.{9,}) -->")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the line of its fence, its text, and why it is not run."""

    kind: str
    line: int
    text: str
    not_run: str | None = None

    def commands(self) -> list[str]:
        """Returns the commands of a shell block, each in one line and without its comment."""
        text = self.text.replace("\\\n", " ")
        if self.kind == "console":
            text = "\n".join(line[2:] for line in text.splitlines() if line.startswith("$ "))
        lines = (shlex.join(shlex.split(line, comments=True)) for line in text.splitlines())
        return [line for line in lines if line]


def blocks_of(page: str) -> Iterator[Block]:
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    start: int | None = None
    for number, line in enumerate(lines):
        if start is not None and line.strip() == "```":
            mark = MARK.fullmatch(lines[start - 1]) if start else None
            text = "\n".join(lines[start + 1 : number])
            yield Block(lines[start].strip("` "), start + 1, text, mark[1] if mark else None)
            start = None
        elif start is None and line.lstrip().startswith("```"):
            start = number
        elif start is None and line.startswith("    ") and not lines[number - 1].strip():
            yield Block("indented", number + 1, line)
    assert start is None, f"{page}:{start}: the fence does not end"
