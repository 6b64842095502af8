"""How a run scores: from the configuration's keys to the figures of a step, on rank 0 and told to the others.

The ranks are stand-ins here. Does NOT prove a whole run; the distributed tests do.
"""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mindgrpo.algorithm.types import Rollout
from mindgrpo.config import load_config
from mindgrpo.errors import UserError
from mindgrpo.grpo.rank_consistency import on_first_rank
from mindgrpo.grpo.scoring import RolloutScorer, ScoringFailed
from mindgrpo.health.rank_health import RankHealth
from mindgrpo.monitor.metrics import MetricsWriter, read_metrics
from mindgrpo.rewards.executors import Limits
from mindgrpo.rewards.score import Scorer
from mindgrpo.rewards.scores import Report, Scores
from mindgrpo.run.preflight import Inputs, prepare
from mindgrpo.run.reward_guard import RewardGuard

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "grpo" / "tiny_arithmetic" / "grpo_config.yaml"

GREEDY = ("--generate_config.sampling_config.temperature", "0")
REWARD = """
def fragile(completions, completion_lengths, finish_reasons, prompts, completion_ids, max_completion_length):
    assert [len(ids) for ids in completion_ids] == completion_lengths
    assert all(prompts) and max_completion_length > 5
    return [1.0 / (length != 3) for length in completion_lengths]
"""


class Rank:
    """One of two; `told` is what rank 0 said."""

    def __init__(self, rank: int, told: Any = None) -> None:
        self.rank, self.world, self.told = rank, self, told
        self.health = RankHealth(rank, 2, None)

    def gather_objects(self, value: Any) -> list[Any]:
        return [value if self.rank == 0 else self.told, None]


def inputs_with(rewards: list[Any], monkeypatch: pytest.MonkeyPatch, *words: str) -> Inputs:
    monkeypatch.chdir(ROOT)
    return prepare(load_config(EXAMPLE, words).config, None, rewards)


def rollout_of(lengths: list[int]) -> Rollout:
    tokens = [np.arange(5, 5 + n, dtype=np.int32) for n in lengths]
    logps = [np.zeros(n, np.float32) for n in lengths]
    prompts, reasons = [tokens[0]] * len(lengths), ["stop"] * len(lengths)
    return Rollout.single_turn(prompts, tokens, reasons, logps, [0, 0, 0, 1])


def test_a_failed_sample_is_counted_and_gets_its_groups_mean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(REWARD)
    inputs = inputs_with([f"{tmp_path}/mine.py:fragile", "format_reward"], monkeypatch)
    assert inputs.scorer is not None
    try:
        inputs.check_rewards()
        owners = [inputs.prompts[0]] * 4
        scorer = RolloutScorer(inputs.scorer, inputs.tokenizer, Rank(0))  # type: ignore[arg-type]
        scored = scorer.score(rollout_of([2, 3, 4, 5]), owners)
    finally:
        inputs.scorer.close()
    assert scored.scores.total.tolist() == [1.0, 1.0, 1.0, 1.0]
    with closing(MetricsWriter(tmp_path, None)) as metrics:
        metrics.write(1, scored.scores.figures())
    (row,) = read_metrics(tmp_path / "metrics.jsonl")
    kinds = ("errors", "exceptions", "timeouts", "exits", "memory", "nan", "bad_results", "none")
    assert [row[f"reward/fragile/{kind}"] for kind in kinds] == [1, 1, 0, 0, 0, 0, 0, 0]
    assert (row["reward/fragile/mean"], row["reward/format_reward/errors"]) == (1.0, 0)
    elsewhere = RolloutScorer(None, inputs.tokenizer, Rank(1, scored.scores))  # type: ignore[arg-type]
    other = elsewhere.score(rollout_of([2, 3, 4, 5]), owners)
    assert other.scores.total.tolist() == scored.scores.total.tolist()


def test_the_keys_of_reward_config_reach_the_scorer(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--reward_config.deadline", "3", "--reward_config.memory", "512MB"]
    words += ["--reward_config.workers", "2", "--reward_config.together_deadline", "1.5"]
    words += [
        "--verifier_function",
        "format_reward,cosine_reward(max_value_wrong=0, min_value_wrong=-0.5)",
    ]
    monkeypatch.chdir(ROOT)
    inputs = prepare(load_config(EXAMPLE, words).config, None)
    assert inputs.scorer is not None
    assert inputs.scorer.limits == Limits(3.0, 1.5, 512 << 20, 2)
    assert inputs.scorer.names == ["format_reward", "cosine_reward"]
    assert inputs.scorer.facts["max_completion_length"] > 0
    inputs.check_rewards()
    inputs.scorer.close()


def test_only_rank_0_loads_rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config = load_config(EXAMPLE, ["--verifier_function", "missing.py:one,missing.py:two"]).config
    inputs = prepare(config, None, scores=False)
    assert inputs.scorer is None
    inputs.check_rewards()


def test_what_rank_0_finds_wrong_is_every_ranks_error() -> None:
    def check() -> None:
        raise UserError("no such column")

    for rank in (Rank(0), Rank(1, (None, "no such column"))):
        with pytest.raises(UserError, match="no such column"):
            on_first_rank(rank, check)  # type: ignore[arg-type]


def test_a_failure_of_scoring_itself_is_told_to_every_rank() -> None:
    class Broken(Scorer):
        def __init__(self) -> None:
            self.names = []

        def score(self, *_: Any) -> Any:
            raise OSError("no more processes")

    class Words:
        def decode(self, ids: list[int]) -> str:
            return json.dumps(ids)

    with pytest.raises(ScoringFailed, match="no more processes"):
        RolloutScorer(Broken(), Words(), Rank(0)).score(rollout_of([1, 1, 1, 1]), [])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("deadline", "0", "must be above 0"),
        ("memory", "lots", "a size above 0"),
        ("workers", "0", "must be at least 1"),
    ],
)
def test_impossible_limits_are_refused(key: str, value: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        load_config(EXAMPLE, [f"--reward_config.{key}", value])


def scores_of(values: list[float], errors: int) -> Scores:
    report = Report({"errors": errors}, "4 raised: ZeroDivisionError" if errors else "")
    array = np.array(values)
    return Scores({"f": array}, np.nan_to_num(array), np.isnan(array), {"f": report})


def test_a_function_that_fails_on_all_samples_of_steps_in_a_row_ends_the_run_with_its_name() -> (
    None
):
    dead, alive = scores_of([np.nan] * 4, 4), scores_of([np.nan, 1.0, 0.0, 1.0], 1)
    guard = RewardGuard(2)
    guard.step_done(1, dead)
    guard.step_done(2, alive)
    guard.step_done(3, dead)
    with pytest.raises(
        UserError, match="function f failed on all samples of 2 steps.*step 4.*ZeroDi"
    ):
        guard.step_done(4, dead)
    unlimited = RewardGuard(None)
    for step in range(9):
        unlimited.step_done(step, dead)


def test_a_function_that_applies_to_no_sample_has_not_failed() -> None:
    guard = RewardGuard(1)
    guard.step_done(1, scores_of([np.nan] * 4, 0))


def test_training_at_temperature_0_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        UserError, match="temperature is 0.*8. times, so every advantage would be 0"
    ):
        inputs_with([lambda completions: [1.0] * len(completions)], monkeypatch, *GREEDY)
