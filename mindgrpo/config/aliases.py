"""What other trainers call our keys, as aliases.yaml has it. Only for suggestions: no value is ever taken over."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import yaml


@dataclass(frozen=True)
class Aliases:
    """`by_key`: our key -> trainer -> its names. `absent`: a name -> why it has no key. `sections`: theirs -> ours.

    `same_in_mindrlhf` are our keys that MindRLHF has too; `generic` are last words that lead to no key by themselves.
    """

    by_key: dict[str, dict[str, list[str]]]
    absent: dict[str, str]
    sections: dict[str, str]
    same_in_mindrlhf: frozenset[str] = frozenset()
    generic: frozenset[str] = frozenset()

    def names_of(self, key: str) -> list[str]:
        """Returns other trainers' names of our key, as they write them."""
        return [name for names in self.by_key.get(key, {}).values() for name in names]

    @cached_property
    def _keys(self) -> dict[str, str]:
        full = {name: key for key in self.by_key for name in self.names_of(key)}
        # Last words that are also ours lead to the wrong key, or to where they lead anyway.
        not_alone = self.generic | {_leaf(key) for key in (*self.by_key, *self.same_in_mindrlhf)}
        dotted = [name for name in reversed(full) if "." in name]
        leaves = {_leaf(name): full[name] for name in dotted if _leaf(name) not in not_alone}
        # A name that is written without dots wins over the last word of another.
        return leaves | {name: key for name, key in full.items() if name not in not_alone}

    def ours(self, name: str) -> str | None:
        """Returns our key for a name that is written as there, or with its last word alone."""
        return self._keys.get(name) or self._keys.get(_leaf(name))

    def remedy(self, name: str, dashes: str = "") -> str | None:
        """Says what is here instead of another trainer's name, as the end of a sentence."""
        ours = self.ours(name)
        return f"it is called {dashes}{ours} here" if ours else self.absent.get(_leaf(name))


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


@cache
def aliases() -> Aliases:
    text = Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
    data = yaml.safe_load(text)
    absent = {name: group["why"] for group in data["absent"] for name in group["names"]}
    same = (f"{section}.{leaf}" for section, leaves in data["mindrlhf"].items() for leaf in leaves)
    generic = frozenset(data["generic"])
    return Aliases(data["keys"], absent, data["sections"], frozenset(same), generic)
