"""Messages between the scoring rank and a worker: a length, then the bytes.

What a worker is told is pickled; what it says is JSON, because its bytes may come from a process that
somebody's code has wrecked. Refuses to wait on the scoring rank's side.
"""

from __future__ import annotations

import json
import os
import pickle
import socket
import struct
from typing import Any

HEADER = struct.Struct("<Q")
CHUNK = 1 << 16
LONGEST_MESSAGE = 1 << 30
KEPT_OUTPUT = 16 << 10


class Closed(Exception):
    """The other side has ended."""


class WorkerEnd:
    """The worker's side: waits."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)

    def receive(self) -> Any:
        (size,) = HEADER.unpack(self._read(HEADER.size))
        return pickle.loads(self._read(size))

    def say(self, message: dict[str, Any]) -> None:
        text = json.dumps(message).encode()
        self._socket.sendall(HEADER.pack(len(text)) + text)

    def _read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            piece = self._socket.recv(min(size - len(data), 1 << 20))
            if not piece:
                raise Closed
            data += piece
        return bytes(data)


class RankEnd:
    """The scoring rank's side: `pump` moves what can be moved without waiting."""

    def __init__(self, side: socket.socket) -> None:
        side.setblocking(False)
        self._socket = side
        self._outgoing = memoryview(b"")
        self._incoming = bytearray()
        self.is_closed = False

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def wants_to_write(self) -> bool:
        return bool(self._outgoing) and not self.is_closed

    def tell(self, message: Any) -> None:
        text = pickle.dumps(message)
        self._outgoing = memoryview(bytes(self._outgoing) + HEADER.pack(len(text)) + text)

    def pump(self) -> list[dict[str, Any]]:
        """Messages that have arrived in full. Sets `is_closed` where the worker has ended or raves."""
        if self.is_closed:
            return []
        try:
            while self._outgoing:
                self._outgoing = self._outgoing[self._socket.send(self._outgoing) :]
        except BlockingIOError:
            pass
        except OSError:
            self._outgoing = memoryview(b"")
        try:
            while piece := self._socket.recv(CHUNK):
                self._incoming += piece
            self.is_closed = True
        except BlockingIOError:
            pass
        except OSError:
            self.is_closed = True
        return self._taken()

    def _taken(self) -> list[dict[str, Any]]:
        messages = []
        while len(self._incoming) >= HEADER.size:
            (size,) = HEADER.unpack_from(self._incoming)
            end = HEADER.size + size
            if size > LONGEST_MESSAGE:
                self.is_closed = True
                break
            if len(self._incoming) < end:
                break
            try:
                messages.append(json.loads(self._incoming[HEADER.size : end]))
            except ValueError:
                self.is_closed = True
            del self._incoming[:end]
        return [message for message in messages if isinstance(message, dict)]

    def close(self) -> None:
        self.is_closed = True
        self._socket.close()


class Output:
    """What a worker prints: the first bytes are kept, all are counted."""

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self._descriptor = descriptor
        self._kept = bytearray()
        self._num_bytes = 0
        # A worker may close what it prints to and live on.
        self.is_at_end = False

    def fileno(self) -> int:
        return self._descriptor

    def pump(self, most: int = 1 << 22) -> None:
        """Takes at most about `most` bytes, so that who prints without end stops nobody."""
        taken = 0
        while taken < most:
            try:
                piece = os.read(self._descriptor, CHUNK)
            except BlockingIOError:
                return
            if not piece:
                self.is_at_end = True
                return
            taken += len(piece)
            self._num_bytes += len(piece)
            self._kept += piece[: max(0, KEPT_OUTPUT - len(self._kept))]

    def take(self) -> tuple[str, int]:
        """The kept text and the number of bytes since the last call."""
        text, num_bytes = self._kept.decode("utf-8", "replace"), self._num_bytes
        self._kept, self._num_bytes = bytearray(), 0
        return text, num_bytes

    def close(self) -> None:
        os.close(self._descriptor)
