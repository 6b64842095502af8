"""Which tokens clip_cov, kl_cov and top_entropy_quantile choose, against a choice written out token by token.

Does not prove that an update computes the log-probs that the choice needs; test_update.py does.
"""

from __future__ import annotations

import numpy as np
from algorithms import replace
from loss_variants import WIDE, tokens_of

from mindgrpo.algorithm.surrogates import Tokens
from mindgrpo.algorithm.token_selection import covariances, select_tokens

CLIP = replace(WIDE, loss_type="clip_cov", clip_cov_low=0.01, clip_cov_high=2.0)


def rng() -> np.random.Generator:
    return np.random.default_rng((3, 4))


def covariance_of(tokens: Tokens, i: int) -> float:
    count = tokens.logps.size
    mean_a, mean_l = (sum(x.tolist()) / count for x in (tokens.advantages, tokens.logps))
    return float((tokens.advantages[i] - mean_a) * (tokens.logps[i] - mean_l))


def test_clip_cov_draws_tokens_between_its_bounds_that_no_clip_decides() -> None:
    tokens = tokens_of(CLIP)
    ratio, advantages = np.exp(tokens.logps - tokens.old), tokens.advantages
    allowed = set()
    for i in range(ratio.size):
        is_clipped = ratio[i] > 1.3 if advantages[i] > 0 else ratio[i] < 0.8
        if 0.01 < covariance_of(tokens, i) < 2.0 and not is_clipped:
            allowed.add(i)
    assert 3 < len(allowed) < ratio.size / 2
    for share, number in ((1e-4, 1), (3.5 / ratio.size, 3), (1.0, len(allowed))):
        config = replace(CLIP, clip_cov_ratio=share)
        factors, penalties = select_tokens(tokens, config, rng())
        left_out = set(np.flatnonzero(factors == 0).tolist())
        assert len(left_out) == number and left_out <= allowed
        assert set(factors.tolist()) <= {0.0, 1.0} and not penalties.any()
        np.testing.assert_array_equal(select_tokens(tokens, config, rng())[0], factors)
    nothing = replace(CLIP, clip_cov_low=50.0, clip_cov_high=60.0)
    assert select_tokens(tokens, nothing, rng())[0].all()


def test_kl_cov_holds_the_tokens_of_highest_covariance() -> None:
    tokens = tokens_of(WIDE)
    ordered = sorted(range(tokens.logps.size), key=lambda i: -covariance_of(tokens, i))
    for share, number in ((1e-4, 1), (0.25, 7)):
        config = replace(WIDE, loss_type="kl_cov", kl_cov_ratio=share, kl_cov_coef=0.7)
        factors, penalties = select_tokens(tokens, config, rng())
        assert factors.all() and set(np.flatnonzero(penalties).tolist()) == set(ordered[:number])
        assert set(penalties.tolist()) == {0.0, 0.7}
    np.testing.assert_allclose(
        covariances(tokens), [covariance_of(tokens, i) for i in range(tokens.logps.size)]
    )


def test_the_tokens_of_highest_entropy_count() -> None:
    tokens = tokens_of(WIDE)
    factors, _ = select_tokens(tokens, replace(WIDE, top_entropy_quantile=0.25), rng())
    kept = tokens.entropy[factors == 1.0]
    assert kept.size == 7 and kept.min() > tokens.entropy[factors == 0.0].max()


def test_an_update_without_tokens_chooses_none() -> None:
    none = np.zeros(0)
    tokens = Tokens(none, none, none, none, none, none, none, np.zeros(0, int))
    for kind in ("clip_cov", "kl_cov"):
        config = replace(WIDE, loss_type=kind, top_entropy_quantile=0.5)
        assert [x.size for x in select_tokens(tokens, config, rng())] == [0, 0]
