"""Forks this process, which has imported what a child needs, and passes messages between the two.

What comes back may have been written by a process that somebody's code has wrecked: it is lines of JSON, of bounded
length. What goes out is pickled.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import socket
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, Protocol

from mindgrpo.processes.child import describe_code
from mindgrpo.processes.linux import STOPPING, end_with_parent, kill_group

READ_BYTES = 1 << 16


class SupportsClose(Protocol):
    def close(self) -> object: ...


def fork(run: Callable[[], object], closing: Iterable[SupportsClose] = ()) -> int:
    """Calls `run` in a new process and returns its id.

    The process ends with this one, leads a session and hears signals as a new program does; it has no open `closing`.
    It ends when `run` does, with status 0, or 1 for an exception, and calls no exit handler.
    """
    parent, status = os.getpid(), 1
    pid = os.fork()
    if pid:
        return pid
    try:
        end_with_parent(parent)
        os.setsid()
        for number in STOPPING:
            signal.signal(number, signal.SIG_DFL)
        for connection in closing:
            connection.close()
        run()
        status = 0
    finally:
        os._exit(status)


def end_forked(pid: int) -> str:
    """Kills a forked process with what it started; returns how it ended, in words."""
    kill_group(pid)
    return describe_code(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


class Channel:
    """The socket to a process that answers; messages of more than `longest` bytes are its end."""

    def __init__(self, connection: socket.socket, longest: int) -> None:
        self.connection, self._longest = connection, longest
        self.text = bytearray()  # what has come and was not taken
        self._num_searched = 0
        connection.setblocking(False)

    def send(self, content: Any, seconds: float) -> None:
        """Waits at most `seconds`. One that takes nothing in, or has ended, is noticed by what is read."""
        self.connection.settimeout(seconds)
        with suppress(OSError):
            self.connection.sendall(pickle.dumps(content))
        self.connection.setblocking(False)

    def read(self) -> bool:
        """Reads what has come by now; returns False at the end."""
        chunk = b""
        with suppress(OSError):
            try:
                chunk = self.connection.recv(READ_BYTES)
            except BlockingIOError:
                return True
        self.text += chunk
        return bool(chunk) and len(self.text) <= self._longest

    def take(self) -> dict[str, Any] | None:
        """Returns the next message; None where it is incomplete. Raises ValueError for a line that is none."""
        end = self.text.find(b"\n", self._num_searched)
        self._num_searched = len(self.text) if end < 0 else 0
        if end < 0:
            return None
        line = bytes(self.text[:end])
        del self.text[: end + 1]
        try:
            message = json.loads(line)
        except RecursionError as error:
            raise ValueError(str(error)) from None
        if not isinstance(message, dict):
            raise ValueError("a message is a JSON object")
        return message

    def drop(self) -> None:
        """Forgets what has come."""
        self.text.clear()
        self._num_searched = 0

    def close(self) -> None:
        self.connection.close()


class AnsweringChannel:
    """The other end, in the process that answers."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.unsent = bytearray()
        self._received = connection.makefile("rb")

    def receive(self) -> Any:
        """Waits for what was sent. Raises EOFError at the end."""
        return pickle.load(self._received)

    def has_received(self) -> bool:
        """Returns whether `receive` has something to return by now; the end is nothing."""
        self.connection.setblocking(False)
        try:
            return bool(self._received.peek(1))
        finally:
            self.connection.setblocking(True)

    def send(self, message: Mapping[str, Any]) -> None:
        """Sends a message after what was printed before it, and waits until it is taken. Raises OSError."""
        self._add(message)
        self.connection.sendall(self.unsent)
        self.unsent.clear()

    def post(self, message: Mapping[str, Any]) -> None:
        """Sends a message as `send` does, but leaves in `unsent` what is not taken at once."""
        self._add(message)
        self.send_more()

    def send_more(self) -> None:
        """Sends as much of `unsent` as is taken at once. Raises OSError."""
        with suppress(BlockingIOError):
            while self.unsent:
                sent = self.connection.send(self.unsent, socket.MSG_DONTWAIT)
                del self.unsent[:sent]

    def _add(self, message: Mapping[str, Any]) -> None:
        for stream in (sys.stdout, sys.stderr):
            # The user's code may have closed or replaced it.
            with suppress(OSError, ValueError, AttributeError):
                stream.flush()
        self.unsent += json.dumps(message).encode() + b"\n"
