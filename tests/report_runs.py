"""Folders of runs as trainers leave them, written by hand, for tests of the pages about them."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Iterable, Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

TOKENIZER = (
    Path(__file__).resolve().parent.parent / "examples/grpo/tiny_arithmetic/model/tokenizer.json"
)
STEPS, PROMPTS, GENERATIONS = 4, 2, 4
# What a completion may hold to break out of a page's data, its markup or its script.
HOSTILE = (
    "<script>alert(1)</script>",
    "</script><img src=x onerror=alert(2)>",
    "<!--<script>",
    "@@DATA@@ ${alert(3)} \\u003cb\\u003e \u2028\u2029 ]]>",
)


class Blocks(HTMLParser):
    """Every element of a page, and the texts of its scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[int, str] = {}
        self.is_inside = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.texts[len(self.tags) - 1] = ""
        self.is_inside = True

    def handle_endtag(self, tag: str) -> None:
        self.is_inside = False

    def handle_data(self, data: str) -> None:
        if self.is_inside:
            self.texts[len(self.tags) - 1] += data

    def inside(self, wanted: str) -> list[tuple[dict[str, str | None], str]]:
        return [(attrs, self.texts[i]) for i, (tag, attrs) in enumerate(self.tags) if tag == wanted]


def data_of(text: str) -> dict[str, Any]:
    """JSON by the block's id."""
    scripts = Blocks(text).inside("script")
    return {str(attrs["id"]): json.loads(body) for attrs, body in scripts if "id" in attrs}


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def packed(values: Iterable[float]) -> str:
    return base64.b64encode(np.asarray(list(values), "<f2").tobytes()).decode()


def a_sample(step: int, number: int) -> dict[str, Any]:
    """Rewards, advantages and lengths differ within a group; the texts of step 1 are hostile."""
    prompt, place = divmod(number, GENERATIONS)
    text = HOSTILE[number % len(HOSTILE)] if step == 1 else f"say {number} " * (place + 1)
    ids = Tokenizer.from_file(str(TOKENIZER)).encode(text, add_special_tokens=False).ids
    return {
        "step": step,
        "prompt": f"Prompt {prompt} <b>of</b> step {step}?",
        "completion": text,
        "answer": "7",
        "finish_reason": "length" if place == 3 else "stop",
        "length": len(ids),
        "rewards": {"accuracy_reward": float(place % 2), "format_reward": place / 4},
        "reward": float(place % 2) + place / 4,
        "advantage": place - 1.5,
        "token_ids": ids,
    }


def conversation(text: str) -> list[dict[str, Any]]:
    """Two turns and a tool between them that failed, with `text` in each field that a page shows."""
    call = {"name": text, "arguments": {"expression": text}}
    return [
        {"role": "assistant", "content": text, "tool_calls": [call]},
        {"role": "tool", "name": text, "content": text, "failure": "raised"},
        {"role": "assistant", "content": text},
    ]


def make_conversations(folder: Path) -> Path:
    """The same run, each sample a conversation, of whose tokens the second one is a tool's."""
    run = make_run(folder)
    rows = [json.loads(line) for line in (run / "completions.jsonl").read_text().splitlines()]
    write_rows(
        run / "completions.jsonl",
        (row | {"messages": conversation(row["completion"])} for row in rows),
    )
    rows = [json.loads(line) for line in (run / "per_token.jsonl").read_text().splitlines()]
    for row in rows:
        logs = ([0.5, float("nan")] + [0.0] * row["length"])[: row["length"]]
        row["log_ratio"] = packed(logs)
    write_rows(run / "per_token.jsonl", rows)
    return run


def arrays_of(sample: Mapping[str, Any], number: int) -> dict[str, Any]:
    """The first token's ratio is e^0.5, the second one's e^-0.5, the others' 1."""
    length = sample["length"]
    logs = ([0.5, -0.5] + [0.0] * length)[:length]
    arrays = {"log_ratio": packed(logs), "entropy": packed([0.5] * length)}
    arrays["gap"] = packed([0.001 * i for i in range(length)])
    return {"step": sample["step"], "sample": number, "length": length, **arrays}


def make_run(folder: Path, steps: int = STEPS, summary: bool = True) -> Path:
    """A run with all files, arrays of three kinds among them."""
    (folder / "hf").mkdir(parents=True)
    shutil.copy(TOKENIZER, folder / "hf")
    samples = {
        s: [a_sample(s, i) for i in range(PROMPTS * GENERATIONS)] for s in range(1, steps + 1)
    }
    write_rows(folder / "completions.jsonl", (row for rows in samples.values() for row in rows))
    arrays = (arrays_of(row, i) for rows in samples.values() for i, row in enumerate(rows))
    write_rows(folder / "per_token.jsonl", arrays)
    figures = (
        {"step": s, "reward/mean": s / 4, "kl": 0.1 * s, "time/update": 2.0} for s in samples
    )
    write_rows(folder / "metrics.jsonl", figures)
    means = ({"step": s, "eval/accuracy_reward/mean": s / steps} for s in (0, steps))
    write_rows(folder / "evaluations.jsonl", means)
    held_out = (
        {**a_sample(step, i), "step": step, "mode": "sampled", "prompt": f"Held out {i}?"}
        | {"completion": f"after {step} steps", "rewards": {"accuracy_reward": float(i < step)}}
        | {"reward": float(i < step)}
        for step in (0, steps)
        for i in range(3)
    )
    write_rows(folder / "eval_completions.jsonl", held_out)
    (folder / "config_resolved.yaml").write_text(
        f"rl_config:\n  num_generations: {GENERATIONS}  # grpo_config.yaml line 3\n"
        "  epsilon_low: 0.2  # default\n  epsilon_high: 0.28  # command line --rl_config.epsilon_high\n"
        'actor_config:\n  load: "a/model # 2"  # default\n'
    )
    if summary:
        text = json.dumps({"steps": steps, "seconds": 60.0, "engine": "embedded"})
        (folder / "summary.json").write_text(text)
    return folder
