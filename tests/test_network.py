"""How ranks of several hosts meet and who is turned away: greetings, tokens, strangers, slow and silent callers.

Over the loopback address, ranks as threads of one process. Does not prove anything about packets that are lost.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from hosts_as_processes import TOKEN, free_port

from mindgrpo.backend.contract import PeerLost
from mindgrpo.backend.cpu import network, wire
from mindgrpo.backend.cpu.network import Network, in_words
from mindgrpo.backend.cpu.placement import Placement
from mindgrpo.errors import UserError

HERE = "127.0.0.1"


def _placement(rank: int, port: int, token: bytes = TOKEN, **more: int) -> Placement:
    sizes = {"world_size": 4, "per_host": 2} | more
    return Placement(rank, sizes["world_size"], sizes["per_host"], (HERE, port), token, 5.0)


def _nothing(words: str) -> None: ...


class Meeting:
    """Threads that each stand for a rank; what came of each, by rank."""

    def __init__(self, *placements: Placement, say: Callable[[str], None] = _nothing) -> None:
        self.outcomes: dict[int, Any] = {}
        self._threads = [
            threading.Thread(target=self._meet, args=(placement, say)) for placement in placements
        ]
        for thread in self._threads:
            thread.start()

    def _meet(self, placement: Placement, say: Callable[[str], None]) -> None:
        own = Network(placement, say)
        try:
            own.meet()
            self.outcomes[placement.rank] = own
        except Exception as error:
            self.outcomes[placement.rank] = error

    def join(self) -> dict[int, Any]:
        for thread in self._threads:
            thread.join(20.0)
            assert not thread.is_alive()
        return self.outcomes


def _connected(port: int) -> socket.socket:
    until = time.monotonic() + 5.0
    while True:
        try:
            return socket.create_connection((HERE, port), timeout=5.0)
        except OSError:
            assert time.monotonic() < until
            time.sleep(0.02)


def _garbage(line: socket.socket) -> None:
    line.sendall(os.urandom(4096))


def _nothing_at_all(line: socket.socket) -> None: ...


def _a_web_browser(line: socket.socket) -> None:
    line.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")


def _a_huge_greeting(line: socket.socket) -> None:
    line.sendall(
        wire.MAGIC + bytes(wire.NONCE_BYTES + wire.DIGEST_BYTES) + struct.pack("!I", 1 << 31)
    )


def _half_a_greeting(line: socket.socket) -> None:
    line.sendall(wire.MAGIC[:5])


STRANGERS = (_garbage, _nothing_at_all, _a_web_browser, _a_huge_greeting, _half_a_greeting)


def test_strangers_neither_take_part_nor_hold_up_the_ranks() -> None:
    port = free_port()
    meeting = Meeting(_placement(0, port))
    lines = []
    for stranger in STRANGERS * 5:
        lines.append(_connected(port))
        stranger(lines[-1])
    started = time.monotonic()
    rest = Meeting(*(_placement(rank, port) for rank in (1, 2, 3)))
    outcomes = meeting.join() | rest.join()
    assert time.monotonic() - started < 5.0
    assert all(isinstance(outcomes[rank], Network) for rank in range(4)), outcomes
    for line in lines:
        line.close()


def test_a_caller_that_sends_a_byte_now_and_then_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wire, "GREETING_SECONDS", 1.0)
    ours, theirs = socket.socketpair()
    stop = threading.Event()

    def drip() -> None:
        while not stop.wait(0.1):
            theirs.send(wire.MAGIC[:1])

    thread = threading.Thread(target=drip)
    thread.start()
    started = time.monotonic()
    with pytest.raises((TimeoutError, wire.NotARank)):
        wire.answer(ours, TOKEN)
    stop.set()
    thread.join()
    assert time.monotonic() - started < 3.0


def test_a_rank_with_another_token_is_told_and_the_others_hear_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(network, "MEET_SECONDS", 2.0)
    port = free_port()
    outcomes = Meeting(
        _placement(0, port),
        *(_placement(r, port) for r in (1, 2)),
        _placement(3, port, b"another" * 3),
    ).join()
    assert isinstance(outcomes[3], UserError) and "set the same on every host" in str(outcomes[3])
    assert isinstance(outcomes[0], PeerLost) and "rank 3 did not come" in str(outcomes[0])
    assert "1 from 127.0.0.1 with another MINDGRPO_JOB_TOKEN" in str(outcomes[0])
    assert isinstance(outcomes[1], PeerLost) and "rank 0" in str(outcomes[1])


def test_a_listener_without_the_token_learns_nothing_and_is_not_believed() -> None:
    ours, theirs = socket.socketpair()
    seen = {}

    def false_rank_0() -> None:
        theirs.sendall(wire.MAGIC + bytes(wire.NONCE_BYTES))
        seen["all"] = theirs.recv(4096)
        theirs.sendall(wire.YES + bytes(wire.DIGEST_BYTES))

    thread = threading.Thread(target=false_rank_0)
    thread.start()
    with pytest.raises(wire.WrongToken):
        wire.greet(ours, TOKEN, {"rank": 1})
    thread.join()
    assert TOKEN not in seen["all"]


def test_a_recorded_greeting_cannot_be_played_again() -> None:
    """The other side's number is in the proof."""

    def converse(speak: Callable[[socket.socket], None]) -> Any:
        ours, theirs = socket.socketpair()
        thread = threading.Thread(target=speak, args=(theirs,))
        thread.start()
        try:
            return wire.answer(ours, TOKEN)
        finally:
            thread.join()

    recorded = bytearray()

    def record(line: socket.socket) -> None:
        real = line.send

        class Recorder:
            def __getattr__(self, name: str) -> Any:
                return getattr(line, name)

            def send(self, raw: Any) -> int:
                count = real(raw)
                recorded.extend(bytes(raw[:count]))
                return count

        wire.greet(Recorder(), TOKEN, {"rank": 1})  # type: ignore[arg-type]

    assert converse(record) == {"rank": 1}
    with pytest.raises(wire.WrongToken):
        converse(lambda line: line.sendall(recorded))


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        ({"world_size": 8}, "rank 3 at 127.0.0.1 has 8 ranks in all and rank 0 has 4"),
        ({"per_host": 1}, "rank 3 at 127.0.0.1 has 1 ranks on each host and rank 0 has 2"),
    ],
)
def test_hosts_that_were_started_differently_are_refused_on_both_sides(
    odd: dict[str, int], words: str
) -> None:
    port = free_port()
    placements = [_placement(rank, port) for rank in range(3)]
    outcomes = Meeting(*placements, _placement(3, port, **odd)).join()
    for rank in (0, 3):
        assert isinstance(outcomes[rank], UserError) and words in str(outcomes[rank])


def test_another_version_of_mindgrpo_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    real = Network._hello

    def older(self: Network, **more: Any) -> dict[str, Any]:
        hello = real(self, **more)
        return hello | {"version": "0.0.1"} if hello["rank"] == 2 else hello

    monkeypatch.setattr(Network, "_hello", older)
    outcomes = Meeting(*(_placement(rank, port) for rank in range(4))).join()
    assert "rank 2 at 127.0.0.1 has 0.0.1 as mindgrpo's version" in str(outcomes[0])


def test_a_rank_that_comes_late_is_awaited_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "SAY_AFTER_SECONDS", 0.5)
    port, said = free_port(), list[str]()
    meeting = Meeting(*(_placement(rank, port) for rank in range(3)), say=said.append)
    time.sleep(1.5)
    late = Meeting(_placement(3, port))
    outcomes = meeting.join() | late.join()
    assert all(isinstance(outcomes[rank], Network) for rank in range(4)), outcomes
    assert said == [f"waiting for rank 3 at 127.0.0.1 port {port}"]
    assert outcomes[1].address_of(2).address == HERE
    assert outcomes[3].name_of(0).startswith("host ") and "ranks 0 to 1" in outcomes[3].name_of(0)


def test_a_port_that_another_program_has_is_refused_in_a_sentence() -> None:
    with socket.create_server((HERE, 0)) as taken:
        port = int(taken.getsockname()[1])
        with pytest.raises(UserError, match=f"cannot listen at 127.0.0.1 port {port}"):
            Network(_placement(0, port), _nothing).meet()


def test_messages_of_many_megabytes_arrive_whole_through_small_buffers() -> None:
    ours, theirs = socket.socketpair()
    for line in (ours, theirs):
        line.setblocking(False)
        line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
    given, taken = os.urandom(32 << 20), bytearray(32 << 20)
    thread = threading.Thread(target=wire.send_all, args=(ours, [given[:1000], given[1000:]]))
    thread.start()
    wire.receive_into(theirs, taken)
    thread.join()
    assert bytes(taken) == given


def test_a_frame_longer_than_agreed_is_not_read() -> None:
    ours, theirs = socket.socketpair()
    ours.sendall(struct.pack("!I", 1 << 30))
    with pytest.raises(wire.NotARank):
        wire.receive_frame(theirs, 1 << 10)


def test_ranks_in_words() -> None:
    assert in_words([3]) == "rank 3"
    assert in_words(range(4, 8)) == "ranks 4 to 7"
    assert in_words([1, 3]) == "ranks 1, 3"
