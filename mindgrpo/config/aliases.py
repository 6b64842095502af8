"""What other trainers call our keys, as aliases.yaml has it. Only for suggestions: no value is ever taken over."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml


@dataclass(frozen=True)
class Aliases:
    """`by_key`: our key -> trainer -> its names. `absent`: a name -> why it has no key. `sections`: theirs -> ours."""

    by_key: dict[str, dict[str, list[str]]]
    absent: dict[str, str]
    sections: dict[str, str]

    def names_of(self, key: str) -> list[str]:
        """Returns other trainers' names of our key, as they write them."""
        return [name for names in self.by_key.get(key, {}).values() for name in names]

    def ours(self, name: str) -> str | None:
        """Returns our key for a name that is written as there, or with its last word alone."""
        names = dict(self._names())
        return names.get(name) or names.get(name.rpartition(".")[2])

    def remedy(self, name: str, dashes: str = "") -> str | None:
        """Says what is here instead of another trainer's name, as the end of a sentence."""
        ours = self.ours(name)
        return (
            f"it is called {dashes}{ours} here"
            if ours
            else self.absent.get(name.rpartition(".")[2])
        )

    def _names(self) -> Iterator[tuple[str, str]]:
        pairs = [(name, key) for key in self.by_key for name in self.names_of(key)]
        # A name that is written without dots comes later, and wins.
        yield from ((name.rpartition(".")[2], key) for name, key in pairs if "." in name)
        yield from pairs


@cache
def aliases() -> Aliases:
    text = Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
    data = yaml.safe_load(text)
    absent = {name: group["why"] for group in data["absent"] for name in group["names"]}
    return Aliases(data["keys"], absent, data["sections"])
