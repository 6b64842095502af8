"""Routes of experts go to the ranks that compute their tokens, in the layers of these, and to nobody else.

Ranks as threads with a transport that counts. On processes: the distributed case "experts" with routes replayed.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ranks_as_threads import ThreadGroup, World

from mindgrpo.algorithm.sample import Sample
from mindgrpo.algorithm.token_arrays import RemoteSegment
from mindgrpo.backend.remote_arrays import FetchedArrays, gathered
from mindgrpo.models.expert_routes import StepExperts, load_by_expert

RANKS, LAYERS, EXPERTS, SLOTS, SAMPLES = 4, 6, 7, 2, 8
PROMPT = 5
# Of replicas of two ranks, each draws four samples: two prompts of two.
REPLICAS = ((0, 1), (2, 3))


class CountedGroup(ThreadGroup):
    """As contract.Group, and `received` counts the bytes that others had for this member."""

    def __init__(self, world: World, rank: int) -> None:
        super().__init__(world, rank)
        self.ranks, self.index, self.size = tuple(range(world.size)), rank, world.size
        self.received = 0

    def exchange_bytes(self, parcels: list[np.ndarray]) -> list[np.ndarray]:
        arrived = [own[self.index] for own in self.gather_objects(parcels)]
        self.received += sum(own.size for own in arrived)
        return arrived

    def sum_array(self, array: np.ndarray) -> np.ndarray:
        return np.sum(self.gather_objects(array), 0)


def whole(dtype: type[np.generic]) -> list[list[np.ndarray]]:
    """Of each sample, its prompt's and its completion's."""
    rng = np.random.default_rng(0)

    def part(count: int) -> np.ndarray:
        return rng.integers(0, EXPERTS, (count, LAYERS, SLOTS)).astype(dtype)

    prompts = [part(PROMPT) for _ in range(SAMPLES // 2)]
    return [[prompts[i // 2], part(3 + 2 * i)] for i in range(SAMPLES)]


def held_by(rank: int, parts: list[list[np.ndarray]]) -> list[Any]:
    """The samples' routes as Replicas hands them to a rank."""
    owned: list[Any] = []
    for replica, own in zip(REPLICAS, (parts[:4], parts[4:]), strict=True):
        known: dict[int, RemoteSegment] = {}
        tokens = np.zeros(1, np.int32)
        samples = [drawn(tokens, tuple(r)).held_by(replica[0], known) for r in own]
        if rank not in replica:
            samples = pickle.loads(pickle.dumps(samples))
        owned += [sample.arrays["routes"] for sample in samples]
    return owned


def drawn(tokens: np.ndarray, parts: tuple[np.ndarray, ...]) -> Sample:
    logps = np.zeros(len(tokens))
    return Sample.drawn(0, tokens, tokens, "stop", 0, logps=logps, routes=parts)


def on_ranks(run: Callable[[int, CountedGroup], Any]) -> list[Any]:
    world = World(RANKS)
    with ThreadPoolExecutor(RANKS) as pool:
        groups = [CountedGroup(world, rank) for rank in range(RANKS)]
        return list(pool.map(run, range(RANKS), groups))


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_a_rank_gets_the_samples_and_layers_that_it_asks_for_and_no_other_byte(
    dtype: type[np.generic],
) -> None:
    parts = whole(dtype)
    # Halves of the layers, and samples of both replicas; the last rank asks twice for one of them.
    layers = [[0, 1, 2], [3, 4, 5], [0, 1, 2], [4]]
    wanted = [[[0, 5], [1]], [[4, 5], []], [[7], [2, 6]], [[3], [3]]]

    def run(rank: int, group: Any) -> tuple[list[np.ndarray], int, int]:
        routes = FetchedArrays(held_by(rank, parts), layers[rank], group)
        found = []
        for samples in wanted[rank]:
            routes.fetch(samples)
            found += [routes[i] for i in samples]
        return found, group.received, routes.bytes_received

    for rank, (found, received, counted) in enumerate(on_ranks(run)):
        samples = [i for one in wanted[rank] for i in one]
        for i, own in zip(samples, found, strict=True):
            assert own.dtype == dtype
            np.testing.assert_array_equal(own, np.concatenate(parts[i])[:, layers[rank]])
        elsewhere = {i for i in samples if rank not in REPLICAS[i // 4]}
        tokens = sum(len(parts[i][1]) for i in elsewhere)
        tokens += PROMPT * len({i // 2 for i in elsewhere})
        size = tokens * len(layers[rank]) * SLOTS * np.dtype(dtype).itemsize
        assert received == counted == size and size > 0


def test_what_is_elsewhere_is_an_error_until_it_is_asked_for() -> None:
    parts = whole(np.uint8)
    here, elsewhere = (held_by(rank, parts)[0] for rank in (0, 2))
    np.testing.assert_array_equal(here, np.concatenate(parts[0]))
    assert [len(own) for own in elsewhere.segments] == [len(own) for own in parts[0]]
    with pytest.raises(ValueError, match="these entries are on rank 0"):
        np.asarray(elsewhere)


def test_samples_travel_without_their_routes() -> None:
    tokens, large = np.zeros(4, np.int32), np.zeros((7, 48, 8), np.uint8)
    sample = drawn(tokens, (large,))
    assert len(pickle.dumps(sample)) > large.nbytes
    assert len(pickle.dumps(sample.held_by(0, {}))) < large.nbytes


def test_the_load_counts_a_prompt_with_each_of_its_samples_and_each_sample_once() -> None:
    parts, samples = whole(np.uint8), [0, 1, 5, 7]
    layers = [[0, 1, 2], [], [3, 4, 5], [5]]

    def run(rank: int, group: Any) -> np.ndarray:
        stage: Any = SimpleNamespace(
            moe=SimpleNamespace(num_experts=EXPERTS),
            num_layers=LAYERS,
            layers=layers[rank],
            world=group,
        )
        routes = FetchedArrays(held_by(rank, parts), layers[rank], group)
        return StepExperts(stage, routes).load(samples)

    expected = load_by_expert([np.concatenate(parts[i]) for i in samples], LAYERS, EXPERTS)
    for own, found in zip(layers, on_ranks(run), strict=True):
        np.testing.assert_array_equal(found, expected[own])


@pytest.mark.parametrize("most_bytes", [1, 100, 1 << 30])
def test_the_first_rank_gets_all_of_them_for_files_a_few_at_a_time(most_bytes: int) -> None:
    parts = whole(np.uint8)

    def run(rank: int, group: Any) -> Any:
        return list(gathered(held_by(rank, parts), group, most_bytes)), group.received

    results = on_ranks(run)
    assert len({len(found) for found, _ in results}) == 1
    for own, expected in zip(results[0][0], parts, strict=True):
        np.testing.assert_array_equal(own, np.concatenate(expected))
    assert results[0][1] > 0 and not any(received for _, received in results[1:])
    assert not any(values.size for found, _ in results[1:] for values in found)
