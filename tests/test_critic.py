"""The critic: advantages against loops and closed forms, its loss against finite differences, and whole runs.

Several ranks and layouts are in test_distributed.py. Does not prove that a critic's advantages are better than others.
"""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import small_runs
from mindspore import Tensor, nn, value_and_grad
from tables import each_row

from mindgrpo.algorithm.estimators import AlgorithmConfig
from mindgrpo.algorithm.gae import (
    explained_variance,
    generalised_advantages,
    rewards_by_token,
    value_loss,
    whitened,
)
from mindgrpo.algorithm.sample import LENGTH, Rollout
from mindgrpo.algorithm.train_batch import compute_advantages
from mindgrpo.config import config_with
from mindgrpo.errors import UserError
from mindgrpo.models.decoder_config import read_config
from mindgrpo.monitor.metrics import read_metrics
from mindgrpo.training.value_loss import ValueLoss
from mindgrpo.weights.pretrained import open_weights

GAE = "--rl_config.advantage_estimator=gae"
CRITIC = (GAE, "--rl_config.dynamic_sampling=false", "--critic_config.lr_schedule.lr=0.01")


@pytest.fixture(scope="module")
def rng() -> np.random.Generator:
    return np.random.default_rng(3)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.5), (0.99, 1.0), (1.0, 0.0)])
def test_advantages_are_the_sum_of_discounted_differences(
    gamma: float, lam: float, rng: np.random.Generator
) -> None:
    rewards, values, last = rng.standard_normal(9), rng.standard_normal(9), 0.7
    following = [*values[1:], last]
    deltas = [r + gamma * v - own for r, v, own in zip(rewards, following, values, strict=True)]
    expected = [
        sum((gamma * lam) ** k * delta for k, delta in enumerate(deltas[t:])) for t in range(9)
    ]
    found = generalised_advantages(rewards, values, gamma, lam, last)
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_lambda_one_is_returns_minus_values_and_lambda_zero_one_difference(
    rng: np.random.Generator,
) -> None:
    rewards, values = rng.standard_normal(6), rng.standard_normal(6)
    returns = np.cumsum(rewards[::-1])[::-1]
    np.testing.assert_allclose(generalised_advantages(rewards, values, 1.0, 1.0), returns - values)
    following = np.append(values[1:], 0.0)
    one_step = rewards + 0.9 * following - values
    np.testing.assert_allclose(generalised_advantages(rewards, values, 0.9, 0.0), one_step)


def test_rewards_are_those_of_last_tokens_and_turns_and_the_kl_of_each() -> None:
    mask = np.array([True, True, False, False, True, True, True])
    penalties = np.arange(7) / 10
    own = rewards_by_token(mask, penalties, 2.0, None)
    np.testing.assert_allclose(own, [0.0, -0.1, -0.4, -0.5, 2.0 - 0.6])
    own = rewards_by_token(mask, penalties, 9.0, np.array([1.0, 3.0]))
    np.testing.assert_allclose(own, [0.0, 1.0 - 0.1, -0.4, -0.5, 3.0 - 0.6])
    with pytest.raises(ValueError, match="2 turns have 1 rewards"):
        rewards_by_token(mask, penalties, 9.0, np.array([1.0]))
    assert rewards_by_token(np.zeros(3, bool), penalties[:3], 1.0, None).size == 0


def test_whitening_counts_the_tokens_of_samples_that_count() -> None:
    sequences = [np.array([1.0, 2.0]), np.array([40.0]), np.array([3.0])]
    found = whitened(sequences, np.array([True, False, True]), 0.0)
    tokens = np.array([1.0, 2.0, 3.0])
    np.testing.assert_allclose(
        np.concatenate([found[0], found[2]]), (tokens - 2) / tokens.std(ddof=1)
    )
    np.testing.assert_allclose(found[1], (40 - 2) / tokens.std(ddof=1))


def rollout_of(masks: list[list[bool]]) -> Rollout:
    tokens = [np.zeros(len(mask), np.int32) for mask in masks]
    none = [np.zeros(len(mask), np.float32) for mask in masks]
    count = len(masks)
    rollout = Rollout.single_turn(
        [np.ones(2, np.int32)] * count, tokens, [LENGTH] * count, none, list(range(count))
    )
    samples = [
        replace(sample, action_mask=np.array(mask))
        for sample, mask in zip(rollout.samples, masks, strict=True)
    ]
    return replace(rollout, samples=tuple(samples))


def verls(
    rewards: np.ndarray, values: np.ndarray, mask: np.ndarray, gamma: float, lam: float
) -> tuple[np.ndarray, np.ndarray]:
    """As verl's compute_gae_advantage_return goes over padded rows, where masked tokens hand on what follows them."""
    following, carried, advantages = 0.0, 0.0, np.zeros(len(values))
    for t in reversed(range(len(values))):
        delta = rewards[t] + gamma * following - values[t]
        ahead = delta + gamma * lam * carried
        following = values[t] * mask[t] + (1 - mask[t]) * following
        carried = ahead * mask[t] + (1 - mask[t]) * carried
        advantages[t] = carried
    return advantages, advantages + values


def test_a_batch_has_verls_advantages_and_returns_with_context_between_turns(
    rng: np.random.Generator,
) -> None:
    masks = [[True] * 5, [True, True, False, False, True, True], [True]]
    rollout = rollout_of(masks)
    rewards = np.array([1.0, -0.5, 0.25])
    values = [rng.standard_normal(len(mask)).astype(np.float32) for mask in masks]
    config = AlgorithmConfig(
        advantage_estimator="gae", num_generations=1, gamma=0.97, lam=0.8, lam_critic=1.0
    )
    batch, _ = compute_advantages(rollout, rewards, config, values=values)
    raw, returns = [], []
    for own, mask, reward in zip(values, masks, rewards, strict=True):
        given = np.zeros(len(mask))
        given[-1] = reward
        as_float = np.array(mask, float)
        raw.append(verls(given, own.astype(np.float64), as_float, 0.97, 0.8)[0])
        returns.append(verls(given, own.astype(np.float64), as_float, 0.97, 1.0)[1])
    tokens = np.concatenate([own[mask] for own, mask in zip(raw, masks, strict=True)])
    assert batch.token_advantages is not None and batch.returns is not None
    for i, mask in enumerate(masks):
        chosen = np.array(mask)
        expected = (raw[i] - tokens.mean()) / tokens.std(ddof=1)
        np.testing.assert_allclose(batch.token_advantages[i][chosen], expected[chosen], rtol=1e-4)
        np.testing.assert_allclose(batch.returns[i][chosen], returns[i][chosen], rtol=1e-5)
        assert not batch.token_advantages[i][~chosen].any() and not batch.returns[i][~chosen].any()


def test_lambda_follows_the_length_and_a_cut_completion_is_continued_by_its_last_value() -> None:
    rollout = rollout_of([[True] * 4, [True] * 8])
    values = [np.linspace(0, 1, 4, dtype=np.float32), np.linspace(0, 1, 8, dtype=np.float32)]
    options = {"advantage_estimator": "gae", "num_generations": 1, "lam": 0.5}
    rewards = np.array([1.0, 0.0])
    by_length = AlgorithmConfig(**options, lam_length_alpha=0.5)
    found, _ = compute_advantages(rollout, rewards, by_length, values=values)
    fixed = AlgorithmConfig(**options | {"lam": 0.75})
    expected, _ = compute_advantages(rollout, rewards, fixed, values=values)
    assert found.token_advantages is not None and expected.token_advantages is not None
    # Of 8 tokens lambda is 1 - 1 / 4, of 4 tokens 1 - 1 / 2.
    assert not np.allclose(found.token_advantages[0], expected.token_advantages[0])
    continued = AlgorithmConfig(**options | {"lam": 1.0, "bootstrap_truncated": True})
    longer, _ = compute_advantages(rollout, rewards, continued, values=values)
    assert longer.returns is not None
    np.testing.assert_allclose(longer.returns[1], np.ones(8), rtol=1e-6)
    np.testing.assert_allclose(longer.returns[0], np.full(4, 2.0), rtol=1e-6)


def test_a_sample_without_a_reward_teaches_neither_policy_nor_critic() -> None:
    rollout = rollout_of([[True] * 3, [True] * 3])
    values = [np.array([0.5, 0.25, 0.0], np.float32)] * 2
    config = AlgorithmConfig(advantage_estimator="gae", num_generations=1)
    failed = np.array([False, True])
    batch, _ = compute_advantages(
        rollout, np.array([1.0, 1.0]), config, values=values, failed=failed
    )
    assert batch.token_advantages is not None and batch.returns is not None
    assert not batch.token_advantages[1].any()
    np.testing.assert_array_equal(batch.returns[1], values[1])


# -- loss ------------------------------------------------------------------------------------------------------


class Whole(nn.Cell):
    def __init__(self, clip: float | None) -> None:
        super().__init__()
        self.loss = ValueLoss(clip)

    def construct(self, values: Tensor, *inputs: Tensor) -> Tensor:
        return self.loss.compute(values, values, inputs)


@pytest.mark.parametrize("clip", [0.2, None])
def test_the_loss_and_its_gradient_are_those_of_numpy(clip: float | None) -> None:
    rng = np.random.default_rng(1)
    values, old, returns = (rng.standard_normal(40).astype(np.float32) for _ in range(3))
    old = (values + 0.5 * old).astype(np.float32)
    weights = np.where(rng.random(40) < 0.3, 0.0, 0.05).astype(np.float32)
    # A token that is not in the loss may hold anything.
    returns[weights == 0] = np.inf
    zeros = np.zeros(40, np.float32)
    inputs = [Tensor(own) for own in (old, zeros, returns, weights, *[zeros] * 4)]
    loss, gradient = value_and_grad(Whole(clip))(Tensor(values), *inputs)
    chosen = weights > 0

    def by_numpy(own: np.ndarray) -> float:
        terms, _ = value_loss(own[chosen], old[chosen], returns[chosen], clip)
        return float((terms * weights[chosen]).sum())

    assert float(loss.asnumpy()) == pytest.approx(by_numpy(values), rel=1e-5)
    exact, step = values.astype(np.float64), 1e-6
    for i in range(40):
        moved = [exact.copy() for _ in range(2)]
        moved[0][i] += step
        moved[1][i] -= step
        expected = (by_numpy(moved[0]) - by_numpy(moved[1])) / (2 * step) if chosen[i] else 0.0
        assert gradient.asnumpy()[i] == pytest.approx(expected, abs=1e-5)


def test_clipped_values_are_verls() -> None:
    """max((v - R)^2, (clip(v, old - c, old + c) - R)^2) / 2, and the share of tokens where the second is larger."""
    values, old = np.array([1.0, 0.3, -1.0]), np.zeros(3)
    terms, clipped = value_loss(values, old, np.array([2.0, 2.0, -2.0]), 0.5)
    np.testing.assert_allclose(terms, 0.5 * np.array([1.5**2, 1.7**2, 1.5**2]))
    assert clipped.tolist() == [True, False, True]
    assert explained_variance(np.array([1.0, 2.0]), np.array([1.0, 2.0])) == 1.0
    assert explained_variance(np.zeros(2), np.array([1.0, 3.0])) == 0.0
    assert explained_variance(np.zeros(2), np.ones(2)) is None


# -- configuration ---------------------------------------------------------------------------------------------


@each_row(
    ("values", "told"),
    [
        ({"rl_config.lam": 0.9}, r"rl_config\.lam is 0\.9, which .* grpo does not use, but gae"),
        ({"rl_config.critic_warmup": 2}, r"critic_warmup is 2, which"),
        (
            {"rl_config.advantage_estimator": "gae", "rl_config.partial_rollout": True},
            r"partial_rollout continues completions over steps, which .* gae",
        ),
        (
            {"rl_config.advantage_estimator": "gae", "rl_config.distillation_coef": 0.1},
            r"distillation_coef gives tokens advantages of its own, and .* gae those of a critic",
        ),
        ({"critic_config.lora.rank": 4}, r"critic_config\.lora"),
        ({"rl_config.advantage_estimator": "gae", "rl_config.num_generations": 1}, None),
        # MindRLHF's defaults of its PPO are of no effect.
        ({"rl_config.gamma": 1.0, "rl_config.lam": 0.95, "rl_config.cliprange_value": 0.2}, None),
    ],
)
def test_keys_of_a_critic_are_refused_where_there_is_none(
    values: dict[str, object], told: str | None
) -> None:
    if told is None:
        config_with(None, values)
        return
    with pytest.raises(UserError, match=told):
        config_with(None, values)


# -- runs ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    small_runs.make_inputs(folder, layers=2)
    return folder


@pytest.fixture(scope="module")
def whole(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("whole") / "run"
    return small_runs.run(inputs, output, *CRITIC, "--rl_config.save_ckpt_interval=2")


def test_a_run_trains_a_critic_and_exports_it_as_a_classifier(whole: Path) -> None:
    rows = [row for row in read_metrics(whole / "metrics.jsonl") if "loss" in row]
    assert len(rows) == small_runs.STEPS
    for row in rows:
        assert row["critic/loss"] > 0 and row["critic/skipped_updates"] == 0
        assert row["critic/explained_variance"] is not None
        assert {"time/values", "time/update_critic"} <= row.keys()
    exported = read_config(whole / "critic")
    assert exported.head == "scalar" and exported.raw["id2label"] == {"0": "LABEL_0"}
    values = [
        np.frombuffer(base64.b64decode(json.loads(line)["value"]), "<f2")
        for line in (whole / "per_token.jsonl").read_text().splitlines()
    ]
    # At first they are 0.
    assert not values[0].any() and any(own.any() for own in values)
    head = open_weights(whole / "critic").read("score.weight")
    assert head.shape == (1, exported.hidden_size) and head.any()


def test_a_run_that_goes_on_from_a_checkpoint_has_the_bits_of_one_that_was_not_stopped(
    inputs: Path, whole: Path, tmp_path: Path
) -> None:
    words = [*CRITIC, f"--rl_config.resume_training={whole / 'checkpoints' / 'step_000002'}"]
    again = small_runs.run(inputs, tmp_path / "again", *words)
    for name in ("critic", "hf"):
        expected, found = (open_weights(run / name) for run in (whole, again))
        assert expected.names == found.names
        for tensor in expected.names:
            np.testing.assert_array_equal(found.read(tensor), expected.read(tensor))


def test_a_warm_up_leaves_every_bit_of_the_policy(inputs: Path, tmp_path: Path) -> None:
    words = [*CRITIC, "--rl_config.max_steps=2", "--rl_config.critic_warmup=2"]
    run = small_runs.run(inputs, tmp_path / "warm", *words)
    before, after = open_weights(inputs / "model"), open_weights(run / "hf")
    for tensor in before.names:
        np.testing.assert_array_equal(after.read(tensor), before.read(tensor))
    assert open_weights(run / "critic").read("score.weight").any()
    rows = [row for row in read_metrics(run / "metrics.jsonl") if "loss" in row]
    assert [row["loss"] for row in rows] == [None, None]
    assert rows[0]["critic/loss"] is not None


def test_a_critic_of_two_bytes_a_weight_learns_and_is_exported_in_them(
    inputs: Path, tmp_path: Path
) -> None:
    words = [*CRITIC, "--rl_config.max_steps=2", "--context.compute_dtype=bfloat16"]
    run = small_runs.run(inputs, tmp_path / "narrow", *words)
    rows = [row for row in read_metrics(run / "metrics.jsonl") if "loss" in row]
    assert all(row["critic/loss"] > 0 for row in rows)
    text = json.loads((run / "critic" / "config.json").read_text())
    assert text["torch_dtype"] == "bfloat16"


def test_a_critic_begins_as_the_classifier_that_is_named(
    inputs: Path, whole: Path, tmp_path: Path
) -> None:
    words = [*CRITIC, "--rl_config.max_steps=1", "--critic_config.lr_schedule.lr=1e-30"]
    words += ["--critic_config.lr_schedule.min_lr=0", f"--critic_config.load={whole / 'critic'}"]
    run = small_runs.run(inputs, tmp_path / "named", *words)
    for tensor in ("score.weight", "model.norm.weight"):
        expected, found = (open_weights(folder / "critic").read(tensor) for folder in (whole, run))
        np.testing.assert_array_equal(found, expected)
    text = json.loads((run / "critic" / "config.json").read_text())
    assert text["architectures"] == ["Qwen2ForSequenceClassification"]
