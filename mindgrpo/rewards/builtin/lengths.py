"""Rewards for how long a completion is and how much it repeats itself.

Lengths are in tokens, as the generator counted them; where nobody did, a reward by length does not apply.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from mindgrpo.errors import UserError
from mindgrpo.rewards.builtin.accuracy import accuracy_reward

# A sign of Chinese, Japanese or Korean is a word by itself: those do not put spaces between words.
IDEOGRAPHS = r"\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af"
WORD = re.compile(rf"[{IDEOGRAPHS}]|[^\s{IDEOGRAPHS}]+")
# Characters at the end of a text in which repetition is looked for: it shows there.
REPETITION_WINDOW = 50_000


def soft_overlong_punishment(
    completions: Sequence[str],
    completion_lengths: Sequence[int] | None = None,
    max_completion_length: int | None = None,
    soft_punish_cache: int | None = None,
) -> list[float | None]:
    """Computes DAPO's soft over-long punishment (arXiv:2503.14476, equation 13), in [-1, 0].

    With L = max_completion_length (default: max_tokens) and C = soft_punish_cache (default: a fifth
    of L) in tokens: 0 up to L - C, then (L - C - length) / C, and -1 above L.
    """
    if completion_lengths is None or max_completion_length is None:
        return [None] * len(completions)
    longest = max_completion_length
    cache = max(1, longest // 5) if soft_punish_cache is None else soft_punish_cache
    if not 0 < cache <= longest:
        raise UserError(
            f"soft_punish_cache is {cache}, but must be from 1 to max_completion_length, which is "
            f"{longest}; correct soft_overlong_punishment(...) in reward_config.verifier_function"
        )
    return [
        -1.0 if length > longest else min(0.0, (longest - cache - length) / cache)
        for length in completion_lengths
    ]


def cosine_reward(
    completions: Sequence[str],
    answers: Sequence[str],
    completion_lengths: Sequence[int] | None = None,
    max_completion_length: int | None = None,
    min_value_wrong: float = -1.0,
    max_value_wrong: float = -0.5,
    min_value_correct: float = 0.5,
    max_value_correct: float = 1.0,
) -> list[float | None]:
    """Computes accuracy scaled by length l / L along half a cosine: arXiv:2502.03373, section 4.2.

    A right answer earns from max_value_correct (short) down to min_value_correct (length L), a wrong
    one from min_value_wrong (short) up to max_value_wrong: thinking on is worth it while wrong.
    """
    if completion_lengths is None or not max_completion_length:
        return [None] * len(completions)
    values: list[float | None] = []
    accuracies = accuracy_reward(completions, answers)
    for accuracy, length in zip(accuracies, completion_lengths, strict=True):
        if accuracy is None:
            values.append(None)
            continue
        start, end = (
            (max_value_correct, min_value_correct)
            if accuracy
            else (min_value_wrong, max_value_wrong)
        )
        share = min(1.0, length / max_completion_length)
        values.append(end + 0.5 * (start - end) * (1.0 + math.cos(math.pi * share)))
    return values


def repetition_penalty_reward(
    completions: Sequence[str], ngram_size: int = 3, max_penalty: float = -1.0
) -> list[float | None]:
    """Returns max_penalty times the share of n-grams of words that occurred in the text before."""
    if ngram_size < 1 or max_penalty > 0:
        raise UserError(
            f"ngram_size is {ngram_size} and max_penalty {max_penalty}, but they must be at least 1 "
            "and at most 0; correct repetition_penalty_reward(...) in reward_config.verifier_function"
        )
    return [max_penalty * repeated_share(text, ngram_size) for text in completions]


def repeated_share(text: object, ngram_size: int) -> float:
    words = WORD.findall(text[-REPETITION_WINDOW:].lower()) if isinstance(text, str) else []
    count = len(words) - ngram_size + 1
    if count < 1:
        return 0.0
    different = len(set(zip(*(words[offset:] for offset in range(ngram_size)), strict=False)))
    return 1.0 - different / count
