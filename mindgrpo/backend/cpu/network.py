"""Connections between this rank and ranks of other hosts: how all meet at rank 0, and one line for each purpose.

Every connection begins with a greeting that proves the job's secret; whatever else connects is turned away and holds
up nobody.
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import mindgrpo
from mindgrpo.backend.contract import PeerLost
from mindgrpo.backend.cpu import wire
from mindgrpo.backend.cpu.placement import TOKEN_KEY, Placement
from mindgrpo.errors import UserError

MEET_SECONDS = 300.0
RETRY_SECONDS = 0.2
ANSWER_SECONDS = 10.0
LATE_SECONDS = 3.0
# A rank that others are late for says so, once.
SAY_AFTER_SECONDS = 15.0
LONGEST_TABLE = 16 << 20
MAX_GREETINGS = 64


@dataclass(frozen=True)
class Caller:
    """A rank that has called rank 0, and what it says of itself."""

    hello: dict[str, Any]
    line: socket.socket
    address: str


Arrived = Callable[[Caller], None]


@dataclass(frozen=True)
class Address:
    """Where a rank listens, and what its host is called."""

    address: str
    port: int
    host_name: str


class Listener:
    """Greets who connects, each in a thread; `arrived` gets what a rank says of itself and its line."""

    def __init__(self, address: str, port: int, token: bytes, arrived: Arrived) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.create_server((address, port), family=family, backlog=1024)
        self._token, self._arrived = token, arrived
        self._room = threading.BoundedSemaphore(MAX_GREETINGS)
        # (address, what was wrong), counted.
        self.turned_away: Counter[tuple[str, str]] = Counter()
        threading.Thread(target=self._serve, name="listener", daemon=True).start()

    @property
    def port(self) -> int:
        return int(self._socket.getsockname()[1])

    def close(self) -> None:
        # Closing alone leaves the thread in accept.
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _serve(self) -> None:
        while True:
            self._room.acquire()
            try:
                line, source = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._greet, args=(line, source[0]), daemon=True).start()

    def _greet(self, line: socket.socket, source: str) -> None:
        try:
            hello = wire.answer(line, self._token)
        except (wire.WrongToken, wire.NotARank, OSError, EOFError, ValueError) as why:
            self.turned_away[source, _in_words(why)] += 1
            line.close()
        else:
            self._arrived(Caller(hello, line, source))
        finally:
            self._room.release()


def _in_words(why: Exception) -> str:
    if isinstance(why, wire.WrongToken):
        return f"another {TOKEN_KEY}"
    return "no greeting of a rank"


class Network:
    """`meet` first, all ranks together. `say` is told what a user who waits should know."""

    def __init__(self, placement: Placement, say: Callable[[str], None]) -> None:
        self._placement, self._say = placement, say
        self._addresses: list[Address] = []
        self._lines: dict[tuple[int, str], socket.socket] = {}
        self._callers: dict[int, Caller] = {}
        self._changed = threading.Condition()
        self._listener: Listener | None = None

    # -- meeting ---------------------------------------------------------------------------------------------

    def meet(self) -> None:
        """Returns when every rank of the job knows where the others are. Raises UserError or PeerLost."""
        deadline = time.monotonic() + MEET_SECONDS
        try:
            meet = self._call if self._placement.rank else self._host_meeting
            table = meet(deadline)
        except BaseException:
            self.close()
            raise
        self._addresses = [Address(*row) for row in table]

    def address_of(self, rank: int) -> Address:
        return self._addresses[rank]

    def name_of(self, host: int) -> str:
        """Such as `host 10.0.0.2 (ranks 4 to 7)`."""
        ranks = self._placement.ranks_of(host)
        peer = self._addresses[ranks[0]]
        name = peer.address if peer.host_name in ("", peer.address) else peer.host_name
        known = f"{name}, {peer.address}" if name != peer.address else name
        return f"host {known} ({in_words(ranks)})"

    def _host_meeting(self, deadline: float) -> list[tuple[str, int, str]]:
        address, port = self._placement.master
        try:
            address = _resolved(address)
            self._listener = Listener(address, port, self._placement.token, self._arrived)
        except OSError as error:
            raise UserError(
                f"rank 0 cannot listen at {address} port {port} ({error.strerror or error}): give mindgrpo launch "
                "--master an address of the first host and a port that is free there, and the one after it too."
            ) from None
        refused = self._await_callers(deadline, f"{address} port {port}")
        callers = dict(self._callers)
        rows = [(address, port, socket.gethostname())]
        for _, caller in sorted(callers.items()):
            hello = caller.hello
            rows.append((caller.address, int(hello["port"]), str(hello["host"])))
        answer = {"refused": refused} if refused else {"ranks": rows}
        for caller in callers.values():
            with suppress(OSError):  # who has gone meanwhile is missed later
                wire.send_frame(caller.line, answer, wire.until(time.monotonic() + ANSWER_SECONDS))
            caller.line.close()
        if refused:
            raise UserError(refused)
        return rows

    def _await_callers(self, deadline: float, where: str) -> str:
        """Why a rank that has come cannot take part; empty when all have come and can."""
        world_size, is_announced = self._placement.world_size, False
        started = time.monotonic()
        with self._changed:
            while True:
                for caller in self._callers.values():
                    if refused := self._refusal(caller):
                        # Who is about to come shall hear it too.
                        self._changed.wait_for(self._all_have_come, LATE_SECONDS)
                        return refused
                if self._all_have_come():
                    return ""
                missing = in_words([r for r in range(1, world_size) if r not in self._callers])
                if time.monotonic() > deadline:
                    raise PeerLost(
                        f"{missing} did not come to {where} within {MEET_SECONDS:.0f} s{self._others()}"
                    )
                if not is_announced and time.monotonic() - started > SAY_AFTER_SECONDS:
                    is_announced = True
                    self._say(f"waiting for {missing} at {where}{self._others()}")
                self._changed.wait(wire.CHECK_SECONDS)

    def _all_have_come(self) -> bool:
        return len(self._callers) >= self._placement.world_size - 1

    def _others(self) -> str:
        """Who was turned away, for a message."""
        assert self._listener is not None
        sources = sorted(self._listener.turned_away.items())[:5]
        reasons = [f"{count} from {source} with {why}" for (source, why), count in sources]
        return f" (turned away: {', '.join(reasons)})" if reasons else ""

    def _hello(self, **more: Any) -> dict[str, Any]:
        return {
            "rank": self._placement.rank,
            "world_size": self._placement.world_size,
            "per_host": self._placement.per_host,
            "version": mindgrpo.__version__,
            "order": sys.byteorder,
            "host": socket.gethostname(),
            **more,
        }

    def _refusal(self, caller: Caller) -> str:
        hello, mine = caller.hello, self._hello()
        source = f"rank {hello['rank']} at {caller.address}"
        for key, what in (
            ("world_size", "ranks in all"),
            ("per_host", "ranks on each host"),
            ("version", "as mindgrpo's version"),
            ("order", "endian numbers"),
        ):
            if hello.get(key) != mine[key]:
                return (
                    f"{source} has {hello.get(key)} {what} and rank 0 has {mine[key]}: start all hosts "
                    "alike, with the same mindgrpo and the same --ranks and --hosts."
                )
        if not 0 < hello["rank"] < self._placement.world_size:
            return f"{source} is none of {self._placement.world_size} ranks: start it with mindgrpo launch."
        return ""

    def _call(self, deadline: float) -> list[tuple[str, int, str]]:
        address, port = self._placement.master
        try:
            address = _resolved(address)
        except OSError as error:
            raise UserError(
                f"the first host's address {address} is not known here ({error.strerror or error}): give "
                "mindgrpo launch --master an address that every host knows."
            ) from None
        line = self._reach(address, port, deadline)
        self._listener = Listener(line.getsockname()[0], 0, self._placement.token, self._arrived)
        where = f"{address} port {port}"
        self._greet(line, self._hello(purpose="meet", port=self._listener.port), where)
        try:
            answer = wire.receive_frame(line, LONGEST_TABLE, wire.until(deadline + MEET_SECONDS))
        except (OSError, EOFError, wire.NotARank):
            raise PeerLost(f"rank 0 at {where} has ended before all ranks had met") from None
        finally:
            line.close()
        if "refused" in answer:
            raise UserError(answer["refused"])
        return [(str(a), int(p), str(h)) for a, p, h in answer["ranks"]]

    def _reach(self, address: str, port: int, deadline: float) -> socket.socket:
        """Rank 0 may come later than this one."""
        started, is_announced = time.monotonic(), False
        while True:
            try:
                return socket.create_connection((address, port), timeout=wire.GREETING_SECONDS)
            except OSError as error:
                why = error.strerror or str(error)
            if time.monotonic() > deadline:
                raise PeerLost(
                    f"rank 0 at {address} port {port} could not be reached within {MEET_SECONDS:.0f} s ({why}): "
                    "see that it was started, and that no firewall is between"
                ) from None
            if (
                not is_announced
                and self._placement.leads
                and time.monotonic() - started > SAY_AFTER_SECONDS
            ):
                is_announced = True
                self._say(f"waiting for rank 0 at {address} port {port} ({why})")
            time.sleep(RETRY_SECONDS)

    def _greet(self, line: socket.socket, hello: dict[str, Any], where: str) -> None:
        try:
            wire.greet(line, self._placement.token, hello)
        except wire.WrongToken:
            raise UserError(
                f"{TOKEN_KEY} of rank {self._placement.rank} is not that of the rank at {where}: set the same on "
                "every host."
            ) from None
        except wire.NotARank as why:
            raise UserError(
                f"what answers at {where} is no rank of this job ({why}): give mindgrpo launch --master a port "
                "that is free on the first host, and the one after it too."
            ) from None
        except (OSError, EOFError) as error:
            raise PeerLost(f"the rank at {where} did not answer ({error})") from None
        wire.prepare(line, self._placement.deadline)

    def _arrived(self, caller: Caller) -> None:
        rank, purpose, line = caller.hello.get("rank"), caller.hello.get("purpose"), caller.line
        with self._changed:
            if not isinstance(rank, int) or not isinstance(purpose, str):
                line.close()
            elif purpose != "meet":
                wire.prepare(line, self._placement.deadline)
                self._lines[rank, purpose] = line
            elif self._placement.rank or rank in self._callers:
                line.close()
            else:
                self._callers[rank] = caller
            self._changed.notify_all()

    # -- lines -----------------------------------------------------------------------------------------------

    def line(self, rank: int, purpose: str, check: wire.Check) -> socket.socket:
        """The line to `rank` for `purpose`, which both ask for once; it never blocks (wire.py waits).

        Raises PeerLost, and what `check` raises while the other has not asked yet.
        """
        if rank < self._placement.rank:
            return self._dial(rank, purpose, check)
        with self._changed:
            while (rank, purpose) not in self._lines:
                self._changed.wait(wire.CHECK_SECONDS)
                if (rank, purpose) not in self._lines:
                    check()
            return self._lines.pop((rank, purpose))

    def _dial(self, rank: int, purpose: str, check: wire.Check) -> socket.socket:
        peer = self._addresses[rank]
        deadline = time.monotonic() + self._placement.deadline
        while True:
            check()
            try:
                line = socket.create_connection((peer.address, peer.port), timeout=5.0)
                break
            except OSError as error:
                if time.monotonic() > deadline:
                    raise PeerLost(
                        f"rank {rank} on {self.name_of(self._placement.host_of(rank))} cannot be connected to "
                        f"({error.strerror or error})"
                    ) from None
            time.sleep(RETRY_SECONDS)
        self._greet(line, self._hello(purpose=purpose), f"{peer.address} port {peer.port}")
        return line

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()


def _resolved(name: str) -> str:
    """The first address of a host's name, IPv4 before IPv6."""
    addresses = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return str(sorted(addresses, key=lambda entry: entry[0] != socket.AF_INET)[0][4][0])


def in_words(ranks: Any) -> str:
    """Such as `ranks 4 to 7`, `rank 3` or `ranks 1, 3`."""
    ranks = list(ranks)
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks))}"
