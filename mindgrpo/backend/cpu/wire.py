"""Bytes between two ranks of a job over TCP: the greeting that proves both know the job's secret, and frames.

A greeting is over in a few seconds or it has failed, whatever the other end sends. Refuses to read a frame that is
longer than was agreed, and to unpickle anything. What follows a greeting is not encrypted.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import select
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

MAGIC = b"mindgrpo-ranks-1"
NONCE_BYTES = 32
DIGEST_BYTES = hashlib.sha256().digest_size
GREETING_SECONDS = 10.0
LONGEST_HELLO = 64 << 10
CHECK_SECONDS = 0.5
YES, NO = b"Y", b"N"
_LENGTH = struct.Struct("!I")

Check = Callable[[], None]


class WrongToken(Exception):
    """The other end does not have this job's secret."""


class NotARank(Exception):
    """What came is not a rank's greeting."""


def _nothing() -> None:
    pass


def prepare(line: socket.socket, deadline: float) -> None:
    """Small messages go at once, and a host that has gone is noticed where nothing is under way."""
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    pause = max(1, int(deadline / 5))
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, pause)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, pause)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, max(1, int(deadline / pause) - 1))


def end_silence(line: socket.socket, deadline: float) -> None:
    """What is sent must be acknowledged in time. Only for a line that is always read: who does not read for long
    would count as gone."""
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(deadline * 1000))


def send_all(line: socket.socket, chunks: list[Any], check: Check = _nothing) -> None:
    """Raises OSError, and what `check` raises, which is asked before every wait."""
    for part in chunks:
        rest = memoryview(part).cast("B")
        while len(rest):
            try:
                rest = rest[line.send(rest) :]
            except BlockingIOError:
                _await(line, select.POLLOUT, check)


def receive_into(line: socket.socket, target: Any, check: Check = _nothing) -> None:
    """Fills `target`, by and by. Raises OSError, EOFError where the other end closed, and what `check` raises."""
    rest = memoryview(target).cast("B")
    while len(rest):
        try:
            got = line.recv_into(rest)
        except BlockingIOError:
            _await(line, select.POLLIN, check)
            continue
        if not got:
            raise EOFError("the other end has closed the connection")
        rest = rest[got:]


def _await(line: socket.socket, event: int, check: Check) -> None:
    """Checks however little comes: who sends a byte now and then must not hold up for ever."""
    poll = select.poll()
    poll.register(line, event)
    while True:
        check()
        if poll.poll(CHECK_SECONDS * 1000):
            return


def receive(line: socket.socket, num_bytes: int, check: Check = _nothing) -> bytes:
    buffer = bytearray(num_bytes)
    receive_into(line, buffer, check)
    return bytes(buffer)


def send_frame(line: socket.socket, value: Any, check: Check = _nothing) -> None:
    text = json.dumps(value).encode()
    send_all(line, [_LENGTH.pack(len(text)) + text], check)


def receive_frame(line: socket.socket, longest: int, check: Check = _nothing) -> Any:
    """Raises NotARank for what is too long or no JSON."""
    (length,) = _LENGTH.unpack(receive(line, _LENGTH.size, check))
    if length > longest:
        raise NotARank(f"a message of {length} bytes where {longest} is the most")
    try:
        return json.loads(receive(line, length, check))
    except ValueError:
        raise NotARank("a message that is no JSON") from None


def paced(check: Check) -> Check:
    """Asked at every turn of a loop, asks `check` twice a second only."""
    last = time.monotonic()

    def pace() -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= CHECK_SECONDS:
            last = now
            check()

    return pace


def until(deadline: float) -> Check:
    """A check that ends a wait at `deadline` of time.monotonic()."""

    def check() -> None:
        if time.monotonic() > deadline:
            raise TimeoutError("the other end did not answer in time")

    return check


def _proof(token: bytes, who: bytes, *chunks: bytes) -> bytes:
    """Of fixed lengths all but the last, so that no two lists of parts are one text."""
    return hmac.new(token, b"".join((MAGIC, who, *chunks)), hashlib.sha256).digest()


def greet(line: socket.socket, token: bytes, hello: dict[str, Any]) -> None:
    """The side that has connected. Raises WrongToken, NotARank, OSError or EOFError."""
    line.setblocking(False)
    check = until(time.monotonic() + GREETING_SECONDS)
    opening = receive(line, len(MAGIC) + NONCE_BYTES, check)
    if not opening.startswith(MAGIC):
        raise NotARank("another program listens there")
    theirs, mine = opening[len(MAGIC) :], os.urandom(NONCE_BYTES)
    text = json.dumps(hello).encode()
    proof = _proof(token, b"caller", theirs, mine, text)
    send_all(line, [MAGIC, mine, proof, _LENGTH.pack(len(text)), text], check)
    if receive(line, 1, check) != YES:
        raise WrongToken
    answer = receive(line, DIGEST_BYTES, check)
    if not hmac.compare_digest(answer, _proof(token, b"called", theirs, mine)):
        raise WrongToken


def answer(line: socket.socket, token: bytes) -> dict[str, Any]:
    """The side that was connected to; what the other says of itself. Raises as `greet` does."""
    line.setblocking(False)
    check = until(time.monotonic() + GREETING_SECONDS)
    mine = os.urandom(NONCE_BYTES)
    send_all(line, [MAGIC, mine], check)
    if receive(line, len(MAGIC), check) != MAGIC:
        raise NotARank("not a rank's greeting")
    theirs, proof = receive(line, NONCE_BYTES, check), receive(line, DIGEST_BYTES, check)
    (length,) = _LENGTH.unpack(receive(line, _LENGTH.size, check))
    if length > LONGEST_HELLO:
        raise NotARank(f"a greeting of {length} bytes")
    text = receive(line, length, check)
    if not hmac.compare_digest(proof, _proof(token, b"caller", mine, theirs, text)):
        send_all(line, [NO], check)
        raise WrongToken
    send_all(line, [YES, _proof(token, b"called", mine, theirs)], check)
    hello = json.loads(text)
    if not isinstance(hello, dict):
        raise NotARank("a greeting that says nothing")
    return hello
