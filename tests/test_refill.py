"""Dynamic sampling: which groups are replaced, by what, how often, and what is told of it.

Does not prove that the generator draws new noise for them, nor anything of several ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mindgrpo.algorithm.types import Samples
from mindgrpo.grpo.dynamic_sampling import DrawGroups, Refills, refill
from mindgrpo.grpo.rollout import Scored
from mindgrpo.rewards.scores import Report, Scores

GROUP = 2


def samples_of(groups: Sequence[int], mark: int) -> Samples:
    """`mark` is the first token of every completion."""
    owners = [group for group in groups for _ in range(GROUP)]
    count = len(owners)
    return Samples(
        prompts=[np.array([mark], np.int32)] * count,
        completions=[np.array([mark, i], np.int32) for i in range(count)],
        finish_reasons=["stop"] * count,
        generator_logps=[np.zeros(2, np.float32)] * count,
        groups=owners,
    )


def scored_of(rewards: Sequence[float], errors: int = 0) -> Scored:
    values = np.array(rewards, np.float32)
    reports = {"f": Report({"errors": errors})}
    scores = Scores({"f": values.astype(float)}, values, values != values, reports)
    return Scored(scores, [f"text {reward}" for reward in rewards])


def drawing(*rounds: list[float]) -> tuple[DrawGroups, list[list[int]]]:
    """Gives the rewards of `rounds`, one after the other, and remembers which groups were asked for."""
    asked: list[list[int]] = []

    def draw(number: int, groups: Sequence[int]) -> tuple[Samples, Scored]:
        asked.append(list(groups))
        assert number == len(asked)
        return samples_of(groups, mark=number), scored_of(rounds[number - 1], errors=1)

    return draw, asked


def test_only_groups_of_equal_rewards_are_replaced_until_none_is_left() -> None:
    samples = samples_of([0, 1, 2, 3], mark=0)
    draw, asked = drawing([0, 1, 1, 1], [1, 0])
    scored, told = refill(samples, scored_of([1, 1, 0, 1, 0, 0, 1, 0]), GROUP, 5, draw)
    assert asked == [[0, 2], [2]]
    assert [tokens[0] for tokens in samples.completions] == [1, 1, 0, 0, 2, 2, 0, 0]
    assert [prompt[0] for prompt in samples.prompts] == [1, 1, 0, 0, 2, 2, 0, 0]
    assert scored.scores.total.tolist() == [0, 1, 0, 1, 1, 0, 1, 0]
    assert scored.scores.per_function["f"].tolist() == scored.scores.total.tolist()
    assert scored.texts[:2] + scored.texts[4:6] == ["text 0", "text 1", "text 1", "text 0"]
    assert told == Refills(rounds=2, groups=3, sampled_mean=(4 + 3 + 1) / 14)


def test_the_rounds_are_bounded_and_groups_that_stay_equal_stay() -> None:
    samples = samples_of([0, 1], mark=0)
    draw, asked = drawing([1, 1], [0, 0])
    scored, told = refill(samples, scored_of([1, 0, 0, 0]), GROUP, 2, draw)
    assert asked == [[1], [1]] and told.rounds == told.groups == 2
    assert [tokens[0] for tokens in samples.completions] == [0, 0, 2, 2]
    assert scored.scores.total.tolist() == [1, 0, 0, 0]


def test_failures_of_replaced_samples_stay_counted() -> None:
    draw, _ = drawing([1, 0])
    scored, _ = refill(samples_of([0], 0), scored_of([0, 0], errors=2), GROUP, 3, draw)
    assert scored.scores.errors == {"f": 3}


def test_nothing_is_drawn_where_every_group_teaches() -> None:
    draw, asked = drawing()
    given = scored_of([1, 0, 0, 1])
    scored, told = refill(samples_of([0, 1], 0), given, GROUP, 3, draw)
    assert asked == [] and scored is given and told == Refills(0, 0, 0.5)


def test_ranks_without_the_texts_do_without() -> None:
    draw, _ = drawing([1, 0])

    def without_texts(number: int, groups: Sequence[int]) -> tuple[Samples, Scored]:
        samples, scored = draw(number, groups)
        return samples, Scored(scored.scores, [])

    given = Scored(scored_of([1, 1]).scores, [])
    assert refill(samples_of([0], 0), given, GROUP, 1, without_texts)[0].texts == []
