"""Writes evaluations.jsonl (one row per evaluation), eval_completions.jsonl (one per sample), and a table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mindgrpo.backend.kernels.shapes import SamplingParams
from mindgrpo.errors import counted
from mindgrpo.grpo.evaluation import Outcome, evaluation_metrics
from mindgrpo.monitor.console import number
from mindgrpo.monitor.metrics import append_rows, read_metrics


def write_evaluation(
    folder: Path, step: int, outcomes: Sequence[Outcome], with_completions: bool
) -> None:
    """Appends an evaluation to both files in `folder`."""
    append_rows(folder / "evaluations.jsonl", step, [evaluation_metrics(outcomes)])
    if with_completions:
        write_completions(folder / "eval_completions.jsonl", step, outcomes)


def before_and_after(path: Path) -> list[str]:
    """Compares the evaluation before the first step, if there is one, with the last, as means ± standard errors.

    `path`: evaluations.jsonl. Returns a row for each reward function, and one for the largest k of its pass@k.
    """
    evaluations = read_metrics(path)
    columns = {"after": evaluations[-1]}
    if evaluations[0]["step"] == 0 and len(evaluations) > 1:
        columns = {"before": evaluations[0], **columns}
    ks = (key.rpartition("/pass@") for key in columns["after"])
    largest: dict[str, int] = {}
    for name, is_pass, k in ks:
        if is_pass and int(k) > 1:
            largest[name] = max(int(k), largest.get(name, 0))
    rows = [["", *columns]]
    for key in columns["after"]:
        name, _, kind = key.rpartition("/")
        label = name.removeprefix("eval/")
        if kind == "mean":
            errors = (number(row.get(f"{name}/stderr")) for row in columns.values())
            means = (number(row.get(key)) for row in columns.values())
            rows.append([label, *map("{} ± {}".format, means, errors)])
        elif kind == f"pass@{largest.get(name)}":
            rows.append([f"{label} {kind}", *(number(row.get(key)) for row in columns.values())])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def write_completions(path: Path, step: int, outcomes: Sequence[Outcome]) -> None:
    append_rows(path, step, (row for outcome in outcomes for row in outcome.rows()))


def details(outcome: Outcome) -> dict[str, Any]:
    """Describes the sampling of an evaluation, and its cost."""
    settings = outcome.mode.settings
    return {
        "num_generations": outcome.mode.num_samples,
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "pass_threshold": outcome.mode.threshold,
        "completion_tokens": outcome.num_tokens,
        "seconds": outcome.seconds,
        "tokens_per_s": outcome.tokens_per_second,
        "scored": {name: scores.num_scored for name, scores in outcome.by_function.items()},
    }


def table(outcomes: Sequence[Outcome]) -> str:
    """Formats a row for each reward function and mode, and a line about the prompts and sampling."""
    lines = []
    for outcome in outcomes:
        n = outcome.mode.num_samples
        by_function = outcome.by_function
        ks = sorted({k for scores in by_function.values() for k in scores.pass_at})
        rows = [["reward", f"mean@{n}", "± se", *(f"pass@{k}" for k in ks), "prompts", "failed"]]
        for name, scores in by_function.items():
            passed = [number(scores.pass_at.get(k)) for k in ks]
            failed = str(outcome.scored.scores.errors.get(name, 0))
            means = [number(scores.mean_at_n), number(scores.error)]
            rows.append([name, *means, *passed, str(scores.num_prompts), failed])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines += [f"\n{outcome.mode.title} ({_settings(outcome.mode.settings)})"]
        for first, *cells in rows:
            right = [cell.rjust(w) for cell, w in zip(cells, widths[1:], strict=True)]
            lines.append("  ".join(["", first.ljust(widths[0]), *right]))
        count = len(outcome.rollout)
        lines.append(
            f"  {counted(count // n, 'prompt')}, {counted(count, 'completion')} of {outcome.num_tokens} tokens, "
            f"{outcome.truncated_fraction:.1%} truncated, {outcome.tokens_per_second:.0f} tokens/s"
        )
    return "\n".join(lines)


def _settings(settings: SamplingParams) -> str:
    if settings.greedy:
        return "the likeliest token each time"
    return f"temperature {settings.temperature:g}, top_p {settings.top_p:g}"
