"""Reads rows of JSONL, JSON, CSV, Parquet and Arrow files by index, each with its file and line for messages.

A row is read from disk whenever it is asked for, so that a rank holds none that it does not use: lines by their
offsets, tables one row group at a time and only the columns that are wanted. A file that was written to since it was
opened is refused.
"""

from __future__ import annotations

import csv
import datetime
import decimal
import io
import json
import re
import sys
from array import array
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np

from mindgrpo.errors import UserError
from mindgrpo.strict_files import NotJson, lines_of, parse_json, read_json

Row = dict[str, Any]
Located = tuple[str, Any]  # file and line, or file and row; then the row
# A document is read at once; larger data sets come one object a line.
MAX_DOCUMENT_BYTES = 1 << 32
CACHE_BYTES = 1 << 28
ROWS_AT_ONCE = 256
# From 20 on it reads what 26 writes; 26 itself does not import beside MindSpore's numpy 1.
PYARROW = "pyarrow>=20,<26"
FOOTER_BYTES = 1 << 20
WRITER = re.compile(rb"parquet-cpp-arrow version (\d+(?:\.\d+)*)")
PLAIN = (str, int, float, bool, type(None))
MISSING_IN_PANDAS = ("NAType", "NaTType")
CHOOSE_COLUMNS = "choose the columns that rewards get with rl_config.dataset_columns"


class Rows(Protocol):
    """Rows that count from 0."""

    def __len__(self) -> int: ...

    def read(self, start: int, stop: int) -> Iterator[Located]:
        """Yields rows from `start` up to `stop`. Raises UserError for one that cannot be read."""


class Blocks:
    """Rows of several files as one, in their order."""

    def __init__(self, blocks: Sequence[Rows]) -> None:
        self._blocks = blocks
        self._starts = [0, *accumulate(map(len, blocks))]

    def __len__(self) -> int:
        return self._starts[-1]

    def read(self, start: int, stop: int) -> Iterator[Located]:
        while start < stop:
            block = bisect_right(self._starts, start) - 1
            first, end = self._starts[block], min(stop, self._starts[block + 1])
            yield from self._blocks[block].read(start - first, end - first)
            start = end


class ListedRows:
    """Rows in memory, all of one file."""

    def __init__(self, rows: Sequence[Any], path: Path | str) -> None:
        self._rows, self._path = rows, path

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, start: int, stop: int) -> Iterator[Located]:
        for number, row in enumerate(self._rows[start:stop], start + 1):
            yield f"{self._path} row {number}", row


class Seeds:
    """Rows for environments that make their own examples: a column `seed` with each of a range of numbers."""

    def __init__(self, seeds: range) -> None:
        self._seeds = seeds

    def __len__(self) -> int:
        return len(self._seeds)

    def read(self, start: int, stop: int) -> Iterator[Located]:
        for seed in self._seeds[start:stop]:
            yield f"seed {seed}", {"question": f"seed {seed}", "seed": seed}


class JsonLines:
    """One object a line. Blank lines hold no row and are passed over."""

    def __init__(self, path: Path) -> None:
        self._path, self._state = path, state_of(path)
        self._offsets, self._numbers = array("q"), array("q")
        with opened(path) as lines:
            for number, (offset, line) in enumerate(lines_of(lines), start=1):
                if line.strip():
                    self._offsets.append(offset)
                    self._numbers.append(number)

    def __len__(self) -> int:
        return len(self._offsets)

    def read(self, start: int, stop: int) -> Iterator[Located]:
        check_unchanged(self._path, self._state)
        with opened(self._path) as lines:
            for row in range(start, stop):
                lines.seek(self._offsets[row])
                where = f"{self._path}:{self._numbers[row]}"
                try:
                    parsed = parse_json(lines.readline().rstrip())
                except NotJson as error:
                    reason = str(error).replace("(line 1 column", "(column")
                    sentence = f"{where} is not a line of JSON: {reason}; correct the line"
                    raise UserError(sentence) from error
                yield where, parsed


def opened(path: Path) -> BinaryIO:
    """Opens a regular file: a pipe or a device would never end, or give its rows only once. Raises UserError."""
    try:
        if path.is_file():
            return path.open("rb")
    except OSError as error:
        raise UserError(
            f"the data file {path} cannot be read: {error.strerror}; make it readable"
        ) from error
    raise UserError(f"the data file {path} is no regular file; give one that can be read again")


def state_of(path: Path) -> tuple[int, int] | None:
    """Returns when a file was written and its size in bytes; None for one that is gone."""
    try:
        return path.stat().st_mtime_ns, path.stat().st_size
    except OSError:
        return None


def check_unchanged(path: Path, state: tuple[int, int] | None) -> None:
    """Raises UserError for a changed file, whose rows would no longer belong to the run's token ids."""
    if state_of(path) != state:
        raise UserError(
            f"the data file {path} changed since the run read it; start the run again, and give a file "
            "that nothing writes to"
        )


def open_json(path: Path) -> Rows:
    """Opens a .json file, which holds one document or, written by many programs, one object a line."""
    with opened(path) as lines:
        filled = (line for line in lines if line.strip())
        first, second = next(filled, b""), next(filled, None)
    try:
        head = parse_json(first)
        is_document = second is None and (isinstance(head, list) or bool(tables_in(head)))
    except NotJson:
        is_document = True
    return ListedRows(read_document(path), path) if is_document else JsonLines(path)


def read_document(path: Path) -> list[Any]:
    """Reads a list of objects, or an object with one such list, as in {"data": [...]}. Raises UserError."""
    content = read_json(path, "the data file", "correct the file", MAX_DOCUMENT_BYTES)
    tables = tables_in(content)
    rows = tables[0] if len(tables) == 1 else content
    if not isinstance(rows, list):
        raise UserError(
            f"{path} holds no list of rows; it must be [{{...}}, ...], an object with one such list, or one "
            "object a line"
        )
    return rows


def tables_in(content: object) -> list[list[Any]]:
    """Returns the values of an object that are lists of objects."""
    values = content.values() if isinstance(content, dict) else ()
    return [
        rows for rows in values if isinstance(rows, list) and rows and isinstance(rows[0], dict)
    ]


def read_csv(path: Path) -> list[Row]:
    """Reads CSV whose first line names the columns. Every value is text: 007 keeps its zeros. Raises UserError."""
    # Of the whole process, and by default less than a long text; MindSpore raises it, too.
    limit = csv.field_size_limit(sys.maxsize)
    try:
        with opened(path) as file, io.TextIOWrapper(file, "utf-8-sig", newline="") as text:
            lines = csv.reader(text, strict=True)
            names = next(lines, [])
            rows = [(lines.line_num, values) for values in lines if values]
    except (csv.Error, UnicodeDecodeError) as error:
        raise UserError(
            f"{path} cannot be read as CSV: {error}; write it as UTF-8 with commas between the values and double "
            "quotes around those that hold commas or line ends"
        ) from error
    finally:
        csv.field_size_limit(limit)
    if not all(names) or len(set(names)) < max(1, len(names)):
        raise UserError(
            f"{path}:1 has the column names {names}; the first line must name every column, each name once"
        )
    for number, values in rows:
        if len(values) != len(names):
            raise UserError(
                f"{path}:{number} has {len(values)} values, but there are {len(names)} columns; put double quotes "
                "around values that hold commas"
            )
    return [dict(zip(names, values, strict=True)) for _, values in rows]


class TableCache:
    """Decoded row groups, up to CACHE_BYTES; the one that was used longest ago goes first."""

    def __init__(self) -> None:
        self._tables: dict[tuple[TableFile, int], Any] = {}

    def table_of(self, file: TableFile, group: int) -> Any:
        table = self._tables.pop((file, group), None)
        if table is None:
            table = file.load(group)
            kept = self._tables
            while kept and table.nbytes + sum(one.nbytes for one in kept.values()) > CACHE_BYTES:
                del kept[next(iter(kept))]
        self._tables[file, group] = table
        return table


class TableFile:
    """A Parquet file, which is decoded by row groups, or an Arrow file, which counts as one group.

    `columns` None means all; ones that are not there are left out. The columns `binary` may hold bytes. Raises
    UserError.
    """

    def __init__(
        self,
        path: Path,
        columns: Sequence[str] | None,
        cache: TableCache,
        binary: Collection[str] = (),
    ) -> None:
        self._path, self._columns, self._cache = path, columns, cache
        self._binary = binary
        self._state = state_of(path)
        with table_file(path) as file:
            if path.suffix == ".arrow":
                sizes = [file.num_rows]
            else:
                groups = map(file.metadata.row_group, range(file.num_row_groups))
                sizes = [group.num_rows for group in groups]
        self._starts = [0, *accumulate(sizes)]

    def __len__(self) -> int:
        return self._starts[-1]

    def read(self, start: int, stop: int) -> Iterator[Located]:
        check_unchanged(self._path, self._state)
        while start < stop:
            group = bisect_right(self._starts, start) - 1
            end = min(stop, self._starts[group + 1], start + ROWS_AT_ONCE)
            table = self._cache.table_of(self, group)
            for number, row in enumerate(
                rows_of(table.slice(start - self._starts[group], end - start)), start
            ):
                where = f"{self._path} row {number + 1}"
                own = {name: row.pop(name) for name in self._binary if name in row}
                yield where, plain_row(row, where) | own
            start = end

    def load(self, group: int) -> Any:
        """Decodes on the thread that asks: every rank has its share of the cores. Raises UserError."""
        with table_file(self._path) as file:
            is_arrow, names = self._path.suffix == ".arrow", None
            if self._columns is not None:
                schema = file.schema if is_arrow else file.schema_arrow
                names = [name for name in schema.names if name in self._columns]
            if is_arrow:
                return file if names is None else file.select(names)
            return file.read_row_group(group, columns=names, use_threads=False)


@contextmanager
def table_file(path: Path) -> Iterator[Any]:
    """Opens a ParquetFile, or an Arrow file's table in mapped memory, which copies nothing until a row is read."""
    # Late, as rows of JSON need none of it.
    try:
        import pyarrow
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise UserError(
            f"{path} needs pyarrow, which cannot be imported: {error}; install it with 'pip install \"{PYARROW}\"'"
        ) from error

    try:
        if path.suffix == ".parquet":
            with ParquetFile(path) as file:
                yield file
            return
        mapped = pyarrow.memory_map(str(path))
        try:
            table = pyarrow.ipc.open_stream(mapped).read_all()
        except pyarrow.ArrowInvalid:
            table = pyarrow.ipc.open_file(mapped).read_all()
        yield table
    except Exception as error:  # pyarrow's own kinds, and OSError
        kind = path.suffix[1:].capitalize()
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        remedy = _newer_writer(path) or "write or download it again"
        raise UserError(f"{path} cannot be read as {kind}: {reason}; {remedy}") from error


def _newer_writer(path: Path) -> str | None:
    """Returns the remedy for a Parquet file that a newer pyarrow than the installed one wrote, if one did."""
    import pyarrow

    with suppress(OSError), path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - FOOTER_BYTES))
        if match := WRITER.search(file.read()):
            version = match.group(1).decode()
            if int(version.split(".")[0]) > int(pyarrow.__version__.split(".")[0]):
                return (
                    f"pyarrow {version} wrote it and pyarrow {pyarrow.__version__} is installed: install a newer one "
                    f"with 'pip install \"{PYARROW}\"' (mindformers 1.9.0 pins 19.0.0: use an environment without "
                    "it), or write the file as .jsonl"
                )
    return None


def rows_of(table: Any) -> list[Row]:
    """Returns the rows of an Arrow table; in the place of a value that cannot be converted stands the error."""
    columns = [cells_of(column) for column in table.columns]
    if not columns:
        return [{} for _ in range(table.num_rows)]
    return [
        dict(zip(table.column_names, cells, strict=True)) for cells in zip(*columns, strict=True)
    ]


def cells_of(column: Any) -> list[Any]:
    # At once, which is faster, but where Python's types lose nanoseconds, or fail: years beyond 9999, no UTF-8.
    try:
        if "[ns" not in str(column.type):
            return list(column.to_pylist())
    except Exception:
        pass
    return [cell_of(scalar) for scalar in column]


def cell_of(scalar: Any) -> Any:
    import pyarrow

    kind, types = scalar.type, pyarrow.types
    if not scalar.is_valid:
        return None
    if types.is_struct(kind):
        return {name: cell_of(held) for name, held in scalar.items()}
    if types.is_list(kind) or types.is_large_list(kind):
        return [cell_of(held) for held in scalar.values]
    try:
        if not types.is_temporal(kind) or getattr(kind, "unit", None) != "ns":
            return scalar.as_py()
        if types.is_duration(kind):
            return duration(*divmod(scalar.value, 1000))
        text: str = scalar.cast(pyarrow.string()).as_py()
        return text.replace(" ", "T", 1)
    except Exception as error:  # pyarrow's own kinds, and what Python's types raise
        return error


def duration(microseconds: int, nanoseconds: int) -> str:
    text = str(datetime.timedelta(microseconds=microseconds))
    if not nanoseconds:
        return text
    return f"{text if '.' in text else text + '.000000'}{nanoseconds:03d}"


def plain_row(row: Mapping[str, Any], where: str, remedy: str = CHOOSE_COLUMNS) -> Row:
    """Makes JSON's types of numpy's, and texts of dates, times and decimals, at any depth.

    Raises UserError for what rewards cannot get as JSON.
    """
    plain: Row = {}
    for name, value in row.items():
        if isinstance(value, PLAIN):
            plain[name] = value
            continue
        try:
            plain[name] = json.loads(json.dumps(value, default=as_plain))
        except (TypeError, ValueError) as error:
            raise UserError(
                f"{where}: column {name!r} holds {error}, which is neither text nor number; {remedy}"
            ) from error
    return plain


def as_plain(value: object) -> Any:
    if type(value).__name__ in MISSING_IN_PANDAS:
        return None
    if isinstance(value, np.ndarray | np.generic):
        if value.dtype.kind not in "mM":
            return value.tolist()
        if isinstance(value, np.ndarray):
            return list(value)
        return None if np.isnat(value) else str(value)
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        whole = datetime.timedelta(value.days, value.seconds, value.microseconds)
        # Those of pandas, which pyarrow gives where it is installed, have nanoseconds.
        return duration(
            whole // datetime.timedelta(microseconds=1), getattr(value, "nanoseconds", 0)
        )
    if isinstance(value, decimal.Decimal):
        return str(value)
    if isinstance(value, Exception):
        raise ValueError(f"a value that cannot be read ({str(value) or type(value).__name__})")
    raise TypeError(type(value).__name__)
