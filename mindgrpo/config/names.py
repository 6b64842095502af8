"""Knows which names exist: live keys, retired and pending ones (retired.yaml), other trainers' names (aliases.yaml).

A near name is only suggested, never used.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import yaml

from mindgrpo.config.schema import LIVE


def _data(name: str) -> Any:
    return yaml.safe_load(Path(__file__).with_name(name).read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Pending:
    """A key of which one value is accepted, `inactive`: what another asks for, or the `rule` that it breaks."""

    inactive: object
    feature: str = ""
    verdict: str = "is not available yet"
    rule: str = ""

    def refusal(self, key: str, value: str) -> str:
        if self.rule:
            return f"{key} is {value}, but {self.rule}"
        return f"{key} {value} asks for {self.feature}, which {self.verdict}"

    def accepts(self, value: object) -> bool:
        # Types are compared as well: `False` and `0` are two things in YAML.
        return type(value) is type(self.inactive) and value == self.inactive


_NOT_LIVE = _data("retired.yaml")
# Accepted without effect, and listed once at start: why, and what to use.
RETIRED: dict[str, str] = _NOT_LIVE["retired"]
PENDING = {key: Pending(**fields) for key, fields in _NOT_LIVE["pending"].items()}
KNOWN: tuple[str, ...] = (*LIVE, *PENDING, *RETIRED)
SECTIONS: frozenset[str] = frozenset(
    ".".join(key.split(".")[:end]) for key in KNOWN for end in range(1, key.count(".") + 1)
)


@dataclass(frozen=True)
class Aliases:
    """What other trainers call our keys, and what their values mean here: the tables that aliases.yaml describes.

    `absent` has why by name; of these, values of `ignored` change nothing, as do the `harmless` values of others.
    """

    by_key: dict[str, dict[str, list[str]]]
    mindrlhf: dict[str, list[str]]
    differences: dict[str, str]
    same: list[str]
    words: dict[str, dict[Any, Any]]
    unset: dict[str, list[Any]]
    idle: dict[str, list[str]]
    generic: frozenset[str]
    absent: dict[str, str]
    ignored: frozenset[str]
    harmless: dict[str, list[Any]]
    peft: dict[str, Any]
    sections: dict[str, str]

    @cached_property
    def same_in_mindrlhf(self) -> frozenset[str]:
        """Returns our keys that MindRLHF has too."""
        sections = self.mindrlhf.items()
        return frozenset(f"{section}.{leaf}" for section, leaves in sections for leaf in leaves)

    def names_of(self, key: str) -> list[str]:
        """Returns other trainers' names of our key, as they write them."""
        return [name for names in self.by_key.get(key, {}).values() for name in names]

    @cached_property
    def of_trl(self) -> dict[str, str]:
        """Maps TRL's names to our keys."""
        return {name: key for key, names in self.by_key.items() for name in names.get("trl", ())}

    @cached_property
    def all_names(self) -> frozenset[str]:
        """Returns every name of other trainers that stands for something, with a key or without."""
        absent = {name for name in self.absent if not name.endswith("*")}
        return frozenset(name for name in (*self._keys, *absent) if self.remedy(name))

    @cached_property
    def _keys(self) -> dict[str, str]:
        """Maps names that are written in full to our keys."""
        return {name: key for key in self.by_key for name in self.names_of(key)}

    @cached_property
    def _full_names(self) -> dict[str, str]:
        """Maps what a user may write of a name to the name in full."""
        full = self._keys
        # Last words that are also ours lead to the wrong key, or to where they lead anyway.
        not_alone = self.generic | {leaf_of(key) for key in (*self.by_key, *self.same_in_mindrlhf)}
        dotted = [name for name in reversed(full) if "." in name]
        leaves = {leaf_of(name): name for name in dotted if leaf_of(name) not in not_alone}
        # A name that is written without dots wins over the last word of another.
        return leaves | {name: name for name in full if name not in not_alone}

    def in_full(self, name: str) -> str:
        """Returns a setting's name as its trainer writes it: of one without sections those of verl are not known."""
        return name if "." in name or name in self._keys else self._full_names.get(name, name)

    def key_of(self, full_name: str) -> str | None:
        """Returns our key for a name that is written as there."""
        return self._keys.get(full_name)

    def _full_name(self, name: str) -> str:
        return self._full_names.get(name) or self._full_names.get(leaf_of(name), "")

    def ours(self, name: str) -> str | None:
        """Returns our key for a name that is written as there, or with its last word alone."""
        return self._keys.get(self._full_name(name))

    def called(self, name: str, dashes: str = "") -> str | None:
        """Says what another trainer's name is called here, and what is different; None for a name without a key."""
        ours, difference = self.ours(name), self.differences.get(self._full_name(name))
        return ours and f"called {dashes}{ours} here{f': {difference}' if difference else ''}"

    def without_key(self, name: str) -> str | None:
        """Returns the entry of `absent` that stands for a name: an end of it, a section around it, or its last word."""
        words = name.split(".")
        ends = (".".join(words[start:]) for start in range(len(words) - 1))
        around = (
            f"{'.'.join(words[start:end])}.*"
            for end in range(len(words) - 1, 0, -1)
            for start in range(end)
        )
        return next((one for one in (*ends, *around, words[-1]) if one in self.absent), None)

    def remedy(self, name: str, dashes: str = "") -> str | None:
        """Says what is here instead of another trainer's name, as the end of a sentence."""
        if called := self.called(name, dashes):
            return f"it is {called}"
        entry = self.without_key(name)
        return self.absent[entry] if entry else None


@cache
def aliases() -> Aliases:
    data = _data("aliases.yaml")
    absent: dict[str, str] = {}
    ignored: set[str] = set()
    harmless: dict[str, list[Any]] = {}
    for group in data["absent"]:
        own, without_effect = group.get("names", ()), group.get("ignored", ())
        absent |= dict.fromkeys((*own, *without_effect), group["why"])
        ignored |= set(without_effect)
        harmless |= own if isinstance(own, dict) else {}
    of_names = {"absent": absent, "ignored": frozenset(ignored), "harmless": harmless}
    return Aliases(**data | of_names | {"generic": frozenset(data["generic"])})


def leaf_of(key: str) -> str:
    return key.rpartition(".")[2]


def retired_key(key: str) -> str | None:
    """Returns `key`, or the section above it, as it is in RETIRED."""
    words = key.split(".")
    prefixes = (".".join(words[:end]) for end in range(len(words), 0, -1))
    return next((name for name in prefixes if name in RETIRED), None)


def nearest(name: str, names: Iterable[str], cutoff: float = 0.6) -> str | None:
    return next(iter(difflib.get_close_matches(name, sorted(names), n=1, cutoff=cutoff)), None)


def suggestion(key: str, dashes: str = "") -> str:
    """Returns the remedy for an unknown dotted key or bare name, as the end of a sentence."""
    if remedy := aliases().remedy(key, dashes):
        return remedy
    if key in SECTIONS:
        return f"it is a section of keys, as in config={{'{key}': {{...}}}}"
    section, _, leaf = key.rpartition(".")
    near = nearest(key, [known for known in KNOWN if leaf_of(known) == leaf], cutoff=0.0)
    # A retired key is not a remedy: it is only what somebody meant who mistyped it.
    for cutoff, names in ((0.85, KNOWN), (0.75, (*LIVE, *PENDING))):
        inside = [name for name in names if name.rpartition(".")[0] == section]
        # In the right section more may be wrong.
        for among, least in ((inside, min(cutoff, 0.6) if section else cutoff), (names, cutoff)):
            leaves = {leaf_of(known): known for known in reversed(among)}
            near = near or leaves.get(nearest(leaf, leaves, least) or "")
        theirs = None if near else nearest(key, aliases().all_names, 0.85)
        if theirs:
            return f"did you mean {theirs}: {aliases().remedy(theirs, dashes)}"
    if not near:
        return "no key comes near it, leave it out"
    retired = f" (which is retired: {RETIRED[near]})" if near in RETIRED else ""
    return f"did you mean {dashes}{near}{retired}"


def section_suggestion(section: str) -> str:
    elsewhere = aliases().sections.get(leaf_of(section))
    if elsewhere:
        return f"what other trainers keep there is in {elsewhere} here"
    near = nearest(section, SECTIONS) or nearest(section, KNOWN, cutoff=0.75)
    top = sorted(name for name in SECTIONS if "." not in name)
    return f"did you mean {near}" if near else f"the sections are {', '.join(top)}"


def unknown(key: str, is_section: bool) -> str:
    """Says what is wrong with a key that is neither live, pending nor retired, and the remedy."""
    words = key.split(".") if is_section or not aliases().remedy(key) else []
    for prefix in (".".join(words[:end]) for end in range(1, len(words))):
        if prefix in LIVE or prefix in PENDING:
            return f"{prefix} takes one value, but is given the section '{key[len(prefix) + 1 :]}'"
        if prefix not in SECTIONS:
            return f"'{prefix}' is no section; {section_suggestion(prefix)}"
    if is_section:
        return f"'{key}' is no section; {section_suggestion(key)}"
    return f"'{key}' is no key of the configuration; {suggestion(key)}"
