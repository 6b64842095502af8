"""Whole runs of a very small model in this process, on one rank, for tests of what a run leaves and goes on from.

Refuses to be told apart by speed: what rows hold of times and memory is left out where they are compared.
"""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mindgrpo.config import load_config
from mindgrpo.models.decoder_config import decoder_config
from mindgrpo.models.parameters import parameter_specs
from mindgrpo.monitor.metrics import read_metrics
from mindgrpo.weights.expert_files import file_tensors
from mindgrpo.weights.model_files import SafetensorsDirectory, SafetensorsWriter

if TYPE_CHECKING:
    from mindgrpo.trainer import GRPOTrainer

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "grpo" / "tiny_arithmetic"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
MODEL: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 384,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}
NUM_ROWS, STEPS, EVAL_SAMPLES = 7, 5, 3
# Everything that carries something from one step to the next: epochs that end inside a step, groups that are
# replaced, several updates a step, a rate that changes, a reference that follows, evaluations.
CONFIG = f"""
rl_config:
  max_steps: {STEPS}
  epochs: 9
  prompts_per_step: 3
  num_generations: 4
  updates_per_rollout: 2
  num_iterations: 2
  batch_size: 2
  seq_length: 64
  beta: 0.05
  seed: 3
  dynamic_sampling: true
  eval_steps: 2
  eval_samples: {EVAL_SAMPLES}
actor_config:
  lr_schedule: {{lr_decay_style: cosine, lr: 0.02, min_lr: 0.001, warmup_step: 3}}
ref_config: {{sync_ref_model: true, ref_model_sync_steps: 1, ref_model_mixup_alpha: 0.5}}
generate_config:
  max_prompt_length: 40
  sampling_config: {{max_tokens: 6, temperature: 1.0}}
monitor_config: {{per_token: 1, report: false}}
"""
# For runs of which it does not matter what they compute: one graph is compiled, that of a micro-batch's update, not
# those of the reference's and the policy's log-probs as well.
NO_REFERENCE = ("--rl_config.beta=0", "--ref_config.sync_ref_model=false")
ONE_GRAPH = (
    *NO_REFERENCE,
    "--rl_config.num_iterations=1",
    "--rl_config.updates_per_rollout=1",
)
TOKEN_ARRAYS = ("logprob", "gap", "log_ratio", "entropy", "kl")
OWN_OF_A_SESSION = ("time/", "memory/", "reshard/", "checkpoint/", "compiles", "late_compiles")


def make_inputs(folder: Path, layers: int = 1) -> None:
    """A model of so many layers, its tokenizer and a few rows below `folder`; two take a third longer to compile."""
    model = folder / "model"
    model.mkdir(parents=True)
    raw = MODEL | {"num_hidden_layers": layers}
    (model / "config.json").write_text(json.dumps(raw))
    draw = np.random.default_rng(0)
    values = {}
    for spec in parameter_specs(decoder_config(raw, "here")):
        norm = len(spec.shape) == 1 and spec.name.endswith("norm.weight")
        noise = 0.1 * draw.standard_normal(spec.shape, dtype=np.float32)
        values[spec.name] = np.ones(spec.shape, np.float32) if norm else noise
    tensors = file_tensors({name: own.shape for name, own in values.items()}, "per_expert")
    with SafetensorsWriter(model, {tensor.name: tensor.shape for tensor in tensors}) as writer:
        for tensor in tensors:
            rows = tensor.rows.made_of(lambda name, box: values[name][box.slices])
            writer.add(tensor.name, rows)
    for name in TOKENIZER_FILES:
        shutil.copy(EXAMPLE / "model" / name, model / name)
    lines = (EXAMPLE / "train.jsonl").read_text().splitlines()[:NUM_ROWS]
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "small.yaml").write_text(CONFIG)


def input_keys(folder: Path) -> dict[str, str]:
    """Keys that give another configuration the inputs below `folder`."""
    rows = str(folder / "train.jsonl")
    return {
        "actor_config.load": str(folder / "model"),
        "rl_config.dataset_file": rows,
        "rl_config.eval_dataset_file": rows,
    }


def reward_words(folder: Path) -> list[str]:
    """Arguments that give a launched run a reward in which a model that has learned nothing has differences."""
    path = folder / "reward.py"
    path.write_text(
        "def spread(completions):\n"
        "    return [float(sum(map(ord, text)) % 7) for text in completions]\n"
    )
    return ["--verifier_function", f"{path}:spread", "--verifier_weight", "1.0"]


def spread(completions: Sequence[str], answers: Sequence[str]) -> list[float]:
    """Equal for about half of the groups at first, so that some are replaced."""
    return [float(sum(map(ord, text)) % 7 < 2) for text in completions]


Reward = Callable[..., list[float]]


def run(folder: Path, output: Path | None, *words: str, reward: Reward = spread) -> Path:
    """A run over the inputs below `folder`; its folder."""
    return trainer(folder, output, *words, reward=reward).train()


def trainer(folder: Path, output: Path | None, *words: str, reward: Reward = spread) -> GRPOTrainer:
    """What `run` trains with."""
    from mindgrpo.trainer import GRPOTrainer

    paths = ["--actor_checkpoint_path", str(folder / "model")]
    paths += ["--dataset_file", str(folder / "train.jsonl")]
    paths += ["--rl_config.eval_dataset_file", str(folder / "train.jsonl")]
    if output is not None:
        paths += ["--output_dir", str(output)]
    loaded = load_config(folder / "small.yaml", [*paths, *words])
    return GRPOTrainer(loaded, [reward], name="small")


def is_own(key: str) -> bool:
    """Whether a figure depends on the machine."""
    return key.startswith(OWN_OF_A_SESSION) or key.endswith("/seconds")


def rows(run: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what depends on the machine."""
    return [
        {key: value for key, value in row.items() if not is_own(key)}
        for row in read_metrics(run / "metrics.jsonl")
    ]


def model_bits(run: Path) -> dict[str, bytes]:
    files = SafetensorsDirectory(run / "hf")
    return {name: files.read(name).tobytes() for name in files.names}


def token_rows(run: Path) -> list[dict[str, Any]]:
    """per_token.jsonl with its arrays as float16."""
    found = [json.loads(line) for line in (run / "per_token.jsonl").open()]
    return [decoded(row) for row in found]


def decoded(row: dict[str, Any]) -> dict[str, Any]:
    arrays = {
        name: np.frombuffer(base64.b64decode(row[name]), "<f2")
        for name in TOKEN_ARRAYS
        if name in row
    }
    assert all(len(values) == row["length"] for values in arrays.values())
    return row | arrays


def completions(run: Path) -> list[str]:
    return (run / "completions.jsonl").read_text().splitlines()
