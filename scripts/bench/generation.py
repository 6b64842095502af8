"""The task of the generation benches, one for every engine: how many prompts, how they are drawn from, how long.

Needs numpy alone. Refuses a result of other lengths than were asked for.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from work import RAGGED_LONGEST, Work, ragged_lengths, read_work

TOP_K, TOP_P = 50, 0.95


@dataclass(frozen=True)
class Generation:
    """`work` has one generation a prompt; `lengths` are the completions' in tokens; `drawing` how they are drawn."""

    work: Work
    lengths: list[int]
    ragged: bool
    drawing: dict[str, Any]

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    def check(self, lengths: Sequence[int]) -> None:
        if list(lengths) != self.lengths:
            raise RuntimeError(f"completions of {list(lengths)} tokens, not {self.lengths}")

    def described(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            "prompts": self.work.prompts,
            "longest": max(self.lengths),
            "ragged": self.ragged,
            **self.drawing,
        }


def add_options(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--work", type=Path, help="work file (its model; default work.json)")
    source.add_argument("--model", type=Path, help="Hugging Face directory")
    parser.add_argument("--ragged", action="store_true", help="geometric lengths, mean 32, max 128")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--prompt_tokens", type=int, default=32)
    parser.add_argument("--new_tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top_k", type=int, default=TOP_K, help="0 is off")
    parser.add_argument("--top_p", type=float, default=TOP_P, help="1 is off")
    parser.add_argument("--repeats", type=int, default=7, help="timed runs")


def generation_of(given: argparse.Namespace) -> Generation:
    """Of a work file only the model counts: prompts and lengths are this bench's own."""
    if given.model is not None:
        model = json.loads((given.model / "config.json").read_text())
        work = Work(model, 1, 1, 1, 1)
    else:
        work = read_work(given.work or Path(__file__).resolve().parent / "work.json")
    work = replace(
        work,
        prompts=given.prompts,
        generations=1,
        prompt_tokens=given.prompt_tokens,
        new_tokens=RAGGED_LONGEST if given.ragged else given.new_tokens,
    )
    lengths = ragged_lengths(given.prompts) if given.ragged else [given.new_tokens] * given.prompts
    drawing = {"temperature": given.temperature, "top_k": given.top_k, "top_p": given.top_p}
    return Generation(work, lengths, given.ragged, drawing)
