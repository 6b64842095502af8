"""Keys that users' configurations carry and that are not live, as retired.yaml has them.

RETIRED keys are accepted without effect and listed once at start: why, and what to use. PENDING keys will be live
later: an inactive value is accepted, an active one is an error. A key is in one of RETIRED, PENDING and schema.LIVE.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import yaml


@dataclass(frozen=True)
class Pending:
    """What an active value asks for, and the inactive value.

    Where a run without the feature still does what its user came for, `goes_on` says once at start what it does
    instead, for the values of `goes_on_for`; any other active value is an error.
    """

    feature: str
    inactive: object
    verdict: str = "is not available yet"
    goes_on: str = ""
    goes_on_for: tuple[int, ...] = ()

    def accepts(self, value: object) -> bool:
        # Types are compared as well: `use_vllm: False` and `use_vllm: 0` are two things in YAML.
        return type(value) is type(self.inactive) and value == self.inactive

    def may_go_on(self, value: object) -> bool:
        return type(value) is int and value in self.goes_on_for


_DATA = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
RETIRED: dict[str, str] = _DATA["retired"]
PENDING = {key: Pending(**fields) for key, fields in _DATA["pending"].items()}


def retired_key(key: str) -> str | None:
    """Returns `key`, or the section above it, as it is in RETIRED."""
    words = key.split(".")
    prefixes = (".".join(words[:end]) for end in range(len(words), 0, -1))
    return next((name for name in prefixes if name in RETIRED), None)
