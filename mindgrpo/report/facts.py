"""Collects what a page shows besides samples: what ran and how it ended, warnings, metrics by step."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from mindgrpo.algorithm.surrogates import LOSS_TYPES, cispo, clipped_surrogate
from mindgrpo.report.run_folder import RunFolder, RunRow, number_of
from mindgrpo.report.samples import evenly, significant

# Values of a column, and of all columns together (about).
MAX_ROWS, MAX_VALUES = 2000, 200_000
_NO_METRICS = ("step", "nonfinite")
_FACTS = (
    ("model", ("rl_config.model_name", "actor_config.load")),
    ("data", ("rl_config.dataset_file",)),
    ("held_out", ("rl_config.eval_dataset_file",)),
    ("rewards", ("reward_config.verifier_function",)),
    ("loss", ("rl_config.loss_type",)),
)
_SUMMARY = ("engine", "engine_version", "backend", "compute_dtype", "float32_matmul_precision")
_AXES = {"data_parallel": "DP", "model_parallel": "MP", "pipeline_stage": "PP"}
_AXES_IN_USE = {"context_parallel": "CP", "pp_interleave_num": "VPP"}


def facts(run: RunFolder) -> list[tuple[str, str]]:
    """Returns (name, text) pairs in the order of the page's header."""
    texts: dict[str, Any] = {}
    for name, keys in _FACTS:
        texts[name] = next((run.values[key] for key in keys if run.values.get(key)), None)
    values, summary = run.values, run.summary
    counts = ("rl_config.prompts_per_step", "rl_config.num_generations")[: 2 - run.is_supervised]
    texts["batch"] = " × ".join(str(values[key]) for key in counts if values.get(key))
    for role in ("actor", "generate", "ref"):
        texts[f"layout_{role}"] = _layout(values, f"{role}_config.parallel_config.")
    needs_reference = ("rl_config.beta", "rl_config.distillation_coef")
    if not any(number_of(values, key, 0.0) for key in needs_reference):
        del texts["layout_ref"]
    elif not texts["layout_ref"]:
        # The default of the reference model's layout.
        texts["layout_ref"] = texts["layout_actor"]
    if run.is_supervised:
        del texts["layout_generate"]
        texts["loss"], texts["rows"] = "supervised", texts.pop("batch")
    texts |= {name: summary.get(name) for name in _SUMMARY}
    texts |= {name: summary.get(name) for name in ("ranks", "host")}
    texts["folder"] = str(run.path)
    return [(name, _text(value)) for name, value in texts.items() if value]


def _text(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _layout(values: Mapping[str, Any], prefix: str) -> str:
    sizes = {short: values.get(prefix + name) for name, short in _AXES.items()}
    more = {short: number_of(values, prefix + name, 1) for name, short in _AXES_IN_USE.items()}
    sizes |= {short: size for short, size in more.items() if size > 1}
    return " ".join(f"{short}{size}" for short, size in sizes.items() if size)


def ending(run: RunFolder) -> dict[str, Any]:
    """Returns when the run ended, in seconds since the epoch, and how; `is_complete` is None without a summary."""
    last = max((row["step"] for row in run.metrics), default=0)
    source = run.path / ("summary.json" if run.summary else "metrics.jsonl")
    ended, reason = source.stat().st_mtime, run.summary.get("ended")
    best = run.summary.get("best_checkpoint")
    return {
        "written": time.time(),
        "ended": ended,
        "seconds": significant(run.summary.get("seconds")),
        "steps": last,
        "max_steps": significant(run.values.get("rl_config.max_steps")),
        "is_complete": (reason is None) if run.summary else None,
        "reason": None if reason is None else str(reason),
        "best": best if isinstance(best, dict) and type(best.get("step")) is int else None,
    }


def warnings(run: RunFolder) -> list[list[Any]]:
    """Returns [code, arguments ...] for each fact that readers of the curves should know."""
    lines: list[list[Any]] = []
    for name, count in _totals(run.metrics, "reward/", "/errors").items():
        lines.append(["reward_failed", name, count])
    skipped = sum(int(row.get("skipped_updates") or 0) for row in run.metrics)
    if skipped:
        lines.append(["skipped_updates", skipped])
    steps = [row["step"] for row in run.metrics if row.get("nonfinite")]
    if steps:
        lines.append(["nonfinite", len(steps), steps[0]])
    files = (run.completions, run.per_token, run.held_out)
    bad = run.num_bad_rows + sum(file.num_bad for file in files)
    if bad:
        lines.append(["bad_rows", bad])
    return lines


def _totals(rows: list[RunRow], prefix: str, suffix: str) -> dict[str, int]:
    totals: dict[str, int] = {}
    for row in rows:
        for key, value in row.items():
            if key.startswith(prefix) and key.endswith(suffix) and isinstance(value, int) and value:
                name = key[len(prefix) : -len(suffix)]
                totals[name] = totals.get(name, 0) + value
    return totals


def metric_columns(run: RunFolder) -> dict[str, Any]:
    """Returns columns by key over `steps`, evenly spaced if there are too many; step 0 is before the first one."""
    rows: dict[int, RunRow] = {}
    for row in [*run.evaluations, *run.metrics]:
        rows[row["step"]] = rows.get(row["step"], {}) | row
    steps = sorted(rows)
    keys = dict.fromkeys(key for row in run.metrics + run.evaluations for key in row)
    limit = max(2, min(MAX_ROWS, MAX_VALUES // max(1, len(keys))))
    evaluated = [row["step"] for row in run.evaluations]
    kept = sorted({*evenly(steps, limit), *evenly(evaluated, limit // 10)})
    columns = {}
    for key in keys:
        values = [significant(rows[step].get(key)) for step in kept]
        if key not in _NO_METRICS and any(value is not None for value in values):
            columns[key] = values
    return {"steps": kept, "num_steps": len(steps), "columns": columns}


def clipping(run: RunFolder) -> dict[str, Any] | None:
    """Returns the bounds by which the page marks the tokens that the update clipped; None where no ratio is clipped."""
    values = run.values
    loss = LOSS_TYPES.get(values.get("rl_config.loss_type", "grpo"))
    if loss is None or loss.epsilon is None or loss.surrogate not in (clipped_surrogate, cispo):
        return None
    bounds = (values.get("rl_config.dual_clip"), values.get("rl_config.delta"))
    return {
        "low": number_of(values, "rl_config.epsilon_low", loss.epsilon[0]),
        "high": number_of(values, "rl_config.epsilon_high", loss.epsilon[1]),
        "bound": next((significant(bound) for bound in bounds if bound is not None), None),
        "by_sequence": values.get("rl_config.importance_sampling_level") == "sequence",
        "both_signs": loss.surrogate is cispo,
    }
