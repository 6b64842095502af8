"""Completions as tables: the first rows of a step, without what is no text or number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mindgrpo.monitor.trackers.contract import Row

MAX_ROWS = 64


def shown(row: Row) -> dict[str, Any]:
    """The cells of a sample, a conversation's turns as one text; other lists are left to completions.jsonl."""
    cells: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, Mapping):
            cells |= {f"{key}/{inner}": cell for inner, cell in shown(value).items()}
        elif key != "step" and (value is None or isinstance(value, str | int | float)):
            cells[key] = value
        elif key == "messages" and isinstance(value, list):
            cells["conversation"] = "\n\n".join(map(_turn, value))
    return cells


def _turn(message: Mapping[str, Any]) -> str:
    """Calls stand in the content already, as the policy wrote them."""
    words = [message.get(key) for key in ("role", "name", "failure")]
    return f"[{' '.join(str(word) for word in words if word)}]\n{message.get('content', '')}"


def columns_of(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(key for row in rows for key in row))


def cells_of(rows: Sequence[Row], columns: Sequence[str]) -> list[list[Any]]:
    """A whole number may stand in one row and a fraction in the next: of a column with both, all are fractions."""
    mixed = {
        column
        for column in columns
        if any(isinstance(row.get(column), float) for row in rows)
        and all(isinstance(row.get(column), int | float | None) for row in rows)
    }
    return [[_cell(row.get(column), column in mixed) for column in columns] for row in rows]


def _cell(value: Any, is_fraction: bool) -> Any:
    return float(value) if is_fraction and value is not None else value


def as_text(row: Row) -> str:
    return "\n".join(f"{key}: {value}" for key, value in row.items())
