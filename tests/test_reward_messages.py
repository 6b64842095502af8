"""Reward functions that read conversations train: with tools, with an environment, and where rows are conversations.

Does not prove what conversations look like: test_conversations.py and test_environment_turns.py do.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from small_runs import ONE_GRAPH, completions, make_inputs, rows, run

from mindgrpo.cli.verbs import main

TEMPLATE = (
    "{% if tools %}{{ tools[0].function.name }} {% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)
TOOL = '''
def double(number: int) -> int:
    """Doubles.

    Args:
        number: What to double.
    """
    return 2 * number
'''
GAME = """
class Game:
    def reset(self, row):
        return [{"role": "user", "content": "Say a number. " * 2}]

    def step(self, completion):
        return [{"role": "user", "content": "Another."}], len(completion) / 10, False
"""
REWARD = """
def turns(completions, messages, prompts):
    scores = []
    for text, conversation, prompt in zip(completions, messages, prompts):
        own = [message for message in conversation if message["role"] == "assistant"]
        assert own[-1]["content"] == text and own[0] is conversation[0], conversation
        assert prompt.endswith("assistant ")
        scores.append(len(own) + len(text) / 64 + sum(turn.get("reward", 0.0) for turn in own))
    return scores
"""
KEYS = ("--rl_config.max_turns", "2", "--rl_config.max_steps", "2", "--rl_config.seq_length", "128")
KEYS += ("--generate_config.max_prompt_length", "64", "--rl_config.eval_steps", "0")
KEYS += ("--generate_config.sampling_config.max_tokens", "40", *ONE_GRAPH)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_inputs(tmp_path)
    for name, text in {"tool": TOOL, "game": GAME, "mine": REWARD}.items():
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "short.jinja").write_text(TEMPLATE)
    return tmp_path


def keys_of(folder: Path, kind: str) -> tuple[str, ...]:
    own = {
        "tools": (
            "--rl_config.tools",
            f"{folder}/tool.py:double",
            "--rl_config.tool_parser",
            "hermes",
        ),
        "environment": ("--rl_config.environment", f"{folder}/game.py:Game"),
    }
    return (*own[kind], "--rl_config.chat_template", str(folder / "short.jinja"), *KEYS)


@pytest.mark.parametrize(
    ("kind", "rows_are"), [("tools", "questions"), ("environment", "conversations")]
)
def test_a_reward_that_reads_messages_trains(kind: str, rows_are: str, folder: Path) -> None:
    if rows_are == "conversations":
        data = [json.loads(line) for line in (folder / "train.jsonl").open()]
        asked = [[{"role": "user", "content": row["question"]}] for row in data]
        lines = [
            json.dumps({"messages": messages, "answer": row["answer"]})
            for messages, row in zip(asked, data, strict=True)
        ]
        (folder / "train.jsonl").write_text("\n".join(lines) + "\n")
    done = run(folder, folder / "run", *keys_of(folder, kind), reward=f"{folder}/mine.py:turns")
    for row in rows(done):
        assert row["reward/turns/errors"] == 0 and row["grad_norm"] > 0, row
    drawn = [json.loads(line) for line in completions(done)]
    for row in drawn:
        own = [message for message in row["messages"] if message["role"] == "assistant"]
        rewards = sum(turn.get("reward", 0.0) for turn in own)
        rewards += len(own[-1]["content"]) / 64
        assert row["rewards"]["turns"] == pytest.approx(len(own) + rewards, abs=1e-5)


def check_words(folder: Path, kind: str, reward: str) -> list[str]:
    words = ["check", "--config", str(folder / "small.yaml"), *keys_of(folder, kind)]
    words += ["--actor_checkpoint_path", str(folder / "model")]
    words += ["--dataset_file", str(folder / "train.jsonl")]
    return [*words, "--reward_config.verifier_function", f"{folder}/mine.py:{reward}"]


@pytest.mark.parametrize("kind", ["tools", "environment"])
def test_check_tries_a_reward_with_a_conversation(
    kind: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(check_words(folder, kind, "turns")) == 0
    told = capsys.readouterr().out
    assert "can run" in told and "turns" in told


def test_score_gives_a_row_without_a_conversation_one_of_one_turn(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "few.py").write_text(
        "def few(completions, messages):\n"
        "    assert [m[-1]['content'] for m in messages] == list(completions)\n"
        "    return [float(len(turns)) for turns in messages]\n"
    )
    words = ["score", "--reward", f"{folder}/few.py:few", "--data", str(folder / "train.jsonl")]
    assert main(words) == 0
    assert "few: mean 1.0000 of 7; no failures" in capsys.readouterr().out
