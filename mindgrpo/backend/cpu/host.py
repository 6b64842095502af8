"""Rendezvous of the ranks of one host: they find each other, map shared memory, wait, and detect that a peer died.

Shared memory is anonymous (memfd): a rank announces each segment on the job's board, and its peers open it through
/proc. This takes no space in /dev/shm, and a crash leaves nothing behind. The board itself, a few pages, has a file
name until all ranks have mapped it.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import mmap
import os
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from mindgrpo.backend.contract import PeerLost
from mindgrpo.backend.cpu.waiting import (
    LINE,
    Counters,
    PolledCounters,
    SleepingCounters,
    Waits,
    unheard,
)
from mindgrpo.backend.host_memory import address_of
from mindgrpo.backend.targets import BOARD_FOLDERS, SHARED_MEMORY, check_hosts
from mindgrpo.errors import UserError, whole_number
from mindgrpo.health.rank_health import RankHealth
from mindgrpo.processes.linux import is_alive

PAGE_BYTES = 4096
# Importing takes ranks a while before they open the board, and their process ids are unknown until then.
MEET_SECONDS = 300.0
MEET_NAPS = (0.001, 0.02)
STALE_SECONDS = 3600.0
MAX_OFFERS = 1000


def job_name(environment: Mapping[str, str]) -> str:
    """Returns a job name that is the same for all ranks of one msrun (same parent process and port), and unique."""
    job = environment.get("MINDGRPO_JOB")
    return job or f"{os.getppid()}-{environment.get('MS_SCHED_PORT', '0')}"


def own_rank(environment: Mapping[str, str], world_size: int) -> int:
    """Returns this process's rank. Raises UserError if RANK_ID is missing or the ranks are on several hosts."""
    rank = environment.get("RANK_ID", "")
    if whole_number(rank) is None:
        raise UserError(
            f"RANK_ID is '{rank}', but must be this process's number among MS_WORKER_NUM={world_size}; start the ranks "
            "with msrun, which sets both."
        )
    check_hosts(SHARED_MEMORY, environment, world_size)
    # msrun numbers devices from 0 on every host.
    if environment.get("DEVICE_ID", rank) != rank:
        raise UserError(
            f"rank {rank} of {world_size} is on one of several hosts, but this backend joins ranks through the memory "
            "of one host only; set context.backend: device, which joins hosts through MindSpore's cluster."
        )
    return int(rank)


class LocalRanks:
    """This rank and its peers: the `world_size` ranks of `job`, all on one host.

    `library` is None without a C compiler, and waits then poll. `spins`: see SleepingCounters. `health` reports waits
    and knows why a rank ended.
    """

    def __init__(
        self,
        job: str,
        rank: int,
        world_size: int,
        library: ctypes.CDLL | None = None,
        spins: int = 0,
        health: RankHealth | None = None,
    ) -> None:
        self._health = health
        self._waits: Waits = health.waits if health else unheard
        if health and library is not None:
            library.group_tell_waits_at.argtypes = [ctypes.c_void_p]
            library.group_tell_waits_at(health.waits_address)
            # The library writes to its memory as long as it is loaded.
            library.__dict__["waits_written_by"] = health
        if library is not None:
            library.first_lost.argtypes = [ctypes.c_void_p, ctypes.c_int32]
            library.first_lost.restype = ctypes.c_int64
        self.job, self.rank, self.world_size = job, rank, world_size
        self.library, self.spins = library, spins
        self._pids: dict[int, int] = {}
        self._board: Board | None = None

    @property
    def board(self) -> Board:
        if self._board is None:
            self._board = Board(self)
        return self._board

    def know(self, rank: int, pid: int) -> None:
        self._pids[rank] = pid

    def pid_of(self, rank: int) -> int:
        return self._pids[rank]

    def check_failure(self) -> None:
        """Raises PeerLost if the C library failed because a rank has ended."""
        pid = 0 if self.library is None else self.library.group_lost_pid()
        if pid:
            raise self.lost(pid)

    @contextmanager
    def naming_the_lost(self) -> Iterator[None]:
        """Context manager that replaces a RuntimeError by PeerLost if a rank's death made the C library fail."""
        try:
            yield
        except RuntimeError:
            self.check_failure()
            raise

    def first_ended(self, pids: np.ndarray, address: int) -> int:
        """Returns the process id of the first rank that was seen to have ended, or 0 if all are alive.

        `pids` int64 [ranks + 1] at `address`, in shared memory: its last element stores the result for all members.
        """
        if self.library is not None:
            return int(self.library.first_lost(address, len(pids) - 1))
        if not pids[-1]:
            pids[-1] = next((pid for pid in pids[:-1].tolist() if pid and not is_alive(pid)), 0)
        return int(pids[-1])

    def lost(self, pid: int) -> PeerLost:
        rank = next((rank for rank, known in self._pids.items() if known == pid), None)
        if rank is None:
            return PeerLost(f"process {pid} of this job has ended; its log says why")
        known = self._health.how_rank_ended(rank) if self._health else ""
        return PeerLost(known or f"rank {rank} (process {pid}) has ended; its log says why")

    def counters(self, memory: mmap.mmap, start: int, count: int) -> Counters:
        if self.library is None:
            return PolledCounters(memoryview(memory)[start : start + count * LINE], self._waits)
        return SleepingCounters(self.library, address_of(memory) + start, self.spins, self._waits)


def header_bytes(num_ranks: int) -> int:
    """Returns the header size of a shared segment, in whole pages.

    The header has a counter per rank for the segment's user, an "attached" counter per rank, the ranks' process ids,
    and the id of the first process whose end was noticed.
    """
    used = 2 * num_ranks * LINE + 8 * (num_ranks + 1)
    return -(-used // PAGE_BYTES) * PAGE_BYTES


class Joined:
    """A header and `num_bytes` of memory that all `ranks` have mapped. Closes the file `descriptor`."""

    def __init__(
        self, host: LocalRanks, ranks: Sequence[int], descriptor: int, num_bytes: int
    ) -> None:
        self._host, self._ranks = host, tuple(ranks)
        size = len(self._ranks)
        self._header_bytes = header_bytes(size)
        self.memory = mmap.mmap(descriptor, self._header_bytes + num_bytes)
        self._pids_start = 2 * size * LINE
        self._pids = np.frombuffer(self.memory, np.int64, size + 1, self._pids_start)
        self.counters = host.counters(self.memory, 0, size)
        try:
            self._attach()
        finally:
            os.close(descriptor)

    def _attach(self) -> None:
        size = len(self._ranks)
        index = self._ranks.index(self._host.rank)
        start = size * LINE
        attached = self._host.counters(self.memory, start, size)
        self._pids[index] = os.getpid()
        attached.post(index, attached.kind)
        attached.wait(range(size), 1, self.check)
        kinds = np.frombuffer(self.memory, np.uint32, size * LINE // 4, start)[:: LINE // 4]
        if len(set(kinds.tolist())) > 1:
            raise RuntimeError(
                f"ranks {self._ranks} do not all have the C kernels: set MINDGRPO_NATIVE=0 for all, "
                "or see that each finds the compiler and ~/.cache/mindgrpo"
            )

    def check(self) -> None:
        """Raises PeerLost if a member has ended; every member names the one whose end was noticed first."""
        first = self._host.first_ended(self._pids, self.pids_address)
        if first:
            raise self._host.lost(first)

    @property
    def address(self) -> int:
        return address_of(self.memory) + self._header_bytes

    @property
    def pids_address(self) -> int:
        return address_of(self.memory) + self._pids_start

    def array(self, start: int, num_bytes: int) -> np.ndarray:
        """Returns a view, uint8 [num_bytes], from byte `start` after the header."""
        return np.frombuffer(self.memory, np.uint8, num_bytes, self._header_bytes + start)


class Board(Joined):
    """Announces the shared memory of each rank to its peers: (hash of the name, file descriptor), in order."""

    def __init__(self, host: LocalRanks) -> None:
        self._deadline = time.monotonic() + MEET_SECONDS
        self._num_offers = 0
        size = host.world_size
        num_bytes = size * MAX_OFFERS * 16
        name = f"mindgrpo-{host.job}-board"
        total = header_bytes(size) + num_bytes
        if host.rank == 0:
            _remove_stale()
            path, descriptor = _create(name, total)
        else:
            path, descriptor = self._open(name, total)
        try:
            super().__init__(host, range(size), descriptor, num_bytes)
        finally:
            # Even after a failure: no other rank will join through this file.
            path.unlink(missing_ok=True)
        for rank, pid in zip(self._ranks, self._pids[:-1].tolist(), strict=True):
            host.know(rank, pid)
        table = self.array(0, num_bytes).view(np.int64)
        self._offers = table.reshape(size, MAX_OFFERS, 2)

    def check(self) -> None:
        if time.monotonic() > self._deadline:
            here = self._pids[:-1].tolist()
            missing = [rank for rank, pid in zip(self._ranks, here, strict=True) if not pid]
            if missing:
                raise PeerLost(f"ranks {missing} did not come within {MEET_SECONDS:.0f} s")
        super().check()

    def _open(self, name: str, total: int) -> tuple[Path, int]:
        nap, longest = MEET_NAPS
        while True:
            for path in (folder / name for folder in BOARD_FOLDERS):
                try:
                    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
                except OSError:
                    continue
                if _is_own(os.fstat(descriptor)) and os.fstat(descriptor).st_size == total:
                    return path, descriptor
                os.close(descriptor)
            if time.monotonic() > self._deadline:
                raise PeerLost(f"rank 0 did not come within {MEET_SECONDS:.0f} s")
            time.sleep(nap)
            nap = min(2 * nap, longest)

    def offer(self, name: str, descriptor: int) -> None:
        if self._num_offers == MAX_OFFERS:
            raise RuntimeError(f"one rank offers at most {MAX_OFFERS} pieces of memory")
        self._offers[self._host.rank, self._num_offers] = _hash(name), descriptor
        self._num_offers += 1
        self.counters.post(self._host.rank, self._num_offers)

    def take(self, name: str, rank: int) -> int:
        """Waits until `rank` offers `name` and opens it; returns a file descriptor of this process."""
        wanted, seen = _hash(name), 0
        while True:
            self.counters.wait([rank], seen + 1, self.check)
            key, descriptor = self._offers[rank, seen].tolist()
            if key == wanted:
                path = f"/proc/{self._host.pid_of(rank)}/fd/{descriptor}"
                return os.open(path, os.O_RDWR | os.O_CLOEXEC)
            seen += 1


def _hash(name: str) -> int:
    return int.from_bytes(
        hashlib.blake2b(name.encode(), digest_size=8).digest(), "little", signed=True
    )


def _is_own(file: os.stat_result) -> bool:
    """Returns whether only this user can have written the file: its folder is world-writable, its name guessable."""
    others = stat.S_IRWXG | stat.S_IRWXO
    return stat.S_ISREG(file.st_mode) and file.st_uid == os.geteuid() and not file.st_mode & others


def _create(name: str, total: int) -> tuple[Path, int]:
    reasons = []
    for path in (folder / name for folder in BOARD_FOLDERS):
        partial = path.with_name(path.name + ".partial")
        try:
            for older in (path, partial):
                older.unlink(missing_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            descriptor = os.open(partial, flags, 0o600)
        except OSError as error:
            reasons.append(f"{path.parent}: {error.strerror}")
            continue
        try:
            # Writing to a sparse file would kill a rank with a bus error if the file system is full.
            os.posix_fallocate(descriptor, 0, total)
            os.rename(partial, path)
        except OSError as error:
            os.close(descriptor)
            partial.unlink(missing_ok=True)
            reasons.append(f"{path.parent}: {error.strerror}")
            continue
        return path, descriptor
    raise UserError(
        f"Ranks need {total >> 10} KiB in a folder to find each other, but there is no room for it "
        f"({'; '.join(reasons)}); free some or mount a tmpfs at {BOARD_FOLDERS[0]}."
    )


def _remove_stale() -> None:
    """Removes the boards of jobs that were killed during rendezvous."""
    for folder in BOARD_FOLDERS:
        for path in folder.glob("mindgrpo-*-board*"):
            starter = path.name.split("-")[1]
            try:
                old = time.time() - path.stat().st_mtime > STALE_SECONDS
                if old and starter.isdecimal() and not is_alive(int(starter)):
                    path.unlink()
            except OSError:
                continue


def nameless(name: str, total: int) -> int:
    """Returns the file descriptor of `total` bytes of anonymous memory (memfd), freed with its last user.

    Raises UserError if the system refuses the size.
    """
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, total)
    except OSError as error:
        os.close(descriptor)
        limit = " (ulimit -f)" if error.errno == errno.EFBIG else ""
        raise UserError(
            f"The ranks of this host need {total / 2**20:.1f} MiB of shared memory for {name}, which the system "
            f"refuses: {error.strerror}{limit}; raise the limit or use fewer ranks."
        ) from None
    return descriptor


class SharedSegment(Joined):
    """`num_bytes` of memory shared by `ranks`, allocated by the first. A `name` is used only once in a job."""

    def __init__(self, host: LocalRanks, name: str, ranks: Sequence[int], num_bytes: int) -> None:
        board, leader = host.board, ranks[0]
        if host.rank == leader:
            descriptor = nameless(f"mindgrpo-{name}", header_bytes(len(ranks)) + num_bytes)
            board.offer(name, descriptor)
        else:
            descriptor = board.take(name, leader)
        super().__init__(host, ranks, descriptor, num_bytes)


class SharedLink:
    """A one-way ring buffer of SLOTS slots between two ranks; the sender waits only if all slots are unread."""

    SLOTS = 4

    def __init__(
        self, host: LocalRanks, source: int, target: int, slot_bytes: int, serial: int
    ) -> None:
        self._slot_bytes = slot_bytes
        name = f"link-{source}_{target}-{serial}"
        self._segment = SharedSegment(host, name, (source, target), self.SLOTS * slot_bytes)
        self._counters = self._segment.counters
        self._sent, self._received = 0, 1
        self._count = 0

    def _slot(self) -> np.ndarray:
        return self._segment.array((self._count % self.SLOTS) * self._slot_bytes, self._slot_bytes)

    def send(self, array: np.ndarray) -> None:
        if array.nbytes > self._slot_bytes:
            raise ValueError(f"{array.nbytes} bytes do not fit a slot of {self._slot_bytes}")
        room = max(0, self._count + 1 - self.SLOTS)
        self._counters.wait([self._received], room, self._segment.check)
        np.copyto(self._slot()[: array.nbytes].view(array.dtype).reshape(array.shape), array)
        self._count += 1
        self._counters.post(self._sent, self._count)

    def receive(self, shape: Sequence[int], dtype: Any) -> np.ndarray:
        self._counters.wait([self._sent], self._count + 1, self._segment.check)
        num_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        array = self._slot()[:num_bytes].view(dtype).reshape(shape).copy()
        self._count += 1
        self._counters.post(self._received, self._count)
        return array
