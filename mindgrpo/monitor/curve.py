"""Draws the picture of a run from its metrics (every point is a step), now and then, in a process of its own.

Each picture reads all steps again and leaves objects in circles behind: drawn by the rank itself that was 0.1 MB of
memory a step, and a quarter of the time of a small step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from mindgrpo.errors import UserError
from mindgrpo.monitor.metrics import read_metrics
from mindgrpo.processes.child import FunctionCall

Points = tuple[list[int], list[float]]

SECONDS_BETWEEN_PICTURES = 30.0
LONGEST_DRAWING = 60.0
INK, MUTED, BAND = "#1f2937", "#9ca3af", "#2563eb"
COLOURS = ("#059669", "#d97706", "#7c3aed", "#dc2626", "#0891b2", "#be185d")


def draw_curve(
    metrics: Path | str, picture: Path | str, before: Mapping[str, float | None] | None = None
) -> None:
    """Draws the PNG file `picture` from a metrics.jsonl: rewards, or the loss of supervised training.

    `before`: each reward's mean, or the loss, on held-out rows before the first step. Raises UserError where no step
    has rewards or a loss.
    """
    png_path = Path(picture)
    rows = read_metrics(Path(metrics))
    has_rewards = any("reward/mean" in row for row in rows)
    if before:
        mean = "/mean" if has_rewards else ""
        start = {f"eval/{name}{mean}": value for name, value in before.items()}
        rows = [{"step": 0, **start}, *rows]
    if not _points(rows, "reward/mean" if has_rewards else "loss")[0]:
        raise UserError(f"{metrics} holds no step with a reward/mean: there is no curve to draw.")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Not pyplot: a figure of one's own leaves no global state and needs no display.
    figure = Figure(figsize=(9, 6.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, 2, height_ratios=(2.6, 1))
    left, right = figure.add_subplot(grid[1, 0]), figure.add_subplot(grid[1, 1])
    if has_rewards:
        _draw_rewards(figure.add_subplot(grid[0, :]), rows)
        lengths = {"completion_length/max": "longest", "completion_length/mean": "mean"}
        _draw_panel(left, rows, "Completion length (tokens)", lengths)
        distances = {"kl": "KL to the reference", "logprob_gap/max": "largest log-prob gap"}
        _draw_panel(right, rows, "KL and log-prob gap", distances, log=True)
    else:
        losses = {"loss": "loss of the step's rows", "eval/loss": "loss, held out"}
        _draw_panel(figure.add_subplot(grid[0, :]), rows, "Loss (nats a token)", losses)
        _draw_panel(left, rows, "Gradient norm", {"grad_norm": "before clipping"})
        _draw_panel(right, rows, "Learning rate", {"lr": "lr"})
    # A reader never sees half a picture while the run continues.
    unfinished = png_path.with_name(f".{png_path.name}.part")
    figure.savefig(unfinished, format="png")
    unfinished.replace(png_path)


def _points(rows: list[dict[str, Any]], key: str) -> Points:
    pairs = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
    return [step for step, _ in pairs], [value for _, value in pairs]


def _functions(rows: list[dict[str, Any]], prefix: str) -> list[str]:
    keys = [key for row in rows for key in row if key.startswith(prefix) and key.endswith("/mean")]
    return [key[len(prefix) : -len("/mean")] for key in dict.fromkeys(keys) if key.count("/") == 2]


def _draw_rewards(axes: Any, rows: list[dict[str, Any]]) -> None:
    steps, means = _points(rows, "reward/mean")
    spread = {row["step"]: row.get("reward/std") or 0.0 for row in rows}
    low = [mean - spread[step] for step, mean in zip(steps, means, strict=True)]
    high = [mean + spread[step] for step, mean in zip(steps, means, strict=True)]
    axes.fill_between(steps, low, high, color=BAND, alpha=0.12, linewidth=0)
    # A run of one step is a point, and a line through one point shows nothing.
    dot = "o" if len(steps) == 1 else None
    axes.plot(steps, means, color=BAND, linewidth=2, marker=dot, label="reward (mean ± std)")
    names = list(dict.fromkeys(_functions(rows, "reward/") + _functions(rows, "eval/")))
    for number, name in enumerate(names):
        colour = COLOURS[number % len(COLOURS)]
        steps, means = _points(rows, f"reward/{name}/mean")
        axes.plot(steps, means, color=colour, linewidth=1.4, marker=dot, label=name)
        steps, means = _points(rows, f"eval/{name}/mean")
        if steps:
            axes.plot(steps, means, "D", color=colour, markersize=7, markeredgecolor="white")
            axes.plot([], [], "D", color=colour, label=f"{name}, held out")
    _dress(axes, "Reward")
    axes.set_xlabel("step", color=INK)
    axes.legend(frameon=False, fontsize=9, ncols=2, loc="best")


def _draw_panel(
    axes: Any, rows: list[dict[str, Any]], title: str, series: dict[str, str], log: bool = False
) -> None:
    values_seen: list[float] = []
    for (key, label), colour in zip(series.items(), (MUTED, BAND), strict=False):
        steps, values = _points(rows, key)
        if steps:
            dot = "o" if len(steps) == 1 else None
            axes.plot(steps, values, color=colour, linewidth=1.4, marker=dot, label=label)
            values_seen += values
    if log and any(value > 0 and math.isfinite(value) for value in values_seen):
        axes.set_yscale("log", nonpositive="mask")
    _dress(axes, title)
    if values_seen:
        axes.legend(frameon=False, fontsize=8)


def _dress(axes: Any, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, color=INK)
    axes.grid(True, axis="y", color="#e5e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(MUTED)
    axes.tick_params(colors=INK, labelsize=9)
    axes.xaxis.get_major_locator().set_params(integer=True)


class CurveProcess:
    """Draws in a process, one picture at a time, the first SECONDS_BETWEEN_PICTURES after this was made."""

    def __init__(self, metrics: Path, picture: Path) -> None:
        self._metrics, self._picture = metrics, picture
        self._process: FunctionCall | None = None
        self._started = time.monotonic()

    def draw_sometimes(self, before: Mapping[str, float | None]) -> None:
        """Starts a drawing, without waiting for it, if the last one has ended and began long enough ago."""
        if self._process is not None and self._process.poll() is not None:
            self._close()
        if self._process is None and time.monotonic() - self._started >= SECONDS_BETWEEN_PICTURES:
            with suppress(OSError):  # the last one says why
                self._start(before)

    def draw_last(self, before: Mapping[str, float | None]) -> str | None:
        """Draws the steps so far and waits for it; returns a sentence if that failed."""
        self._close()
        try:
            why = self._start(before).failure(LONGEST_DRAWING)
        except OSError as error:
            why = f"its process cannot be started ({error.strerror})"
        return None if why is None else f"{self._picture} was not drawn: {why}"

    def _close(self) -> None:
        if self._process is not None:
            self._process.end()
            self._process = None

    def _start(self, before: Mapping[str, float | None]) -> FunctionCall:
        self._started = time.monotonic()
        files = {"metrics": str(self._metrics), "picture": str(self._picture)}
        self._process = FunctionCall(
            "mindgrpo.monitor.curve:draw_curve", {**files, "before": dict(before)}
        )
        return self._process
