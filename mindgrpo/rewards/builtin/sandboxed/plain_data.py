"""Plain data between two processes that do not trust each other, as bytes that are decoded strictly.

A value is the index of its type in KINDS (one byte), a size (four bytes, little endian) and its content: so many
bytes, or so many values. Only these types themselves come out, so comparing what was decoded runs no code of
the sender's. Imports nothing that takes time, for every process here imports this.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False  # importing typing would take a tenth of the process's start
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

MAX_MESSAGE_BYTES = 4 << 20
NOTHING = type(None)
KINDS = (
    *(NOTHING, bool, int, float, complex, str, bytes),
    *(list, tuple, set, frozenset, dict),
)
TO_BYTES: dict[type, Callable[[Any], bytes]] = {
    NOTHING: lambda _: b"",
    bool: lambda value: b"1" if value else b"",
    int: lambda value: int.to_bytes(value, value.bit_length() // 8 + 1, "little", signed=True),
    float: lambda value: float.hex(value).encode(),
    complex: lambda value: f"{value.real.hex()} {value.imag.hex()}".encode(),
    str: lambda value: str.encode(value, "utf-8", "surrogatepass"),
    bytes: bytes,
}
FROM_BYTES: dict[type, Callable[[bytes], Any]] = {
    NOTHING: lambda _: None,
    bool: bool,
    int: lambda content: int.from_bytes(content, "little", signed=True),
    float: lambda content: float.fromhex(content.decode()),
    complex: lambda content: complex(*map(float.fromhex, content.decode().split())),
    str: lambda content: content.decode("utf-8", "surrogatepass"),
    bytes: bytes,
}


class NotPlain(TypeError):
    """The value is not plain data; the message is the name of its type."""


class BrokenMessage(ValueError):
    """What was received is not what `send` writes."""


def encode(value: Any, exact: bool = True) -> bytes:
    """Encodes a value. Raises NotPlain, also for more than 4 MiB.

    With `exact` false, an instance of a subclass (a Counter, an IntEnum) is sent as its built-in base.
    """
    chunks: list[bytes] = []
    _encode(value, exact, chunks)
    encoded = b"".join(chunks)
    if len(encoded) > MAX_MESSAGE_BYTES:
        raise NotPlain(f"value of {len(encoded) >> 20} MiB")
    return encoded


def _encode(value: Any, exact: bool, chunks: list[bytes]) -> None:
    kind = type(value)
    if kind not in KINDS and not exact:
        kind = next((base for base in KINDS if isinstance(value, base)), kind)
    if kind not in KINDS:
        raise NotPlain(type(value).__name__)
    tag = bytes([KINDS.index(kind)])
    if kind in TO_BYTES:
        content = TO_BYTES[kind](value)
        chunks += [tag, len(content).to_bytes(4, "little"), content]
        return
    chunks += [tag, len(value).to_bytes(4, "little")]
    for item in value:
        _encode(item, exact, chunks)
        if kind is dict:
            _encode(value[item], exact, chunks)


def decode(data: bytes) -> Any:
    """Returns the value that was encoded. Raises an Exception of some kind if that is not what `data` is."""
    value, end = _decode(data, 0)
    if end != len(data):
        raise BrokenMessage
    return value


def _decode(data: bytes, start: int) -> tuple[Any, int]:
    kind: Any = KINDS[data[start]]
    size, end = int.from_bytes(data[start + 1 : start + 5], "little"), start + 5
    if kind in FROM_BYTES:
        return FROM_BYTES[kind](data[end : end + size]), end + size
    items = []
    for _ in range(2 * size if kind is dict else size):
        item, end = _decode(data, end)
        items.append(item)
    return dict(zip(items[::2], items[1::2], strict=True)) if kind is dict else kind(items), end


def send(descriptor: int, encoded: bytes) -> None:
    """Raises OSError where nobody reads."""
    rest = len(encoded).to_bytes(4, "little") + encoded
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def receive(descriptor: int) -> Any:
    """Returns the next message. Raises EOFError where there is none, and what `decode` raises."""
    size = int.from_bytes(_read(descriptor, 4), "little")
    if size > MAX_MESSAGE_BYTES:
        raise BrokenMessage
    return decode(_read(descriptor, size))


def _read(descriptor: int, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        chunk = os.read(descriptor, size - len(data))
        if not chunk:
            raise EOFError
        data += chunk
    return bytes(data)
