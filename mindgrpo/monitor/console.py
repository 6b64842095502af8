"""What the person at the keyboard reads, on one rank only."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

RULE_WIDTH = 78
MANY = 0.9  # of a step's groups or completions: worth a hint

FIGURES = (  # key in the metrics, word on the line, format
    ("reward/mean", "reward", ".3f"),
    ("kl", "kl", ".4f"),
    ("grad_norm", "grad", ".3f"),
    ("logprob_gap/max", "gap", ".1e"),
    ("completion_length/mean", "length", ".1f"),
    ("time/step", "time", ".1f"),
)

HINTS = (
    (
        "zero_std_fraction",
        "of the groups have equal rewards, so their advantages are 0: "
        "try easier or harder prompts, a higher temperature or more generations",
    ),
    (
        "truncated_fraction",
        "of the completions were cut at max_tokens: "
        "raise generate_config.sampling_config.max_tokens or check the stop ids",
    ),
)


class Console:
    """Silent where not enabled, so that every rank may run the same lines."""

    def __init__(self, enabled: bool, stream: TextIO | None = None) -> None:
        self._stream = (stream or sys.stdout) if enabled else None
        self._hinted: set[str] = set()
        self._colour = self._stream is not None and self._stream.isatty()

    def line(self, text: str = "") -> None:
        if self._stream is not None:
            # print writes the end of the line by itself: a rank may be killed in between.
            self._stream.write(f"{text}\n")
            self._stream.flush()

    def banner(self, title: str, sections: Mapping[str, Sequence[str]]) -> None:
        """A ruled title, then each section's name in the margin of its lines; none of a section without lines."""
        self.line(self._bold(f"── {title} ".ljust(RULE_WIDTH, "─")))
        margin = max((len(name) for name, lines in sections.items() if lines), default=0)
        for name, lines in sections.items():
            for number, text in enumerate(lines):
                head = name if number == 0 else ""
                self.line(f"  {self._bold(head.ljust(margin))}  {text}")
        self.line(self._bold("─" * RULE_WIDTH))

    @contextmanager
    def phase(self, text: str) -> Iterator[None]:
        """Says what is going on, and afterwards how long it took."""
        self.line(f"  {text} ...")
        start = time.perf_counter()
        try:
            yield
        except BaseException:
            self.line(f"  {text}: failed after {time.perf_counter() - start:.1f} s")
            raise
        self.line(f"  {text}: {time.perf_counter() - start:.1f} s")

    def step_line(self, metrics: Mapping[str, Any], num_steps: int | None = None) -> None:
        """One line with the figures that matter, then a hint where one of them asks for it."""
        total = "" if num_steps is None else f"/{num_steps}"
        words = [self._bold(f"step {metrics['step']}{total}")]
        for key, word, style in FIGURES:
            if key in metrics:
                words.append(f"{word} {_figure(metrics[key], style)}")
            if key == "reward/mean":
                words += _function_means(metrics, "reward/")
        if "time/step" in metrics:
            words[-1] += " s"
        self.line("  ".join(words))
        evaluation = _function_means(metrics, "eval/")
        if evaluation:
            self.line("  held out:  " + "  ".join(evaluation))
        self._hints(metrics)

    def _hints(self, metrics: Mapping[str, Any]) -> None:
        # The rewards of a group are equal as well where a function failed on all of it, which is told by itself.
        has_failed = any(
            value is None and key.startswith("reward/") and key.endswith("/mean")
            for key, value in metrics.items()
        )
        for key, advice in HINTS:
            share = None if has_failed and key == "zero_std_fraction" else metrics.get(key)
            many = share is not None and share > MANY
            # Told when it begins: a policy that has learnt its task stays there for long.
            if many and key not in self._hinted:
                self.line(f"  hint: {share:.0%} {advice}")
            (self._hinted.add if many else self._hinted.discard)(key)

    def _bold(self, text: str) -> str:
        return f"\033[1m{text}\033[0m" if self._colour and text.strip() else text


def _figure(value: Any, style: str) -> str:
    return "-" if value is None else format(float(value), style)


def _function_means(metrics: Mapping[str, Any], prefix: str) -> list[str]:
    return [
        f"{key[len(prefix) : -len('/mean')].removesuffix('_reward')} {_figure(value, '.2f')}"
        for key, value in metrics.items()
        if key.startswith(prefix) and key.endswith("/mean") and key.count("/") == 2
    ]
