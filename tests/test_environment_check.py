"""`check` tries an environment: one reset and one step, and what the startup lines say of its prompts.

Does not prove that conversations run: test_environment_turns.py and test_environment_runs.py do.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from data_sets import MODEL

from mindgrpo.cli.verbs import main
from mindgrpo.data.tokenizer import load_tokenizer

EXAMPLE = MODEL.parent / "grpo_config.yaml"
STEPS = {
    "raise KeyError('move')": r"step\('12'\) fails on the row of .*:1: KeyError: 'move'",
    "return 5": r"step\('12'\) .*: step returned 5, not \(messages, reward, done\)",
    "return 'no', 'much', True": "returned 'much' for reward, which is a number",
}


@pytest.mark.parametrize("body", STEPS)
def test_a_step_that_fails_is_told_by_check(
    body: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(check_words(tmp_path, body)) == 2
    assert re.search(STEPS[body], capsys.readouterr().err)


def test_check_shows_the_length_of_what_reset_returns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(check_words(tmp_path, "return 'no', 0.0, False")) == 0
    told = capsys.readouterr().out
    tokenizer = load_tokenizer(MODEL).with_template("qwen")
    length = len(
        tokenizer.encode(tokenizer.render([{"role": "user", "content": "play a long game"}]))
    )
    assert f"1 of 1 rows kept; reset returns {length} of at most 88 tokens" in told
    assert "longest prompt" not in told


def check_words(folder: Path, step: str) -> list[str]:
    (folder / "game.py").write_text(
        "class Game:\n    def reset(self, row):\n        return 'play a long game'\n"
        f"    def step(self, completion):\n        {step}\n"
    )
    (folder / "rows.jsonl").write_text('{"question": "q", "answer": "12"}\n')
    words = ["check", "--config", str(EXAMPLE), "--generate_config.max_prompt_length", "88"]
    words += ["--rl_config.environment", f"{folder}/game.py:Game"]
    words += ["--rl_config.chat_template", "qwen", "--rl_config.eval_steps", "0"]
    return [*words, "--actor_checkpoint_path", str(MODEL), "--dataset_file", f"{folder}/rows.jsonl"]
