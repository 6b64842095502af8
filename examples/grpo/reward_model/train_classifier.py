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
import os
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
TINY = HERE.parent / "tiny_arithmetic"
sys.path[:0] = [str(TINY)]

from make_data import Problem, careful, guessed, make_splits, sample_problem, unformatted  # noqa: E402

from mindgrpo.algorithm.packing import PackedRollout  # noqa: E402
from mindgrpo.algorithm.sample import LENGTH, Rollout, TrainBatch  # noqa: E402
from mindgrpo.backend.connect import connect  # noqa: E402
from mindgrpo.config import config_with  # noqa: E402
from mindgrpo.data.tokenizer import Tokenizer, load_tokenizer  # noqa: E402
from mindgrpo.grpo.build import make_policy, runtime_settings  # noqa: E402
from mindgrpo.grpo.inputs import sampling_params  # noqa: E402
from mindgrpo.memory.residency import Residency  # noqa: E402
from mindgrpo.models.decoder_config import read_config  # noqa: E402
from mindgrpo.models.pipeline import compute_log_probs  # noqa: E402
from mindgrpo.plan.run_plan import plan_run  # noqa: E402
from mindgrpo.run.model_export import export_policy  # noqa: E402
from mindgrpo.training.critic_update import update_critic  # noqa: E402
from mindgrpo.training.policy import Policy  # noqa: E402
from mindgrpo.weight_sync.transfer import load_once  # noqa: E402

ANSWERS_A_STEP, LR = 64, 1e-3


@dataclass(frozen=True)
class Labelled:
    question: str
    answer: str
    label: float


def wrong(problem: Problem, rng: random.Random) -> str:
    """Returns careful work whose last number, in the work and as the answer, is another one."""
    right = str(problem.result)
    other = str(rng.choice([n for n in range(30) if str(n) != right]))
    text = careful(problem, rng)
    start = text.rindex("=") + 1
    return text[:start] + text[start:].replace(right, other)


def answers(problem: Problem, rng: random.Random) -> list[Labelled]:
    """Returns answers to a problem, the best one first."""
    made = [
        (careful(problem, rng), 1.0),
        (unformatted(problem, rng), 0.5),
        (guessed(problem, rng), 0.0),
        (wrong(problem, rng), 0.0),
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
    _, heldout = make_splits()
    keep_out, rng = {problem.key for problem in heldout}, random.Random(given.seed)
    print(f"pairs in the right order before: {pair_accuracy(model, heldout, tokenizer):.3f}")
    for step in range(given.steps):
        problems = [sample_problem(rng, keep_out) for _ in range(ANSWERS_A_STEP // 4)]
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
