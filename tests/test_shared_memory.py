"""Groups and links over shared memory, between plain processes, with the C library and without.

Does not prove anything about msrun or speed, nor about memory that is ordered more weakly than x86-64's: for that see
test_ordering.py.
"""

from __future__ import annotations

import ctypes
import gc
import os
import queue
import resource
import signal
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mindspore import Tensor
from ranks_as_processes import Work, native, numbers, run

from mindgrpo.backend.contract import PeerLost
from mindgrpo.backend.cpu import host as host_module
from mindgrpo.backend.cpu.backend import CpuLink
from mindgrpo.backend.cpu.host import LocalRanks, SharedLink, SharedSegment, own_rank
from mindgrpo.backend.cpu.shared_group import SharedGroup, shared_group
from mindgrpo.backend.cpu.waiting import PolledCounters
from mindgrpo.backend.targets import RANKS_PER_HOST
from mindgrpo.errors import UserError
from mindgrpo.health.heartbeat import heartbeats_in
from mindgrpo.health.rank_health import RankHealth

SMALL_BUFFER = 1000
LARGE_BUFFER = 150_000  # above what one member adds alone


@pytest.fixture(params=["native", "polled"])
def library(request: pytest.FixtureRequest) -> ctypes.CDLL | None:
    return native() if request.param == "native" else None


def _group(host: LocalRanks, size: int, buffer_bytes: int) -> SharedGroup:
    return shared_group(host, range(size), buffer_bytes)


def _sums(host: LocalRanks, size: int, buffer_bytes: int, dtype: str, counts: list[int]) -> Any:
    group = _group(host, size, buffer_bytes)
    outs = []
    for count in counts:
        out = np.empty(count, dtype)
        group.sum_into(numbers(host.rank, count, dtype), out)
        outs.append(out)
    return outs


@pytest.mark.parametrize("buffer_bytes", [SMALL_BUFFER, LARGE_BUFFER])
@pytest.mark.parametrize("dtype", ["float32", "float64", "int64"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_member_gets_the_sum_of_a_binary_tree_whatever_the_length(
    library: ctypes.CDLL | None, size: int, dtype: str, buffer_bytes: int
) -> None:
    counts = [1, 7, 0, 125, 251, 9_000, 60_001]
    outcomes = run(library, size, _sums, buffer_bytes, dtype, counts)
    for i, count in enumerate(counts):
        parts = [numbers(rank, count, dtype) for rank in range(size)]
        while len(parts) > 1:
            parts = [sum(parts[i + 1 : i + 2], parts[i]) for i in range(0, len(parts), 2)]
        (expected,) = parts
        for rank in range(size):
            assert outcomes[rank][i].tobytes() == expected.tobytes()


def _sum_in_place(host: LocalRanks, size: int) -> np.ndarray:
    group = _group(host, size, LARGE_BUFFER)
    array = numbers(host.rank, 60_001, "float32")
    group.sum_into(array, array)
    return array


def test_a_sum_may_be_written_over_its_own_source(library: ctypes.CDLL | None) -> None:
    outcomes = run(library, 3, _sum_in_place)
    expected = np.sum([numbers(rank, 60_001, "float32") for rank in range(3)], axis=0)
    assert all(outcomes[rank].tobytes() == expected.tobytes() for rank in range(3))


def _object_of(rank: int) -> Any:
    return {"rank": rank, "text": "y" * (5_000 * rank), "array": np.arange(rank * 300)}


def _gather(host: LocalRanks, size: int) -> list[Any]:
    group = _group(host, size, SMALL_BUFFER)
    first = group.gather_objects(_object_of(host.rank))
    return [first, group.gather_objects(host.rank)]


def test_objects_far_larger_than_the_buffer_arrive_whole_and_in_rank_order(
    library: ctypes.CDLL | None,
) -> None:
    outcomes = run(library, 3, _gather)
    for objects, ranks in outcomes.values():
        assert ranks == [0, 1, 2]
        for rank, found in enumerate(objects):
            expected = _object_of(rank)
            assert np.array_equal(found.pop("array"), expected.pop("array")) and found == expected


def _exchange(host: LocalRanks, size: int) -> list[np.ndarray]:
    group = _group(host, size, SMALL_BUFFER)
    return group.exchange_bytes([_parcel(host.rank, other) for other in range(size)])


def _parcel(source: int, target: int) -> np.ndarray:
    """None from a rank to itself, and one that is longer than several buffers."""
    count = 0 if source == target else 3 * SMALL_BUFFER + 5 if target == 1 else source + 2 * target
    return (np.arange(count) % 251 + source + 2 * target).astype(np.uint8)


def test_bytes_reach_the_member_that_they_are_for(library: ctypes.CDLL | None) -> None:
    for rank, arrived in run(library, 3, _exchange).items():
        for source, own in enumerate(arrived):
            assert np.array_equal(own, _parcel(source, rank))


def _many_operations(host: LocalRanks, size: int) -> int:
    """Barriers, sums and gathers in turn, with ranks that dawdle by turns: buffers must not be overtaken."""
    group = _group(host, size, SMALL_BUFFER)
    wrong = 0
    for i in range(300):
        if i % 50 == host.rank:
            time.sleep(0.01)
        if i % 3 == 0:
            group.barrier()
        elif i % 3 == 1:
            out = np.empty(20, np.int64)
            group.sum_into(np.full(20, host.rank + i), out)
            wrong += int((out != sum(range(size)) + size * i).any())
        else:
            wrong += group.gather_objects((host.rank, i)) != [(r, i) for r in range(size)]
    return wrong


def test_hundreds_of_operations_in_turn_do_not_mix_their_buffers(
    library: ctypes.CDLL | None,
) -> None:
    assert set(run(library, 4, _many_operations).values()) == {0}


def _barrier_then_time(host: LocalRanks, size: int) -> tuple[float, float]:
    group = _group(host, size, SMALL_BUFFER)
    time.sleep(0.3 * (host.rank == size - 1))
    arrived = time.monotonic()
    group.barrier()
    return arrived, time.monotonic()


def test_nobody_passes_a_barrier_before_the_last_has_arrived(library: ctypes.CDLL | None) -> None:
    times = run(library, 3, _barrier_then_time).values()
    assert min(left for _, left in times) >= max(arrived for arrived, _ in times)


def _link(host: LocalRanks) -> SharedLink:
    return SharedLink(host, 0, 1, 4096, 0)


SHAPES = [(1 + i % 7, 1 + i % 4) for i in range(50)]


def _send_or_receive(host: LocalRanks, size: int, late: int) -> Any:
    link = _link(host)
    received = []
    for i, shape in enumerate(SHAPES):
        if host.rank == late and i % 10 == 0:
            time.sleep(0.02)
        array = np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + 1000 * i
        if host.rank == 0:
            link.send(array)
        else:
            received.append(np.array_equal(link.receive(shape, np.float32), array))
    return received


@pytest.mark.parametrize("late", [0, 1])
def test_a_link_keeps_order_and_shapes_when_either_end_is_late(
    library: ctypes.CDLL | None, late: int
) -> None:
    assert run(library, 2, _send_or_receive, late)[1] == [True] * len(SHAPES)


def _send_ahead(host: LocalRanks, size: int) -> int:
    link = _link(host)
    group = _group(host, size, SMALL_BUFFER)
    if host.rank == 0:
        for i in range(SharedLink.SLOTS):
            link.send(np.array([i]))
    group.barrier()  # nothing is received before all is sent
    if host.rank == 0:
        return SharedLink.SLOTS
    return sum(int(link.receive((1,), np.int64)[0]) for _ in range(SharedLink.SLOTS))


def test_a_sender_runs_ahead_by_the_slots_of_its_link(library: ctypes.CDLL | None) -> None:
    assert run(library, 2, _send_ahead) == {0: 4, 1: 6}


def _send_too_much(host: LocalRanks, size: int) -> None:
    link = _link(host)
    if host.rank == 0:
        link.send(np.zeros(4097, np.uint8))


def test_an_array_larger_than_a_slot_is_refused(library: ctypes.CDLL | None) -> None:
    assert "4097 bytes do not fit a slot of 4096" in str(run(library, 2, _send_too_much)[0])


def _die_before_a_barrier(host: LocalRanks, size: int) -> None:
    group = _group(host, size, SMALL_BUFFER)
    group.barrier()
    if host.rank == 1:
        os._exit(1)
    group.barrier()


def _die_before_sending(host: LocalRanks, size: int) -> None:
    link = _link(host)
    if host.rank == 0:
        os._exit(1)
    link.receive((1,), np.int64)


def _die_before_receiving(host: LocalRanks, size: int) -> None:
    link = _link(host)
    if host.rank == 1:
        os._exit(1)
    for i in range(SharedLink.SLOTS + 1):
        link.send(np.array([i]))


@pytest.mark.parametrize(
    ("work", "size", "dead"),
    [(_die_before_a_barrier, 3, 1), (_die_before_sending, 2, 0), (_die_before_receiving, 2, 1)],
)
def test_who_waits_for_a_dead_rank_is_told_which_one(
    library: ctypes.CDLL | None, work: Work, size: int, dead: int
) -> None:
    outcomes = run(library, size, work, silent=1)
    assert sorted([*outcomes, dead]) == list(range(size))
    for outcome in outcomes.values():
        assert isinstance(outcome, PeerLost)
        assert f"rank {dead} " in str(outcome)


def _be_late(host: LocalRanks, size: int, folder: Path) -> list[float]:
    health = RankHealth.of_process(host.rank, size, {"MINDGRPO_STATUS_DIR": str(folder)})
    host = LocalRanks(host.job, host.rank, size, host.library, health=health)
    group = _group(host, size, SMALL_BUFFER)
    group.barrier()
    while host.rank == 1 and not all(health.heartbeats()[rank].waits_since for rank in (0, 2)):
        time.sleep(0.02)
    before = [health.heartbeats()[rank].waits_since for rank in range(size)]
    group.barrier()
    group.barrier()
    # As the others see it: none of them may end before.
    while any(heartbeat.waits_since for heartbeat in heartbeats_in(folder).values()):
        time.sleep(0.02)
    return before


def test_ranks_tell_that_they_wait_and_the_one_that_is_waited_for_does_not(
    library: ctypes.CDLL | None, tmp_path: Path
) -> None:
    begun = time.monotonic()
    before = run(library, 3, _be_late, tmp_path)[1]
    assert before[1] == 0.0
    assert all(begun < before[rank] < time.monotonic() for rank in (0, 2))


def _lose_the_other(host: LocalRanks, size: int, folder: Path) -> float:
    health = RankHealth.of_process(host.rank, size, {"MINDGRPO_STATUS_DIR": str(folder)})
    host = LocalRanks(host.job, host.rank, size, host.library, health=health)
    with pytest.raises(PeerLost):
        _die_before_a_barrier(host, size)
    return health.heartbeats()[host.rank].waits_since


def test_a_rank_that_has_caught_the_loss_of_another_waits_for_nobody(
    library: ctypes.CDLL | None, tmp_path: Path
) -> None:
    assert run(library, 2, _lose_the_other, tmp_path, silent=1) == {0: 0.0}


def _two_jobs_in_a_process(host: LocalRanks, size: int) -> list[float]:
    """As two trainers of one program, the second of which is gone first."""
    first = _group(host, size, SMALL_BUFFER)
    second = _group(LocalRanks(f"{host.job}-2", host.rank, size, host.library), size, LARGE_BUFFER)
    sums = []
    for group in (first, second, first):
        total = np.ones(1)
        group.sum_into(total, total)
        sums.append(float(total[0]))
    # Groups without the C library have none.
    numbers_differ = first.kernel_id == -1 or first.kernel_id != second.kernel_id
    del second, group
    gc.collect()
    total = np.full(1, float(numbers_differ))
    first.sum_into(total, total)
    return [*sums, float(total[0])]


def test_a_second_group_of_the_same_ranks_leaves_the_first_as_it_was(
    library: ctypes.CDLL | None,
) -> None:
    for outcome in run(library, 2, _two_jobs_in_a_process).values():
        assert outcome == [2.0] * 4


def _mixed(host: LocalRanks, size: int) -> None:
    if host.rank == 1:
        host = LocalRanks(host.job, host.rank, size, None)
    SharedSegment(host, "mixed", range(size), 4096)


def test_ranks_with_and_without_the_library_do_not_join() -> None:
    for outcome in run(native(), 2, _mixed).values():
        assert "do not all have the C kernels" in str(outcome)


def test_plain_stores_are_refused_where_others_may_see_them_in_another_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    PolledCounters(memoryview(bytearray(64))).post(0, 1)
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    with pytest.raises(UserError, match="on aarch64 need the C library.*; install gcc"):
        PolledCounters(memoryview(bytearray(64)))


def _share_with_little_room(host: LocalRanks, size: int, room: int, num_bytes: int) -> int:
    """No file of this process may be larger than `room`: what a full folder or a small limit is like."""
    if host.rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
    SharedSegment(host, "large", range(size), num_bytes).array(0, num_bytes)[:] = 1
    return num_bytes


def test_no_room_for_the_board_is_a_sentence_with_the_room_needed() -> None:
    outcomes = run(native(), 2, _share_with_little_room, 4096, 100, silent=1)
    sentence = str(outcomes[0])
    assert (
        isinstance(outcomes[0], UserError) and "need 35 KiB" in sentence and "/dev/shm" in sentence
    )


def test_memory_that_the_system_refuses_is_a_sentence_with_the_size_needed() -> None:
    outcomes = run(native(), 2, _share_with_little_room, 1 << 20, 8 << 20)
    assert isinstance(outcomes[0], UserError) and "need 8.0 MiB" in str(outcomes[0])
    assert isinstance(outcomes[1], PeerLost) and "rank 0 " in str(outcomes[1])


def _share_much(host: LocalRanks, size: int, folder: Path) -> int:
    host_module.BOARD_FOLDERS = (folder,)
    return _share_with_little_room(host, size, resource.RLIM_INFINITY, 8 << 20)


def test_a_folder_of_a_few_pages_is_enough_for_any_amount_of_memory(tmp_path: Path) -> None:
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40k", "none", str(tmp_path)])
    if mounted.returncode:
        pytest.skip("may not mount a folder of limited size")
    try:
        assert run(native(), 2, _share_much, tmp_path) == {0: 8 << 20, 1: 8 << 20}
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def _die_while_meeting(host: LocalRanks, size: int, others: Barrier) -> None:
    if host.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    host_module.MEET_SECONDS = 5.0
    others.wait()
    try:
        _group(host, size, SMALL_BUFFER)
    finally:
        others.wait()  # or the one that waits longer would miss the other


def test_who_never_comes_is_named_and_nothing_is_left(library: ctypes.CDLL | None) -> None:
    others = get_context("fork").Barrier(2)
    outcomes = run(library, 3, _die_while_meeting, others, silent=1)
    assert all("ranks [1] did not come" in str(outcomes[rank]) for rank in (0, 2))


def test_what_killed_jobs_left_is_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    stale = tmp_path / f"mindgrpo-{ended.pid}-2000-board"
    fresh = tmp_path / f"mindgrpo-{ended.pid}-2001-board"
    alive = tmp_path / f"mindgrpo-{os.getpid()}-2000-board"
    for path in (stale, fresh, alive):
        path.touch()
    long_ago = time.time() - 2 * host_module.STALE_SECONDS
    for path in (stale, alive):
        os.utime(path, (long_ago, long_ago))
    monkeypatch.setattr(host_module, "BOARD_FOLDERS", (tmp_path,))
    assert LocalRanks("job", 0, 1).board is not None
    assert sorted(tmp_path.iterdir()) == sorted([fresh, alive])


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({}, "RANK_ID is '', but must be this process's number among MS_WORKER_NUM=8"),
        ({"RANK_ID": "0", "DEVICE_ID": "0", RANKS_PER_HOST: "4"}, "set context.backend: device"),
        # msrun's second node, without our launcher.
        ({"RANK_ID": "5", "DEVICE_ID": "1"}, "rank 5 of 8 is on one of several hosts"),
    ],
)
def test_ranks_of_several_hosts_are_refused_with_the_backend_that_joins_them(
    environment: dict[str, str], words: str
) -> None:
    with pytest.raises(UserError) as refused:
        own_rank(environment, 8)
    assert words in str(refused.value)


def test_a_rank_is_known_by_the_number_that_msrun_gave_it() -> None:
    assert own_rank({"RANK_ID": "5", "DEVICE_ID": "5", RANKS_PER_HOST: "8"}, 8) == 5


class Ring(queue.Queue[np.ndarray]):
    """A SharedLink between threads, whose ends give up when they wait for ever."""

    def __init__(self) -> None:
        super().__init__(SharedLink.SLOTS)

    def send(self, array: np.ndarray) -> None:
        self.put(array, timeout=10)

    def receive(self, shape: Sequence[int], dtype: Any) -> np.ndarray:
        return self.get(timeout=10)


def test_both_ends_of_a_link_run_ahead_of_what_they_take_and_take_it_in_any_order() -> None:
    rings: tuple[Any, Any] = (Ring(), Ring())
    ends = CpuLink(*rings), CpuLink(*rings[::-1])
    count = 5 * SharedLink.SLOTS

    def exchange(number: int) -> list[float]:
        values = (np.full(1, 100 * number + i, np.float32) for i in range(count))
        takes = [ends[number].exchange(Tensor(value), receives=(1,)) for value in values]
        return [float(take().asnumpy()[0]) for take in reversed(takes)]

    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(exchange, range(2)))
    wanted = list(reversed(range(count)))
    assert found == [[100.0 + i for i in wanted], [float(i) for i in wanted]]
