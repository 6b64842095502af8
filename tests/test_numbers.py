"""What is not finite is found and named, ranks that differ are named, and sums of weights do not know layouts.

Does not prove that a whole run stops on any of it: test_faults_in_numbers.py does.
"""

from __future__ import annotations

import numpy as np
import pytest

from mindgrpo.algorithm import non_finite
from mindgrpo.algorithm.sample import Rollout, TrainBatch
from mindgrpo.backend.cpu.backend import CpuBackend
from mindgrpo.backend.rank_consistency import RanksDisagree, check_alike, different_ranks, digest
from mindgrpo.grpo.metrics import step_digests
from mindgrpo.models.decoder_config import decoder_config
from mindgrpo.models.parameters import parameter_specs
from mindgrpo.parallel.mesh import Mesh
from mindgrpo.parallel.sharding import Box, Layout
from mindgrpo.weights.checksum import MODULUS, box_sum, host_sums, total_sums
from mindgrpo.weights.local_weights import Weights
from mindgrpo.weights.pretrained import fill_random

CONFIG = decoder_config(
    {
        "model_type": "qwen2",
        "vocab_size": 67,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "here",
)
LAYOUTS = [(1, 1, 1), (1, 4, 2), (2, 4, 1), (2, 2, 2), (4, 1, 1), (1, 2, 4)]


def batch() -> TrainBatch:
    lengths = [3, 1, 4]

    def values(number: float) -> list[np.ndarray]:
        return [np.full(n, number, np.float32) for n in lengths]

    rollout = Rollout.single_turn(
        [np.arange(2, dtype=np.int32)] * 3,
        [np.arange(n, dtype=np.int32) for n in lengths],
        ["stop"] * 3,
        values(-1.0),
        [0, 0, 0],
    )
    return TrainBatch(
        rollout,
        advantages=np.zeros(3, np.float32),
        token_advantages=values(1.0),
        old_logps=values(-1.0),
        reference_logps=values(-1.0),
        rollout_is_weights=values(1.0),
    )


def first_in(given: TrainBatch, rewards: np.ndarray) -> non_finite.NonFinite | None:
    return non_finite.in_rollout(given.rollout, rewards, given.reference_logps, given.old_logps)


def test_finite_samples_have_nothing_to_tell() -> None:
    assert first_in(batch(), np.zeros(3)) is None
    assert non_finite.in_batch(batch()) is None
    assert non_finite.in_logps({0: np.zeros(3), 2: np.zeros(4)}) is None
    assert non_finite.in_arrays([("x", np.zeros((2, 3))), ("y", 1.0)]) is None


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("generator_logps", "the generator's log-probs of sample 2, token 1: nan"),
        ("reference_logps", "the reference's log-probs of sample 2, token 1: nan"),
        ("old_logps", "the policy's log-probs before its update of sample 2, token 1: nan"),
        ("token_advantages", "advantages of sample 2, token 1: nan"),
        (
            "rollout_is_weights",
            "weights of the correction for the generator of sample 2, token 1: nan",
        ),
    ],
)
def test_a_number_of_a_token_is_named(name: str, words: str) -> None:
    given = batch()
    owner = given.rollout if name == "generator_logps" else given
    getattr(owner, name)[2][1] = np.nan
    found = first_in(given, np.zeros(3)) or non_finite.in_batch(given)
    assert str(found) == words


def test_a_number_of_a_sample_is_named() -> None:
    given = batch()
    assert str(first_in(given, np.array([0, -np.inf, 0]))) == "rewards of sample 1: -inf"
    given.advantages[0] = np.nan
    assert str(non_finite.in_batch(given)) == "advantages of sample 0: nan"
    found = non_finite.in_logps({4: np.zeros(3), 7: np.array([0, np.inf])})
    assert str(found) == "the policy's log-probs of sample 7, token 1: inf"
    assert str(non_finite.in_arrays([("x", 1.0), ("the loss", np.nan)])) == "the loss: nan"


def test_a_digest_sees_bits_shapes_types_and_order() -> None:
    zeros = np.zeros(4, np.float32)
    different = [zeros, -zeros, zeros.reshape(2, 2), zeros.astype(np.int32), [zeros, zeros]]
    different += [[zeros[:2], zeros[2:]], [zeros[:3], zeros[3:]], None, "0", 0, []]
    digests = [digest(value) for value in different]
    assert len(set(digests)) == len(different)
    assert digest(np.asfortranarray(np.eye(3)[:2])) == digest(np.eye(3)[:2].copy())


def test_the_rank_that_differs_is_named_with_what_it_differs_in() -> None:
    by_rank = [step_digests(batch(), np.zeros(3)) for _ in range(4)]
    check_alike(by_rank, "in step 3", "")
    other = batch()
    other.rollout.completion_ids[1][0] = 9
    by_rank[2] = step_digests(other, np.zeros(3))
    with pytest.raises(RanksDisagree, match="^rank 2 of 4 differ in completions in step 3; look"):
        check_alike(by_rank, "in step 3", "look")


def test_the_commonest_value_is_the_others_and_rank_0s_among_equals() -> None:
    assert different_ranks(["a", "b", "b", "b"]) == [0]
    assert different_ranks(["a", "b"]) == [1]
    assert different_ranks(["a", "a"]) == []
    assert different_ranks(["a", "b", "c", "b"]) == [0, 2]


def weights_of(degrees: tuple[int, int, int], seed: int = 5) -> list[Weights]:
    """Of every rank, filled alike."""
    data, model, stages = degrees
    layout = Layout.of(Mesh(data, model, stages), parameter_specs(CONFIG))
    made = []
    for rank in range(data * model * stages):
        weights = Weights(layout, rank, CpuBackend({}))
        fill_random(weights, seed, 0.1)
        made.append(weights)
    return made


def sums(ranks: list[Weights]) -> tuple[dict[str, int], dict[str, list[int]]]:
    return total_sums(ranks[0].layout, [host_sums(weights) for weights in ranks], MODULUS)


@pytest.mark.parametrize("degrees", LAYOUTS)
def test_sums_of_weights_are_the_same_under_every_layout(degrees: tuple[int, int, int]) -> None:
    expected = (sums(weights_of((1, 1, 1)))[0], {})
    assert sums(weights_of(degrees)) == expected
    other = sums(weights_of(degrees, seed=6))[0]
    same = {name for name, value in other.items() if value == expected[0][name]}
    assert all(name.endswith("norm.weight") for name in same)


@pytest.mark.parametrize("degrees", LAYOUTS)
def test_one_changed_bit_changes_one_sum(degrees: tuple[int, int, int]) -> None:
    ranks = weights_of(degrees)
    before, _ = sums(ranks)
    name = "model.layers.1.mlp.down_proj.weight"
    for weights in ranks:
        if name in weights.arrays.hf_views:
            weights.arrays.hf_views[name].view(np.uint32)[3, 5] ^= 1 << 31
    after, _ = sums(ranks)
    assert [key for key in before if before[key] != after[key]] == [name]


def test_rows_or_columns_that_changed_places_change_the_sum() -> None:
    (weights,) = weights_of((1, 1, 1))
    name = "model.layers.0.mlp.down_proj.weight"
    before = host_sums(weights)[name]
    part = weights.arrays.hf_views[name]
    part[[0, 1]] = part[[1, 0]]
    swapped = host_sums(weights)[name]
    part[[0, 1]] = part[[1, 0]]
    part[:, [0, 1]] = part[:, [1, 0]]
    assert len({before, swapped, host_sums(weights)[name]}) == 3


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_sums_of_stacked_matrices_do_not_depend_on_the_cut(dim: int) -> None:
    stacked = np.random.default_rng(3).standard_normal((4, 6, 8), np.float32)

    def sum_of(values: np.ndarray, *slices: slice) -> int:
        box = Box(tuple(s.start for s in slices), tuple(s.stop for s in slices))
        return box_sum(values[slices], box)

    full = [slice(0, n) for n in stacked.shape]
    halves = [[*full], [*full]]
    halves[0][dim], halves[1][dim] = slice(0, 2), slice(2, stacked.shape[dim])
    whole = sum_of(stacked, *full)
    assert sum(sum_of(stacked, *half) for half in halves) % MODULUS == whole
    exchanged = np.swapaxes(
        np.swapaxes(stacked, 0, dim)[[1, 0, *range(2, stacked.shape[dim])]], 0, dim
    )
    assert sum_of(exchanged, *full) != whole


def test_a_replica_that_differs_is_named() -> None:
    ranks = weights_of((2, 2, 2))
    name = "model.layers.3.self_attn.k_proj.weight"
    holders = [rank for rank, weights in enumerate(ranks) if name in weights.arrays.hf_views]
    ranks[holders[-1]].arrays.hf_views[name][0, 0] += 1.0
    totals, wrong = sums(ranks)
    assert wrong == {name: [holders[-1]]}
    assert totals == sums(weights_of((1, 1, 1)))[0]
