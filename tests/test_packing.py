"""Samples in packed rows: nothing lost or cut, labels and positions right, rows shared out, results put back.

Does not prove that attention keeps the samples of a row apart, nor how full the rows are beside an optimum.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from mindgrpo.algorithm.packing import MicroBatch, micro_batches, pack, padding_share
from mindgrpo.algorithm.samples import Completion, Samples, collect
from mindgrpo.errors import UserError

ROW = 20


def samples_of(lengths: Sequence[tuple[int, int]], seed: int = 0) -> Samples:
    """One sample a (prompt, completion) length, of tokens from 1 up, so that 0 is padding only."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(1, 90, p).astype(np.int32) for p, _ in lengths]
    completions = [rng.integers(1, 90, c).astype(np.int32) for _, c in lengths]
    logps = [rng.normal(size=c).astype(np.float32) for _, c in lengths]
    return Samples(prompts, completions, ["stop"] * len(lengths), logps)


def random_samples(count: int, seed: int) -> Samples:
    rng = np.random.default_rng(seed)
    pairs = [(int(rng.integers(1, 9)), int(rng.integers(0, 12))) for _ in range(count)]
    return samples_of(pairs, seed)


def batches_of(samples: Samples, ways: int = 1, batch_rows: int = 3) -> list[list[MicroBatch]]:
    rows = pack(samples, range(len(samples)), ROW, None)
    return [micro_batches(samples, rows, ROW, batch_rows, ways, i) for i in range(ways)]


@pytest.mark.parametrize("seed", range(5))
def test_every_sample_is_placed_once_and_whole_without_overlap(seed: int) -> None:
    samples = random_samples(17, seed)
    rows = pack(samples, range(17), ROW, None)
    assert sorted(placed.sample for row in rows for placed in row) == list(range(17))
    for row in rows:
        end = 0
        for placed in row:
            assert placed.start == end
            assert placed.prompt == len(samples.prompts[placed.sample])
            assert placed.completion == len(samples.completions[placed.sample])
            end += placed.prompt + placed.completion
        assert end <= ROW


def test_only_the_members_are_packed() -> None:
    rows = pack(random_samples(9, 1), [7, 2, 5], ROW, None)
    assert sorted(placed.sample for row in rows for placed in row) == [2, 5, 7]


@pytest.mark.parametrize("limit", [1, 2])
def test_no_row_has_more_samples_than_allowed(limit: int) -> None:
    rows = pack(samples_of([(2, 2)] * 7), range(7), ROW, limit)
    assert max(len(row) for row in rows) == limit
    assert len(rows) == -(-7 // limit)


def test_packing_is_first_fit_by_falling_length() -> None:
    rows = pack(samples_of([(2, 3), (10, 5), (4, 6), (5, 5)]), range(4), ROW, None)
    assert [[placed.sample for placed in row] for row in rows] == [[1, 0], [2, 3]]


@pytest.mark.parametrize("seed", range(3))
def test_tokens_positions_segments_and_labels_are_those_of_each_sample(seed: int) -> None:
    samples = random_samples(11, seed)
    for batch in batches_of(samples)[0]:
        assert batch.tokens.dtype == batch.labels.dtype == np.int32
        free = np.ones(batch.tokens.shape, bool)
        for index, row in enumerate(batch.rows):
            for number, placed in enumerate(row, 1):
                sequence = samples.sequence(placed.sample)
                columns = slice(placed.start, placed.start + len(sequence))
                np.testing.assert_array_equal(batch.tokens[index, columns], sequence)
                np.testing.assert_array_equal(
                    batch.positions[index, columns], np.arange(len(sequence))
                )
                assert set(batch.segments[index, columns]) == {number}
                completion = samples.completions[placed.sample]
                labels = batch.labels[index, placed.predictions]
                np.testing.assert_array_equal(labels, completion)
                free[index, columns] = False
        for array in (batch.tokens, batch.positions, batch.segments, batch.labels):
            assert not array[free].any()


def test_no_column_predicts_the_first_token_of_the_next_sample() -> None:
    samples = samples_of([(3, 4), (3, 4)])
    (batch,) = batches_of(samples, batch_rows=1)[0]
    assert batch.labels[0, 6] == 0
    np.testing.assert_array_equal(batch.labels[0, 7:9], samples.prompts[1][1:])


@pytest.mark.parametrize("ways", [1, 2, 3, 8])
@pytest.mark.parametrize("count", [1, 5, 40])
def test_ranks_share_out_all_rows_and_have_equally_many_micro_batches(
    ways: int, count: int
) -> None:
    samples = random_samples(count, count)
    rows = pack(samples, range(count), ROW, None)
    shares = batches_of(samples, ways, batch_rows=2)
    assert len({len(share) for share in shares}) == 1
    held = [row for share in shares for batch in share for row in batch.rows]
    assert len([row for row in held if row]) == len(rows)
    assert {row for row in held if row} == set(rows)
    assert all(batch.tokens.shape == (2, ROW) for share in shares for batch in share)
    assert held.count(()) == len(held) - len(rows) < 2 * ways


def test_a_padding_row_is_zero_everywhere() -> None:
    (batch,) = batches_of(samples_of([(3, 4)]), batch_rows=2)[0]
    assert batch.rows[1] == ()
    for array in (batch.tokens, batch.positions, batch.segments, batch.labels):
        assert not array[1].any()


@pytest.mark.parametrize("seed", range(3))
def test_what_is_spread_over_tokens_is_gathered_again(seed: int) -> None:
    samples = random_samples(13, seed)
    gathered: dict[int, np.ndarray] = {}
    total = 0
    for share in batches_of(samples, ways=2):
        for batch in share:
            spread = batch.spread(samples.generator_logps)
            assert spread.shape == (batch.tokens.size,) and spread.dtype == np.float32
            total += np.count_nonzero(spread)
            gathered |= batch.gather(spread)
    assert sorted(gathered) == list(range(13))
    assert total == samples.completion_lengths.sum()
    for i, values in gathered.items():
        np.testing.assert_array_equal(values, samples.generator_logps[i])


def test_a_number_a_sample_is_spread_over_its_completion_alone() -> None:
    samples = samples_of([(3, 4), (2, 5)])
    (batch,) = batches_of(samples, batch_rows=1)[0]
    expected = np.zeros(ROW)
    expected[2:6] = 10.0
    expected[8:13] = 20.0
    np.testing.assert_array_equal(batch.spread(np.array([10.0, 20.0])), expected)


def test_gathered_values_do_not_change_with_their_source() -> None:
    (batch,) = batches_of(samples_of([(1, 2)]), batch_rows=1)[0]
    values = np.arange(ROW, dtype=np.float32)
    gathered = batch.gather(values)
    values[:] = -1
    np.testing.assert_array_equal(gathered[0], [0, 1])


def test_an_empty_completion_keeps_its_place_and_predicts_nothing() -> None:
    samples = samples_of([(5, 0), (2, 3)])
    (batch,) = batches_of(samples, batch_rows=1)[0]
    gathered = batch.gather(batch.spread(samples.generator_logps))
    assert gathered[0].shape == (0,)
    np.testing.assert_array_equal(gathered[1], samples.generator_logps[1])
    assert np.count_nonzero(batch.spread(np.ones(2, np.float32))) == 3


def test_a_completion_that_ends_at_the_last_column_keeps_all_its_labels() -> None:
    samples = samples_of([(8, ROW - 8)])
    (batch,) = batches_of(samples, batch_rows=1)[0]
    np.testing.assert_array_equal(batch.labels[0, 7 : ROW - 1], samples.completions[0])
    assert batch.labels[0, ROW - 1] == 0
    np.testing.assert_array_equal(batch.tokens[0], samples.sequence(0))


def test_a_sample_longer_than_a_row_is_refused_with_its_length_and_the_keys() -> None:
    with pytest.raises(UserError) as raised:
        pack(samples_of([(8, ROW - 7)]), [0], ROW, None)
    sentence = str(raised.value)
    for part in ("21 tokens", "rl_config.seq_length 20", "max_tokens"):
        assert part in sentence


def test_the_padding_share_counts_all_rows_of_the_graph() -> None:
    samples = samples_of([(5, 5), (5, 5)])
    rows = pack(samples, range(2), ROW, None)
    assert padding_share(rows, ROW, 1) == 0.0
    assert padding_share(rows, ROW, 4) == 0.75


def completion(sample: int) -> Completion:
    return Completion(sample, np.array([sample], np.int32), np.zeros(1, np.float32), "stop")


def test_completions_are_put_in_order_with_their_prompts() -> None:
    prompts = [np.array([100]), np.array([200])]
    samples = collect(prompts, 2, [completion(i) for i in (3, 0, 2, 1)])
    assert [int(tokens[0]) for tokens in samples.completions] == [0, 1, 2, 3]
    assert [int(prompt[0]) for prompt in samples.prompts] == [100, 100, 200, 200]


@pytest.mark.parametrize("arrived", [(0, 1, 2), (0, 1, 2, 2), (0, 1, 2, 3, 3)])
def test_a_completion_that_is_missing_or_comes_twice_is_refused(arrived: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="completions arrived for 4 samples"):
        collect([np.array([1]), np.array([2])], 2, [completion(i) for i in arrived])
