"""Rows of Parquet and Arrow files, read with pyarrow a piece at a time and only the columns that are wanted.

Arrow files are mapped into memory, Parquet is decoded a row group at a time, on the thread that asks. Refuses values
that a reward could not be given as plain Python, such as the bytes of an image.
"""

from __future__ import annotations

import datetime
import decimal
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from mindgrpo.data.rows import Row, Rows, Unchanged
from mindgrpo.errors import UserError

KEPT_BYTES = 1 << 28
ROWS_AT_ONCE = 256
PLAIN = (str, int, float, bool, type(None))


@dataclass(frozen=True)
class Piece:
    """A row group of a Parquet file, or a whole Arrow file (`group` None)."""

    path: Path
    group: int | None
    num_rows: int
    first_in_file: int


class TableRows(Rows):
    """`columns` None means all; names that a file lacks are left out, the reader of rows tells."""

    def __init__(self, paths: Sequence[Path], columns: Sequence[str] | None = None) -> None:
        self._pieces = [piece for path in paths for piece in pieces_of(path)]
        self._starts = [0, *accumulate(piece.num_rows for piece in self._pieces)]
        self._columns = columns
        self._unchanged = Unchanged(paths)
        self._kept: dict[int, Any] = {}

    def __len__(self) -> int:
        return self._starts[-1]

    def _piece_at(self, place: int) -> int:
        return bisect_right(self._starts, place) - 1

    def where(self, place: int) -> str:
        index = self._piece_at(place)
        piece = self._pieces[index]
        return f"{piece.path} row {piece.first_in_file + place - self._starts[index] + 1}"

    def read(self, start: int, stop: int) -> Iterator[Row]:
        place = start
        while place < stop:
            index = self._piece_at(place)
            self._unchanged.check(self._pieces[index].path)
            end = min(stop, self._starts[index + 1], place + ROWS_AT_ONCE)
            table = self._piece(index).slice(place - self._starts[index], end - place)
            for offset, row in enumerate(table.to_pylist()):
                yield plain_row(row, self.where(place + offset))
            place = end

    def _piece(self, index: int) -> Any:
        """Decoded pieces are kept up to KEPT_BYTES; the one that was used longest ago goes first."""
        table = self._kept.pop(index, None)
        if table is None:
            table = self._load_piece(index)
            while (
                self._kept
                and table.nbytes + sum(t.nbytes for t in self._kept.values()) > KEPT_BYTES
            ):
                del self._kept[next(iter(self._kept))]
        self._kept[index] = table
        return table

    def _load_piece(self, index: int) -> Any:
        piece = self._pieces[index]
        if piece.group is None:
            return chosen(arrow_table(piece.path), self._columns)
        file = parquet_file(piece.path)
        names = present(file.schema_arrow.names, self._columns)
        try:
            return file.read_row_group(piece.group, columns=names, use_threads=False)
        except Exception as error:  # pyarrow's own kinds, and OSError
            raise unreadable(piece.path, "Parquet", error) from error


def pieces_of(path: Path) -> list[Piece]:
    if path.suffix == ".arrow":
        return [Piece(path, None, arrow_table(path).num_rows, 0)]
    metadata = parquet_file(path).metadata
    sizes = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
    firsts = [0, *accumulate(sizes)]
    return [Piece(path, group, size, firsts[group]) for group, size in enumerate(sizes)]


def need_pyarrow(path: Path) -> None:
    try:
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"reading {path} takes pyarrow, which is not installed; pip install pyarrow, or give JSONL"
        ) from error


def parquet_file(path: Path) -> Any:
    need_pyarrow(path)
    from pyarrow.parquet import ParquetFile

    try:
        return ParquetFile(path)
    except Exception as error:  # pyarrow's own kinds, and OSError
        raise unreadable(path, "Parquet", error) from error


def arrow_table(path: Path) -> Any:
    """The file's batches in mapped memory: nothing is copied until a row is read."""
    need_pyarrow(path)
    import pyarrow as pa

    try:
        mapped = pa.memory_map(str(path))
        try:
            return pa.ipc.open_stream(mapped).read_all()
        except pa.ArrowInvalid:
            return pa.ipc.open_file(mapped).read_all()
    except Exception as error:  # pyarrow's own kinds, and OSError
        raise unreadable(path, "Arrow", error) from error


def unreadable(path: Path, kind: str, error: Exception) -> UserError:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return UserError(f"{path} cannot be read as {kind}: {reason}; write or download it again")


def present(names: Sequence[str], columns: Sequence[str] | None) -> list[str] | None:
    return None if columns is None else [name for name in names if name in columns]


def chosen(table: Any, columns: Sequence[str] | None) -> Any:
    names = present(table.column_names, columns)
    return table if names is None else table.select(names)


def plain_row(row: Row, where: str) -> Row:
    for name, value in row.items():
        if not isinstance(value, PLAIN):
            row[name] = plain(value, f"{where}: column {name!r}")
    return row


def plain(value: object, where: str) -> object:
    """Lists, objects, text and numbers; dates and decimals as text."""
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, dict):
        return {str(key): plain(item, where) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, where) for item in value]
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, decimal.Decimal | datetime.timedelta):
        return str(value)
    raise UserError(
        f"{where} holds {type(value).__name__}, which is neither text nor number; choose the columns that "
        "rewards get with rl_config.dataset_columns (--columns)"
    )
