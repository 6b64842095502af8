"""Groups, links and buckets over shared memory, between plain processes.

Does not prove anything about graphs, msrun or speed, nor about machines whose memory ordering is weaker than x86-64's.
"""

from __future__ import annotations

import multiprocessing
import os
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mindgrpo.backend import PeerLost
from mindgrpo.backend.shared_memory import Peers, SharedBuckets, SharedGroup, SharedLink

SHM = Path("/dev/shm")
WAIT_SECONDS = 30.0
SMALL_BUFFER = 1000
LARGE_BUFFER = 100_000  # above what is added by every member alone

Work = Callable[..., Any]


def _rank(
    work: Work, job: str, rank: int, size: int, results: Any, arguments: tuple[Any, ...]
) -> None:
    try:
        outcome = work(job, rank, size, *arguments)
    except BaseException as error:
        outcome = error
    results.put((rank, outcome))


def run(size: int, work: Work, *arguments: Any, silent: int = 0) -> dict[int, Any]:
    """What `work(job, rank, size, *arguments)` returns or raises on each rank; `silent` ranks say nothing."""
    job = f"test-{uuid.uuid4().hex[:12]}"
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    processes = [
        context.Process(target=_rank, args=(work, job, rank, size, results, arguments))
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    try:
        deadline = time.monotonic() + WAIT_SECONDS
        outcomes: dict[int, Any] = {}
        while len(outcomes) < size - silent:
            assert time.monotonic() < deadline, f"only ranks {sorted(outcomes)} came to an end"
            if results.empty():
                time.sleep(0.005)
                continue
            rank, outcome = results.get()
            outcomes[rank] = outcome
    finally:
        for process in processes:
            process.join(1.0)
            if process.is_alive():
                process.kill()
    assert not list(SHM.glob(f"*{job}*"))
    return outcomes


def _group(job: str, rank: int, size: int, buffer_bytes: int) -> SharedGroup:
    return SharedGroup(job, rank, range(size), buffer_bytes, Peers())


def _numbers(rank: int, count: int, dtype: str) -> np.ndarray:
    return (np.random.RandomState(rank).standard_normal(count) * 100).astype(dtype)


def _sums(job: str, rank: int, size: int, buffer_bytes: int, dtype: str, counts: list[int]) -> Any:
    group = _group(job, rank, size, buffer_bytes)
    outs = []
    for count in counts:
        out = np.empty(count, dtype)
        group.sum_into(_numbers(rank, count, dtype), out)
        outs.append(out)
    return outs


@pytest.mark.parametrize("buffer_bytes", [SMALL_BUFFER, LARGE_BUFFER])
@pytest.mark.parametrize("dtype", ["float32", "float64", "int64"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_member_gets_the_sum_in_rank_order_whatever_the_length(
    size: int, dtype: str, buffer_bytes: int
) -> None:
    counts = [1, 7, 0, 125, 251, 9_000, 60_001]
    outcomes = run(size, _sums, buffer_bytes, dtype, counts)
    for i, count in enumerate(counts):
        expected = _numbers(0, count, dtype)
        for rank in range(1, size):
            expected = expected + _numbers(rank, count, dtype)
        for rank in range(size):
            assert outcomes[rank][i].tobytes() == expected.tobytes()


def _sum_in_place(job: str, rank: int, size: int) -> np.ndarray:
    group = _group(job, rank, size, LARGE_BUFFER)
    array = _numbers(rank, 60_001, "float32")
    group.sum_into(array, array)
    return array


def test_a_sum_may_be_written_over_its_own_source() -> None:
    outcomes = run(3, _sum_in_place)
    expected = sum(_numbers(rank, 60_001, "float32") for rank in range(3))
    assert all(outcomes[rank].tobytes() == expected.tobytes() for rank in range(3))


def _object_of(rank: int) -> Any:
    return {"rank": rank, "text": "y" * (5_000 * rank), "array": np.arange(rank * 300)}


def _gather(job: str, rank: int, size: int) -> list[Any]:
    group = _group(job, rank, size, SMALL_BUFFER)
    first = group.gather_objects(_object_of(rank))
    return [first, group.gather_objects(rank)]


def test_objects_far_larger_than_the_buffer_arrive_whole_and_in_rank_order() -> None:
    outcomes = run(3, _gather)
    for objects, ranks in outcomes.values():
        assert ranks == [0, 1, 2]
        for rank, found in enumerate(objects):
            expected = _object_of(rank)
            assert np.array_equal(found.pop("array"), expected.pop("array")) and found == expected


def _many_operations(job: str, rank: int, size: int) -> int:
    """Barriers, sums and gathers in turn, with ranks that dawdle by turns: buffers must not be overtaken."""
    group = _group(job, rank, size, SMALL_BUFFER)
    wrong = 0
    for i in range(300):
        if i % 50 == rank:
            time.sleep(0.01)
        if i % 3 == 0:
            group.barrier()
        elif i % 3 == 1:
            out = np.empty(20, np.int64)
            group.sum_into(np.full(20, rank + i), out)
            wrong += int((out != sum(range(size)) + size * i).any())
        else:
            wrong += group.gather_objects((rank, i)) != [(r, i) for r in range(size)]
    return wrong


def test_hundreds_of_operations_in_turn_do_not_mix_their_buffers() -> None:
    assert set(run(4, _many_operations).values()) == {0}


def _barrier_then_time(job: str, rank: int, size: int) -> tuple[float, float]:
    group = _group(job, rank, size, SMALL_BUFFER)
    time.sleep(0.3 * (rank == size - 1))
    arrived = time.monotonic()
    group.barrier()
    return arrived, time.monotonic()


def test_nobody_passes_a_barrier_before_the_last_has_arrived() -> None:
    times = run(3, _barrier_then_time).values()
    assert min(left for _, left in times) >= max(arrived for arrived, _ in times)


def _link(job: str, rank: int, size: int) -> SharedLink:
    return SharedLink(job, rank, 0, 1, 4096, 0, Peers())


SHAPES = [(1 + i % 7, 1 + i % 4) for i in range(50)]


def _send_or_receive(job: str, rank: int, size: int, late: int) -> Any:
    link = _link(job, rank, size)
    received = []
    for i, shape in enumerate(SHAPES):
        if rank == late and i % 10 == 0:
            time.sleep(0.02)
        array = np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + 1000 * i
        if rank == 0:
            link.send(array)
        else:
            received.append(np.array_equal(link.receive(shape, np.float32), array))
    return received


@pytest.mark.parametrize("late", [0, 1])
def test_a_link_keeps_order_and_shapes_when_either_end_is_late(late: int) -> None:
    assert run(2, _send_or_receive, late)[1] == [True] * len(SHAPES)


def _send_ahead(job: str, rank: int, size: int) -> int:
    link = _link(job, rank, size)
    if rank == 0:
        for i in range(SharedLink.SLOTS):
            link.send(np.array([i]))
        return SharedLink.SLOTS
    time.sleep(0.3)
    return sum(int(link.receive((1,), np.int64)[0]) for _ in range(SharedLink.SLOTS))


def test_a_sender_runs_ahead_by_the_slots_of_its_link() -> None:
    assert run(2, _send_ahead) == {0: 4, 1: 6}


def _send_too_much(job: str, rank: int, size: int) -> None:
    link = _link(job, rank, size)
    if rank == 0:
        link.send(np.zeros(4097, np.uint8))


def test_an_array_larger_than_a_slot_is_refused() -> None:
    assert "4097 bytes do not fit a slot of 4096" in str(run(2, _send_too_much)[0])


def _buckets(job: str, rank: int, size: int) -> list[int]:
    group = _group(job, rank, size, SMALL_BUFFER)
    buckets = SharedBuckets(job, rank, size, 4096, 0, Peers())
    buckets.of(rank)[:] = rank + 1
    group.barrier()
    seen = [int(buckets.of(other).sum()) for other in range(size)]
    group.barrier()
    return seen


def test_every_rank_reads_every_bucket_and_none_is_written_into_anothers() -> None:
    outcomes = run(4, _buckets)
    assert all(seen == [4096, 8192, 12288, 16384] for seen in outcomes.values())


def _die_before_a_barrier(job: str, rank: int, size: int) -> None:
    group = _group(job, rank, size, SMALL_BUFFER)
    group.barrier()
    if rank == 1:
        os._exit(1)
    group.barrier()


def _die_before_sending(job: str, rank: int, size: int) -> None:
    link = _link(job, rank, size)
    if rank == 0:
        os._exit(1)
    link.receive((1,), np.int64)


def _die_before_receiving(job: str, rank: int, size: int) -> None:
    link = _link(job, rank, size)
    if rank == 1:
        os._exit(1)
    for i in range(SharedLink.SLOTS + 1):
        link.send(np.array([i]))


@pytest.mark.parametrize(
    ("work", "size", "dead"),
    [(_die_before_a_barrier, 3, 1), (_die_before_sending, 2, 0), (_die_before_receiving, 2, 1)],
)
def test_who_waits_for_a_dead_rank_is_told_which_one_within_seconds(
    work: Work, size: int, dead: int
) -> None:
    started = time.monotonic()
    outcomes = run(size, work, silent=1)
    assert time.monotonic() - started < 5.0
    assert sorted([*outcomes, dead]) == list(range(size))
    for outcome in outcomes.values():
        assert isinstance(outcome, PeerLost)
        assert f"rank {dead} " in str(outcome)
