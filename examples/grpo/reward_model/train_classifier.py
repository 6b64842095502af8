"""Trains a reward model on labelled answers that it makes itself: the bundled model with a scalar head.

    python train_classifier.py                 # two minutes on 2 cores; writes output/judge
    python train_classifier.py --output DIR --steps 600

An answer is labelled 1 if it is right and in the right form, 0.5 if it is right without the form, and 0 if it is a
guess or ends with a wrong number. The model learns labels by the critic's loss: a conversation is the prompt of a token
that nobody reads, and the value of its last token is its score. Held-out problems are never seen; the share of their
pairs is printed of which the better answer has the higher score.
"""

from __future__ import annotations

import argparse
import json
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mindgrpo.algorithm.packing import PackedRollout
from mindgrpo.algorithm.sample import LENGTH, Rollout, TrainBatch
from mindgrpo.backend.connect import connect
from mindgrpo.config import config_with
from mindgrpo.data.tokenizer import Tokenizer, load_tokenizer
from mindgrpo.grpo.build import make_policy, runtime_settings
from mindgrpo.grpo.inputs import sampling_params
from mindgrpo.memory.residency import Residency
from mindgrpo.models.decoder_config import read_config
from mindgrpo.models.pipeline import compute_log_probs
from mindgrpo.plan.run_plan import plan_run
from mindgrpo.run.model_export import export_policy
from mindgrpo.training.critic_update import update_critic
from mindgrpo.training.policy import Policy
from mindgrpo.weight_sync.transfer import load_once

TINY = Path(__file__).resolve().parent.parent / "tiny_arithmetic"
ANSWERS_A_STEP, LR = 64, 1e-3
LARGEST = 29


@dataclass(frozen=True)
class Problem:
    """A row of the example's data: its question, such as 6+8=14 and 14-12=2 the work, and the result."""

    question: str
    steps: tuple[str, ...]
    result: int

    @property
    def work(self) -> str:
        return f"<think>{', '.join(self.steps)}</think>"


@dataclass(frozen=True)
class Labelled:
    question: str
    answer: str
    label: float


def read_problems(name: str) -> list[Problem]:
    rows = map(json.loads, (TINY / name).read_text(encoding="utf-8").splitlines())
    lines = [(row["question"], row["answer"].splitlines()) for row in rows]
    return [Problem(text, tuple(own[:-1]), int(own[-1].split()[-1])) for text, own in lines]


def answers(problem: Problem, rng: random.Random) -> list[Labelled]:
    """Returns answers to a problem, the best one first."""
    result = problem.result
    misses = [n for n in (result + off for off in (-10, -2, -1, 1, 2, 10)) if 0 <= n <= LARGEST]
    other = rng.choice([n for n in range(LARGEST + 1) if n != result])
    mistaken = problem.work.replace(f"={result}</think>", f"={other}</think>")
    made = [
        (f"{problem.work}<answer>{result}</answer>", 1.0),
        (f"{problem.work}{result}", 0.5),
        (f"I guess {rng.choice(misses)}", 0.0),
        (f"{mistaken}<answer>{other}</answer>", 0.0),
    ]
    return [Labelled(problem.question, text, label) for text, label in made]


def batch_of(rows: Sequence[Labelled], tokenizer: Tokenizer) -> TrainBatch:
    texts = [
        tokenizer.render(
            [
                {"role": "user", "content": row.question},
                {"role": "assistant", "content": row.answer},
            ],
            add_generation_prompt=False,
        )
        for row in rows
    ]
    count, unread = len(rows), np.zeros(1, np.int32)
    rollout = Rollout.single_turn(
        tuple(np.array(tokenizer.encode(text), np.int32) for text in texts),
        (unread,) * count,
        (LENGTH,) * count,
        (np.zeros(1, np.float32),) * count,
        range(count),
    )
    labels = [np.array([row.label], np.float32) for row in rows]
    return TrainBatch(rollout, np.zeros(count, np.float32), values=labels, returns=labels)


def scores_of(model: Policy, rows: Sequence[Labelled], tokenizer: Tokenizer) -> np.ndarray:
    packed = PackedRollout(batch_of(rows, tokenizer).rollout)
    mesh = model.weights.layout.mesh
    return np.concatenate(compute_log_probs(model.pipeline, mesh, model.backend, packed))


def pair_accuracy(model: Policy, problems: Sequence[Problem], tokenizer: Tokenizer) -> float:
    """Returns the share of pairs of answers to a problem in which the better one has the higher score."""
    rng = random.Random(1)
    groups = [answers(problem, rng) for problem in problems]
    scores = iter(scores_of(model, [row for group in groups for row in group], tokenizer).tolist())
    known = [[(row.label, next(scores)) for row in group] for group in groups]
    pairs = [(a, b) for group in known for a in group for b in group if a[0] > b[0]]
    return sum(better[1] > worse[1] for better, worse in pairs) / len(pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains the example's reward model.")
    parser.add_argument("--output", type=Path, default=Path("output/judge"))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    directory = str(TINY / "model")
    values = {
        "actor_config.load": directory,
        "rl_config.advantage_estimator": "gae",
        "rl_config.cliprange_value": 0,
        "rl_config.seq_length": 512,
        "rl_config.prompts_per_step": ANSWERS_A_STEP,
        "generate_config.max_prompt_length": 80,
        "generate_config.sampling_config.max_tokens": 40,
        "critic_config.optimizer.max_grad_norm": 1.0,
    }
    config = config_with(None, values).config
    backend = connect(config.context.target, dict(os.environ), runtime_settings(config))
    plan = plan_run(config, read_config(directory), backend.world_size)
    tokenizer = load_tokenizer(directory)
    assert plan.critic is not None
    model = make_policy(plan.critic, backend, sampling_params(config, tokenizer))
    residency = Residency()
    residency.add(model.pools)
    residency.activate("update_critic")
    load_once(model.masters, directory, backend, may_lack_score=True)
    model.masters_changed()
    training, heldout = read_problems("train.jsonl"), read_problems("heldout.jsonl")
    rng = random.Random(given.seed)
    print(f"pairs in the right order before: {pair_accuracy(model, heldout, tokenizer):.3f}")
    for step in range(given.steps):
        problems = rng.sample(training, ANSWERS_A_STEP // 4)
        batch = batch_of([row for problem in problems for row in answers(problem, rng)], tokenizer)
        lr = LR * min(1.0, (step + 1) / 20) * (1.0 - step / given.steps)
        packed = PackedRollout(batch.rollout)
        report = update_critic(model, batch, packed, range(len(batch)), lr)
        if (step + 1) % 100 == 0:
            print(f"step {step + 1}: loss {report.loss:.4f}", flush=True)
    print(f"pairs in the right order after: {pair_accuracy(model, heldout, tokenizer):.3f}")
    export_policy(
        model.weights, backend, directory, given.output, residency, None, "bfloat16", True
    )
    print(f"written: {given.output}")
    backend.close()


if __name__ == "__main__":
    main()
