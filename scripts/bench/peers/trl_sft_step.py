"""Seconds of a step of TRL's SFTTrainer (torch on CPU) on the rows of sft_step.py: its peer.

PEERS/trl/bin/python trl_sft_step.py --work W.json [--rows 200] [--rows_a_step 20] [--steps 7] prints one JSON line. One
process, all cores, loss on completions alone, padded to a batch's longest row, as TRL does by default; in float32, or
with --bf16 under autocast to bfloat16 with float32 weights. Refuses what would slow TRL down without need: no logs, no
files, no gradient checkpointing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from contextlib import redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from datasets import Dataset
from model_directory import model_directory, text, tokenizer
from trl import SFTConfig, SFTTrainer
from trl_step import Clock

BENCH = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(BENCH))
from work import Work, answered_rows, read_work  # noqa: E402

UNTIMED = 2


def measure(work: Work, given: argparse.Namespace) -> dict[str, Any]:
    rows = [
        {"prompt": text(prompt.tolist()), "completion": " " + text(answer.tolist())}
        for prompt, answer in answered_rows(work, given.rows)
    ]
    clock = Clock()
    with model_directory(work.model) as model, TemporaryDirectory() as folder:
        arguments = SFTConfig(
            output_dir=folder,
            per_device_train_batch_size=given.rows_a_step,
            learning_rate=1e-6,
            max_length=given.row_tokens,
            max_steps=given.steps + UNTIMED,
            model_init_kwargs={"dtype": "float32"},
            use_cpu=True,
            bf16=given.bf16,
            gradient_checkpointing=False,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = SFTTrainer(
            model=str(model),
            args=arguments,
            train_dataset=Dataset.from_list(rows),
            # The last word ends a text.
            processing_class=tokenizer(work.model["vocab_size"] - 1),
            callbacks=[clock],
        )
        trainer.train()
    timed = clock.seconds[UNTIMED:]
    tokens = sum(
        len(prompt) + len(answer) + 1 for prompt, answer in answered_rows(work, given.rows)
    )
    return {
        "bench": "trl_sft_step",
        "median_step_s": statistics.median(timed),
        "min_step_s": min(timed),
        "tokens_per_step": tokens / given.rows * given.rows_a_step,
        "steps_s": timed,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=BENCH / "work_smollm2.json")
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--rows_a_step", type=int, default=20)
    parser.add_argument("--row_tokens", type=int, default=512, help="longest row")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--bf16", action="store_true", help="TRL's default")
    given = parser.parse_args()
    work = read_work(given.work)
    with redirect_stdout(sys.stderr):
        figures = measure(work, given)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
