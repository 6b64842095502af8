"""What earlier steps' rewards leave to later ones: baselines of roles (rae) and prompts that are not drawn again, in a
run on one rank and in one that goes on.

Does not prove what the updates make of advantages (test_distributed.py does, on several ranks).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from small_runs import NUM_ROWS, ONE_GRAPH, make_inputs, model_bits, rows, trainer

from mindgrpo.algorithm.advantages import role_baselines
from mindgrpo.checkpoint.folders import folder_of
from mindgrpo.checkpoint.format import read_manifest
from mindgrpo.errors import UserError
from mindgrpo.grpo.metrics import StepOutcome
from mindgrpo.grpo.state import State

STEPS, GROUP, GAMMA, SHARE = 4, 4, 0.8, 0.5
WORDS = (
    *ONE_GRAPH,
    "--rl_config.advantage_estimator=rae",
    "--rl_config.role_column=player",
    f"--rl_config.role_baseline_ema_gamma={GAMMA}",
    f"--rl_config.no_positive_resampling={SHARE}",
    "--rl_config.eval_pass_threshold=0.5",
    "--rl_config.dynamic_sampling=false",
    f"--rl_config.max_steps={STEPS}",
    "--rl_config.save_ckpt_interval=1",
    "--rl_config.save_max_ckpt_num=9",
    "--rl_config.eval_on_start=false",
    "--rl_config.eval_steps=0",
    "--rl_config.eval_samples=1",
)
PLAYERS = ("first", "second", None)
Steps = list[tuple[StepOutcome, list[int], list[str]]]


def letters(completions: Sequence[str], answers: Sequence[str]) -> list[float]:
    """Above one half for about a third of the completions."""
    return [sum(map(ord, text)) % 101 / 75 - 0.35 for text in completions]


def trained(inputs: Path, output: Path, *words: str) -> Steps:
    """Of each step the outcome, and its samples' rows and roles."""
    made = trainer(inputs, output, *WORDS, *words, reward=letters)
    found: Steps = []
    run = made.stepper.run

    def kept(state: State) -> StepOutcome:
        outcome = run(state)
        owners = made.run.prompts.owners(outcome.batch.rollout.group_ids)
        players = [str(owner.columns["player"]) for owner in owners]
        found.append((outcome, [owner.index for owner in owners], players))
        return outcome

    made.stepper.run = kept  # type: ignore[method-assign]
    made.train()
    return found


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("carried")
    make_inputs(folder)
    lines = (folder / "train.jsonl").read_text().splitlines()
    with_players = [
        json.dumps(json.loads(line) | {"player": PLAYERS[i % 3]}) for i, line in enumerate(lines)
    ]
    (folder / "train.jsonl").write_text("\n".join(with_players) + "\n")
    return folder


@pytest.fixture(scope="module")
def whole(inputs: Path) -> Steps:
    return trained(inputs, inputs / "whole")


def test_baselines_move_by_the_rewards_of_their_role_alone_before_they_are_subtracted() -> None:
    rewards, roles = np.array([1.0, 0.0, -2.0, 1.0]), ["a", "b", "a", "a"]
    own, after = role_baselines(rewards, roles, {"a": 0.5, "c": 3.0}, 0.9)
    first = 0.9 * 0.5 + 0.1 * 1.0
    second = 0.9 * first - 0.1 * 2.0
    third = 0.9 * second + 0.1 * 1.0
    np.testing.assert_allclose(own, [first, 0.0, second, third], rtol=1e-15)
    assert after == pytest.approx({"a": third, "b": 0.0, "c": 3.0})
    failed = np.array([False, True, True, False])
    own, after = role_baselines(rewards, roles, {"a": 0.5, "c": 3.0}, 0.9, failed)
    np.testing.assert_allclose(own, [first, 0.0, first, 0.9 * first + 0.1], rtol=1e-15)
    assert after == pytest.approx({"a": 0.9 * first + 0.1, "c": 3.0})
    with pytest.raises(ValueError, match="not finite"):
        role_baselines(np.array([np.nan]), ["a"], {}, 0.9)


def test_advantages_are_rewards_less_the_moving_average_of_their_role(
    inputs: Path, whole: Steps
) -> None:
    baselines: dict[str, float] = {}
    for step, (outcome, _, players) in enumerate(whole, start=1):
        total = outcome.scored.scores.total.astype(float)
        expected = []
        for reward, player in zip(total.tolist(), players, strict=True):
            baselines[player] = GAMMA * baselines.get(player, 0.0) + (1 - GAMMA) * reward
            expected.append(reward - baselines[player])
        np.testing.assert_allclose(outcome.batch.advantages, expected, atol=1e-6)
        state = read_manifest(folder_of(inputs / "whole", step)).state
        assert state.baselines == pytest.approx(baselines, rel=1e-12)
    assert set(baselines) == {"first", "second", "None"}


def test_rows_whose_samples_pass_are_not_drawn_again(inputs: Path, whole: Steps) -> None:
    solved: set[int] = set()
    told = rows(inputs / "whole")
    drawn_twice = 0
    for step, (outcome, indices, _) in enumerate(whole, start=1):
        drawn = indices[::GROUP]
        assert not solved & set(drawn)
        passed = outcome.scored.scores.total.reshape(-1, GROUP) >= 0.5
        solved |= {row for row, own in zip(drawn, passed, strict=True) if own.mean() >= SHARE}
        assert told[step - 1]["solved_prompts"] == len(solved)
        assert read_manifest(folder_of(inputs / "whole", step)).state.solved == sorted(solved)
    everything = [row for _, indices, _ in whole for row in indices[::GROUP]]
    drawn_twice = len(everything) - len(set(everything))
    # Rows are drawn again, but not all of them: an epoch has fewer than there are.
    assert 0 < len(solved) < NUM_ROWS and drawn_twice > 0


def test_a_run_goes_on_from_its_checkpoint_bit_for_bit(
    inputs: Path, whole: Steps, tmp_path: Path
) -> None:
    again = tmp_path / "again"
    shutil.copytree(inputs / "whole", again)
    for step in range(2, STEPS + 1):
        shutil.rmtree(folder_of(again, step))
    later = trained(inputs, again, "--resume_training")
    for (found, *others), (expected, *same) in zip(later, whole[1:], strict=True):
        assert others == same
        np.testing.assert_array_equal(found.batch.advantages, expected.batch.advantages)
    assert rows(again) == rows(inputs / "whole")
    assert model_bits(again) == model_bits(inputs / "whole")


def test_a_column_that_there_is_not_is_refused(inputs: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"role_column is team, but the columns .* are player"):
        trainer(inputs, tmp_path / "team", *WORDS, "--rl_config.role_column=team", reward=letters)
