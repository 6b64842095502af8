"""Reads text, JSON and JSON lines strictly. Executes nothing.

A file that is not regular (a pipe would never end), is larger than its kind can be, or is not UTF-8 is a UserError; so
is JSON with a key twice, half characters, or nesting that no program writes.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from mindgrpo.errors import UserError

MAX_BYTES = 1 << 28
MAX_DEPTH = 100


class NotJson(ValueError):
    """The message goes into a sentence: what is wrong, and where."""


def no_path(text: str) -> str | None:
    """Says why no file can have this name on any system that we know, for a sentence; None where one can."""
    if "\0" in text:
        return "a path has no NUL in it"
    data = text.encode("utf-8", "surrogateescape")
    if len(data) > 4000 or max(map(len, data.split(b"/"))) > 255:
        return "no path is that long"
    return None


def at_home(path: str) -> str:
    """Expands ~ at the beginning, as a shell does."""
    return os.path.expanduser(path) if path.startswith("~") else path


def looked_at(path: str | Path) -> str:
    """Says where a path leads from the current folder, for a sentence; nothing of one that says it."""
    return "" if Path(path).is_absolute() else f" ({Path(path).absolute()})"


def is_inside(name: str) -> bool:
    """Returns whether a name in a file stays, by its spelling, in that file's folder; links are the user's own."""
    names = PurePosixPath(name.replace("\\", "/")).parts
    fits = all(len(one.encode("utf-8", "replace")) < 256 for one in names) and len(name) < 1024
    return fits and name.isprintable() and ".." not in names and not name.startswith(("/", "\\"))


def read_bytes(path: Path, what: str, remedy: str, max_bytes: int = MAX_BYTES) -> bytes:
    """Reads a file. Raises UserError with `what` and `remedy`: "the configuration" and "give a YAML file." """
    try:
        if not path.is_file():
            reason = "it is no regular file"
            if not path.exists():
                reason = f"No such file{looked_at(path)}"
        elif path.stat().st_size > max_bytes:
            reason = f"it has {path.stat().st_size} bytes, and more than {max_bytes} are none"
        else:
            return path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = getattr(error, "strerror", None) or str(error)
    raise UserError(f"{what} '{path}' cannot be read: {reason}; {remedy}")


def read_text(path: Path, what: str, remedy: str, max_bytes: int = MAX_BYTES) -> str:
    """Reads UTF-8 text. Raises UserError."""
    try:
        return read_bytes(path, what, remedy, max_bytes).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{what} '{path}' cannot be read: it is not UTF-8 text (byte {error.start}); {remedy}"
        ) from None


def read_json(path: Path, what: str, remedy: str, max_bytes: int = MAX_BYTES) -> Any:
    """Reads any JSON value. Raises UserError."""
    try:
        return parse_json(read_bytes(path, what, remedy, max_bytes))
    except NotJson as error:
        raise UserError(f"{what} '{path}' is not JSON: {error}; {remedy}") from None


def read_object(path: Path, what: str, remedy: str, max_bytes: int = MAX_BYTES) -> dict[str, Any]:
    """Reads a JSON object. Raises UserError."""
    content = read_json(path, what, remedy, max_bytes)
    if not isinstance(content, dict):
        raise UserError(
            f"{what} '{path}' holds a {type(content).__name__}, but must hold a JSON object; {remedy}"
        )
    return content


def parse_json(data: bytes) -> Any:
    """Parses JSON. Raises NotJson."""
    try:
        value = json.loads(data.decode("utf-8-sig"), object_pairs_hook=_without_doubles)
        if data.count(b"[") + data.count(b"{") > MAX_DEPTH and _is_deeper(value, MAX_DEPTH):
            raise RecursionError
        if b"\\u" in data:
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise NotJson(f"it is not UTF-8 text (byte {error.start})") from None
    except UnicodeEncodeError:
        raise NotJson("it holds half a character (a lone surrogate \\uD8xx)") from None
    except RecursionError:
        raise NotJson(f"its lists and objects are more than {MAX_DEPTH} deep") from None
    except json.JSONDecodeError as error:
        raise NotJson(f"{error.msg} (line {error.lineno} column {error.colno})") from None
    except ValueError as error:
        raise NotJson(str(error).partition(";")[0]) from None
    return value


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the key {twice!r} stands twice in one object")
    return value


def _is_deeper(value: Any, levels: int) -> bool:
    if not isinstance(value, list | dict):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_is_deeper(one, levels - 1) for one in inner)


def lines_of(file: BinaryIO, start: int = 0) -> Iterator[tuple[int, bytes]]:
    """Yields the offset and the bytes of each line from byte `start` on, where `file` stands."""
    for line in file:
        yield start, line
        start += len(line)


def row_of(line: bytes) -> dict[str, Any] | None:
    """Parses a line that a run wrote; returns None for half a line, damage, or another value than an object."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None
