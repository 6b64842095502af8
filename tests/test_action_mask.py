"""Tokens that the policy did not write are context: no loss, no advantage, in no mean, whatever stands at them.

A tiny model in one process and hand-made conversations; what is expected is written out here in Python's own numbers.
Does not prove that an engine marks the right tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from algorithms import advantages_of, loss_of, replace
from test_update import CONFIG, LAYOUT, SETTINGS

from mindgrpo.algorithm.estimators import AlgorithmConfig
from mindgrpo.algorithm.packing import MicroShape, PackedRollout
from mindgrpo.algorithm.sample import Arrays, Rollout, TrainBatch
from mindgrpo.algorithm.train_batch import compute_advantages
from mindgrpo.backend.cpu.backend import CpuBackend
from mindgrpo.grpo.metrics import StepOutcome, logprob_gap, step_metrics
from mindgrpo.grpo.scoring import RolloutScorer, Scored
from mindgrpo.health.rank_health import RankHealth
from mindgrpo.models.pipeline import compute_log_probs
from mindgrpo.rewards.scores import Scores
from mindgrpo.rollout.engine import RolloutStats
from mindgrpo.training.policy import Policy
from mindgrpo.training.update import update
from mindgrpo.weights.pretrained import fill_random

# P: the policy wrote it; t: a tool or a template did. Two groups of three conversations.
TURNS = ("PPPtttPP", "PPtPPPPttP", "PPPPP", "ttPPP", "PPPPttt", "tttt")
MASKS = [np.array([turn == "P" for turn in turns]) for turns in TURNS]
REWARDS = np.array([1.0, 0.0, 0.5, 0.0, 1.0, 0.2])
GARBAGE = 37.0


def values(seed: int, mean: float, garbage: float | None = None) -> list[np.ndarray]:
    """float32 a token; `garbage` at those that the policy did not write."""
    rng = np.random.default_rng(seed)
    rows = [rng.normal(mean, 0.3, mask.size).astype(np.float32) for mask in MASKS]
    if garbage is None:
        return rows
    return [
        np.where(mask, row, garbage).astype(np.float32)
        for row, mask in zip(rows, MASKS, strict=True)
    ]


def rollout(garbage: float | None = None) -> Rollout:
    rng = np.random.default_rng(4)
    prompts = [rng.integers(1, 67, n).astype(np.int32) for n in (3, 5)]
    given = Rollout.single_turn(
        [prompts[i // 3] for i in range(len(MASKS))],
        [rng.integers(1, 67, mask.size).astype(np.int32) for mask in MASKS],
        ["stop"] * len(MASKS),
        values(1, -4.2, garbage),
        [i // 3 for i in range(len(MASKS))],
    )
    pairs = zip(given.samples, MASKS, strict=True)
    return replace(given, samples=tuple(replace(s, action_mask=mask) for s, mask in pairs))


def batch(garbage: float | None = None) -> TrainBatch:
    return TrainBatch(
        rollout(garbage),
        advantages=np.array([0.7, -1.2, 0.4, -0.3, 0.9, 0.5], np.float32),
        old_logps=values(2, -4.2, garbage),
        reference_logps=values(3, -4.2, garbage),
        rollout_is_weights=[np.abs(row) / 4 for row in values(5, -4.2, garbage)],
    )


def written(loss: AlgorithmConfig, given: TrainBatch, logps: Arrays) -> float:
    """The loss token by token, over the tokens that the policy wrote."""
    assert given.old_logps and given.reference_logps and given.rollout_is_weights
    counts = [turns.count("P") for turns in TURNS]
    low, high = loss.clip_bounds
    total = 0.0
    for i, turns in enumerate(TURNS):
        actions = [t for t, turn in enumerate(turns) if turn == "P"]
        logs = [float(logps[i][t]) - float(given.old_logps[i][t]) for t in actions]
        for log, t in zip(logs, actions, strict=True):
            if loss.by_sequence:
                log = sum(logs) / len(logs)
            ratio, advantage = math.exp(log), float(given.advantages[i])
            clipped = min(max(ratio, 1 - low), 1 + high)
            gain = min(ratio * advantage, clipped * advantage)
            d = float(given.reference_logps[i][t]) - float(logps[i][t])
            term = -float(given.rollout_is_weights[i][t]) * gain
            term += loss.beta * (math.exp(d) - d - 1)
            per_token = {
                "grpo": 1 / (len(TURNS) * counts[i]),
                "dapo": 1 / sum(counts),
                "dr_grpo": 1 / (len(TURNS) * LONGEST),
            }[loss.loss_type]
            total += per_token * term
    return total


LONGEST = 16
# Ends that no ratio reaches: a difference quotient has no corners to cross.
WIDE = loss_of(
    epsilon_low=0.99, epsilon_high=20.0, beta=0.05, importance_sampling_correction="token_truncate"
)
LOSSES = {
    "grpo": WIDE,
    "dapo": replace(WIDE, loss_type="dapo"),
    "dr_grpo": replace(WIDE, loss_type="dr_grpo"),
    "gspo": replace(WIDE, importance_sampling_level="sequence"),
}
Made = Callable[[AlgorithmConfig, int | None], Policy]


@pytest.fixture(scope="module")
def policy_of() -> Made:
    """A policy with the same random weights for each loss and number of samples a row."""
    backend = CpuBackend({})
    made: dict[tuple[AlgorithmConfig, int | None], Policy] = {}

    def of(loss: AlgorithmConfig, per_row: int | None) -> Policy:
        key = (loss, per_row)
        if key not in made:
            shape = MicroShape(2, 24, per_row)
            made[key] = Policy(
                CONFIG,
                LAYOUT,
                backend,
                replace(SETTINGS, shape=shape, loss_config=loss, max_tokens=LONGEST),
            )
        fill_random(made[key].weights, seed=2, scale=0.1)
        made[key].clear_gradients()
        return made[key]

    return of


def log_probs(policy: Policy) -> list[np.ndarray]:
    packed = PackedRollout(rollout())
    return compute_log_probs(policy.pipeline, LAYOUT.mesh, policy.backend, packed)


@pytest.mark.parametrize(("name", "per_row"), [*((name, None) for name in LOSSES), ("gspo", 1)])
def test_loss_and_gradient_are_those_of_the_tokens_that_the_policy_wrote(
    policy_of: Made, monkeypatch: pytest.MonkeyPatch, name: str, per_row: int | None
) -> None:
    policy, loss = policy_of(LOSSES[name], per_row), LOSSES[name]
    monkeypatch.setattr(policy, "apply", lambda norm, lr: None)  # the gradient is to be looked at
    given = batch(GARBAGE)
    report = update(policy, given, PackedRollout(given.rollout), range(len(given)), 1e-2)
    before = log_probs(policy)
    assert report.loss == pytest.approx(written(loss, given, before), rel=1e-5, abs=1e-6)

    gradient = [part.copy() for part in policy.gradients.arrays.hf_views.values()]
    size = math.sqrt(sum(float((g.astype(np.float64) ** 2).sum()) for g in gradient))
    assert report.grad_norm == pytest.approx(size, rel=1e-5) and size > 0.05
    rng = np.random.default_rng(0)
    for direction in (gradient, [rng.normal(size=g.shape) + 2 * g / size for g in gradient]):
        length = math.sqrt(sum(float((d.astype(np.float64) ** 2).sum()) for d in direction))
        slope = sum(float((g * d).sum()) for g, d in zip(gradient, direction, strict=True))
        ends = []
        for step in (0.002, -0.004):
            for part, d in zip(policy.weights.arrays.hf_views.values(), direction, strict=True):
                part += (step / length) * d
            ends.append(written(loss, given, log_probs(policy)))
        assert (ends[0] - ends[1]) / 0.004 == pytest.approx(slope / length, rel=5e-3)
        fill_random(policy.weights, seed=2, scale=0.1)


@pytest.mark.parametrize("name", LOSSES)
def test_what_stands_at_tokens_of_others_changes_nothing(policy_of: Made, name: str) -> None:
    policy, found = policy_of(LOSSES[name], None), []
    for garbage in (None, GARBAGE):
        fill_random(policy.weights, seed=2, scale=0.1)
        given = batch(garbage)
        tokens = [np.where(m, a, garbage or 0.0) for m, a in zip(MASKS, values(6, 0), strict=True)]
        given = replace(given, token_advantages=tokens)
        found.append(update(policy, given, PackedRollout(given.rollout), range(len(given)), 0.0))
    for figure in ("loss", "kl", "entropy", "grad_norm", "clipped_low", "clipped_high"):
        assert getattr(found[0], figure) == getattr(found[1], figure), figure


def test_a_conversation_that_the_policy_had_no_part_in_counts_as_an_empty_one(
    policy_of: Made,
) -> None:
    """It is in N, as TRL and verl have it, and teaches nothing."""
    policy, given = policy_of(LOSSES["grpo"], None), batch()
    packed = PackedRollout(given.rollout)
    report = update(policy, given, packed, [5], 0.0)
    assert (report.loss, report.grad_norm, report.entropy) == (0.0, 0.0, 0.0)
    assert report.logps[5].size == 4


def actions_of(rows: Arrays) -> list[list[float]]:
    return [row[mask].astype(float).tolist() for row, mask in zip(rows, MASKS, strict=True)]


@pytest.mark.parametrize("mode", ["token_truncate", "sequence_mask"])
def test_importance_weights_are_those_of_the_tokens_that_the_policy_wrote(mode: str) -> None:
    config = advantages_of(3, importance_sampling_correction=mode, importance_sampling_cap=1.3)
    old = values(2, -4.2, GARBAGE)
    made, correction = compute_advantages(rollout(), REWARDS, config, old)
    assert correction is not None and made.rollout_is_weights is not None
    logs = [
        [a - b for a, b in zip(own, drawn, strict=True)]
        for own, drawn in zip(actions_of(old), actions_of(rollout().generator_logps), strict=True)
    ]
    if mode == "sequence_mask":
        logs = [[sum(row)] * len(row) for row in logs]
    ratios = [[math.exp(log) for log in row] for row in logs]
    above = 1.3 if mode == "token_truncate" else 0.0
    for found, row in zip(actions_of(made.rollout_is_weights), ratios, strict=True):
        assert found == pytest.approx([r if r <= 1.3 else above for r in row], rel=1e-5)
    every = [r for row in ratios for r in row]
    assert correction.mean == pytest.approx(sum(every) / len(every), rel=1e-6)
    assert correction.largest == pytest.approx(max(every), rel=1e-6)
    assert correction.capped == pytest.approx(sum(r > 1.3 for r in every) / len(every))


def test_kl_in_the_reward_is_that_of_the_tokens_that_the_policy_wrote() -> None:
    config = advantages_of(3, "rloo", kl_in_reward=True, beta=0.1, kl_estimator="k1")
    old, reference = values(2, -4.2, GARBAGE), values(3, -4.2)
    made, _ = compute_advantages(rollout(), REWARDS, config, old, reference)
    pairs = zip(REWARDS, actions_of(old), actions_of(reference), strict=True)
    totals = [float(r) - 0.1 * (sum(a) - sum(b)) for r, a, b in pairs]
    for i, advantage in enumerate(made.advantages):
        others = [totals[j] for j in range(i // 3 * 3, i // 3 * 3 + 3) if j != i]
        assert advantage == pytest.approx(totals[i] - sum(others) / 2, rel=1e-5)


def test_token_advantages_are_normalised_over_the_tokens_that_the_policy_wrote() -> None:
    config = advantages_of(3, "reinforce_plus_plus", kl_in_reward=True, beta=0.1, kl_estimator="k1")
    old, reference = values(2, -4.2, GARBAGE), values(3, -4.2)
    made, _ = compute_advantages(rollout(), REWARDS, config, old, reference)
    returns = [
        [float(reward) - 0.1 * (sum(own[t:]) - sum(other[t:])) for t in range(len(own))]
        for reward, own, other in zip(REWARDS, actions_of(old), actions_of(reference), strict=True)
    ]
    tokens = [value for row in returns for value in row]
    mean = sum(tokens) / len(tokens)
    deviation = math.sqrt(sum((value - mean) ** 2 for value in tokens) / len(tokens))
    assert made.token_advantages is not None
    for i, row in enumerate(returns):
        expected = [(value - mean) / deviation for value in row]
        assert actions_of(made.token_advantages)[i] == pytest.approx(expected, rel=1e-4)
        assert not made.token_advantages[i][~MASKS[i]].any()
        average = sum(expected) / len(expected) if expected else 0.0
        assert made.advantages[i] == pytest.approx(average, rel=1e-4, abs=1e-6)


def test_lengths_and_the_gap_are_those_of_the_tokens_that_the_policy_wrote() -> None:
    given = batch(GARBAGE)
    close = [row + np.float32(1e-3) for row in values(1, -4.2)]
    given = replace(given, old_logps=close)
    gap = logprob_gap(given, [], None)
    assert gap is not None and gap.differing == sum(turns.count("P") for turns in TURNS)
    assert (gap.mean, gap.largest) == pytest.approx((1e-3, 1e-3), rel=0.01)
    scores = Scores({"f": REWARDS}, REWARDS, REWARDS < 0)
    stats = RolloutStats(1, 1, 1, 1)
    outcome = StepOutcome(
        batch=given,
        scored=Scored(scores, []),
        reports=[],
        lr=0.0,
        seconds={},
        stats=stats,
        skipped=[],
    )
    row = step_metrics(outcome, 3, prompts_used=0)
    counts = [turns.count("P") for turns in TURNS]
    assert row["completion_length/mean"] == pytest.approx(sum(counts) / len(counts))
    assert row["completion_length/max"] == max(counts)
    assert row["tokens"] == 3 * 3 + 3 * 5 + sum(map(len, TURNS))


def test_rewards_by_length_are_told_the_tokens_that_the_policy_wrote() -> None:
    columns: dict[str, Any] = {}

    def score(texts: list[str], answers: list[str], told: dict[str, Any], *_: Any) -> Scores:
        columns.update(told)
        return Scores({"f": REWARDS}, REWARDS, REWARDS < 0)

    world = SimpleNamespace(gather_objects=lambda value: [value])
    alone = SimpleNamespace(rank=0, world=world, health=RankHealth(0, 1, None))
    prompt = SimpleNamespace(text="", answer="", question="", columns={}, images={})
    words = SimpleNamespace(decode=lambda ids: " ".join(map(str, ids)))
    rewards = SimpleNamespace(
        begin=lambda *samples: partial(score, *samples), names=["f"], num_done=lambda: 0
    )
    scorer = RolloutScorer(rewards, words, alone)  # type: ignore[arg-type]
    prompts: Any = [prompt] * len(TURNS)
    scored = scorer.score(rollout(), prompts)
    assert columns["completion_lengths"] == [turns.count("P") for turns in TURNS]
    # What `score` gives them from a run's file.
    lengths = [row["length"] for row in scored.rows(rollout(), prompts)]
    assert lengths == columns["completion_lengths"]
    assert [len(ids) for ids in columns["completion_ids"]] == [len(turns) for turns in TURNS]
