"""Plain data between two processes that do not trust each other: framed JSON, decoded strictly.

Only None and values of exactly bool, int, float, complex, str, bytes, list, tuple, set, frozenset and dict
come out of `decode`, so comparing what it returned runs no code of the sender's.
"""

from __future__ import annotations

import json
import os
import struct

TYPE_CHECKING = False  # importing typing would take a tenth of the process's start
if TYPE_CHECKING:
    from typing import Any

HEADER = struct.Struct("<I")
MAX_MESSAGE_BYTES = 4 << 20
SCALARS = (bool, int, float, str)
SEQUENCES = {kind.__name__: kind for kind in (list, tuple, set, frozenset)}
KINDS = (*SCALARS, complex, bytes, dict, *SEQUENCES.values())


class NotPlain(TypeError):
    """The value is not plain data; the message is the name of its type."""


class BrokenMessage(ValueError):
    """What was received is not a message of this protocol."""


def encode(value: Any, exact: bool = True) -> Any:
    """Return what JSON can hold for `value`. Raises NotPlain.

    With `exact` false, an instance of a subclass (a Counter, an IntEnum) is sent as its built-in base.
    """
    kind = type(value)
    if not exact:
        kind = next((base for base in KINDS if isinstance(value, base)), kind)
    if value is None or kind in SCALARS:
        return value
    if kind is bytes:
        return ["bytes", value.hex()]
    if kind is complex:
        return ["complex", [value.real, value.imag]]
    if kind is dict:
        return ["dict", [[encode(key, exact), encode(value[key], exact)] for key in value]]
    if kind in KINDS:
        return [kind.__name__, [encode(item, exact) for item in value]]
    raise NotPlain(type(value).__name__)


def decode(coded: Any) -> Any:
    """Return the value that `encode` was given. Raises BrokenMessage, TypeError or ValueError."""
    if coded is None or type(coded) in SCALARS:
        return coded
    if type(coded) is not list or len(coded) != 2 or type(coded[0]) is not str:
        raise BrokenMessage
    kind, content = coded
    if kind == "bytes":
        return bytes.fromhex(content)
    if type(content) is not list:
        raise BrokenMessage
    if kind == "complex":
        real, imaginary = content
        return complex(real, imaginary)
    if kind == "dict":
        return {decode(key): decode(value) for key, value in content}
    if kind in SEQUENCES:
        return SEQUENCES[kind]([decode(item) for item in content])
    raise BrokenMessage


def send(descriptor: int, message: list[Any]) -> None:
    """Raises NotPlain for a message of more than 4 MiB, OSError where nobody reads."""
    text = json.dumps(message).encode("ascii")
    if len(text) > MAX_MESSAGE_BYTES:
        raise NotPlain(f"value of {len(text) >> 20} MiB")
    rest = memoryview(HEADER.pack(len(text)) + text)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def receive(descriptor: int) -> list[Any]:
    """Return the next message, a list. Raises BrokenMessage, ValueError or EOFError."""
    (size,) = HEADER.unpack(_read(descriptor, HEADER.size))
    if size > MAX_MESSAGE_BYTES:
        raise BrokenMessage
    message = json.loads(_read(descriptor, size))
    if type(message) is not list:
        raise BrokenMessage
    return message


def _read(descriptor: int, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        chunk = os.read(descriptor, size - len(data))
        if not chunk:
            raise EOFError
        data += chunk
    return bytes(data)
