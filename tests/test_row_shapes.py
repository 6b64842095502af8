"""Which lengths rows get: as long as their content, few in a run, and another one only where it pays.

Does not prove that graphs of other lengths compute the same (test_update.py, test_distributed.py), nor any time.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from mindgrpo.algorithm.packing import MicroShape, PackedRollout, most_picks, num_micro_batches
from mindgrpo.algorithm.row_shapes import (
    MAX_SHAPES,
    TOKENS_PER_COMPILE,
    ShapeChoice,
    row_lengths,
)
from mindgrpo.algorithm.sample import Rollout
from mindgrpo.config import Config
from mindgrpo.errors import UserError
from mindgrpo.plan.micro_shapes import row_lines, update_shape


def packed(*lengths: tuple[int, int], group: int = 1) -> PackedRollout:
    """One sample a (prompt, completion) length; `group` of each, with one prompt."""
    prompts = [np.full(prompt, 1 + i % 9, np.int32) for i, (prompt, _) in enumerate(lengths)]
    repeated = [i for i in range(len(lengths)) for _ in range(group)]
    completions = [np.full(lengths[i][1], 5, np.int32) for i in repeated]
    logps = [np.zeros(len(completion), np.float32) for completion in completions]
    stops = ["stop"] * len(repeated)
    return PackedRollout(
        Rollout.single_turn([prompts[i] for i in repeated], completions, stops, logps, repeated)
    )


def lengths_of(choice: ShapeChoice, rollouts: Sequence[PackedRollout]) -> list[int]:
    return [choice.choose(rollout, 1).length for rollout in rollouts]


def test_lengths_are_powers_of_two_and_the_longest() -> None:
    def lengths(longest: int, unit: int = 1) -> tuple[int, ...]:
        return row_lengths(MicroShape(1, longest, unit=unit))

    assert lengths(1024) == (64, 128, 256, 512, 1024)
    assert lengths(2560) == (64, 128, 256, 512, 1024, 2048, 2560)
    assert lengths(64) == (64,) and lengths(24) == (24,)
    # Tokens that three ranks share out.
    assert lengths(201, 3) == (66, 129, 201)


def test_a_sample_a_row_costs_its_content() -> None:
    choice = ShapeChoice(MicroShape(2, 8192, 1))
    shape = choice.choose(packed((90, 410), (60, 300), (80, 220), (90, 400)), 1)
    assert (shape.rows, shape.length, shape.max_per_row) == (2, 512, 1)


@pytest.mark.parametrize("column_cost", [0.0, 1e-3])
def test_packed_rows_are_of_the_length_that_computes_least(column_cost: float) -> None:
    rollout = packed(*[(40, 45 + i) for i in range(12)], group=8)
    shape = ShapeChoice(MicroShape(2, 4096), column_cost).choose(rollout, 2)

    def cost(length: int) -> float:
        micro = MicroShape(2, length)
        count = num_micro_batches(rollout.rows(micro), micro, 2)
        return count * (128 + 2 * length * (1 + length * column_cost))

    assert cost(shape.length) == min(
        cost(n) for n in row_lengths(MicroShape(2, 4096)) if n >= 40 + 56
    )
    assert shape.length < 4096


def test_what_ragged_kernels_pad_is_less_than_a_quarter_where_a_long_row_was_two_thirds_empty() -> (
    None
):
    rollout = packed(*[(30, 36)] * 16)
    choice = ShapeChoice(MicroShape(1, 3072))
    shape = choice.choose(rollout, 1)
    tokens = shape.tokens * num_micro_batches(rollout.rows(shape), shape, 1)
    used = 16 * (30 + 35)
    assert 1 - used / 3072 > 0.65
    assert 1 - used / tokens < 0.25


def test_a_run_has_few_shapes_whatever_comes_and_each_holds_its_samples() -> None:
    draw = np.random.default_rng(0)
    for per_row in (1, 3, None):
        choice = ShapeChoice(MicroShape(2, 4096, per_row), 1e-4)
        for _ in range(60):
            longest = int(2 ** draw.uniform(3, 11.9))
            pairs = [tuple(draw.integers(1, 1 + longest // 2, 2)) for _ in range(6)]
            rollout = packed(*pairs)
            shape = choice.choose(rollout, 2)
            batches = rollout.micro_batches(shape, 2, 0) + rollout.micro_batches(shape, 2, 1)
            placed = [one.sample for batch in batches for row in batch.rows for one in row]
            assert sorted(placed) == list(range(6))
            assert {batch.picks.size for batch in batches} == {shape.picks}
        assert len(choice.in_use) <= MAX_SHAPES


def test_samples_that_need_less_are_padded_until_that_has_cost_as_much_as_a_compile() -> None:
    choice = ShapeChoice(MicroShape(2, 4096, 1))
    long, short = packed((100, 900)), packed((100, 300))
    assert lengths_of(choice, [long, short, short]) == [1024] * 3
    steps = -(-TOKENS_PER_COMPILE // (2 * 1024 - 2 * 512))
    after = lengths_of(choice, [short] * steps)
    assert after[0] == 1024 and after[-1] == 512
    assert lengths_of(choice, [long, short]) == [1024, 512]


def test_samples_that_no_shape_holds_get_one_at_once_with_all_picks() -> None:
    choice = ShapeChoice(MicroShape(2, 4096, 1))
    first = choice.choose(packed((100, 300)), 1)
    assert first.picks is not None and first.picks < first.tokens
    late = choice.choose(packed((10, 700)), 1)
    assert (late.length, late.picks) == (1024, 2 * 1024)


def test_all_data_parallel_ranks_get_one_shape_though_one_needs_more_picks() -> None:
    rollout = packed((10, 50), (50, 2), (10, 50), (50, 2))
    choice = ShapeChoice(MicroShape(1, 64, 1))
    shape = choice.choose(rollout, 2)
    assert most_picks(rollout.rows(shape), shape, 2) == 50
    sizes = {batch.picks.size for i in range(2) for batch in rollout.micro_batches(shape, 2, i)}
    assert sizes == {shape.picks}


def test_a_prompt_that_many_short_samples_share_never_needs_more_picks_than_tokens() -> None:
    rollout = packed((2, 2), (1, 1), (3, 4), group=90)
    choice = ShapeChoice(MicroShape(2, 256))
    choice.choose(packed((20, 100)), 1)
    for _ in range(3):
        shape = choice.choose(rollout, 1)
        assert shape.picks is not None and shape.picks <= shape.tokens
        assert sum(len(row) for row in rollout.rows(shape)) == 3 * 90
        rollout.micro_batches(shape, 1, 0)
    assert len(choice.in_use) <= MAX_SHAPES


@pytest.mark.parametrize("in_use", [(), ((64, 8),), ((64, 8), (64, 9), (64, 10))])
def test_a_rank_that_has_the_last_token_of_a_shared_prompt_may_have_more_picks_than_tokens(
    in_use: tuple[tuple[int, int], ...],
) -> None:
    rollout = packed((2, 2), group=30)
    choice = ShapeChoice(MicroShape(1, 64, context_ranks=2))
    choice.restore(in_use, 0)
    shape = choice.choose(rollout, 1)
    sizes = [rollout.micro_batches(shape, 1, 0, part=part)[0].picks.size for part in range(2)]
    assert shape.picks is not None and shape.picks > shape.tokens == 32
    assert sizes == [shape.picks] * 2
    # A run that goes on has it too.
    again = ShapeChoice(choice.widest)
    again.restore(choice.in_use, choice.excess)
    assert again.in_use == choice.in_use


def test_looking_changes_nothing() -> None:
    choice = ShapeChoice(MicroShape(2, 4096, 1))
    rollout = packed((100, 300))
    seen = choice.look(rollout, 1)
    assert choice.in_use == () and choice.choose(rollout, 1) == seen


def test_a_choice_that_is_restored_goes_on_as_the_one_that_did_not_end() -> None:
    rollouts = [packed((100, 900))] + [packed((100, 300))] * 40
    whole, first, second = (ShapeChoice(MicroShape(2, 4096, 1)) for _ in range(3))
    expected = lengths_of(whole, rollouts + rollouts)
    found = lengths_of(first, rollouts)
    second.restore(first.in_use, first.excess)
    assert found + lengths_of(second, rollouts) == expected
    assert 512 in expected


def test_shapes_of_a_wider_run_are_not_restored() -> None:
    choice = ShapeChoice(MicroShape(2, 512, 1))
    choice.restore([(1024, 2048), (256, 512)], 7)
    assert choice.in_use == ((256, 512),)


def test_a_sample_that_fits_no_row_is_a_users_error() -> None:
    with pytest.raises(UserError, match="does not fit rl_config.seq_length 64"):
        ShapeChoice(MicroShape(2, 64)).choose(packed((40, 40)), 1)


def config(**rl: object) -> Config:
    tree = {
        "rl_config": {"seq_length": 8192, "batch_size": 2, **rl},
        "ref_config": {"ref_model_batch_size": 2},
        "generate_config": {"max_prompt_length": 500, "sampling_config": {"max_tokens": 2000}},
    }
    return Config.model_validate(tree)


def test_no_row_is_longer_than_what_may_be_in_it() -> None:
    assert update_shape(config(pack_num=1), ragged=False) == MicroShape(2, 2560, 1)
    assert update_shape(config(packing=False), ragged=True) == MicroShape(2, 2560, 1)
    assert update_shape(config(pack_num=2), ragged=True) == MicroShape(1, 2 * 5056, 4)
    assert update_shape(config(), ragged=False) == MicroShape(2, 8192)
    assert update_shape(config(pack_num=1, tools=["calculator"]), ragged=False).length == 8192


def test_rows_are_rounded_up_to_tokens_that_ranks_can_share_out() -> None:
    tree = config(pack_num=1).model_dump(by_alias=True)
    parallel = {"model_parallel": 3, "use_seq_parallel": True}
    tree["actor_config"]["parallel_config"] |= parallel
    split = Config.model_validate(tree)
    assert update_shape(split, ragged=False) == MicroShape(2, 2562, 1, unit=3)
    assert update_shape(split, ragged=True) == MicroShape(1, 2 * 2560 + 1, 2, unit=3)
    assert (
        "513, 1026, 2049, 4098 or 5121 tokens, as their content needs, multiples of 3 that ranks"
        in (row_lines(split)[0])
    )


def test_rows_that_ranks_share_have_whole_blocks_of_columns_on_each() -> None:
    tree = config(pack_num=1).model_dump(by_alias=True)
    tree["actor_config"]["parallel_config"] |= {"context_parallel": 3}
    shared = update_shape(Config.model_validate(tree), ragged=False)
    assert shared == MicroShape(2, 2592, 1, unit=48, context_ranks=3)
    assert shared.tokens == 2 * 2592 // 3


def test_the_lengths_are_described() -> None:
    (line,) = row_lines(config(packing=False))
    assert line == (
        "micro-batches: 2 rows of 64, 128, 256, 512, 1024, 2048 or 2560 tokens, as their content needs; at most 4 "
        "shapes a graph in a run"
    )
