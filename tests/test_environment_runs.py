"""Whole runs with an environment on one rank: what is rewarded and told, and resumed = uninterrupted.

Does not prove it of several ranks: the distributed case "environment" does.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from report_runs import data_of
from small_runs import STEPS, completions, make_inputs, model_bits, rows, run

from mindgrpo.algorithm.sample import STOPPED
from mindgrpo.checkpoint.folders import folder_of
from mindgrpo.rollout.conversations import Conversations
from mindgrpo.workers.protocol import RAISED

# Fails on some turns; has a state, random numbers, and a column of the row.
GAME = """
import random

class Game:
    async def reset(self, row):
        self.secret, self.turns = random.randint(0, 9), 0
        return f"{self.secret} {row['question'][:20]}"

    def step(self, completion):
        self.turns += 1
        if len(completion) == 4:
            raise ValueError("no such move")
        total = sum(map(ord, completion)) + self.secret
        answer = {"role": "user", "content": f"turn {self.turns}"}
        return [answer], (total % 7) / 7, total % 5 == 0
"""
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)
STOPS = json.dumps(list(range(0, 384, 3)))
WORDS = ("--rl_config.max_turns", "3", "--rl_config.turn_advantages", "true")
WORDS += ("--rl_config.seq_length", "128", "--generate_config.max_prompt_length", "72")
WORDS += ("--generate_config.sampling_config.max_tokens", "48")
WORDS += ("--generate_config.sampling_config.eos_token_id", STOPS)
WORDS += ("--reward_config.environment_weight", "2.0")
WORDS += ("--rl_config.save_ckpt_interval", "1", "--rl_config.save_max_ckpt_num", "null")


def nothing(completions: Sequence[str], answers: Sequence[str]) -> list[float]:
    """A reward function beside the environment."""
    return [0.25] * len(completions)


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[str, ...]]:
    folder = tmp_path_factory.mktemp("environment")
    make_inputs(folder, layers=2)
    (folder / "game.py").write_text(GAME)
    (folder / "short.jinja").write_text(TEMPLATE)
    words = ("--rl_config.environment", f"{folder}/game.py:Game", *WORDS)
    words += ("--monitor_config.report", "true")
    return folder, (*words, "--rl_config.chat_template", str(folder / "short.jinja"))


@pytest.fixture(scope="module", autouse=True)
def any_end() -> Any:
    """Random weights hardly ever draw the one token that ends a turn of the template."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Conversations, "_can_go_on", lambda _, s: s.finish_reason == STOPPED)
        yield


@pytest.fixture(scope="module")
def whole(words: tuple[Path, tuple[str, ...]]) -> Path:
    folder, keys = words
    return run(folder, folder / "run", *keys, reward=nothing)


def test_turns_are_rewarded_and_told(whole: Path) -> None:
    found = [json.loads(line) for line in completions(whole)]
    num_turns = set()
    for row in found:
        turns = [m for m in row["messages"] if m["role"] == "assistant"]
        num_turns.add(len(turns))
        assert (
            row["prompt"].startswith("<|im_start|>user ")
            and row["completion"] == turns[-1]["content"]
        )
        if row["finish_reason"] == "failed":
            assert turns[-1]["failure"] == RAISED and "no such move" in turns[-1]["error"]
            assert row["rewards"]["environment"] is None
            continue
        rewards = sum(turn["reward"] for turn in turns)
        assert row["rewards"]["environment"] == pytest.approx(rewards, abs=1e-6)
        assert [turn["done"] for turn in turns[:-1]] == [False] * (len(turns) - 1)
    assert num_turns == {1, 2, 3}
    assert {"failed", "max_turns", "stop"} <= {row["finish_reason"] for row in found}
    told = rows(whole)
    sure = [row for row in told if not row["environment/failures"]]
    for row in sure:
        expected = 2 * row["reward/environment/mean"] + 0.25
        assert row["reward/mean"] == pytest.approx(expected, abs=1e-5)
    assert sure
    assert all(1 < row["environment/turns"] <= 3 for row in told)
    assert any(row["environment/failures"] for row in told)
    assert any("eval/environment/turns" in row for row in told)


def test_the_files_and_the_page_have_the_total_with_the_environments_weight(whole: Path) -> None:
    shown = data_of((whole / "report.html").read_text(encoding="utf-8"))
    num_sure = 0
    for row in rows(whole):
        groups = [group["samples"] for group in shown[f"step-0-{row['step']}"]["groups"]]
        samples = [sample for group in groups for sample in group]
        known = [sample for sample in samples if sample["rewards"]["environment"] is not None]
        mean = sum(sample["total"] for sample in known) / len(known)
        assert mean == pytest.approx(row["reward/mean"], abs=1e-5)
        for sample in known:
            # A page has six digits of each number.
            own = sample["rewards"]["environment"]
            assert sample["total"] == pytest.approx(2 * own + 0.25, abs=3e-5)
        num_sure += len(known)
    assert num_sure
    for row in map(json.loads, (whole / "eval_completions.jsonl").open()):
        if (own := row["rewards"]["environment"]) is not None:
            assert row["reward"] == pytest.approx(2 * own + 0.25, abs=1e-5)


def test_a_run_that_is_resumed_is_the_one_that_never_ended(
    words: tuple[Path, tuple[str, ...]], whole: Path
) -> None:
    folder, keys = words
    again, kept = folder / "again", 2
    shutil.copytree(whole, again)
    for step in range(kept + 1, STEPS + 1):
        shutil.rmtree(folder_of(again, step))
    run(folder, again, "--resume_training", *keys, reward=nothing)
    assert rows(again) == rows(whole)
    assert completions(again) == completions(whole)
    assert model_bits(again) == model_bits(whole)
