"""`python -m mindgrpo score`: a reward is tried on a file, without a model.

Runs the verb in this process. Does NOT prove anything about a run, which scores through the same Scorer.
"""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from mindgrpo.cli import score
from mindgrpo.cli.verbs import main
from mindgrpo.config.rl import RewardConfig
from mindgrpo.rewards.builtin import BUILTINS
from mindgrpo.rewards.call import KINDS

ROOT = Path(__file__).resolve().parent.parent
PROBLEMS = ROOT / "tests" / "data" / "word_problems.jsonl"

REWARD = """
def length(completions, question):
    print("asked", question[0][:3])
    return [float(len(text)) for text in completions]

def fragile(completions):
    return [1.0 / (text != "wrong") for text in completions]

def by_length(completions, completion_lengths, max_completion_length):
    return [n / max_completion_length for n in completion_lengths]
"""


def said_by(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> str:
    assert main(["score", *words]) == status
    out, err = capsys.readouterr()
    return err if status else out


@pytest.fixture
def reward(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(REWARD)
    return f"{tmp_path}/mine.py"


def completions_file(folder: Path) -> Path:
    file = folder / "completions.jsonl"
    rows = [
        {"prompt": "p", "completion": "<answer>42</answer>", "answer": "42", "length": 5},
        {"prompt": "p", "completion": "wrong", "answer": "42", "length": 1},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_a_configuration_says_what_flags_leave_out(
    capsys: pytest.CaptureFixture[str], reward: str, tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"q": "one?", "gold": "1"}\n' * 3)
    config = tmp_path / "run.yaml"
    config.write_text(
        f"rl_config:\n  dataset_file: {tmp_path}/rows.jsonl\n"
        "  dataset_map_keys: [question=q, answer=gold]\n"
        f"reward_config:\n  verifier_function: ['{reward}:length', accuracy_reward]\n"
    )
    said = said_by(capsys, "--config", str(config))
    assert "3 rows of" in said and "length: mean 1.0000 of 3" in said
    assert "accuracy_reward: mean 1.0000 of 3" in said
    # Flags win, and keys of the configuration can be set as everywhere.
    said = said_by(capsys, "--reward", "accuracy_reward", "--config", str(config), "--limit", "2")
    assert "2 rows of" in said and "length" not in said
    other = ("--data", str(PROBLEMS), "--rl_config.dataset_map_keys", "[]")
    assert str(PROBLEMS) in said_by(capsys, "--config", str(config), *other)
    config.write_text("rl_config:\n  seed: 1\n")
    assert "needs something to try" in said_by(capsys, "--config", str(config), status=2)
    assert "'--limits' is no flag" in said_by(capsys, "--limits", "3", status=2)


def test_gold_answers_stand_in_for_completions(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--reward", "accuracy_reward", "--reward", "qwen_accuracy_reward"]
    said = said_by(capsys, *words, "--data", str(PROBLEMS))
    assert "'answer' is scored as if it were one" in said
    assert "accuracy_reward: mean 1.0000 of 5; no failures" in said
    assert "qwen_accuracy_reward: mean 1.0000 of 5; no failures" in said
    assert len([line for line in said.splitlines() if line.endswith("1.000")]) == 5


def test_missing_golds_are_empty_texts_and_the_column_of_golds_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    rows = [{"completion": c, "answer": a, "solution": "s"} for c, a in (("4", "4"), ("nan", None))]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "same.py").write_text(
        "def same(completions, answers):\n"
        "    return [float(c == a) for c, a in zip(completions, answers)]\n"
    )
    said = said_by(capsys, "--reward", f"{tmp_path}/same.py:same", "--data", str(path))
    assert "gold answers are 'answer', not 'solution'" in said
    assert "same: mean 0.5000 of 2" in said
    path.write_text(
        '{"completion": "None", "answer": null}\n{"completion": "nan", "answer": NaN}\n'
    )
    said = said_by(capsys, "--reward", f"{tmp_path}/same.py:same", "--data", str(path))
    assert "same: mean 0.0000 of 2" in said


def test_a_function_of_the_users_and_what_it_prints(
    capsys: pytest.CaptureFixture[str], reward: str
) -> None:
    words = ["--reward", f"{reward}:length", "--data", str(PROBLEMS), "--limit", "2"]
    said = said_by(capsys, *words, "--completion-column", "question")
    assert "length: mean 59.5000 of 2" in said
    assert "printed: asked Ana" in said


def test_completions_of_a_run_and_failures(
    capsys: pytest.CaptureFixture[str], reward: str, tmp_path: Path
) -> None:
    file = completions_file(tmp_path)
    words = ["--reward", f"{reward}:fragile", "--reward", f"{reward}:by_length"]
    said = said_by(capsys, *words, "--data", str(file), "--max-completion-length", "10")
    rows = [line.split() for line in said.splitlines() if line.startswith("   ")]
    assert [row[-2:] for row in rows[:2]] == [["1.000", "0.500"], ["failed", "0.100"]]
    assert "fragile: mean 1.0000 of 1; errors 1, exceptions 1" in said
    assert "ZeroDivisionError" in said


def test_the_mean_is_of_all_steps(
    capsys: pytest.CaptureFixture[str],
    reward: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(score, "STEP", 2)
    file = completions_file(tmp_path)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    lines = [json.dumps(row | {"length": length}) for length in (3, 6) for row in rows]
    file.write_text("\n".join(lines) + "\n")
    words = ["--reward", f"{reward}:by_length", "--data", str(file), "--limit", "4"]
    said = said_by(capsys, *words, "--max-completion-length", "10")
    assert "by_length: mean 0.4500 of 4" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--reward", "acuracy_reward", "--data", str(PROBLEMS)],
            "nearest name is 'accuracy_reward'",
        ),
        (["--reward", "accuracy_reward", "--data", "missing.jsonl"], "does not exist"),
        (["--reward", "accuracy_reward", "--data", __file__], "ends in '.py'; it must be"),
        (
            ["--reward", "accuracy_reward", "--data", str(PROBLEMS), "--answer-column", "gold"],
            "keys: question, answer",
        ),
        (
            ["--reward", "format_reward", "--data", str(PROBLEMS), "--memory", "much"],
            "a size above 0",
        ),
        (["--reward", "missing.py:f", "--data", str(PROBLEMS)], "does not exist"),
    ],
)
def test_mistakes_are_one_sentence(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    told = said_by(capsys, *words, status=2)
    assert told.startswith("mindgrpo: ") and told.count("\n") == 1
    assert said in told


def test_the_guides_reward_works_and_the_page_is_complete(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    guide = (ROOT / "docs" / "rewards.md").read_text(encoding="utf-8")
    (tmp_path / "brevity.py").write_text(guide.split("```python\n")[1].split("```")[0])
    spec = f"{tmp_path}/brevity.py:brevity_reward(limit=50)"
    said = said_by(capsys, "--reward", spec, "--data", str(PROBLEMS))
    assert "brevity_reward: mean 0.8000 of 5; no failures" in said
    names = {found.function for found in BUILTINS.values()}
    assert [name for name in sorted(names) if f"| `{name}`" not in guide] == []
    assert [kind for kind in (*KINDS, "none") if f"`{kind}`" not in guide] == []
    keys = RewardConfig.model_fields.keys() - {"verifier_function", "verifier_weight"}
    assert [key for key in keys if f"`{key}`" not in guide] == []


def test_conversations_of_a_run_are_scored_by_their_messages(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "calls.py").write_text(
        "def calls(completions, messages):\n"
        "    return [sum(len(m.get('tool_calls', ())) for m in turns) for turns in messages]\n"
    )
    called = {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": {}}]}
    turns = [called, {"role": "tool", "content": "4"}, {"role": "assistant", "content": "4"}]
    rows = [{"completion": "4", "answer": "4", "messages": part} for part in (turns, turns[2:])]
    (tmp_path / "completions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--reward", f"{tmp_path}/calls.py:calls", "--reward", "accuracy_reward"]
    said = said_by(capsys, *words, "--data", str(tmp_path / "completions.jsonl"))
    assert "calls: mean 0.5000 of 2; no failures" in said
    assert "accuracy_reward: mean 1.0000 of 2; no failures" in said


def test_functions_in_trls_form_are_tried_with_messages(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "trl.py").write_text(
        "def words(prompts, completions, **columns):\n"
        "    assert all(prompt[-1]['role'] == 'user' for prompt in prompts)\n"
        "    return [float(len(completion[-1]['content'])) for completion in completions]\n"
    )
    prompt = [{"role": "system", "content": "S"}, {"role": "user", "content": "q?"}]
    turns = [{"role": "assistant", "content": "a"}, {"role": "user", "content": "more"}]
    rows = [{"prompt": prompt, "answer": "42"}, {"prompt": "q?", "completion": "12345"}]
    rows += [{"prompt": "q?", "completion": "123", "messages": turns}]
    words = ["--reward", f"{tmp_path}/trl.py:words", "--data", str(tmp_path / "rows.jsonl")]
    for own, mean in ((rows[:1], "2.0000"), (rows[1:2], "5.0000"), (rows[2:], "4.0000")):
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in own))
        said = said_by(capsys, *words, "--reward", "format_reward", "--completions", "messages")
        assert f"words: mean {mean} of 1; no failures" in said
    told = said_by(capsys, *words, status=2)
    assert "completions are texts here: set --completions to messages" in told
    config = tmp_path / "run.yaml"
    config.write_text("reward_config:\n  completions: messages\n")
    words += ["--config", str(config)]
    assert "words: mean 4.0000 of 1; no failures" in said_by(capsys, *words)
    # The flag wins.
    assert "texts here" in said_by(capsys, *words, "--completions", "text", status=2)


GAME = """
class Up:
    def reset(self, row):
        self.number, self.turns = int(row["seed"]), 0
        return f"Which number is {self.number}?"

    def step(self, completion):
        if completion == "fails":
            raise ValueError("no number")
        self.turns += 1
        is_right = completion == str(self.number)
        return f"not {completion}", is_right / self.turns, is_right
"""


def played_with(lines: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[str]:
    (folder / "game.py").write_text(GAME)
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    return ["--environment", f"{folder}/game.py:Up"]


def test_an_environment_is_played_by_hand(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words = played_with("5\n7\n8\n3\n", monkeypatch, tmp_path)
    said = said_by(capsys, *words, "--seed", "7", "--seed", "8", "--seed", "9", "--seed", "10")
    first, second, third = said.strip().split("\n\n")
    assert first.splitlines() == [
        "environment game.py:Up, seed 7",
        "user> Which number is 7?",
        "assistant> 5",
        "reward 0.000",
        "user> not 5",
        "assistant> 7",
        "reward 0.500",
        "user> not 7",
        "done: reward 0.500 in 2 turns",
    ]
    assert second.endswith("done: reward 1.000 in 1 turn")
    assert third.endswith("assistant> \nnot done: reward 0.000 in 1 turn")


def test_an_environment_that_fails_by_hand_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words = played_with("fails\n", monkeypatch, tmp_path)
    said = said_by(capsys, *words, status=2)
    assert "environment game.py:Up: step failed: ValueError: no number" in said
    both = [*words, "--seed", "1", "--data", str(PROBLEMS)]
    assert "leave one of them out" in said_by(capsys, *both, status=2)
    assert "name a file or directory with --data" in said_by(
        capsys, "--reward", "accuracy_reward", status=2
    )


def test_an_environment_is_played_by_a_model(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words = played_with("", monkeypatch, tmp_path)
    words += ["--model", str(ROOT / "examples" / "grpo" / "tiny_arithmetic" / "model")]
    words += ["--chat-template", "qwen", "--max-turns", "2", "--seed", "12345", "--seed", "54321"]
    said = said_by(capsys, *words)
    first, second = said[said.index("\nseed 12345") :].strip().split("\n\nseed 54321\n")
    for number, talk in (("12345", first), ("54321", second)):
        assert f"Which number is {number}?" in talk
        turns = talk[talk.index("assistant> ") :].splitlines()
        answered = [line for line in turns if line.startswith("user> not ")]
        assert len([line for line in turns if line.startswith("reward ")]) == len(answered) + 1
        assert turns[-1].startswith(("max_turns: reward", "length: reward", "stop: reward"))
