"""Prints the lines that the user reads, on one rank only."""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

from mindgrpo.errors import show
from mindgrpo.health.heartbeat import CLEAR
from mindgrpo.monitor.notebook import NotebookProgress, in_notebook

WIDTH = 80  # where the terminal's is not known
DIVERGED = 1.0  # KL to the reference, nats a token, from where on other hints would mislead

COLUMNS = (  # key in the metrics, word on the line, format, importance (0: never left out of a line that is too long)
    ("reward/mean", "reward", ".3f", 0),
    ("loss", "loss", ".4f", 0),
    ("kl", "kl", ".4f", 4),
    ("grad_norm", "grad", ".3f", 6),
    ("logprob_gap/max", "gap", ".1e", 7),
    ("completion_length/mean", "length", ".1f", 5),
    ("time/step", "", ".1f", 1),
)
OF_FUNCTIONS = 2  # the importance of each function's mean

HINTS = (  # key in the metrics, the share above which it is worth a hint, the hint
    (
        "zero_std_fraction",
        0.9,
        "of the groups have equal rewards, so their advantages are 0: "
        "try easier or harder prompts, a higher temperature or more generations",
    ),
    (
        "truncated_fraction",
        0.9,
        "of the completions were cut at max_tokens: raise generate_config.sampling_config.max_tokens or check the "
        "stop ids; if the completions make no sense, lower actor_config.lr_schedule.lr",
    ),
    (
        "padding_share",
        0.5,
        "of the positions that the update computes are padding: lower rl_config.batch_size (rows a micro-batch)",
    ),
)
# Mean turns of conversations below which a share of them that is cut is worth a hint, and that share.
FEW_TURNS, MANY_CUT = 2.0, 0.25


class Console:
    """Prints if `enabled`, so that every rank may run the same code; `width` in columns, by default the terminal's.

    Sentences are wrapped for a terminal only (or if COLUMNS is set), so that logs can be searched by line. `is_read`
    says that the stream is no pipe which nobody reads any more.
    """

    def __init__(
        self, enabled: bool, stream: TextIO | None = None, width: int | None = None
    ) -> None:
        self._stream = (stream or sys.stdout) if enabled else None
        self._width = width or shutil.get_terminal_size((WIDTH, 24)).columns
        self._hinted: set[str] = set()
        self._divergence = 0
        self.is_read = True
        self._colour = self._stream is not None and self._stream.isatty()
        self._lock, self._live = threading.Lock(), ""
        shows_notebook = enabled and stream is None and in_notebook()
        self._notebook = NotebookProgress() if shows_notebook else None
        self._wraps = self._colour or width is not None or "COLUMNS" in os.environ

    def line(self, text: str = "") -> None:
        if self._stream is not None:
            with self._lock:
                # print writes the end of the line by itself: a rank may be killed in between.
                self._show(f"{CLEAR if self._live else ''}{text}\n")
                self._live = ""

    def _show(self, text: str) -> None:
        self.is_read = show(self._stream, text) and self.is_read

    @property
    def shows_live(self) -> bool:
        """Returns whether `live` shows anything: on a terminal and in a notebook."""
        return self._colour or self._notebook is not None

    def live(self, text: str) -> None:
        """Shows the text below the printed lines until the next one is printed or shown; in a notebook, in its place
        there."""
        if self._notebook is not None:
            self._notebook.live(text)
        text = text[: self._width - 1]
        if self._stream is None or not self._colour or text == self._live:
            return
        with self._lock:
            self._show(f"{CLEAR}{text}")
            self._live = text

    def end_live(self) -> None:
        """Takes away what `live` shows, for good in a notebook."""
        self.live("")
        if self._notebook is not None:
            self._notebook.end()

    def banner(self, title: str, sections: Mapping[str, Sequence[str]]) -> None:
        """Prints a ruled title, then each section that has lines, with its name in their margin."""
        self.line(self._bold(f"── {title} ".ljust(self._width, "─")))
        margin = max((len(name) for name, lines in sections.items() if lines), default=0)
        for name, lines in sections.items():
            wrapped = [part for text in lines for part in self._wrapped(text, margin + 4)]
            for number, text in enumerate(wrapped):
                head = name if number == 0 else ""
                self.line(f"  {self._bold(head.ljust(margin))}  {text}")
        self.line(self._bold("─" * self._width))

    def _wrapped(self, text: str, margin: int) -> list[str]:
        """Wraps a line that does not fit, without breaking paths, so that they can be copied."""
        room = max(self._width - margin, 20)
        if len(text) <= room or not self._wraps:
            return [text]
        return textwrap.wrap(
            text, room, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )

    @contextmanager
    def phase(self, text: str) -> Iterator[None]:
        """Prints the phase, and afterwards how long it took."""
        self.line(f"  {text} ...")
        start = time.perf_counter()
        try:
            yield
        except BaseException:
            self.line(f"  {text}: failed after {time.perf_counter() - start:.1f} s")
            raise
        self.line(f"  {text}: {time.perf_counter() - start:.1f} s")

    def step_line(self, metrics: Mapping[str, Any], num_steps: int | None = None) -> None:
        """Prints one line with the most important metrics, then a hint if one of them calls for it; in a notebook the
        line is a row of its table."""
        total = "" if num_steps is None else f"/{num_steps}"
        words, cells = [(0, f"step {metrics['step']}{total}")], {}
        for key, word, style, importance in COLUMNS:
            value = metrics.get(key)
            if key == "loss" and "reward/mean" in metrics:
                continue  # GRPO's says nothing about learning
            if key in metrics and not (value is None and key == "kl"):
                shown = number(value, style) + (" s" if key == "time/step" else "")
                words.append((importance, f"{word} {shown}".strip()))
                cells[word or "time"] = shown
            if key == "reward/mean":
                means = _function_means(metrics, "reward/")
                words += [(OF_FUNCTIONS, text) for text in means]
                cells |= {
                    name: shown for name, _, shown in (text.rpartition(" ") for text in means)
                }
        if self._notebook is not None and num_steps is not None:
            self._notebook.step(metrics["step"], num_steps, cells)
        else:
            first, *others = self._fitting(words)
            self.line("  ".join([self._bold(first), *others]))
        self._hints(metrics)

    def means_line(self, title: str, metrics: Mapping[str, Any], prefix: str) -> None:
        """Prints one line with the mean of each reward function, as many as fit."""
        words = [(0, f"  {title}")]
        words += [(OF_FUNCTIONS, text) for text in _function_means(metrics, prefix, ".3f")]
        self.line("  ".join(self._fitting(words)))

    def _fitting(self, words: Sequence[tuple[int, str]]) -> list[str]:
        """Leaves out the least important words (0 is the highest importance) until the line fits."""
        left = list(words)
        while len("  ".join(text for _, text in left)) > self._width and any(i for i, _ in left):
            least = max(range(len(left)), key=lambda number: (left[number][0], number))
            del left[least]
        return [text for _, text in left]

    def _hints(self, metrics: Mapping[str, Any]) -> None:
        # Rewards are also equal where a function failed, which is reported by itself, and where there is none.
        has_failed = any(
            value is None and key.startswith("reward/") and key.endswith("/mean")
            for key, value in metrics.items()
        )
        is_unrewarded = has_failed or not _function_means(metrics, "reward/")
        none = metrics.get("reward/mean", 0.0) is None and not any(
            value for key, value in metrics.items() if re.fullmatch("reward/.*/errors", key)
        )
        self._hint(
            "none",
            none,
            "no reward function gave any sample a number (all returned None), so nothing is learnt: check the columns "
            "and the form of the answers that they read (python -m mindgrpo score tries them)",
        )
        divergence = metrics.get("kl") or 0.0
        has_diverged = divergence > DIVERGED
        # Said again where it has become ten times as much.
        further = sum(divergence > factor * DIVERGED for factor in (1, 10, 100))
        if further > self._divergence:
            self._print_hint(
                f"KL to the reference is {number(divergence, '.2g')}, so the policy has diverged: lower "
                "actor_config.lr_schedule.lr or raise rl_config.beta"
            )
        self._divergence = further
        turns = metrics.get("environment/turns", metrics.get("tools/turns"))
        cut = metrics.get("truncated_fraction") or 0.0
        is_short = turns is not None and turns < FEW_TURNS and cut > MANY_CUT and not has_diverged
        self._hint(
            "turns",
            is_short,
            f"{cut:.0%} of the conversations ended at max_tokens, with {number(turns, '.1f')} turns on average: raise "
            "generate_config.sampling_config.max_tokens, which counts all turns and the replies between them",
        )
        for key, threshold, advice in HINTS:
            misleads = (is_unrewarded and key == "zero_std_fraction") or (
                has_diverged and key != "padding_share"
            )
            misleads |= is_short and key == "truncated_fraction"
            share = None if misleads else metrics.get(key)
            many = share is not None and share > threshold
            self._hint(key, many, f"{share:.0%} {advice}" if many else "")

    def _hint(self, key: str, applies: bool, advice: str) -> None:
        """Prints the hint when it begins to apply: a policy that has learnt its task stays in that state for long."""
        if applies and key not in self._hinted:
            self._print_hint(advice)
        (self._hinted.add if applies else self._hinted.discard)(key)

    def _print_hint(self, advice: str) -> None:
        for text in self._wrapped(f"hint: {advice}", 2):
            self.line(f"  {text}")

    def _bold(self, text: str) -> str:
        return f"\033[1m{text}\033[0m" if self._colour and text.strip() else text


def number(value: float | None, style: str = ".3f") -> str:
    """Formats a number; `-` for None and NaN."""
    return "-" if value is None or value != value else format(float(value), style)


def _function_means(metrics: Mapping[str, Any], prefix: str, style: str = ".2f") -> list[str]:
    return [
        f"{key[len(prefix) : -len('/mean')].removesuffix('_reward')} {number(value, style)}"
        for key, value in metrics.items()
        if key.startswith(prefix) and key.endswith("/mean") and key.count("/") == 2
    ]
