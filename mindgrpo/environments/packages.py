"""Environments that other packages publish, under the names that these give them: `kind:name(argument=value, ...)`.

An example is of the seed in the row's column `seed`, without one of a seed drawn for the conversation's prompt. What a
package makes once, it makes before processes are forked for conversations. GEM and TextArena give their own rewards;
reasoning-gym's score is of what stands in the last <answer></answer>, else of the whole completion.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any


def seed_of(row: Mapping[str, Any]) -> int:
    """Returns the row's seed, or one drawn from `random`, which is seeded for the prompt's group."""
    return int(row["seed"]) if "seed" in row else random.getrandbits(31)


class ReasoningGym:
    """A task of reasoning-gym (arXiv:2505.24760), in one turn; `arguments` are its configuration's."""

    def __init__(self, name: str, **arguments: Any) -> None:
        import reasoning_gym
        from reasoning_gym.utils import extract_answer

        self._data = reasoning_gym.create_dataset(name, **{"seed": 0, **arguments})
        self._extract = extract_answer
        self._entry: dict[str, Any] = {}

    def reset(self, row: Mapping[str, Any]) -> str:
        self._entry = self._data[seed_of(row)]
        return str(self._entry["question"])

    def step(self, completion: str) -> tuple[None, float, bool]:
        answer = self._extract(completion) or completion.strip()
        return None, float(self._data.score_answer(answer, self._entry)), True


class Gem:
    """An environment of GEM (arXiv:2510.01051); `arguments` are those of gem.make."""

    def __init__(self, name: str, **arguments: Any) -> None:
        import gem
        import gem.envs

        self._environment = gem.make(name, **arguments)

    def reset(self, row: Mapping[str, Any]) -> str:
        return _with_suffix(*self._environment.reset(seed=seed_of(row)))

    def step(self, completion: str) -> tuple[str, float, bool]:
        text, reward, terminated, truncated, facts = self._environment.step(completion)
        return _with_suffix(text, facts), reward, terminated or truncated


def _with_suffix(text: str, facts: Mapping[str, Any]) -> str:
    return "\n".join(part for part in (text, facts.get("suffix", "")) if part)


class TextArena:
    """A game of TextArena (arXiv:2504.11442) for one player; `arguments` are those of textarena.make."""

    def __init__(self, name: str, **arguments: Any) -> None:
        import textarena

        self._game = textarena.make(env_id=name, **arguments)
        self._seen = ""

    def reset(self, row: Mapping[str, Any]) -> str:
        self._game.reset(num_players=1, seed=seed_of(row))
        return self._news()

    def step(self, completion: str) -> tuple[str | None, float, bool]:
        is_done, _ = self._game.step(action=completion)
        if not is_done:
            return self._news(), 0.0, False
        rewards, _ = self._game.close()
        return None, float(rewards[0]), True

    def _news(self) -> str:
        """Returns what was added to the game's record since the last turn, the policy's own turn included."""
        _, record = self._game.get_observation()
        news, self._seen = record.removeprefix(self._seen), record
        return str(news).strip()


PACKAGES = {
    "reasoning_gym": (ReasoningGym, "reasoning-gym"),
    "gem": (Gem, "gem-llm"),
    "textarena": (TextArena, "textarena"),
}
