"""pass@k against every choice of k samples, and means with their errors by hand.

Does not prove which samples an evaluation draws (test_evaluation.py).
"""

from __future__ import annotations

from itertools import combinations, product
from math import comb

import numpy as np
import pytest

from mindgrpo.algorithm.pass_at_k import pass_at_k, reported_ks, summarise

NAN = float("nan")


def test_pass_at_k_is_the_share_of_all_choices_of_k_samples_that_hold_a_passed_one() -> None:
    for n in range(1, 9):
        for passed, k in product(range(n + 1), range(1, n + 1)):
            samples = [True] * passed + [False] * (n - passed)
            choices = [any(chosen) for chosen in combinations(samples, k)]
            expected = sum(choices) / len(choices)
            assert pass_at_k(n, passed, k) == pytest.approx(expected, abs=1e-15)


def test_pass_at_k_is_right_where_factorials_no_longer_fit_a_float() -> None:
    for passed, k in ((1, 1), (3, 100), (500, 2), (1999, 1000)):
        exact = 1 - comb(2000 - passed, k) / comb(2000, k)
        assert pass_at_k(2000, passed, k) == pytest.approx(exact, rel=1e-12)


def test_pass_at_k_is_unbiased_where_the_plain_estimate_is_not() -> None:
    """The mean over all outcomes of n draws that pass with chance p, against 1 - (1 - p)^k."""
    n, k, p = 6, 4, 0.3
    chances = [comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
    ours = sum(chance * pass_at_k(n, c, k) for c, chance in enumerate(chances))
    plain = sum(chance * (1 - (1 - c / n) ** k) for c, chance in enumerate(chances))
    assert ours == pytest.approx(1 - (1 - p) ** k, abs=1e-12)
    assert abs(plain - (1 - (1 - p) ** k)) > 0.03


@pytest.mark.parametrize(("n", "passed", "k"), [(4, 2, 5), (4, 2, 0), (4, 5, 1), (4, -1, 1)])
def test_what_no_samples_can_tell_is_refused(n: int, passed: int, k: int) -> None:
    with pytest.raises(ValueError, match=f"pass@{k} of {n} samples"):
        pass_at_k(n, passed, k)


def test_powers_of_two_and_the_number_itself_are_reported() -> None:
    assert [reported_ks(n) for n in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


def test_a_prompts_samples_count_together() -> None:
    values = np.array([1.0, 0.0, 1.0, 1.0, 0.0, 0.0])
    found = summarise(values, [0, 0, 1, 1, 2, 2], 1.0)
    assert (found.num_scored, found.num_prompts) == (6, 3)
    assert found.mean == found.mean_at_n == 0.5
    # Of the prompts' means 0.5, 1 and 0: as if six samples were drawn alone it would be 0.22.
    assert found.error == pytest.approx(0.5 / np.sqrt(3))
    assert found.pass_at == {1: 0.5, 2: pytest.approx(2 / 3)}


def test_a_reward_passes_from_the_threshold_on() -> None:
    values = np.array([0.5, 0.49999, 0.7, -1.0])
    assert summarise(values, [0, 1, 2, 3], 0.5).pass_at == {1: 0.5}


def test_samples_without_a_score_are_left_out_and_not_counted_as_failed() -> None:
    values = np.array([1.0, NAN, NAN, NAN, 0.0, 1.0])
    found = summarise(values, [0, 0, 1, 1, 2, 2], 1.0)
    assert (found.num_scored, found.num_prompts) == (3, 2)
    assert found.mean == pytest.approx(2 / 3) and found.mean_at_n == 0.75
    assert found.pass_at == {1: 0.75, 2: 1.0}


def test_nothing_scored_and_a_single_prompt_have_no_figure_where_there_is_none() -> None:
    nothing = summarise(np.array([NAN, NAN]), [0, 1], 1.0)
    assert (nothing.mean, nothing.mean_at_n, nothing.error, nothing.pass_at) == (None,) * 3 + (
        {1: None},
    )
    assert summarise(np.array([1.0]), [0], 1.0).error is None
