"""Rows as they stand in JSONL and JSON files, by place, each with the words that say where it stands.

What lies on disk is read again whenever a row is asked for, so a rank holds no row that it does not use; a file that
changed meanwhile is refused. Refuses to know what a question is: a row is a dictionary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

from mindgrpo.errors import UserError
from mindgrpo.strict_files import NotJson, parse_json, read_json

Row = dict[str, Any]
# A document is read at once; larger data sets come one object a line.
MAX_DOCUMENT_BYTES = 1 << 32


class Rows(ABC):
    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def where(self, place: int) -> str:
        """File and line (or row) of the row at `place`, which counts from 0."""

    @abstractmethod
    def read(self, start: int, stop: int) -> Iterator[Row]:
        """The rows from place `start` up to `stop`. Raises UserError for one that cannot be read."""


class Unchanged:
    """Refuses files that were written to since: a row read then would belong to other token ids."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._seen = {path: self._state(path) for path in paths}

    @staticmethod
    def _state(path: Path) -> tuple[int, int] | None:
        try:
            found = path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size

    def check(self, path: Path) -> None:
        if self._state(path) != self._seen[path]:
            raise UserError(
                f"the data file {path} changed since the run read it; start the run again, and give a file "
                "that nothing writes to"
            )


class JsonLines(Rows):
    """One object a line. Blank lines hold no row and are passed over."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._unchanged = Unchanged([path])
        self._offsets, self._numbers = array("q"), array("q")
        offset = 0
        with opened(path) as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    self._offsets.append(offset)
                    self._numbers.append(number)
                offset += len(line)

    def __len__(self) -> int:
        return len(self._offsets)

    def where(self, place: int) -> str:
        return f"{self._path}:{self._numbers[place]}"

    def read(self, start: int, stop: int) -> Iterator[Row]:
        self._unchanged.check(self._path)
        with opened(self._path) as lines:
            for place in range(start, stop):
                lines.seek(self._offsets[place])
                yield parse_line(lines.readline(), self.where(place))


def opened(path: Path) -> BinaryIO:
    """Raises UserError. A pipe or a device would never end, or give its rows only once."""
    try:
        if not path.is_file():
            raise UserError(
                f"the data file {path} is no regular file; give one that can be read again"
            )
        return path.open("rb")
    except OSError as error:
        raise UserError(
            f"the data file {path} cannot be read: {error.strerror}; make it readable"
        ) from error


class JoinedRows(Rows):
    """Several files as one, in their order."""

    def __init__(self, parts: Sequence[Rows]) -> None:
        self._parts = parts
        self._starts = [0, *accumulate(map(len, parts))]

    def __len__(self) -> int:
        return self._starts[-1]

    def _part_at(self, place: int) -> int:
        return bisect_right(self._starts, place) - 1

    def where(self, place: int) -> str:
        index = self._part_at(place)
        return self._parts[index].where(place - self._starts[index])

    def read(self, start: int, stop: int) -> Iterator[Row]:
        while start < stop:
            index = self._part_at(start)
            end = min(stop, self._starts[index + 1])
            yield from self._parts[index].read(
                start - self._starts[index], end - self._starts[index]
            )
            start = end


def parse_line(line: bytes, where: str) -> Row:
    try:
        row = parse_json(line)
    except NotJson as error:
        raise UserError(f"{where} is not a line of JSON: {error}; correct the line") from error
    if not isinstance(row, dict):
        raise UserError(
            f'{where} holds a {type(row).__name__}; each line must be an object with "question" and "answer"'
        )
    return row


class JsonArray(Rows):
    """One list of objects, or an object in which one value is such a list, as in {"data": [...]}."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows = read_array(path)

    def __len__(self) -> int:
        return len(self._rows)

    def where(self, place: int) -> str:
        return f"{self._path} row {place + 1}"

    def read(self, start: int, stop: int) -> Iterator[Row]:
        for place in range(start, stop):
            row = self._rows[place]
            if not isinstance(row, dict):
                raise UserError(
                    f"{self.where(place)} is a {type(row).__name__}; each row must be an object with "
                    '"question" and "answer"'
                )
            yield row


def read_array(path: Path) -> list[Any]:
    content = read_json(path, "the data file", "correct the file", MAX_DOCUMENT_BYTES)
    if isinstance(content, dict):
        lists = [value for value in content.values() if is_table(value)]
        content = lists[0] if len(lists) == 1 else content
    if not isinstance(content, list):
        raise UserError(
            f"{path} holds no list of rows; it must be [{{...}}, ...], an object with one such list, or one "
            "object a line"
        )
    return content


def is_table(value: object) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def open_json(path: Path) -> Rows:
    """Files named .json hold one document or, written by many programs, one object a line."""
    with opened(path) as lines:
        filled = (line for line in lines if line.strip())
        first, second = next(filled, b""), next(filled, None)
    try:
        head = parse_json(first)
    except NotJson:
        return JsonArray(path)
    single = second is None and isinstance(head, dict)
    is_document = isinstance(head, list) or (single and any(map(is_table, head.values())))
    return JsonArray(path) if is_document and second is None else JsonLines(path)
