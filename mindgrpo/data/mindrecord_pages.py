"""The rows of a MindRecord, read from its pages in plain Python.

MindSpore's own reader ends the whole process at a file that is damaged; here every number that a file gives is compared
with the file before it is used. Needs no index (.db) and nothing of MindSpore. Refuses pages, rows and columns that do
not lie where the header says, and shards outside of the file's folder.

A file is a header (8 bytes of length, JSON, filled up to `header_size`) and pages of `page_size` bytes. Rows lie one
after another, each behind 8 bytes of length: numbers and texts as msgpack in RAW_DATA pages, bytes and arrays in
BLOB_DATA pages, the columns of a row each behind 8 bytes of length (big-endian) where there are several.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mindgrpo.data.rows import Row
from mindgrpo.errors import UserError
from mindgrpo.strict_files import NotJson, parse_json

MAX_HEADER_BYTES = 1 << 28
LENGTH = struct.Struct("<Q")
LENGTH_IN_BLOB = struct.Struct(">Q")
COUNT = struct.Struct(">I")
ARRAYS = {"int32": "<i4", "int64": "<i8", "float32": "<f4", "float64": "<f8"}
# Whole numbers of arrays take 1, 2, 4 or 8 bytes each, as two bits a number say.
WIDTHS = (1, 2, 4, 8)
COMPRESSED = ("int32", "int64")
NUMBERS = {0xCA: ">f", 0xCB: ">d", 0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q"}
NUMBERS |= {0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q"}
TEXTS = {0xD9: ">B", 0xDA: ">H", 0xDB: ">I"}
CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}


class Damaged(ValueError):
    """The message is a part of a sentence: what is wrong in the file."""


def read_rows(path: Path) -> list[Row]:
    """All rows of the data set that `path` is a file of, shard after shard. Raises UserError."""
    again = "convert the data again with rlhf_data.py"
    try:
        shards = _object(_header(path).get("shard_addresses"), list, "shard_addresses")
        if not all(isinstance(name, str) and name == Path(name).name for name in shards):
            raise Damaged("a shard's name leads out of its folder")
        # A file that was renamed is still itself.
        files = [path] if len(shards) < 2 else [path.parent / name for name in shards]
        return [row for file in files for row in _rows_of(file)]
    except OSError as error:
        reason = f"{error.strerror or error}"
        if error.filename and Path(error.filename) != path:
            reason = f"{Path(error.filename).name}: {reason}"
    except (Damaged, NotJson) as error:
        reason = str(error)
    raise UserError(f"{path} cannot be read as a MindRecord ({reason}); {again}")


def _header(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise Damaged(f"{path.name} is no regular file")
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(size - 8, MAX_HEADER_BYTES):
            raise Damaged("its header is cut off")
        header = parse_json(file.read(length))
    return _object(header, dict, "its header")


def _rows_of(path: Path) -> Iterator[Row]:
    header = _header(path)
    schemas = _object(header.get("schema"), list, "schema")
    if len(schemas) != 1:
        raise Damaged(f"it has {len(schemas)} schemas")
    schema = _object(schemas[0], dict, "schema")
    types = _object(schema.get("schema"), dict, "schema")
    blobs = _object(schema.get("blob_fields"), list, "blob_fields")
    if not all(isinstance(name, str) and isinstance(types.get(name), dict) for name in blobs):
        raise Damaged("its blob_fields are not in its schema")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as pages:
        raw = list(_pieces(header, "RAW_DATA", pages))
        rest = list(_pieces(header, "BLOB_DATA", pages)) if blobs else [b""] * len(raw)
    if len(raw) != len(rest):
        raise Damaged(f"it has {len(raw)} rows and arrays for {len(rest)}")
    for packed, blob in zip(raw, rest, strict=True):
        row = _object(_Message(packed).whole(), dict, "a row")
        wanted = types.keys() - set(
            blobs
        )  # MindSpore gives rows of arrays alone a column of its own
        if not wanted <= row.keys():
            raise Damaged(f"a row lacks {', '.join(map(str, sorted(wanted - row.keys())))}")
        yield {**{name: row[name] for name in wanted}, **_columns(blob, blobs, types)}


def _pieces(header: dict[str, Any], kind: str, pages: mmap.mmap) -> Iterator[bytes]:
    """What the pages of a kind hold, in their order: the bytes behind each length."""
    header_size = _count(header.get("header_size"), "header_size")
    page_size = _count(header.get("page_size"), "page_size")
    listed = [_object(page, dict, "page") for page in _object(header.get("page"), list, "page")]
    numbered = {_count(page.get("page_id"), "page_id"): page for page in listed}
    if len(numbered) < len(listed):
        raise Damaged("two of its pages have the same number")
    for number in sorted(numbered):
        page = numbered[number]
        if page.get("page_type") != kind:
            continue
        start = header_size + number * page_size
        stop = start + _count(page.get("page_size"), "page_size")
        if stop > len(pages) or stop - start > page_size:
            raise Damaged(f"page {number} is cut off")
        while start < stop:
            if start + LENGTH.size > stop:
                raise Damaged(f"a row of page {number} is cut off")
            (length,) = LENGTH.unpack_from(pages, start)
            start += LENGTH.size
            if length > stop - start:
                raise Damaged(f"a row of page {number} is cut off")
            yield pages[start : start + length]
            start += length


def _columns(blob: bytes, names: list[str], types: dict[str, Any]) -> Row:
    if len(names) == 1:
        return {names[0]: _array(blob, types[names[0]])}
    found: Row = {}
    place = 0
    for name in names:
        if place + LENGTH_IN_BLOB.size > len(blob):
            raise Damaged(f"a row's {name} is cut off")
        (length,) = LENGTH_IN_BLOB.unpack_from(blob, place)
        place += LENGTH_IN_BLOB.size
        if length > len(blob) - place:
            raise Damaged(f"a row's {name} is cut off")
        found[name] = _array(blob[place : place + length], types[name])
        place += length
    return found


def _array(data: bytes, described: dict[str, Any]) -> Any:
    kind = described.get("type")
    if kind == "bytes":
        return data
    if kind not in ARRAYS:
        raise Damaged(f"it has arrays of {kind!r}")
    if kind in COMPRESSED:
        values = _expanded(data, ARRAYS[kind])
    elif len(data) % np.dtype(ARRAYS[kind]).itemsize:
        raise Damaged("an array is cut off")
    else:
        values = np.frombuffer(data, ARRAYS[kind])
    shape = described.get("shape")
    if isinstance(shape, list) and len(shape) > 1:
        try:
            return values.reshape(shape)
        except (ValueError, TypeError, OverflowError):
            raise Damaged(f"an array has not the shape {shape}") from None
    return values


def _expanded(data: bytes, dtype: str) -> np.ndarray:
    """A count, two bits a number for its width, then the numbers."""
    if len(data) < COUNT.size:
        raise Damaged("an array is cut off")
    (count,) = COUNT.unpack_from(data)
    start = COUNT.size + -(-count // 4)
    if count > len(data):
        raise Damaged("an array is cut off")
    bits = np.frombuffer(data, np.uint8, start - COUNT.size, COUNT.size)
    codes = (bits[:, None] >> np.array([6, 4, 2, 0], np.uint8) & 3).reshape(-1)[:count]
    widths = np.array(WIDTHS)[codes]
    ends = start + np.cumsum(widths)
    if (ends[-1] if count else start) != len(data):
        raise Damaged("an array is cut off")
    values = np.empty(count, dtype)
    whole = np.frombuffer(data, np.uint8)
    for width in np.unique(widths):
        chosen = widths == width
        places = (ends[chosen] - width)[:, None] + np.arange(width)
        values[chosen] = np.ascontiguousarray(whole[places]).view(f"<i{width}")[:, 0]
    return values


def _object(value: Any, kind: type, what: str) -> Any:
    if not isinstance(value, kind):
        raise Damaged(f"{what} is no {kind.__name__}")
    return value


def _count(value: object, what: str) -> int:
    if type(value) is not int or not 0 <= value < 1 << 40:
        raise Damaged(f"{what} is {str(value)[:40]}")
    return value


class _Message:
    """msgpack as far as rows need it: one map of names to numbers, texts and constants."""

    def __init__(self, data: bytes) -> None:
        self._data, self._place = data, 0

    def whole(self) -> Any:
        names = self._byte()
        if not 0x80 <= names <= 0x8F and names not in (0xDE, 0xDF):
            raise Damaged("a row is no map")
        count = names & 0x0F
        if names > 0x8F:
            count = int.from_bytes(self._taken(2 if names == 0xDE else 4))
        row = {}
        for _ in range(count):
            name = self._value()
            if not isinstance(name, str):
                raise Damaged("the name of a row's column is no text")
            row[name] = self._value()
        if self._place != len(self._data):
            raise Damaged("a row is longer than its columns")
        return row

    def _value(self) -> Any:
        mark = self._byte()
        if mark < 0x80:
            return mark
        if mark >= 0xE0:
            return mark - 0x100
        if 0xA0 <= mark <= 0xBF:
            return self._text(mark & 0x1F)
        if mark in TEXTS:
            return self._text(self._number(TEXTS[mark]))
        if mark in NUMBERS:
            return self._number(NUMBERS[mark])
        if mark in CONSTANTS:
            return CONSTANTS[mark]
        raise Damaged(f"a column's value begins with {mark:#x}")

    def _number(self, form: str) -> Any:
        return struct.unpack(form, self._taken(struct.calcsize(form)))[0]

    def _text(self, length: int) -> str:
        try:
            return self._taken(length).decode()
        except UnicodeDecodeError:
            raise Damaged("a text is not UTF-8") from None

    def _byte(self) -> int:
        return self._taken(1)[0]

    def _taken(self, length: int) -> bytes:
        if length > len(self._data) - self._place:
            raise Damaged("a row is cut off")
        start = self._place
        self._place += length
        return self._data[start : self._place]
