"""Dynamic sampling: groups whose rewards are all equal teach nothing, and give way to groups of further prompts.

(DAPO, arXiv:2503.14476, section 3.2, equation 11.) Refuses to go on for ever: groups that are still equal after the
last round stay, and are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mindgrpo.algorithm.advantages import zero_std_groups
from mindgrpo.algorithm.types import Samples
from mindgrpo.grpo.rollout import Scored

# (round from 1, numbers of the groups to replace) -> their new samples, in that order, and scores.
DrawGroups = Callable[[int, Sequence[int]], tuple[Samples, Scored]]


@dataclass(frozen=True)
class Refills:
    """`groups` is how many were replaced over `rounds`; `sampled_mean` is the reward of all samples that were drawn,
    the replaced ones too: that of the step's own is biased by the choice.
    """

    rounds: int
    groups: int
    sampled_mean: float


def refill(
    samples: Samples, scored: Scored, num_generations: int, rounds: int, draw: DrawGroups
) -> tuple[Scored, Refills]:
    """Replaces groups of `samples` in place, at most `rounds` times; the scores that go with them now."""
    drawn = [scored.scores.total]
    replaced = 0
    for number in range(1, rounds + 1):
        equal = zero_std_groups(scored.scores.total, num_generations)
        groups = np.flatnonzero(equal).tolist()
        if not groups:
            break
        fresh, fresh_scored = draw(number, groups)
        places = samples.replace_groups(groups, fresh)
        scored = scored.with_replaced(places, fresh_scored)
        drawn.append(fresh_scored.scores.total)
        replaced += len(groups)
    mean = float(np.concatenate(drawn).mean(dtype=np.float64))
    return scored, Refills(len(drawn) - 1, replaced, mean)
