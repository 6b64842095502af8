"""What a page of Markdown is made of, and what its translation must have in common with it.

A page is a sequence of sections, each of a heading and its units: paragraphs, list items, table rows, fenced blocks. A
unit and its translation have the same figures, code spans and links, in any order.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import zip_longest

from fenced_blocks import MARK, ROOT, blocks_of

HEADING, ITEM = re.compile(r"(#+) "), re.compile(r"\s*([-*]|\d+\.) ")
CODE, LINK = re.compile(r"`([^`]+)`"), re.compile(r"\]\(([^)\s]+)\)")
SWITCH = re.compile(r"\[[^]]+\]\(([^)\s]+)\)")
# A hyphen after a letter or a figure is no sign. A unit counts if it is written alike in every language.
FIGURE = re.compile(
    r"(?:(?<![0-9A-Za-z.-])-)?\d+(?:[.,]\d+)*(?:e[-+]?\d+)?(?:\s?(?:%|(?:[KMGT]i?B|ms)(?![A-Za-z])))?"
)
# English pages lie beside the folder of their translations, except for the clone's first page.
FIRST, FIRST_TRANSLATED = "README.md", "README_CN.md"


@dataclass(frozen=True)
class Unit:
    """`kind` is its kind with what else must be the same of it, such as the level of a heading."""

    page: str
    line: int
    kind: str
    text: str

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True)
class Section:
    """A heading and what follows it up to the next one; the first section of a page may have no heading."""

    heading: Unit
    units: list[Unit]


def english_of(page: str) -> str:
    """Returns the path of the English page, from the clone's folder, of a page in either language."""
    return FIRST if page == FIRST_TRANSLATED else re.sub(r"(^|/)zh/([^/]+)$", r"\1\2", page)


def targets(unit: Unit) -> list[str]:
    """Returns what a unit links to: addresses as they are, files from the clone's folder, without what follows a #."""
    paths = []
    for target in LINK.findall(CODE.sub("", unit.text)):
        path = target.partition("#")[0]
        folder = os.path.dirname(unit.page)
        inside = os.path.normpath(os.path.join(folder, path)) if path else unit.page
        paths.append(target if "://" in target else inside)
    return paths


def units_of(page: str) -> Iterator[Unit]:
    """Yields headings and units in their order, without the line that leads to the page in the other language."""
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    blocks = {block.line - 1: block for block in blocks_of(page)}
    unit: Unit | None = None
    number = 0
    while number < len(lines):
        line, block = lines[number], blocks.get(number)
        kind = "block" if block else _kind(line)
        if unit and (kind or not line.strip()):
            yield unit
            unit = None
        if block:
            mark = f", marked as not run: {block.not_run}" if block.not_run else ""
            yield Unit(page, number + 1, f"block of {block.kind}{mark}", block.text)
            number += 0 if block.kind == "indented" else len(block.text.splitlines()) + 1
        elif unit:
            unit = Unit(page, unit.line, unit.kind, f"{unit.text} {line.strip()}")
        elif line.strip() and not MARK.fullmatch(line) and not _is_switch(page, line):
            unit = Unit(page, number + 1, kind or "paragraph", line)
        number += 1
    if unit:
        yield unit


def _kind(line: str) -> str:
    """Returns the kind of unit that a line begins by itself; empty for a line of text."""
    if heading := HEADING.match(line):
        return f"heading of level {len(heading[1])}"
    if line.startswith("|"):
        return f"table row of {CODE.sub('', line).count('|') - 1} cells"
    return "list item" if ITEM.match(line) else ""


def _is_switch(page: str, line: str) -> bool:
    link = SWITCH.fullmatch(line.strip())
    return bool(link) and _leads_to_itself(Unit(page, 0, "", line))


def _leads_to_itself(unit: Unit) -> bool:
    return [english_of(path) for path in targets(unit)] == [english_of(unit.page)]


def sections_of(page: str) -> list[Section]:
    sections = [Section(Unit(page, 1, "start", "the start of the page"), [])]
    for unit in units_of(page):
        if unit.kind.startswith("heading"):
            sections.append(Section(unit, []))
        else:
            sections[-1].units.append(unit)
    return sections


def facts(units: Sequence[Unit]) -> Counter[str]:
    """Counts what a translation leaves as it is: figures outside code and addresses, code spans, targets of links."""
    counted: Counter[str] = Counter()
    for unit in units:
        if unit.kind.startswith("block"):
            continue
        counted.update(f"`{' '.join(code.split())}`" for code in CODE.findall(unit.text))
        own = english_of(unit.page)
        links = (english_of(path) for path in targets(unit))
        counted.update(f"link to {path}" for path in links if path != own)
        prose = LINK.sub("]", CODE.sub("` `", unit.text))
        counted.update("".join(figure.split()) for figure in FIGURE.findall(prose))
    return counted


def differences(english: str, translated: str) -> list[str]:
    """Compares two pages, whose paths are relative to the clone; returns a sentence for each difference."""
    ours, theirs = sections_of(english), sections_of(translated)
    for left, right in zip_longest(ours, theirs):
        if left is None or right is None or left.heading.kind != right.heading.kind:
            ends = [s.heading if s else None for s in (left, right)]
            return [f"{_shown(ends[0], english)}, but {_shown(ends[1], translated)}"]
    found: list[str] = []
    for left, right in zip(ours, theirs, strict=True):
        found += section_differences(left, right)
    return found


def _shown(heading: Unit | None, page: str) -> str:
    if heading is None:
        return f"{page} has no further heading"
    return f"{heading.where} has the {heading.kind} '{heading.text.strip('# ')}'"


def section_differences(left: Section, right: Section) -> list[str]:
    found = _fact_differences([left.heading], [right.heading])
    if [unit.kind for unit in left.units] == [unit.kind for unit in right.units]:
        for ours, theirs in zip(left.units, right.units, strict=True):
            found += _fact_differences([ours], [theirs])
            if ours.kind.startswith("block"):
                found += _block_differences(ours, theirs)
    else:
        found += [
            f"{unit.where} has a {unit.kind} without a counterpart" for unit in _lone(left, right)
        ]
        found += _fact_differences(left.units or [left.heading], right.units or [right.heading])
    names = " / ".join(section.heading.text.strip("# ") for section in (left, right))
    return [f"section '{names}': {sentence}" for sentence in found]


def _lone(left: Section, right: Section) -> list[Unit]:
    """Returns the units that the other section has not in the same order, with the same kind and facts."""
    keys = [[(u.kind, frozenset(facts([u]).items())) for u in side.units] for side in (left, right)]
    lone: list[Unit] = []
    for step, a, b, c, d in SequenceMatcher(None, *keys, autojunk=False).get_opcodes():
        if step != "equal":
            lone += [*left.units[a:b], *right.units[c:d]]
    return lone


def _fact_differences(ours: Sequence[Unit], theirs: Sequence[Unit]) -> list[str]:
    here, there = ours[0].where, theirs[0].where
    only_ours, only_theirs = facts(ours) - facts(theirs), facts(theirs) - facts(ours)
    found = [f"{here} has {fact}, which {there} lacks" for fact in only_ours.elements()]
    return found + [f"{there} has {fact}, which {here} lacks" for fact in only_theirs.elements()]


def _block_differences(ours: Unit, theirs: Unit) -> list[str]:
    lines = zip_longest(ours.text.splitlines(), theirs.text.splitlines(), fillvalue="(no line)")
    for number, (left, right) in enumerate(lines, start=1):
        if left != right:
            numbers = [f"{unit.page}:{unit.line + number}" for unit in (ours, theirs)]
            return [f"{numbers[0]} has '{left}' in its block, {numbers[1]} has '{right}'"]
    return []
