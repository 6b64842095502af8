"""Seconds of a GRPO step of TRL (torch on CPU, transformers' generate) on a work file: the peer of step.py.

PEERS/trl/bin/python trl_step.py --work W.json [--steps 7] [--bf16] prints one JSON line. One process, float32 unless
asked for bf16, all cores, beta 0.01, one optimizer step, the same number of samples and tokens, rewards that cost
nothing. Refuses what would slow TRL down without need: no logs, no files, no gradient checkpointing unless asked for.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from datasets import Dataset
from model_directory import model_directory, text, tokenizer
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

BENCH = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(BENCH))
from work import Work, random_rewards, read_work  # noqa: E402

BETA = 0.01


class Clock(TrainerCallback):
    """When each step began and ended; TRL generates inside of it."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.started = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(time.perf_counter() - self.started)


class Rewards:
    __name__ = "random"

    def __init__(self, work: Work) -> None:
        self.work, self.calls = work, 0
        self.lengths: set[int] = set()

    def __call__(self, completion_ids: list[list[int]], **_: Any) -> list[float]:
        self.lengths |= {len(ids) for ids in completion_ids}
        self.calls += 1
        return [float(r) for r in random_rewards(self.calls, len(completion_ids))]


def settings(work: Work, given: argparse.Namespace, folder: str) -> GRPOConfig:
    at_once = given.samples_at_once or work.samples
    return GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=at_once,
        gradient_accumulation_steps=work.samples // at_once,
        num_generations=work.generations,
        max_completion_length=work.new_tokens,
        temperature=1.0,
        beta=BETA,
        learning_rate=1e-6,
        max_steps=given.steps + 1,
        model_init_kwargs={"dtype": "float32"},
        use_cpu=True,
        bf16=given.bf16,
        gradient_checkpointing=given.checkpointing,
        shuffle_dataset=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def measure(work: Work, given: argparse.Namespace) -> dict[str, Any]:
    prompts = [text(ids) for step in range(given.steps + 1) for ids in work.prompt_ids(step)]
    clock, rewards = Clock(), Rewards(work)
    with model_directory(work.model) as model, TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=str(model),
            reward_funcs=rewards,
            args=settings(work, given, folder),
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            processing_class=tokenizer(work.model["vocab_size"]),
            callbacks=[clock],
        )
        trainer.train()
    if rewards.lengths != {work.new_tokens}:
        raise RuntimeError(f"completions of {rewards.lengths} tokens, not {work.new_tokens}")
    first, *timed = clock.seconds
    return {
        "bench": "trl_step",
        "median_step_s": statistics.median(timed),
        "min_step_s": min(timed),
        "tokens_per_step": work.tokens,
        "new_tokens_per_step": work.samples * work.new_tokens,
        "compile_s": first,
        "phases": {},
        "steps_s": timed,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=BENCH / "work.json")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--bf16", action="store_true", help="TRL's autocast to bfloat16")
    parser.add_argument("--samples_at_once", type=int, help="samples a backward pass; default all")
    parser.add_argument("--checkpointing", action="store_true", help="as TRL does by default")
    given = parser.parse_args()
    work = read_work(given.work)
    with redirect_stdout(sys.stderr):
        figures = measure(work, given)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
