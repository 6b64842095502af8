"""Ranks of several hosts: groups, links and buckets between them, and what the others hear of a rank that ends.

The hosts are processes of one machine that share no memory. Does not prove what happens to a line that is cut
(test_two_hosts.py does),
nor that graphs run on such groups (distributed/ does).
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import numpy as np
import pytest
from hosts_as_processes import Rank, run
from ranks_as_processes import numbers

from mindgrpo.backend import PeerLost
from mindgrpo.backend.far_memory import FarBuckets, FarLink


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
    return group.gather_objects(value), few and few.gather_objects(rank.host.rank)


def test_objects_are_gathered_over_hosts_and_in_groups_of_some_of_their_ranks() -> None:
    outcomes = run((2, 2), _gather)
    everyone = [{"rank": rank, "much": "x" * (3000 * rank)} for rank in range(4)]
    for rank, outcome in outcomes.items():
        assert outcome == (everyone, [1, 2] if rank in (1, 2) else None)
