"""Whole runs whose completions go on, with real vLLM: conversations with a tool, and partial rollouts.

One rank and the bundled models. Does not prove that they learn, nor anything of several ranks.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine_process import ROOT
from engine_subject import needs_vllm

from mindgrpo.config import load_config
from mindgrpo.monitor.metrics import read_metrics

pytestmark = needs_vllm

EXAMPLES = ROOT / "examples" / "grpo"
SMALL = {
    "rl_config.prompts_per_step": "4",
    "rl_config.num_generations": "4",
    "rl_config.max_steps": "2",
    "rl_config.eval_on_start": "false",
    "rl_config.eval_samples": "2",
    "generate_config.use_vllm": "1",
}


def run(example: str, folder: Path, keys: dict[str, str]) -> tuple[list[dict[str, Any]], list[Any]]:
    """Rows of metrics and samples."""
    from mindgrpo.trainer import GRPOTrainer

    home = EXAMPLES / example
    paths = {
        "rl_config.dataset_file": home / "train.jsonl",
        "rl_config.eval_dataset_file": home / "heldout.jsonl",
        "actor_config.load": home / "model",
        "output_dir": folder,
    }
    words = [str(word) for k, v in (paths | SMALL | keys).items() for word in (f"--{k}", v)]
    GRPOTrainer(load_config(home / "grpo_config.yaml", words), name=example).train()
    lines = (folder / "completions.jsonl").read_text().splitlines()
    return list(read_metrics(folder / "metrics.jsonl")), [json.loads(line) for line in lines]


def test_conversations_with_a_calculator(tmp_path: Path) -> None:
    rows, samples = run("calculator", tmp_path / "run", {})
    assert all(row["logprob_gap/max"] < 1e-3 for row in rows)
    assert all(row["tools/called_fraction"] > 0 for row in rows)
    called = [sample for sample in samples if len(sample["messages"]) > 1]
    for sample in called:
        roles = [message["role"] for message in sample["messages"]]
        assert roles[:3] == ["assistant", "tool", "assistant"]
        assert sample["length"] < len(sample["token_ids"])
    assert any(sample["rewards"]["accuracy_reward"] == 1 for sample in called)


def test_partial_rollouts(tmp_path: Path) -> None:
    keys = {
        "rl_config.partial_rollout": "true",
        "rl_config.partial_rollout_chunk": "6",
        "rl_config.importance_sampling_correction": "token_truncate",
        **{
            f"{section}.parallel_config.{axis}": "1"
            for section in ("actor_config", "generate_config")
            for axis in ("data_parallel", "model_parallel")
        },
        "actor_config.parallel_config.pipeline_stage": "1",
    }
    rows, samples = run("tiny_arithmetic", tmp_path / "run", keys)
    assert all(row["logprob_gap/max"] < 1e-3 for row in rows)
    assert rows[0]["partial_rollout/unfinished_tokens"] > 0
    assert rows[1]["partial_rollout/stale_token_fraction"] > 0
    assert any(len(sample["weights_versions"]) > 1 for sample in samples)
