"""The work that benches and their peers do: a model's config.json fields, random prompts, lengths and rewards.

Needs numpy alone, as peers run in environments of their own, and every engine gets the same numbers from it. Refuses
a work file that lacks a key or has one too many.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

COUNTS = ("prompts", "generations", "prompt_tokens", "new_tokens")
RAGGED_MEAN, RAGGED_LONGEST = 32, 128
PROMPTS, LENGTHS, REWARDS = range(3)  # what a stream of random numbers is for
SEED = 17


def refuse(sentence: str) -> NoReturn:
    print(f"mindgrpo: {sentence}", file=sys.stderr)
    sys.exit(2)


@dataclass(frozen=True)
class Work:
    """`model` holds the fields of a config.json; lengths are in tokens, `generations` are a prompt's."""

    model: dict[str, Any]
    prompts: int
    generations: int
    prompt_tokens: int
    new_tokens: int

    @property
    def samples(self) -> int:
        return self.prompts * self.generations

    @property
    def tokens(self) -> int:
        """Of all samples, prompts counted once a sample."""
        return self.samples * (self.prompt_tokens + self.new_tokens)

    def prompt_ids(self, step: int) -> np.ndarray:
        """int32 [prompts, prompt_tokens]; another draw each step, so that no engine can reuse a prefix."""
        shape = (self.prompts, self.prompt_tokens)
        return stream(PROMPTS, step).integers(3, self.model["vocab_size"], shape, dtype=np.int32)


def read_work(path: str | Path) -> Work:
    try:
        given = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        refuse(f"The work file '{path}' cannot be read ({error}); give one like work.json.")
    wanted = {"model", *COUNTS}
    if not isinstance(given, dict) or set(given) != wanted or not isinstance(given["model"], dict):
        refuse(f"The work file '{path}' must have exactly the keys {', '.join(sorted(wanted))}.")
    for key in COUNTS:
        if not isinstance(given[key], int) or given[key] < 1:
            refuse(f"{key} in '{path}' is {given[key]!r}, but must be a whole number from 1 up.")
    return Work(**given)


def stream(purpose: int, index: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=np.array([SEED + purpose, index], np.uint64)))


def random_rewards(step: int, count: int) -> np.ndarray:
    """float32 [count] in 0..1: they say nothing, but no group's are all alike, so every sample has an advantage."""
    return stream(REWARDS, step).random(count, dtype=np.float32)


def answered_rows(work: Work, count: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Prompts and answers of ragged lengths, int32, the same for every trainer; the last id, which ends them, is in
    neither."""
    most, draws = work.model["vocab_size"] - 1, stream(PROMPTS, 0)
    sizes = ((work.prompt_tokens, length) for length in ragged_lengths(count))
    return [tuple(draws.integers(3, most, n, dtype=np.int32) for n in pair) for pair in sizes]  # type: ignore[misc]


def ragged_lengths(count: int) -> list[int]:
    """Completion lengths: geometric with mean 32, at most 128; the same list for every engine."""
    drawn = stream(LENGTHS, 0).geometric(1.0 / RAGGED_MEAN, count)
    return [int(length) for length in np.minimum(drawn, RAGGED_LONGEST)]
