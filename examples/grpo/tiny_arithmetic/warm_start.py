"""Trains the example's model from nothing on worked sums, supervised, in one process.

    python warm_start.py           # about 8 minutes on 2 cores; writes model/config.json and model.safetensors

First mostly careful work, so that the careful path is right when it is taken; at the end careless answers take
their share, so that a sampled answer is right about half the time and GRPO has something to teach. Held-out
numbers are never seen. Supervised learning is the policy's own update with every advantage 1.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from make_data import Problem, careful, guessed, make_splits, sample_problem, unformatted  # noqa: E402

from mindgrpo.algorithm.loss_config import LossConfig  # noqa: E402
from mindgrpo.algorithm.packing import MicroShape, PackedRollout  # noqa: E402
from mindgrpo.algorithm.schedule import learning_rate  # noqa: E402
from mindgrpo.algorithm.types import STOPPED, Rollout, TrainBatch  # noqa: E402
from mindgrpo.backend.connect import connect  # noqa: E402
from mindgrpo.backend.targets import SHARED_MEMORY  # noqa: E402
from mindgrpo.data.tokenizer import Tokenizer, load_tokenizer  # noqa: E402
from mindgrpo.models.decoder import KEEP_ALL  # noqa: E402
from mindgrpo.models.decoder_config import decoder_config  # noqa: E402
from mindgrpo.models.parameters import parameter_specs  # noqa: E402
from mindgrpo.parallel.mesh import Grid  # noqa: E402
from mindgrpo.parallel.sharding import Layout, layers_of_stage  # noqa: E402
from mindgrpo.training.optimizer import AdamWSettings  # noqa: E402
from mindgrpo.training.policy import Policy, UpdateSettings  # noqa: E402
from mindgrpo.training.update import update  # noqa: E402
from mindgrpo.weights.pretrained import fill_random  # noqa: E402
from mindgrpo.weights.safetensors_writer import SafetensorsWriter  # noqa: E402

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 352,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "initializer_range": 0.02,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "torch_dtype": "float32",
}
ROWS, ROW_LENGTH = 32, 128
# (careful, unformatted, guessed): while learning to add, and at the end.
LEARNING, FINAL = (0.75, 0.25, 0.0), (0.36, 0.12, 0.52)
FINAL_SHARE_OF_STEPS = 0.2


def batch_of(
    tokenizer: Tokenizer,
    rng: random.Random,
    keep_out: set[tuple[int, ...]],
    shares: tuple[float, ...],
) -> TrainBatch:
    """As many samples as surely fit the rows."""
    prompts, completions, used = [], [], 0
    budget = int(ROWS * ROW_LENGTH * 0.85)
    while True:
        problem: Problem = sample_problem(rng, keep_out)
        style = rng.choices((careful, unformatted, guessed), shares)[0]
        text = tokenizer.render([{"role": "user", "content": problem.question}])
        prompt = np.array(tokenizer.encode(text), np.int32)
        completion = np.array([*tokenizer.encode(style(problem, rng)), tokenizer.eos_id], np.int32)
        used += prompt.size + completion.size
        if used > budget:
            break
        prompts.append(prompt)
        completions.append(completion)
    count = len(prompts)
    logps = [np.zeros(tokens.size, np.float32) for tokens in completions]
    reasons = [STOPPED] * count
    rollout = Rollout.single_turn(prompts, completions, reasons, logps, range(count))
    return TrainBatch(rollout, np.ones(count, np.float32))


def train(policy: Policy, tokenizer: Tokenizer, num_steps: int, peak: float, seed: int) -> None:
    rng = random.Random(seed)
    _, heldout = make_splits()
    keep_out = {problem.key for problem in heldout}
    started = time.time()
    for step in range(num_steps):
        shares = FINAL if step >= num_steps * (1 - FINAL_SHARE_OF_STEPS) else LEARNING
        batch = batch_of(tokenizer, rng, keep_out, shares)
        lr = learning_rate(step, "cosine", peak, peak / 100, 50, num_steps)
        packed = PackedRollout(batch.rollout)
        report = update(policy, batch, packed, range(len(batch)), lr)
        if step % 20 == 0 or step == num_steps - 1:
            nll = -float(np.concatenate(list(report.logps.values())).mean())
            print(
                f"step {step} nll {nll:.4f} norm {report.grad_norm:.2f} {time.time() - started:.0f} s",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains the example's warm start.")
    parser.add_argument("--steps", type=int, default=700)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output_dir", type=Path, default=HERE / "model")
    arguments = parser.parse_args()
    config = decoder_config(CONFIG, "warm_start.py")
    layout = Layout(Grid(1, 1), parameter_specs(config), tuple(layers_of_stage(4, 1)))
    settings = UpdateSettings(
        shape=MicroShape(ROWS, ROW_LENGTH),
        num_positions=ROW_LENGTH,
        temperature=1.0,
        recompute=KEEP_ALL,
        # Every token alike: weighing samples alike would teach the short careless answers most.
        loss_config=LossConfig(loss_type="bnpo", beta=0.0),
        max_grad_norm=1.0,
        adamw=AdamWSettings(0.9, 0.98, 1e-8, 0.01),
    )
    policy = Policy(config, layout, connect(SHARED_MEMORY, dict(os.environ)), settings)
    fill_random(policy.weights, arguments.seed, 0.04)
    train(policy, load_tokenizer(HERE / "model"), arguments.steps, arguments.lr, arguments.seed)
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    for old in arguments.output_dir.glob("*.safetensors"):
        old.unlink()
    with (
        SafetensorsWriter(arguments.output_dir, 1 << 30) as writer,
        policy.weights.on_host() as full,
    ):
        for spec in layout.specs:
            writer.add(spec.name, full.hf_views[spec.name])
    (arguments.output_dir / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")


if __name__ == "__main__":
    main()
