"""What several samples a prompt say about a policy: mean@n with its standard error, and pass@k. Pure numpy.

A sample that is nan was not scored and is left out of its prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Computes 1 - C(n - c, k) / C(n, k): the chance that k of n samples drawn without replacement hold a passed one.

    Equation 1 of Chen et al. 2021, arXiv:2107.03374, as the product that neither overflows nor cancels. Unbiased for
    1 - (1 - p)^k, which 1 - (1 - c/n)^k is not. Raises ValueError unless 1 <= k <= n and 0 <= c <= n.
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
    """One reward function over an evaluation. `mean` is over all samples that it scored, `mean_at_n` over the means
    of prompts, and `error` the latter's standard error: prompts are what was drawn, samples of one belong together.

    `pass_at` has pass@k by k over the prompts with k scored samples or more. None: nothing scored, or for `error` fewer
    than two prompts.
    """

    num_scored: int
    num_prompts: int
    mean: float | None
    mean_at_n: float | None
    error: float | None
    pass_at: dict[int, float | None]


def summarise(values: np.ndarray, groups: Sequence[int], threshold: float) -> PromptScores:
    """Summarises `values` float64 [samples], nan where not scored, by prompt: `groups` holds each sample's.

    A sample has passed where its value is at least `threshold`.
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
