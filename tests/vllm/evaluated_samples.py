"""What an evaluation's generator answered, of the embedded one and of vLLM."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import small_runs


def evaluated(folder: Path, workers: int, *words: str) -> list[dict[str, Any]]:
    """The samples of `mindgrpo eval`, greedy, by vLLM with `workers`, by the embedded generator without."""
    kept = folder / f"answers{workers}.jsonl"
    command = [sys.executable, "-m", "mindgrpo", "eval", "--config", str(folder / "small.yaml")]
    command += [*small_runs.reward_words(folder), *words, "--model", str(folder / "model")]
    command += ["--rl_config.eval_dataset_file", str(folder / "train.jsonl")]
    command += ["--rl_config.eval_modes=greedy", f"--generate_config.use_vllm={workers}"]
    subprocess.run([*command, "--completions", str(kept)], check=True, timeout=400)
    return [json.loads(line) for line in kept.read_text().splitlines()]
