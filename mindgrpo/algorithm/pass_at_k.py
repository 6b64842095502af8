"""Statistics of several samples per prompt: mean@n with its standard error, and pass@k. Pure numpy.

A value of nan means that the sample was not scored; it is excluded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Computes 1 - C(n - c, k) / C(n, k): the probability that k of n samples include one of the c that passed.

    Equation 1 of Chen et al. 2021, arXiv:2107.03374, as a product that neither overflows nor cancels. It is an unbiased
    estimate of 1 - (1 - p)^k, unlike 1 - (1 - c/n)^k. Raises ValueError unless 1 <= k <= n and 0 <= c <= n.
    """
    if not 1 <= k <= num_samples or not 0 <= num_passed <= num_samples:
        raise ValueError(f"pass@{k} of {num_samples} samples, {num_passed} of them passed")
    if num_samples - num_passed < k:
        return 1.0
    failed = np.arange(num_samples - num_passed + 1, num_samples + 1, dtype=np.float64)
    return float(1.0 - np.prod(1.0 - k / failed))


def reported_ks(num_samples: int) -> list[int]:
    """Returns the powers of two up to n, and n itself."""
    powers = [1 << i for i in range(num_samples.bit_length()) if 1 << i <= num_samples]
    return sorted({*powers, num_samples})


@dataclass(frozen=True)
class PromptScores:
    """Results of one reward function: `mean` over scored samples, `mean_at_n` over the prompts' means.

    `error` is the standard error of `mean_at_n`, over prompts, because samples of a prompt are not independent.
    `pass_at` is pass@k by k, over prompts with at least k scored samples. Values are None if nothing was scored,
    `error` also with fewer than two prompts.
    """

    num_scored: int
    num_prompts: int
    mean: float | None
    mean_at_n: float | None
    error: float | None
    pass_at: dict[int, float | None]


def summarise(values: np.ndarray, groups: Sequence[int], threshold: float) -> PromptScores:
    """Summarises `values` float64 [samples], nan where not scored; `groups` are the samples' prompts.

    A sample has passed if its value is at least `threshold`.
    """
    prompts, of = np.unique(np.asarray(groups, np.int64), return_inverse=True)
    known = ~np.isnan(values)
    drawn = np.bincount(of, minlength=len(prompts))
    scored = np.bincount(of[known], minlength=len(prompts))
    sums = np.bincount(of[known], weights=values[known], minlength=len(prompts))
    hits = np.bincount(of[known & (values >= threshold)], minlength=len(prompts))
    means = sums[scored > 0] / scored[scored > 0]
    counts = list(zip(scored.tolist(), hits.tolist(), strict=True))
    num_samples = int(drawn.max(initial=0))
    passed: dict[int, float | None] = {}
    for k in reported_ks(num_samples) if num_samples else []:
        chances = [pass_at_k(n, c, k) for n, c in counts if n >= k]
        passed[k] = float(np.mean(chances)) if chances else None
    return PromptScores(
        num_scored=int(known.sum()),
        num_prompts=len(means),
        mean=float(values[known].mean()) if known.any() else None,
        mean_at_n=float(means.mean()) if means.size else None,
        error=float(means.std(ddof=1) / np.sqrt(len(means))) if len(means) > 1 else None,
        pass_at=passed,
    )
