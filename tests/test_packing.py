"""Samples in packed rows: nothing lost or cut, labels and positions right, rows shared out, results put back.

Does not prove that attention keeps the samples of a row apart, nor how full the rows are beside an optimum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from mindgrpo.algorithm.packing import (
    MicroBatch,
    MicroShape,
    PackedRollout,
    PackedRow,
    micro_batches,
    pack,
    padding_share,
)
from mindgrpo.algorithm.sample import Rollout, Sample, collect
from mindgrpo.errors import UserError

ROW = 20


def samples_of(
    lengths: Sequence[tuple[int, int]], seed: int = 0, groups: Sequence[int] | None = None
) -> Rollout:
    """One sample a (prompt, completion) length, of tokens from 1 up, so that 0 is padding only."""
    rng = np.random.default_rng(seed)
    groups = list(groups) if groups is not None else list(range(len(lengths)))
    shared = {
        g: rng.integers(1, 90, p).astype(np.int32)
        for g, (p, _) in zip(groups, lengths, strict=True)
    }
    completions = [rng.integers(1, 90, c).astype(np.int32) for _, c in lengths]
    logps = [rng.normal(size=c).astype(np.float32) for _, c in lengths]
    prompts = [shared[g] for g in groups]
    return Rollout.single_turn(prompts, completions, ["stop"] * len(lengths), logps, groups)


def random_samples(count: int, seed: int, group: int = 1) -> Rollout:
    rng = np.random.default_rng(seed)
    groups = [i // group for i in range(count)]
    prompts = {g: int(rng.integers(1, 9)) for g in set(groups)}
    pairs = [(prompts[g], int(rng.integers(0, 12))) for g in groups]
    return samples_of(pairs, seed, groups)


def batches_of(
    samples: Rollout, ways: int = 1, batch_rows: int = 3, limit: int | None = None
) -> list[list[MicroBatch]]:
    shape = MicroShape(batch_rows, ROW, limit)
    rows = pack(samples, range(len(samples)), shape)
    return [micro_batches(samples, rows, shape, ways, i) for i in range(ways)]


def rows_of(samples: Rollout, members: Sequence[int], limit: int | None = None) -> list[PackedRow]:
    return pack(samples, members, MicroShape(1, ROW, limit))


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("seed", range(5))
def test_every_sample_is_placed_once_and_whole_without_overlap(seed: int, group: int) -> None:
    samples = random_samples(17, seed, group)
    rows = rows_of(samples, range(17))
    assert sorted(placed.sample for row in rows for placed in row) == list(range(17))
    for row in rows:
        taken: list[int] = []
        prompts = {}
        for placed in row:
            assert placed.prompt == len(samples.prompt_ids[placed.sample])
            assert placed.completion == len(samples.completion_ids[placed.sample])
            prompts[placed.prompt_start] = placed.prompt
            taken += range(placed.start, placed.start + max(0, placed.completion - 1))
        for start, length in prompts.items():
            taken += range(start, start + length)
        assert len(taken) == len(set(taken))
        assert not taken or max(taken) < ROW


def test_only_the_members_are_packed() -> None:
    rows = rows_of(random_samples(9, 1), [7, 2, 5])
    assert sorted(placed.sample for row in rows for placed in row) == [2, 5, 7]


@pytest.mark.parametrize("limit", [1, 2])
def test_no_row_has_more_samples_than_allowed(limit: int) -> None:
    rows = rows_of(samples_of([(2, 2)] * 7), range(7), limit)
    assert max(len(row) for row in rows) == limit
    assert len(rows) == -(-7 // limit)


def test_a_row_takes_the_largest_group_that_fits_whole() -> None:
    rows = rows_of(samples_of([(2, 4), (10, 6), (4, 7), (5, 6)]), range(4))
    assert [[placed.sample for placed in row] for row in rows] == [[1, 0], [2, 3]]


def test_samples_of_a_group_share_one_prompt_in_a_row() -> None:
    (row,) = rows_of(samples_of([(4, 3), (4, 5), (4, 1)], groups=[0, 0, 0]), range(3))
    assert [placed.prompt_start for placed in row] == [0, 0, 0]
    assert [(placed.sample, placed.start) for placed in row] == [(1, 4), (0, 8), (2, 10)]


def test_samples_share_a_prompt_in_a_row_where_its_ids_are_equal_and_only_there() -> None:
    samples = samples_of([(4, 3)] * 4, groups=[0, 0, 1, 1])
    prompts = [np.array(ids, np.int32) for ids in ([1, 2, 3, 4], [5, 6, 7, 8], [1, 2, 3, 4], [9])]
    pairs = zip(samples.samples, prompts, strict=True)
    own = replace(samples, samples=tuple(replace(one, prompt=prompt) for one, prompt in pairs))
    (row,) = rows_of(own, range(4))
    starts = {placed.sample: placed.prompt_start for placed in row}
    assert starts[0] == starts[2] and len(set(starts.values())) == 3
    (batch,) = micro_batches(own, (row,), MicroShape(1, ROW), 1, 0)
    for placed in row:
        shared = slice(placed.prompt_start, placed.prompt_start + placed.prompt)
        np.testing.assert_array_equal(batch.tokens[0, shared], prompts[placed.sample])


def test_a_group_too_long_for_a_row_is_continued_with_its_prompt_again() -> None:
    samples = samples_of([(4, 9)] * 5, groups=[0] * 5)
    rows = rows_of(samples, range(5))
    assert [[placed.sample for placed in row] for row in rows] == [[0, 1], [2, 3], [4]]
    assert all(placed.prompt_start == 0 for row in rows for placed in row)


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("seed", range(3))
def test_tokens_positions_spans_and_labels_are_those_of_each_sample(seed: int, group: int) -> None:
    """Read as attention reads it: what a predicting place sees is the sample up to there."""
    samples = random_samples(11, seed, group)
    for batch in batches_of(samples)[0]:
        assert batch.tokens.dtype == batch.labels.dtype == batch.spans.dtype == np.int32
        used = 0
        for i, labels in batch.gather(batch.labels).items():
            np.testing.assert_array_equal(labels, samples.completion_ids[i])
            used += len(labels)
        places = batch.gather(batch.picks)
        for i, columns in places.items():
            whole = np.concatenate([samples.prompt_ids[i], samples.completion_ids[i]])
            for number, place in enumerate(columns.astype(int)):
                row, column = divmod(place, ROW)
                prefix, length, start = batch.spans[row, column]
                seen = [*range(prefix, prefix + length), *range(start, column + 1)]
                count = len(samples.prompt_ids[i]) + number
                np.testing.assert_array_equal(batch.tokens[row, seen], whole[:count])
                np.testing.assert_array_equal(batch.positions[row, seen], np.arange(count))
        assert (batch.picks[used:] == -1).all() and not batch.labels[used:].any()


@pytest.mark.parametrize("ways", [1, 2, 3, 8])
@pytest.mark.parametrize("count", [1, 5, 40])
def test_ranks_share_out_all_rows_and_have_equally_many_micro_batches(
    ways: int, count: int
) -> None:
    samples = random_samples(count, count)
    rows = rows_of(samples, range(count))
    shares = batches_of(samples, ways, batch_rows=2)
    assert len({len(share) for share in shares}) == 1
    held = [row for share in shares for batch in share for row in batch.rows]
    assert len([row for row in held if row]) == len(rows)
    assert {row for row in held if row} == set(rows)
    assert all(batch.tokens.shape == (2, ROW) for share in shares for batch in share)
    assert held.count(()) == len(held) - len(rows) < 2 * ways


def test_a_padding_row_sees_itself_and_predicts_nothing() -> None:
    (batch,) = batches_of(samples_of([(3, 4)]), batch_rows=2)[0]
    assert batch.rows[1] == ()
    assert not batch.tokens[1].any() and not batch.positions[1].any()
    np.testing.assert_array_equal(batch.spans[1], [(0, 0, i) for i in range(ROW)])
    assert (batch.picks < ROW).all()


@pytest.mark.parametrize("seed", range(3))
def test_what_is_spread_over_tokens_is_gathered_again(seed: int) -> None:
    samples = random_samples(13, seed, group=2)
    gathered: dict[int, np.ndarray] = {}
    total = 0
    for share in batches_of(samples, ways=2):
        for batch in share:
            spread = batch.spread(samples.generator_logps)
            assert spread.shape == batch.picks.shape and spread.dtype == np.float32
            total += np.count_nonzero(spread)
            gathered |= batch.gather(spread)
    assert sorted(gathered) == list(range(13))
    assert total == samples.completion_lengths.sum()
    for i, values in gathered.items():
        np.testing.assert_array_equal(values, samples.generator_logps[i])


def test_a_number_a_sample_is_spread_over_its_completion_alone() -> None:
    samples = samples_of([(3, 4), (2, 5)])
    (batch,) = batches_of(samples, batch_rows=1)[0]
    spread = batch.spread(np.array([10.0, 20.0]))
    values, counts = np.unique(spread[batch.picks >= 0], return_counts=True)
    assert values.tolist() == [10.0, 20.0] and counts.tolist() == [4, 5]
    assert not spread[batch.picks < 0].any()


def test_segments_add_up_to_each_samples_mean_and_padding_stands_alone() -> None:
    samples = random_samples(17, seed=3, group=4)
    for batch in batches_of(samples)[0]:
        segments, shares = batch.segments()
        values = batch.spread(samples.generator_logps)
        means = np.bincount(segments, values * shares, minlength=segments.size)[segments]
        for sample, found in batch.gather(means).items():
            if found.size:
                mean = samples.generator_logps[sample].mean()
                np.testing.assert_allclose(found, mean, rtol=1e-5, atol=1e-6)
        padding = batch.picks < 0
        assert not set(segments[padding]) & set(segments[~padding])
        np.testing.assert_array_equal(shares[padding], 0.0)


def test_gathered_values_do_not_change_with_their_source() -> None:
    (batch,) = batches_of(samples_of([(1, 2)]), batch_rows=1)[0]
    values = np.arange(batch.picks.size, dtype=np.float32)
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


@pytest.mark.parametrize("completions", [1, 4, 9, 19])
def test_heads_run_over_few_sizes_and_never_over_fewer_places_than_predict(
    completions: int,
) -> None:
    (batch,) = batches_of(samples_of([(1, completions)]), batch_rows=1)[0]
    assert completions <= batch.picks.size <= ROW
    assert batch.picks.size % (ROW // 4) == 0


def test_a_sample_longer_than_a_row_is_refused_with_its_length_and_the_keys() -> None:
    with pytest.raises(UserError) as raised:
        rows_of(samples_of([(8, ROW - 7)]), [0])
    sentence = str(raised.value)
    for part in ("21 tokens", "rl_config.seq_length 20", "max_tokens"):
        assert part in sentence


def test_the_padding_share_counts_all_places_of_the_graphs_and_a_shared_prompt_once() -> None:
    rows = rows_of(samples_of([(5, 6), (5, 6)]), range(2))
    assert padding_share(rows, ROW) == 0.0
    assert padding_share(rows, 4 * ROW) == 0.75
    rows = rows_of(samples_of([(5, 6), (5, 6)], groups=[0, 0]), range(2))
    assert padding_share(rows, ROW) == 0.25


@pytest.mark.parametrize("seed", range(4))
def test_ragged_groups_leave_less_than_a_tenth_of_full_micro_batches_empty(seed: int) -> None:
    """Sixteen groups of eight, geometric lengths with mean 32, in rows of 1,024: not a promise for few samples."""
    rng = np.random.default_rng(seed)
    lengths = np.minimum(rng.geometric(1 / 32, 128), 128)
    groups = [i // 8 for i in range(128)]
    prompts = rng.integers(8, 40, 16)
    samples = samples_of(
        [(int(prompts[g]), int(n)) for g, n in zip(groups, lengths, strict=True)], seed, groups
    )
    rows = pack(samples, range(128), MicroShape(1, 1024))
    assert padding_share(rows[:-1], 1024 * (len(rows) - 1)) < 0.05


def test_a_rollout_is_packed_once_for_all_who_compute_on_it_alike() -> None:
    rollout, shape, other = (
        random_samples(12, seed=1, group=3),
        MicroShape(2, ROW),
        MicroShape(3, ROW),
    )
    packed = PackedRollout(rollout)
    assert packed.rows(shape) == pack(rollout, range(12), shape)
    assert packed.rows(shape) is packed.rows(shape, range(12)) is not packed.rows(shape, range(5))
    batches = packed.micro_batches(shape, 2, 1)
    assert batches is packed.micro_batches(shape, 2, 1, list(range(12)))
    assert batches is not packed.micro_batches(other, 2, 1)
    assert batches is not packed.micro_batches(shape, 2, 0)
    expected = micro_batches(rollout, pack(rollout, range(12), shape), shape, 2, 1)
    for found, wanted in zip(batches, expected, strict=True):
        assert found.rows == wanted.rows
        np.testing.assert_array_equal(found.tokens, wanted.tokens)
        np.testing.assert_array_equal(found.picks, wanted.picks)


def completion(sample: int) -> Sample:
    prompt = np.array([100 + 100 * (sample // 2)])
    return Sample.drawn(sample, prompt, np.array([sample]), "stop", 7, logps=[0.0])


def test_replaced_groups_bring_their_prompts_and_leave_the_others_alone() -> None:
    before, drawn = random_samples(12, seed=1, group=3), random_samples(6, seed=2, group=3)
    fresh = replace(drawn, group_ids=(1, 1, 1, 3, 3, 3))
    after = before.with_groups_of(fresh)
    assert before.samples_of([1, 3]) == [3, 4, 5, 9, 10, 11]
    assert list(after.group_ids) == [i // 3 for i in range(12)]
    columns = "samples", "prompt_ids", "completion_ids", "action_mask", "messages", "group_ids"
    for name in (*columns, "finish_reasons", "generator_logps", "weights_version"):
        found, kept, new = (getattr(rollout, name) for rollout in (after, before, fresh))
        assert all(found[i] is kept[i] for i in (0, 1, 2, 6, 7, 8))
        assert all(found[i] is new[j] for j, i in enumerate((3, 4, 5, 9, 10, 11)))
    with pytest.raises(ValueError, match="do not replace"):
        before.with_groups_of(replace(drawn, group_ids=(1,) * 6))


def test_completions_are_put_in_order_with_their_prompts() -> None:
    samples = collect([completion(i) for i in (3, 0, 2, 1)], 2, [0, 1])
    assert [int(tokens[0]) for tokens in samples.completion_ids] == [0, 1, 2, 3]
    assert [int(prompt[0]) for prompt in samples.prompt_ids] == [100, 100, 200, 200]
    assert [v.tolist() for v in samples.weights_version] == [[7]] * 4
    assert [mask.tolist() for mask in samples.action_mask] == [[True]] * 4


@pytest.mark.parametrize("arrived", [(0, 1, 2), (0, 1, 2, 2), (0, 1, 2, 3, 3)])
def test_a_completion_that_is_missing_or_comes_twice_is_refused(arrived: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="completions arrived for 4 samples"):
        collect([completion(i) for i in arrived], 2, [0, 1])
