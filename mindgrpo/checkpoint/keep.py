"""Which checkpoints stay. Pure. Refuses to give up the newest, or the best where one was asked for."""

from __future__ import annotations

from collections.abc import Iterable


def to_delete(steps: Iterable[int], keep: int | None, best: int | None = None) -> list[int]:
    """Of the steps whose checkpoints are whole, those to delete: all but the `keep` newest (None: all) and `best`."""
    ordered = sorted(set(steps))
    if keep is None:
        return []
    newest = ordered[-max(keep, 1) :]
    return [step for step in ordered if step not in newest and step != best]
