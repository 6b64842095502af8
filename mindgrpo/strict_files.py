"""Text and JSON files that a user hands over, read whole and strictly: the one way in for all of them.

Refuses what is no regular file (a pipe would never end), what is too large to be what it is said to be, text that is
not UTF-8, keys that stand twice, half characters and nesting that no program writes. Executes nothing.
"""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath
from typing import Any

from mindgrpo.errors import UserError

MAX_BYTES = 1 << 28
MAX_DEPTH = 100


class NotJson(ValueError):
    """The message is a part of a sentence: what is wrong, and where."""


def no_path(text: str) -> str | None:
    """Why no file can have this name on any system that we know, as a part of a sentence; None where one can."""
    if "\0" in text:
        return "a path has no NUL in it"
    data = text.encode("utf-8", "surrogateescape")
    if len(data) > 4000 or max(map(len, data.split(b"/"))) > 255:
        return "no path is that long"
    return None


def is_inside(name: str) -> bool:
    """Whether a name that a file gives stays in that file's folder, by its spelling: links are the user's own."""
    parts = PurePosixPath(name.replace("\\", "/")).parts
    fits = all(len(part.encode("utf-8", "replace")) < 256 for part in parts) and len(name) < 1024
    return fits and name.isprintable() and ".." not in parts and not name.startswith(("/", "\\"))


def read_bytes(path: Path, what: str, remedy: str, most: int = MAX_BYTES) -> bytes:
    """`what` and `remedy` are parts of the sentence, as in "the configuration" and "give a YAML file"."""
    try:
        if not path.is_file():
            reason = "it is no regular file" if path.exists() else "No such file"
        elif path.stat().st_size > most:
            reason = f"it has {path.stat().st_size} bytes, and more than {most} are none"
        else:
            return path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = getattr(error, "strerror", None) or str(error)
    raise UserError(f"{what} '{path}' cannot be read: {reason}; {remedy}")


def read_text(path: Path, what: str, remedy: str, most: int = MAX_BYTES) -> str:
    try:
        return read_bytes(path, what, remedy, most).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{what} '{path}' cannot be read: it is not UTF-8 text (byte {error.start}); {remedy}"
        ) from None


def read_object(path: Path, what: str, remedy: str, most: int = MAX_BYTES) -> dict[str, Any]:
    """The JSON object that a file holds. Raises UserError."""
    content = read_json(path, what, remedy, most)
    if not isinstance(content, dict):
        raise UserError(
            f"{what} '{path}' holds a {type(content).__name__}, but must hold a JSON object; {remedy}"
        )
    return content


def read_json(path: Path, what: str, remedy: str, most: int = MAX_BYTES) -> Any:
    try:
        return parse_json(read_bytes(path, what, remedy, most))
    except NotJson as error:
        raise UserError(f"{what} '{path}' is not JSON: {error}; {remedy}") from None


def parse_json(data: bytes) -> Any:
    """Raises NotJson."""
    try:
        text = data.decode("utf-8-sig")
        value = json.loads(text, object_pairs_hook=_without_doubles)
        if data.count(b"[") + data.count(b"{") > MAX_DEPTH:
            _check_depth(text)
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
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} stands twice in one object")
    return found


def _check_depth(text: str) -> None:
    depth, in_text, escaped = 0, False, False
    for letter in text:
        if in_text:
            in_text = escaped or letter != '"'
            escaped = letter == "\\" and not escaped
        elif letter == '"':
            in_text = True
        elif letter in "[{":
            depth += 1
            if depth > MAX_DEPTH:
                raise RecursionError
        elif letter in "]}":
            depth -= 1
