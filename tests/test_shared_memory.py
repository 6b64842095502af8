"""Groups, links and buckets over shared memory, between plain processes, with the C library and without.

Does not prove anything about msrun or speed, nor about machines whose memory ordering is weaker than x86-64's.
"""

from __future__ import annotations

import ctypes
import os
import time
from typing import Any

import numpy as np
import pytest
from ranks_as_processes import Work, native, numbers, run

from mindgrpo.backend import PeerLost
from mindgrpo.backend.shared_group import SharedGroup, shared_group
from mindgrpo.backend.shared_memory import Host, SharedBuckets, SharedLink

SMALL_BUFFER = 1000
LARGE_BUFFER = 150_000  # above what one member adds alone


@pytest.fixture(params=["native", "polled"])
def library(request: pytest.FixtureRequest) -> ctypes.CDLL | None:
    return native() if request.param == "native" else None


def _group(host: Host, size: int, buffer_bytes: int) -> SharedGroup:
    return shared_group(host, range(size), buffer_bytes)


def _sums(host: Host, size: int, buffer_bytes: int, dtype: str, counts: list[int]) -> Any:
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
def test_every_member_gets_the_sum_in_rank_order_whatever_the_length(
    library: ctypes.CDLL | None, size: int, dtype: str, buffer_bytes: int
) -> None:
    counts = [1, 7, 0, 125, 251, 9_000, 60_001]
    outcomes = run(library, size, _sums, buffer_bytes, dtype, counts)
    for i, count in enumerate(counts):
        expected = numbers(0, count, dtype)
        for rank in range(1, size):
            expected = expected + numbers(rank, count, dtype)
        for rank in range(size):
            assert outcomes[rank][i].tobytes() == expected.tobytes()


def _sum_in_place(host: Host, size: int) -> np.ndarray:
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


def _gather(host: Host, size: int) -> list[Any]:
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


def _many_operations(host: Host, size: int) -> int:
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


def _barrier_then_time(host: Host, size: int) -> tuple[float, float]:
    group = _group(host, size, SMALL_BUFFER)
    time.sleep(0.3 * (host.rank == size - 1))
    arrived = time.monotonic()
    group.barrier()
    return arrived, time.monotonic()


def test_nobody_passes_a_barrier_before_the_last_has_arrived(library: ctypes.CDLL | None) -> None:
    times = run(library, 3, _barrier_then_time).values()
    assert min(left for _, left in times) >= max(arrived for arrived, _ in times)


def _link(host: Host) -> SharedLink:
    return SharedLink(host, 0, 1, 4096, 0)


SHAPES = [(1 + i % 7, 1 + i % 4) for i in range(50)]


def _send_or_receive(host: Host, size: int, late: int) -> Any:
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


def _send_ahead(host: Host, size: int) -> int:
    link = _link(host)
    if host.rank == 0:
        for i in range(SharedLink.SLOTS):
            link.send(np.array([i]))
        return SharedLink.SLOTS
    time.sleep(0.3)
    return sum(int(link.receive((1,), np.int64)[0]) for _ in range(SharedLink.SLOTS))


def test_a_sender_runs_ahead_by_the_slots_of_its_link(library: ctypes.CDLL | None) -> None:
    assert run(library, 2, _send_ahead) == {0: 4, 1: 6}


def _send_too_much(host: Host, size: int) -> None:
    link = _link(host)
    if host.rank == 0:
        link.send(np.zeros(4097, np.uint8))


def test_an_array_larger_than_a_slot_is_refused(library: ctypes.CDLL | None) -> None:
    assert "4097 bytes do not fit a slot of 4096" in str(run(library, 2, _send_too_much)[0])


def _buckets(host: Host, size: int) -> list[int]:
    group = _group(host, size, SMALL_BUFFER)
    buckets = SharedBuckets(host, size, 4096, 0)
    buckets.of(host.rank)[:] = host.rank + 1
    group.barrier()
    seen = [int(buckets.of(other).sum()) for other in range(size)]
    group.barrier()
    return seen


def test_every_rank_reads_every_bucket_and_none_is_written_into_anothers(
    library: ctypes.CDLL | None,
) -> None:
    outcomes = run(library, 4, _buckets)
    assert all(seen == [4096, 8192, 12288, 16384] for seen in outcomes.values())


def _die_before_a_barrier(host: Host, size: int) -> None:
    group = _group(host, size, SMALL_BUFFER)
    group.barrier()
    if host.rank == 1:
        os._exit(1)
    group.barrier()


def _die_before_sending(host: Host, size: int) -> None:
    link = _link(host)
    if host.rank == 0:
        os._exit(1)
    link.receive((1,), np.int64)


def _die_before_receiving(host: Host, size: int) -> None:
    link = _link(host)
    if host.rank == 1:
        os._exit(1)
    for i in range(SharedLink.SLOTS + 1):
        link.send(np.array([i]))


@pytest.mark.parametrize(
    ("work", "size", "dead"),
    [(_die_before_a_barrier, 3, 1), (_die_before_sending, 2, 0), (_die_before_receiving, 2, 1)],
)
def test_who_waits_for_a_dead_rank_is_told_which_one_within_seconds(
    library: ctypes.CDLL | None, work: Work, size: int, dead: int
) -> None:
    started = time.monotonic()
    outcomes = run(library, size, work, silent=1)
    assert time.monotonic() - started < 5.0
    assert sorted([*outcomes, dead]) == list(range(size))
    for outcome in outcomes.values():
        assert isinstance(outcome, PeerLost)
        assert f"rank {dead} " in str(outcome)


def _mixed(host: Host, size: int) -> None:
    if host.rank == 1:
        host = Host(host.job, host.rank, None)
    SharedBuckets(host, size, 4096, 0)


def test_ranks_with_and_without_the_library_do_not_join() -> None:
    for outcome in run(native(), 2, _mixed).values():
        assert "do not all have the C kernels" in str(outcome)
