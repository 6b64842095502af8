"""Size of report.html, and seconds to write and to open it, for a run of many steps.

report.py [--steps 500] [--prompts 16] [--generations 8] [--tokens 100] [--keep FOLDER] prints one JSON line: `bytes`,
`seconds_to_write`, and `seconds_to_open` in headless Chromium (null where there is none). The run is made up of seeded
random tokens, with every array of per_token.jsonl; --keep leaves its folder there.
"""

from __future__ import annotations

import argparse
import base64
import json
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from chromium import browser, chromium
from tokenizers import Tokenizer

from mindgrpo.report.samples import ARRAYS
from mindgrpo.report.write import write_report

TINY = Path(__file__).resolve().parents[2] / "examples" / "grpo" / "tiny_arithmetic"
HELD_OUT = 200


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--prompts", type=int, default=16, help="groups of a step")
    parser.add_argument("--generations", type=int, default=8, help="samples of a group")
    parser.add_argument("--tokens", type=int, default=100, help="mean length of a completion")
    parser.add_argument("--opens", type=int, default=3, help="times the page is opened; the median")
    parser.add_argument("--keep", type=Path, help="leave the run and its page in this folder")
    return parser.parse_args()


class SeededRun:
    """Writes the files of a run whose rewards rise with its steps."""

    def __init__(self, folder: Path, asked: argparse.Namespace) -> None:
        self._folder, self._asked = folder, asked
        self._draw = np.random.default_rng(0)
        # Lengths of the samples by step.
        self._written: dict[int, list[int]] = defaultdict(list)
        self._codec = Tokenizer.from_file(str(TINY / "model" / "tokenizer.json"))

    def write(self) -> None:
        asked = self._asked
        (self._folder / "hf").mkdir(parents=True)
        shutil.copy(TINY / "model" / "tokenizer.json", self._folder / "hf")
        rl = {"num_generations": asked.generations, "epsilon_low": 0.2, "epsilon_high": 0.2}
        lines = [f"  {key}: {value}  # default" for key, value in rl.items()]
        text = "\n".join(["rl_config:", *lines]) + "\n"
        (self._folder / "config_resolved.yaml").write_text(text)
        summary = {"steps": asked.steps, "seconds": 9.0 * asked.steps}
        (self._folder / "summary.json").write_text(json.dumps(summary))
        steps = range(1, asked.steps + 1)
        self._lines("metrics", (self._figures(step) for step in steps))
        self._lines("completions", (row for step in steps for row in self._samples(step)))
        self._lines("per_token", (row for step in steps for row in self._arrays(step)))
        self._lines(
            "evaluations",
            ({"step": s, "eval/accuracy_reward/mean": s / asked.steps} for s in (0, asked.steps)),
        )
        self._lines(
            "eval_completions", (row for step in (0, asked.steps) for row in self._answers(step))
        )

    def _lines(self, name: str, rows: Iterator[dict[str, Any]]) -> None:
        with (self._folder / f"{name}.jsonl").open("w", encoding="utf-8") as lines:
            lines.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)

    def _figures(self, step: int) -> dict[str, Any]:
        names = [f"figure/{number}" for number in range(50)]
        names += [
            "reward/mean",
            "kl",
            "entropy",
            "grad_norm",
            "time/rollout",
            "time/update",
            "time/step",
        ]
        return {
            "step": step,
            **dict(zip(names, self._draw.random(len(names)).tolist(), strict=True)),
        }

    def _samples(self, step: int) -> Iterator[dict[str, Any]]:
        for prompt in range(self._asked.prompts):
            lengths = self._lengths(self._asked.generations)
            ids = [
                self._draw.integers(3, self._codec.get_vocab_size(), n).tolist() for n in lengths
            ]
            self._written[step] += map(len, ids)
            for own, text in zip(ids, self._codec.decode_batch(ids), strict=True):
                yield self._row(
                    step, f"Prompt {prompt} of step {step}: how many are left?", text
                ) | {
                    "advantage": float(self._draw.normal()),
                    "length": len(own),
                    "token_ids": own,
                }

    def _lengths(self, count: int) -> np.ndarray:
        return np.clip(self._draw.poisson(self._asked.tokens, count), 1, None)

    def _row(self, step: int, prompt: str, text: str) -> dict[str, Any]:
        right = float(self._draw.random() < step / self._asked.steps)
        row = {"step": step, "prompt": prompt, "completion": text, "answer": "7"}
        return row | {
            "finish_reason": "stop",
            "rewards": {"accuracy_reward": right},
            "reward": right,
        }

    def _arrays(self, step: int) -> Iterator[dict[str, Any]]:
        """Of the samples that were written."""
        for sample, length in enumerate(self._written[step]):
            values = self._draw.normal(0, 0.1, (len(ARRAYS), length)).astype("<f2")
            arrays = {
                name: base64.b64encode(row.tobytes()).decode()
                for name, row in zip(ARRAYS, values, strict=True)
            }
            yield {"step": step, "sample": sample, "length": length, **arrays}

    def _answers(self, step: int) -> Iterator[dict[str, Any]]:
        for number in range(HELD_OUT):
            ids = self._draw.integers(3, self._codec.get_vocab_size(), self._asked.tokens).tolist()
            yield {
                "mode": "sampled",
                **self._row(step, f"Held-out prompt {number}", self._codec.decode(ids)),
            }


def seconds_to_open(page: Path, times: int) -> float | None:
    program = chromium()
    if program is None:
        return None
    with browser(program) as shown:
        return statistics.median(shown.open(page) for _ in range(times))


def measure(folder: Path, asked: argparse.Namespace) -> dict[str, Any]:
    SeededRun(folder, asked).write()
    started = time.monotonic()
    page = write_report([folder])
    written = time.monotonic() - started
    opened = seconds_to_open(page, asked.opens)
    return {
        "bench": "report",
        "steps": asked.steps,
        "samples": asked.steps * asked.prompts * asked.generations,
        "bytes": page.stat().st_size,
        "seconds_to_write": round(written, 2),
        "seconds_to_open": None if opened is None else round(opened, 2),
    }


def main() -> None:
    asked = options()
    if asked.keep is not None:
        print(json.dumps(measure(asked.keep, asked)))
        return
    with tempfile.TemporaryDirectory(prefix="mindgrpo-report-") as folder:
        print(json.dumps(measure(Path(folder) / "run", asked)))


if __name__ == "__main__":
    main()
