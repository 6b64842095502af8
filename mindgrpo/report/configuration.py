"""A run's config_resolved.yaml: every key with its value and where that came from."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

_LINE = re.compile(r"( *)([^\s:#][^:]*):(?: (.*))?")


@dataclass(frozen=True)
class Entry:
    """`text` is the value as the file has it."""

    key: str
    text: str
    origin: str


def read_configuration(path: Path) -> list[Entry]:
    """Of a file that is not there, none; a line that is no entry is passed."""
    if not path.is_file():
        return []
    entries: list[Entry] = []
    sections: list[str] = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        match = _LINE.fullmatch(line)
        if match is None:
            continue
        depth, name, rest = len(match[1]) // 2, match[2], match[3]
        sections = [*sections[:depth], name]
        if rest is not None:
            text, _, origin = rest.rpartition("  # ")
            entries.append(Entry(".".join(sections), text or rest, origin if text else ""))
    return entries


def values_of(entries: list[Entry]) -> dict[str, Any]:
    values = {}
    for entry in entries:
        try:
            values[entry.key] = yaml.safe_load(entry.text)
        except yaml.YAMLError:
            values[entry.key] = entry.text
    return values


def number_of(values: Mapping[str, Any], key: str, default: float) -> float:
    value = values.get(key)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else default
