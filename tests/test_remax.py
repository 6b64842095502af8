"""Advantages against one greedy completion of each prompt: a whole run on one rank, and one that goes on.

tests/test_distributed.py has layouts. Does not prove that vLLM draws the likeliest tokens: its evaluations do.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from small_runs import NUM_ROWS, ONE_GRAPH, completions, make_inputs, model_bits, rows, trainer

from mindgrpo.checkpoint.folders import folder_of
from mindgrpo.grpo.metrics import StepOutcome
from mindgrpo.grpo.state import State

REMAX = (
    *ONE_GRAPH,
    "--rl_config.advantage_estimator=remax",
    "--rl_config.dynamic_sampling=false",
    "--rl_config.max_steps=2",
    "--rl_config.save_ckpt_interval=1",
    f"--rl_config.eval_samples={NUM_ROWS}",
    "--rl_config.eval_modes=greedy",
)


def letters(completions: Sequence[str], answers: Sequence[str]) -> list[float]:
    """A reward of which no two completions are likely to have the same."""
    return [sum(map(ord, text)) % 101 / 101 for text in completions]


def trained(inputs: Path, output: Path, *words: str) -> list[StepOutcome]:
    made = trainer(inputs, output, *REMAX, *words, reward=letters)
    outcomes: list[StepOutcome] = []
    run = made.stepper.run

    def kept(state: State) -> StepOutcome:
        outcomes.append(run(state))
        return outcomes[-1]

    made.stepper.run = kept  # type: ignore[method-assign]
    made.train()
    return outcomes


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("remax")
    make_inputs(folder)
    return folder


@pytest.fixture(scope="module")
def whole(inputs: Path) -> Sequence[StepOutcome]:
    return trained(inputs, inputs / "whole")


def test_advantages_are_rewards_less_that_of_the_prompts_greedy_completion(
    inputs: Path, whole: Sequence[StepOutcome]
) -> None:
    first, group = whole[0], 4
    assert first.greedy is not None and len(set(first.greedy.tolist())) > 1
    total = first.scored.scores.total.astype(float)
    expected = total - first.greedy.astype(float).repeat(group)
    np.testing.assert_allclose(first.batch.advantages, expected, atol=1e-6)
    # By an evaluation of the same weights, before the step.
    lines = (inputs / "whole" / "eval_completions.jsonl").read_text().splitlines()
    of = [json.loads(line) for line in lines]
    greedy = {row["prompt"]: row["reward"] for row in of[:NUM_ROWS]}
    assert len(greedy) == NUM_ROWS and {row["step"] for row in of[:NUM_ROWS]} == {0}
    drawn = [json.loads(line) for line in completions(inputs / "whole")]
    prompts = [row["prompt"] for row in drawn if row["step"] == 1][::group]
    np.testing.assert_allclose(first.greedy, [greedy[prompt] for prompt in prompts], rtol=1e-6)
    told = rows(inputs / "whole")[0]["reward/greedy"]
    assert told == pytest.approx(first.greedy.mean(), rel=1e-6)


def test_greedy_completions_are_not_trained_on_and_change_no_sample(
    inputs: Path, whole: Sequence[StepOutcome]
) -> None:
    assert len(whole[0].batch) == 3 * 4
    words = ("--rl_config.advantage_estimator=grpo", "--rl_config.max_steps=1")
    (other,) = trained(inputs, inputs / "grpo", *words)
    assert other.greedy is None
    for one, two in zip(whole[0].batch.rollout.samples, other.batch.rollout.samples, strict=True):
        np.testing.assert_array_equal(one.tokens, two.tokens)


def test_a_run_goes_on_from_its_checkpoint_bit_for_bit(
    inputs: Path, whole: Sequence[StepOutcome], tmp_path: Path
) -> None:
    again = tmp_path / "again"
    shutil.copytree(inputs / "whole", again)
    shutil.rmtree(folder_of(again, 2))
    (later,) = trained(inputs, again, "--resume_training")
    np.testing.assert_array_equal(later.greedy, whole[1].greedy)
    np.testing.assert_array_equal(later.batch.advantages, whole[1].batch.advantages)
    assert model_bits(again) == model_bits(inputs / "whole")
