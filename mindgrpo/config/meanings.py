"""Holds what decisions on another trainer's settings may be, what they look at, and what the tables say of them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, get_origin

from mindgrpo.config.names import aliases
from mindgrpo.config.schema import LIVE
from mindgrpo.settings.section import kinds

Values = dict[str, object]
_PATHS = ("_file", ".load", "_dir")
_CONDITION = re.compile(r"(with|without) ([\w.]+)(?:([ =])(\w+))?")


class Ignored(str):
    """Says why a value changes nothing here."""


class Refused(str):
    """Says what is here instead of a setting, as the end of a sentence."""


Meaning = Values | Ignored | Refused
# The value asks for what happens anyway.
AS_HERE = Ignored("as it is here")


class Others(dict[str, Any]):
    """Settings by their names in full; `processes` of TRL that train together, None where it is not known."""

    def __init__(self, settings: Mapping[str, Any], processes: int | None = None) -> None:
        super().__init__({aliases().in_full(name): value for name, value in settings.items()})
        self.processes = processes

    def number(self, name: str, default: float) -> Any:
        """Returns a number; the default where there is none."""
        value = self.get(name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return value if is_number else default

    def word(self, name: str) -> str | None:
        """Returns a text; None where there is none."""
        value = self.get(name)
        value = value.value if isinstance(value, Enum) else value
        return value if isinstance(value, str) else None

    def is_on(self, name: str) -> bool:
        """Returns whether a setting is true, above 0 or a text."""
        return self.get(name) is True or self.number(name, 0) > 0 or bool(self.word(name))

    def without_effect_on(self, name: str) -> Ignored | None:
        """Says which of these settings leave the value of `name` without an effect there, by the table `idle`."""
        for condition in aliases().idle.get(name, ()):
            match = _CONDITION.fullmatch(condition)
            assert match is not None
            which, other, sign, value = match.groups()
            is_so = self.is_on(other) if value is None else str(self.get(other)) == value
            if is_so == (which == "with"):
                words = other.split(".")
                shown = ".".join(words[-2 if words[-1] in aliases().generic else -1 :])
                return without_effect(f"{which} {shown}{sign or ''}{value or ''}")
        return None


def without_effect(where: str) -> Ignored:
    """Says that a value changes nothing in the other trainer, either."""
    return Ignored(f"as there, {where}")


Rule = Callable[[Any, Others], Meaning]


class Rules(dict[str, Rule]):
    """Rules of settings that depend on others, or count in other units, by name in full."""

    def of(self, *names: str, null: bool = False) -> Callable[[Rule], Rule]:
        """Adds a rule of `names`; without `null` these are as here where their value is null."""

        def add(rule: Rule) -> Rule:
            def of_value(value: Any, others: Others) -> Meaning:
                return AS_HERE if value is None else rule(value, others)

            self.update(dict.fromkeys(names, rule if null else of_value))
            return rule

        return add


def by_tables(full: str, value: Any) -> Meaning:
    """Decides on a setting with a key by the tables of aliases.yaml."""
    table, ours = aliases(), aliases().key_of(full)
    assert ours is not None
    words, difference = table.words.get(full), table.differences.get(full)
    if words is not None and not isinstance(value, list | dict) and value in words:
        return AS_HERE if words[value] == "unset" else {ours: words[value]}
    if value is None:
        return AS_HERE
    is_taken = "*" in words if words is not None else not difference or full in table.same
    if not is_taken:
        return Refused(f"{ours} here{f': {difference}' if difference else ''}")
    if isinstance(value, list) and ours.endswith("_file"):
        if len(value) > 1:
            return Refused(f"{ours} is one file or folder here; join these {len(value)}")
        value = next(iter(value), None)
    if isinstance(value, str) and ours.endswith(_PATHS):
        value = os.path.expanduser(value)
    wanted = kinds(LIVE[ours].field.annotation) if ours in LIVE else ()
    is_list = any(get_origin(kind) is list for kind in wanted)
    if isinstance(value, tuple) or (is_list and type(value) not in (list, *wanted)):
        value = list(value) if isinstance(value, tuple | set) else [value]
    return {ours: value}
