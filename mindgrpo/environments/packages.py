"""Environments that other packages publish, under the names that these give them: `kind:name(argument=value, ...)`.

An example is of the seed in the row's column `seed`, without one of a seed drawn for the conversation's prompt. What a
package makes once, it makes before processes are forked for conversations. GEM, TextArena and OpenEnv give their own
rewards; reasoning-gym's score is of what stands in the last <answer></answer>, else of the whole completion.
"""

from __future__ import annotations

import json
import random
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

SCHEMA_SECONDS, CLOSE_SECONDS = 10.0, 1.0
COMMON_FIELDS = ("done", "reward", "metadata")


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


class OpenEnv:
    """A session of the OpenEnv server at `url`, http://host:port; `action` and `observation` name fields of its schema.

    A completion becomes the one, the other is shown; None is the only field, or the only text. The protocol is that of
    openenv-core 0.3, env_server/http_server.py, whose client needs a hundred packages; POST /step has no session.
    Raises ConnectionError where no server answers, and ValueError for another one's answers and fields that it lacks.
    """

    def __init__(self, url: str, action: str | None = None, observation: str | None = None) -> None:
        import websockets.sync.client

        self._connect, self._url = websockets.sync.client.connect, url.rstrip("/")
        self._refusals = OSError, websockets.WebSocketException
        try:
            with urllib.request.urlopen(f"{self._url}/schema", timeout=SCHEMA_SECONDS) as answer:
                schemas = json.load(answer)
            names = {"action": action, "observation": observation}
            fields = {kind: dict(schemas[kind]["properties"]) for kind in names}
        except OSError as error:
            raise ConnectionError(f"no OpenEnv server answers at {url} ({error})") from None
        except (ValueError, LookupError, TypeError):
            raise ValueError(f"{url}/schema is not what an OpenEnv server answers") from None
        self._fields = {kind: _field(kind, name, fields[kind]) for kind, name in names.items()}

    def reset(self, row: Mapping[str, Any]) -> Any:
        try:
            self._session = self._connect(f"ws{self._url.removeprefix('http')}/ws")
        except self._refusals as error:
            raise ConnectionError(f"{self._url}/ws opens no session ({error})") from None
        return self._asked("reset", {"seed": seed_of(row)})[0]

    def step(self, completion: str) -> tuple[Any, Any, Any]:
        return self._asked("step", {self._fields["action"]: completion})

    def close(self) -> None:
        with suppress(*self._refusals):
            self._session.send(json.dumps({"type": "close"}))
            self._session.recv(CLOSE_SECONDS)  # until the server ends it: else it logs an exception
        self._session.close()

    def _asked(self, kind: str, data: Mapping[str, Any]) -> tuple[Any, Any, Any]:
        try:
            self._session.send(json.dumps({"type": kind, "data": data}))
            answer = json.loads(self._session.recv())
            result = answer["data"]
            if answer["type"] == "error":
                raise RuntimeError(f"{self._url} refused {kind}: {result}")
            seen = result["observation"][self._fields["observation"]]
            return seen, result["reward"], result["done"]
        except self._refusals as error:
            raise ConnectionError(f"{self._url} ended the session ({error})") from None
        except (ValueError, LookupError, TypeError):
            raise ValueError(f"{self._url} answered {kind} with no observation") from None


def _field(kind: str, asked: str | None, fields: Mapping[str, Any]) -> str:
    own = [name for name in fields if name not in COMMON_FIELDS]
    texts = [name for name in own if '"string"' in json.dumps(fields[name])]
    fitting = [asked] if asked in own else [] if asked else own if len(own) == 1 else texts
    if len(fitting) != 1:
        raise ValueError(f"the {kind} has the fields {', '.join(own)}; name one with {kind}='...'")
    return fitting[0]


PACKAGES = {
    "reasoning_gym": (ReasoningGym, "reasoning-gym"),
    "gem": (Gem, "gem-llm"),
    "textarena": (TextArena, "textarena"),
    "openenv": (OpenEnv, "websockets"),
}
