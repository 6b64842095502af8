"""Holds what a decision on another trainer's setting may be, and the settings that it looks at."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

from mindgrpo.config.names import aliases

Values = dict[str, object]


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


Rule = Callable[[Any, Others], Meaning]


def without_effect(where: str) -> Ignored:
    """Says that a value changes nothing in the other trainer, either."""
    return Ignored(f"as there, {where}")
