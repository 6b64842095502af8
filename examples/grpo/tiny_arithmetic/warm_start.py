"""Trains an initial model from nothing on worked sums, supervised, in one process: the shape is a config.json's.

    python warm_start.py                                          # about 8 minutes on 2 cores; writes model/
    python warm_start.py --config ../tiny_moe/model/config.json   # writes there

First mostly careful work, so that the careful path is right when it is taken; at the end careless answers take
their share, so that a sampled answer is right about half the time and GRPO has something to teach. Held-out
numbers are never seen. Supervised learning is the policy's own update with every advantage 1.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from make_data import Problem, careful, guessed, make_splits, sample_problem, unformatted  # noqa: E402
from supervised import TOKENS_A_STEP, new_policy, train, write_model  # noqa: E402

from mindgrpo.algorithm.sample import STOPPED, Rollout  # noqa: E402
from mindgrpo.data.tokenizer import Tokenizer, load_tokenizer  # noqa: E402

# (careful, unformatted, guessed): while learning to add, and at the end.
LEARNING, FINAL = (0.75, 0.25, 0.0), (0.36, 0.12, 0.52)
FINAL_SHARE_OF_STEPS = 0.2


def rollout_of(
    tokenizer: Tokenizer,
    rng: random.Random,
    keep_out: set[tuple[int, ...]],
    shares: tuple[float, ...],
) -> Rollout:
    """As many samples as surely fit a step."""
    prompts, completions, used = [], [], 0
    while True:
        problem: Problem = sample_problem(rng, keep_out)
        style = rng.choices((careful, unformatted, guessed), shares)[0]
        text = tokenizer.render([{"role": "user", "content": problem.question}])
        prompt = np.array(tokenizer.encode(text), np.int32)
        completion = np.array([*tokenizer.encode(style(problem, rng)), tokenizer.eos_id], np.int32)
        used += prompt.size + completion.size
        if used > TOKENS_A_STEP:
            break
        prompts.append(prompt)
        completions.append(completion)
    count = len(prompts)
    logps = [np.zeros(tokens.size, np.float32) for tokens in completions]
    return Rollout.single_turn(prompts, completions, [STOPPED] * count, logps, range(count))


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains the example's warm start.")
    parser.add_argument("--steps", type=int, default=700)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--config", type=Path, default=HERE / "model" / "config.json")
    parser.add_argument("--output_dir", type=Path, help="default: the folder of --config")
    arguments = parser.parse_args()
    model = json.loads(arguments.config.read_text())
    tokenizer, rng = load_tokenizer(HERE / "model"), random.Random(arguments.seed)
    _, heldout = make_splits()
    keep_out = {problem.key for problem in heldout}

    def rollout(step: int) -> Rollout:
        is_late = step >= arguments.steps * (1 - FINAL_SHARE_OF_STEPS)
        return rollout_of(tokenizer, rng, keep_out, FINAL if is_late else LEARNING)

    policy = new_policy(model, arguments.seed)
    train(policy, rollout, arguments.steps, arguments.lr)
    write_model(policy, model, arguments.output_dir or arguments.config.parent)


if __name__ == "__main__":
    main()
