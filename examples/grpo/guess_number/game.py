"""GEM's game of guessing a number, in so few words that a model of a few hundred tokens can read it.

gem is imported here, once, and not by each conversation in its own process.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import gem
import gem.envs

NUMBER, HINT = re.compile(r"\d+"), re.compile("higher|lower")


class ShortGuess:
    """A guess is the last number of a turn; what is answered is higher or lower. The reward is 1 for the number, else
    0: of GEM's own, which grow as the last guess comes near, this model learns to guess the middle."""

    def __init__(self, most: int = 7, turns: int = 3) -> None:
        rules = {"min_number": 1, "max_number": most, "max_turns": turns}
        self._game, self._most = gem.make("game:GuessTheNumber-v0-easy", **rules), most

    def reset(self, row: Mapping[str, Any]) -> str:
        self._game.reset(seed=row["seed"])
        return f"1 to {self._most}?"

    def step(self, completion: str) -> tuple[str, float, bool]:
        guess = NUMBER.findall(completion)
        text, reward, done, _, _ = self._game.step(f"\\boxed{{{guess[-1] if guess else ''}}}")
        hint = HINT.search(text)
        return hint.group() if hint else "another", float(reward == 1), done
