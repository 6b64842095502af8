"""Framing of the protocol: 4 bytes big-endian length, then a JSON object in UTF-8. Standard library only.

Both sides import this file: the engine's process and the one that drives it.
"""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

Message = dict[str, Any]

_LENGTH = struct.Struct(">I")


class EngineFailure(Exception):
    """A request that failed: one sentence, and whether the user or the engine (or its driver) is to blame."""

    def __init__(self, sentence: str, kind: str = "engine") -> None:
        super().__init__(sentence)
        self.kind = kind

    def reply(self) -> Message:
        return {"type": "error", "error": str(self), "kind": self.kind}


class UserFailure(EngineFailure):
    """What the user asked for cannot be done."""

    def __init__(self, sentence: str) -> None:
        super().__init__(sentence, "user")


def sentence(error: BaseException) -> str:
    """The error in one line: the first lines of its text that say something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join([f"{type(error).__name__}:", *lines[:3]]) if lines else type(error).__name__


def send(connection: socket.socket, message: Message) -> None:
    body = json.dumps(message, separators=(",", ":")).encode("utf-8")
    connection.sendall(_LENGTH.pack(len(body)) + body)


def receive(connection: socket.socket) -> Message | None:
    """The next message; None where the other side has closed between two of them."""
    head = _read(connection, _LENGTH.size)
    if not head:
        return None
    length = _LENGTH.unpack(head)[0] if len(head) == _LENGTH.size else -1
    body = _read(connection, length)
    if len(body) != length:
        raise ConnectionError("the connection ended in the middle of a message")
    message = json.loads(body)
    if not isinstance(message, dict):
        raise ValueError(f"a message is a JSON object, not {type(message).__name__}")
    return message


def _read(connection: socket.socket, length: int) -> bytearray:
    """That many bytes, or fewer where the other side has closed."""
    data = bytearray()
    while len(data) < length:
        chunk = connection.recv(min(length - len(data), 1 << 20))
        if not chunk:
            break
        data += chunk
    return data
