"""Ranks of several hosts: groups, links and buckets between them, and what the others hear of a rank that ends.

The hosts are processes of one machine that share no memory. Does not prove what happens when a line is cut
(test_two_hosts.py does), nor that graphs run on such groups (scripts/faults/two_hosts.py does).
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hosts_as_processes import Rank, run
from ranks_as_processes import numbers

from mindgrpo.backend.contract import PeerLost
from mindgrpo.backend.cpu.far_group import by_host
from mindgrpo.backend.cpu.far_memory import FarBuckets, FarLink
from mindgrpo.backend.cpu.placement import Placement, placement_of
from mindgrpo.errors import UserError


def _sums(rank: Rank, counts: list[int], dtype: str) -> Any:
    group, found = rank.world(), []
    for count in counts:
        x = numbers(rank.host.rank, count, dtype)
        group.sum_into(x, x)
        found.append(x)
    return found


@pytest.mark.parametrize("sizes", [(2, 2), (3, 1), (2, 3)])
def test_a_sum_over_hosts_has_the_bits_of_a_sum_in_rank_order(sizes: tuple[int, int]) -> None:
    counts = [1, 7, 250, 60_001]
    size = sizes[0] * sizes[1]
    outcomes = run(sizes, _sums, counts, "float32")
    for place, count in enumerate(counts):
        wanted = numbers(0, count, "float32")
        for rank in range(1, size):
            wanted = wanted + numbers(rank, count, "float32")
        for rank in range(size):
            assert not isinstance(outcomes[rank], BaseException), outcomes[rank]
            assert outcomes[rank][place].tobytes() == wanted.tobytes()


def _gather(rank: Rank) -> Any:
    group = rank.world()
    value = {"rank": rank.host.rank, "much": "x" * (3000 * rank.host.rank)}
    group.barrier()
    few = rank.group(1, 2) if rank.host.rank in (1, 2) else None
    here = rank.group(*rank.placement.here)
    return (
        group.gather_objects(value),
        few and few.gather_objects(rank.host.rank),
        here.gather_objects(rank.host.rank),
    )


def test_objects_are_gathered_over_hosts_and_in_groups_of_some_of_their_ranks() -> None:
    outcomes = run((2, 2), _gather)
    everyone = [{"rank": rank, "much": "x" * (3000 * rank)} for rank in range(4)]
    for rank, outcome in outcomes.items():
        here = [rank - rank % 2, rank - rank % 2 + 1]
        assert outcome == (everyone, [1, 2] if rank in (1, 2) else None, here)


def _both_ways(rank: Rank, num_bytes: int, times: int) -> Any:
    """Each sends before it receives, far more than sockets hold."""
    other = 1 - rank.host.rank
    out, into = (
        FarLink(rank.far, rank.host.rank, source, 1 - source, num_bytes, 0)
        for source in ((0, 1) if rank.host.rank == 0 else (1, 0))
    )
    if rank.host.rank == 1:
        time.sleep(0.5)  # a peer that comes late
    found = []
    for i in range(times):
        out.send(numbers(10 * i + rank.host.rank, num_bytes // 4, "float32"))
        found.append(into.receive((2, num_bytes // 8), np.float32))
    return [
        np.array_equal(x.ravel(), numbers(10 * i + other, x.size, "float32"))
        for i, x in enumerate(found)
    ]


def test_two_ranks_that_send_much_to_each_other_at_a_time_both_come_to_an_end() -> None:
    outcomes = run((2, 1), _both_ways, 24 << 20, 3)
    assert outcomes == {0: [True] * 3, 1: [True] * 3}


def _wrong_shape(rank: Rank) -> Any:
    link = FarLink(rank.far, rank.host.rank, 0, 1, 1 << 10, 0)
    if rank.host.rank == 0:
        link.send(np.ones(7, np.float32))
        return None
    return link.receive((8,), np.float32)


def test_an_array_that_is_not_the_expected_one_is_an_error() -> None:
    outcomes = run((2, 1), _wrong_shape)
    assert "28 bytes came from rank 0, but 1 of 32 was expected" in str(outcomes[1])


def _rounds(rank: Rank, bucket_bytes: int) -> Any:
    buckets = FarBuckets(rank.far, rank.host, bucket_bytes, 0)
    readers, size, found = rank.group(*rank.placement.here), rank.placement.world_size, []
    for turn in range(3):
        mine = numbers(100 * turn + rank.host.rank, bucket_bytes // 4 // (turn + 1), "float32")
        buckets.of(rank.host.rank)[: mine.nbytes] = mine.view(np.uint8)
        buckets.exchange(mine.nbytes)
        readers.barrier()
        found += [
            np.array_equal(
                buckets.of(r)[: mine.nbytes].view(np.float32),
                numbers(100 * turn + r, mine.size, "float32"),
            )
            for r in range(size)
        ]
        readers.barrier()
    return all(found) and len(found)


@pytest.mark.parametrize("sizes", [(2, 2), (3, 1)])
def test_every_rank_reads_every_bucket_in_every_round(sizes: tuple[int, int]) -> None:
    size = sizes[0] * sizes[1]
    assert run(sizes, _rounds, 6 << 20) == dict.fromkeys(range(size), 3 * size)


def _one_dies(rank: Rank, victim: int, waits: str) -> Any:
    group = rank.world()
    x = np.ones(5, np.float32)
    group.sum_into(x, x)
    link = FarLink(rank.far, rank.host.rank, 1, 2, 64, 0) if rank.host.rank in (1, 2) else None
    if rank.host.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    if waits == "link" and link is not None and rank.host.rank == 2:
        link.receive((1,), np.float32)
    group.sum_into(x, x)


@pytest.mark.parametrize("waits", ["group", "link"])
@pytest.mark.parametrize("victim", [0, 1, 3])
def test_a_killed_rank_is_named_on_every_host_within_seconds(victim: int, waits: str) -> None:
    started = time.monotonic()
    outcomes = run((2, 2), _one_dies, victim, waits, silent=1)
    assert time.monotonic() - started < 8.0
    for outcome in outcomes.values():
        assert isinstance(outcome, PeerLost) and f"rank {victim} " in str(outcome), outcome


def _one_leaves(rank: Rank) -> Any:
    rank.world().barrier()
    rank.far.close()
    time.sleep(0.2 * rank.host.rank)
    rank.far.check()
    return "well"


def test_a_host_that_ends_with_a_farewell_is_not_lost() -> None:
    assert run((2, 2), _one_leaves) == dict.fromkeys(range(4), "well")


def _phases(rank: Rank) -> Any:
    health = rank.far._health
    health.at_step(3)
    mine = f"phase {rank.host.rank}"
    with health.phase(mine):
        until = time.monotonic() + 5.0
        while time.monotonic() < until:
            found = {r: snapshot.position for r, snapshot in health.heartbeats().items()}
            if len(found) == 4 and all(f"phase {r} of step 3" in found[r] for r in found):
                break
            time.sleep(0.02)
        ages = [time.monotonic() - snapshot.since for snapshot in health.heartbeats().values()]
        rank.world().barrier()
    return found, max(ages), min(ages)


def test_ranks_see_the_phases_of_those_on_other_hosts_by_their_own_clock(tmp_path: Path) -> None:
    for host in range(2):
        (tmp_path / f"host_{host}").mkdir()
    for found, oldest, youngest in run((2, 2), _phases, status=tmp_path).values():
        assert found == {rank: f"phase phase {rank} of step 3" for rank in range(4)}
        assert -0.5 < youngest <= oldest < 10.0


def _different_calls(rank: Rank) -> None:
    x = np.ones(5 + (rank.host.rank > 1), np.float32)
    rank.world().sum_into(x, x)


def test_hosts_that_make_different_calls_get_no_garbage() -> None:
    outcomes = run((2, 2), _different_calls)
    assert all(isinstance(outcome, RuntimeError) for outcome in outcomes.values())
    assert any("did not make the same calls" in str(outcome) for outcome in outcomes.values())


def _told(**environment: str) -> Placement:
    given = {"MS_SCHED_HOST": "10.0.0.1", "MS_SCHED_PORT": "7000"} | environment
    return placement_of(given, 5, 8)


def test_hosts_are_equal_parts_of_the_ranks_in_order() -> None:
    token = {"MINDGRPO_RANKS_PER_HOST": "4", "MINDGRPO_JOB_TOKEN": "x" * 16}
    placement = _told(**token)
    assert (placement.num_hosts, placement.host, list(placement.here)) == (2, 1, [4, 5, 6, 7])
    assert (placement.leads, list(placement.leaders())) == (False, [0, 4])
    assert placement.master == ("10.0.0.1", 7001) and placement.deadline == 20.0
    assert _told().num_hosts == 1
    with pytest.raises(ValueError, match="do not follow each other"):
        by_host(placement, [0, 4, 1])
    assert by_host(placement, [3, 4, 5]) == {0: [3], 1: [4, 5]}


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"DEVICE_ID": "1"}, "start it with mindgrpo launch --hosts"),
        ({"MINDGRPO_RANKS_PER_HOST": "3"}, "hosts have equally many"),
        ({"MINDGRPO_RANKS_PER_HOST": "4"}, "MINDGRPO_JOB_TOKEN has 0 characters"),
        (
            {"MINDGRPO_RANKS_PER_HOST": "4", "MINDGRPO_JOB_TOKEN": "x" * 16, "MS_SCHED_HOST": ""},
            "MS_SCHED_HOST is ''",
        ),
        (
            {
                "MINDGRPO_RANKS_PER_HOST": "4",
                "MINDGRPO_JOB_TOKEN": "x" * 16,
                "MINDGRPO_UNREACHABLE_SECONDS": "soon",
            },
            "MINDGRPO_UNREACHABLE_SECONDS is 'soon'",
        ),
    ],
)
def test_what_hosts_need_to_meet_is_asked_for_in_a_sentence(
    environment: dict[str, str], words: str
) -> None:
    with pytest.raises(UserError, match=words.replace("(", "\\(")):
        _told(**environment)
