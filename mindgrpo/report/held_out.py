"""Compares answers to held-out prompts: those of a run's first and last evaluation, or of two runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindgrpo.report.run_folder import RunFolder
from mindgrpo.report.samples import (
    data_text,
    evenly,
    num_bytes,
    rewards_of,
    shortened,
    significant,
    text_of,
    total_of,
    turns_of,
)

Key = tuple[str, str, int]
Answers = dict[Key, dict[str, Any]]


def held_out(runs: Sequence[RunFolder], budget: int) -> dict[str, Any]:
    """Returns columns (run, step), and a row for each prompt in any of them: answers by column, null if it has none.

    `change` of a row is the reward of its last column minus that of the first; for two runs, minus that of the first
    run's last column.
    """
    columns: list[dict[str, int]] = []
    answers: list[Answers] = []
    for number, run in enumerate(runs):
        steps = run.held_out.steps
        for step in sorted({*steps[:1], *steps[-1:]}):
            columns.append({"run": number, "step": step})
            answers.append(_answers(run, step))
    keys = list(dict.fromkeys(key for of_column in answers for key in of_column))
    start = max((i for i, column in enumerate(columns) if column["run"] == 0), default=0)
    compared = (start if len(runs) > 1 else 0, len(columns) - 1)
    rows = [_row(key, answers, compared) for key in keys]
    # Sorted by the change, so that an evenly spaced choice has losses and gains.
    rows.sort(key=lambda row: row["change"] or 0.0)
    sizes = sum(num_bytes(data_text(row)) for row in rows)
    limit = len(rows) if sizes <= budget else max(1, len(rows) * budget // sizes)
    shown, size = [], 0
    for index in evenly(range(len(rows)), limit):
        size += num_bytes(data_text(rows[index]))
        if size > budget:
            break
        shown.append(rows[index])
    return {"columns": columns, "rows": shown, "num_rows": len(rows)}


def _answers(run: RunFolder, step: int) -> Answers:
    """Returns the n-th answer to a prompt in a mode, by (mode, prompt, n)."""
    counts: dict[tuple[str, str], int] = {}
    answers: Answers = {}
    for row in run.held_out.of_step(step):
        if row is None:
            continue
        key = text_of(row, "mode"), text_of(row, "prompt")
        counts[key] = counts.get(key, -1) + 1
        answers[(*key, counts[key])] = row
    return answers


def _row(key: Key, answers: Sequence[Answers], compared: tuple[int, int]) -> dict[str, Any]:
    mode, prompt, _ = key
    rows = [of_column.get(key) for of_column in answers]
    cells = [row and _cell(row) for row in rows]
    before, after = ((cells[i] or {}).get("total") for i in compared)
    change = None
    if compared[0] != compared[1] and before is not None and after is not None:
        change = significant(after - before)
    first = next(row for row in rows if row)
    return {
        "mode": mode,
        "prompt": shortened(prompt),
        "answer": shortened(text_of(first, "answer")),
        "cells": cells,
        "change": change,
    }


def _cell(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "text": shortened(text_of(row, "completion")),
        "finish": text_of(row, "finish_reason"),
        "length": row.get("length"),
        "rewards": rewards_of(row),
        "total": total_of(row),
        **({"turns": turns} if (turns := turns_of(row)) else {}),
    }
