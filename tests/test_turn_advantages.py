"""Advantages of the turns of a conversation, against the formula written out with loops.

Does not prove that tokens get those of their turns: that is test_environment_turns.py.
"""

from __future__ import annotations

import numpy as np
import pytest

from mindgrpo.algorithm.advantages import group_advantages, turn_advantages


def plain_turn_advantages(
    rewards: list[list[float]], group: int, scale: str, floor: float
) -> list[list[float]]:
    """The formula with loops: each reward normalised by its group's, then summed from a turn on."""
    out = []
    everything = np.array([r for own in rewards for r in own])
    for i, own in enumerate(rewards):
        first = i - i % group
        of_group = np.array([r for one in rewards[first : first + group] for r in one])
        deviation = {
            "group": of_group.std(ddof=1) + floor,
            "batch": everything.std(ddof=1) + floor,
            "none": 1.0,
        }[scale]
        normalised = [(r - of_group.mean()) / deviation for r in own]
        out.append([sum(normalised[k:]) for k in range(len(own))])
    return out


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages_of_turns_are_those_of_the_formula(scale: str) -> None:
    rewards = [[1.0, 0.0, 2.0], [0.5], [0.0, 0.0], [3.0, -1.0], [1.0], [0.25, 0.5]]
    made = turn_advantages([np.array(own) for own in rewards], 3, scale, 1e-6)
    expected = plain_turn_advantages(rewards, 3, scale, 1e-6)
    for own, wanted in zip(made, expected, strict=True):
        np.testing.assert_allclose(own, wanted, rtol=1e-5, atol=1e-6)
        assert own.dtype == np.float32


def test_with_one_turn_each_the_advantages_of_turns_are_those_of_the_group() -> None:
    rewards = np.random.default_rng(0).normal(size=12).astype(np.float32)
    for scale in ("group", "batch", "none"):
        made = turn_advantages([rewards[i : i + 1] for i in range(12)], 4, scale)
        whole = group_advantages(rewards, 4, scale)
        np.testing.assert_allclose(np.concatenate(made), whole, rtol=1e-5, atol=1e-6)


def test_failed_samples_and_flat_groups_have_no_advantages() -> None:
    nothing, known = np.full(2, np.nan), [np.array([1.0, 2.0]), np.array([0.0])]
    made = turn_advantages([known[0], nothing, known[1]], 3, "group")
    assert made[1].tolist() == [0.0, 0.0]
    without = plain_turn_advantages([own.tolist() for own in known], 2, "group", 1e-6)
    np.testing.assert_allclose(made[0], without[0], rtol=1e-5)
    np.testing.assert_allclose(made[2], without[1], rtol=1e-5)
    flat = turn_advantages([np.full(3, 0.1), np.full(1, 0.1), nothing], 3, "group")
    assert all(not own.any() for own in flat)
    assert not turn_advantages([nothing, nothing], 2, "batch")[0].any()
    with pytest.raises(ValueError, match="not finite"):
        turn_advantages([np.array([np.inf])], 1, "group")
