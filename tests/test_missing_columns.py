"""Rows are accepted alike wherever they come from, and what they lack is said once, before a run.

Does not prove that every format is read as it was written: test_data_sources.py does.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from data_sets import MODEL, flat, save_to_disk, write_arrow, write_lines, write_parquet

from mindgrpo.cli.verbs import main
from mindgrpo.data.convert import convert, progress_bar
from mindgrpo.data.prompts import PromptForm
from mindgrpo.data.sources import open_examples
from mindgrpo.data.tokenizer import load_tokenizer
from mindgrpo.errors import UserError
from mindgrpo.rewards.score import Scorer
from mindgrpo.run.trl_arguments import with_arguments

EXAMPLE = MODEL.parent / "grpo_config.yaml"
Data = list[dict[str, Any]]
ROWS: dict[str, Data] = {
    "prompt and answer": [{"prompt": f"{n}+1?", "answer": str(n + 1)} for n in range(4)],
    "prompt and ground truth": [{"prompt": f"{n}?", "ground_truth": str(n)} for n in range(4)],
    "prompt and solution": [{"prompt": f"{n}?", "solution": f"so #### {n}"} for n in range(4)],
    "prompt alone": [{"prompt": f"Say {n}", "level": "easy"} for n in range(4)],
    "question alone": [{"question": f"Say {n}"} for n in range(4)],
}


def write_csv(path: Path, rows: Data) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def write_json(path: Path, rows: Data) -> Path:
    path.write_text(json.dumps({"data": rows}))
    return path


def save_splits(folder: Path, rows: Data) -> Path:
    save_to_disk(folder / "train", rows)
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": ["train"]}))
    return folder


def write_mindrecord(path: Path, rows: Data) -> Path:
    lines = write_lines(path.with_suffix(".jsonl"), *rows)
    form = PromptForm(load_tokenizer(MODEL).with_template("qwen"), 100)
    convert(open_examples(lines), path, form, source=str(lines), progress=lambda _: progress_bar(0))
    return path


FORMATS: dict[str, Callable[[Path, Data], Path]] = {
    "rows.jsonl": lambda path, rows: write_lines(path, *rows),
    "rows.json": write_json,
    "rows.csv": write_csv,
    "rows.parquet": write_parquet,
    "rows.arrow": write_arrow,
    "saved": save_to_disk,
    "splits": save_splits,
    "rows.mindrecord": write_mindrecord,
}


def in_memory(rows: Any) -> list[dict[str, Any]]:
    config: Any = with_arguments(None, None, rows, None)
    return [flat(example) for example in open_examples(config.config.rl_config.dataset_file)]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_rows_of_a_file_are_those_in_memory(tmp_path: Path, subtests: pytest.Subtests) -> None:
    for (what, rows), (name, write) in product(ROWS.items(), FORMATS.items()):
        with subtests.test(what=what, name=name):
            folder = tmp_path / what
            folder.mkdir(exist_ok=True)
            examples = open_examples(write(folder / name, rows))
            assert [flat(example) for example in examples] == in_memory(rows)


def test_rows_in_memory_may_come_by_split() -> None:
    rows = ROWS["prompt and answer"]
    assert in_memory({"train": rows, "test": rows[:1]}) == in_memory(rows)
    with pytest.raises(UserError, match="train_dataset has the splits a, b; set train_dataset"):
        in_memory({"a": rows, "b": rows})


def check(folder: Path, path: Path, *words: str) -> int:
    given = ["check", "--config", str(EXAMPLE), "--dataset_file", str(path), *words]
    given += ["--rl_config.eval_steps", "0", "--rl_config.eval_dataset_file", "null"]
    return main([*given, "--reward_config.verifier_weight", "null"])


def test_answers_are_needed_where_a_reward_asks_for_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], subtests: pytest.Subtests
) -> None:
    lacks = "reward function accuracy_reward wants 'answers', which the data does not have"
    for name, write in FORMATS.items():
        with subtests.test(name=name):
            path = write(tmp_path / name, ROWS["prompt alone"])
            assert check(tmp_path, path, "--verifier_function", "format_reward") == 0
            capsys.readouterr()
            words = "--verifier_function", "format_reward,accuracy_reward"
            assert check(tmp_path, path, *words) == 2
            told = capsys.readouterr().err
            assert lacks in told
            assert (
                "name the one that holds it with answer=KEY in rl_config.dataset_map_keys" in told
            )
            assert told.count("\n") == 1 and "prompt, level)" in told


def test_one_row_without_an_answer_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [*ROWS["prompt and answer"], {"prompt": "2+2?", "target": "4"}]
    path = write_lines(tmp_path / "rows.jsonl", *rows)
    assert check(tmp_path, path, "--verifier_function", "accuracy_reward") == 2
    told = capsys.readouterr().err
    assert "answer=target in rl_config.dataset_map_keys" in told
    assert f"({path}:5 has prompt, target)" in told


def test_an_environment_needs_no_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "game.py").write_text(
        "class Game:\n    def reset(self, row):\n        return 'play ' + row['level']\n"
        "    def step(self, completion):\n        return [], 1.0, True\n"
    )
    path = write_lines(tmp_path / "rows.jsonl", *ROWS["prompt alone"])
    words = ["--rl_config.environment", f"{tmp_path}/game.py:Game", "--verifier_function", "[]"]
    words += ["--rl_config.chat_template", "qwen", "--generate_config.max_prompt_length", "88"]
    assert check(tmp_path, path, *words) == 0
    assert "4 of 4 rows kept; reset returns" in capsys.readouterr().out


def test_a_row_that_names_an_environment_that_there_is_not_is_named_before_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whichever row it is: those that are tried before a run are the first."""
    (tmp_path / "games.py").write_text(
        "class One:\n    def reset(self, row):\n        return 'play'\n"
        "    def step(self, completion):\n        return [], 1.0, True\nclass Two(One):\n    pass\n"
    )
    rows = [{"prompt": "1", "environment": f"games.py:{name}"} for name in ("One", "Two", "Three")]
    path = write_lines(tmp_path / "rows.jsonl", *rows)
    both = f"[{tmp_path}/games.py:One, {tmp_path}/games.py:Two]"
    words = ["--rl_config.environment", both, "--verifier_function", "[]"]
    words += ["--rl_config.chat_template", "qwen"]
    assert check(tmp_path, path, *words) == 2
    told = capsys.readouterr().err
    assert (
        f"{path}:3: the column environment is 'games.py:Three', but rl_config.environment" in told
    )
    write_lines(path, *rows[:2])
    assert check(tmp_path, path, *words) == 0


def test_all_that_a_row_lacks_is_named_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_lines(tmp_path / "rows.jsonl", {"instruction": "1+1?", "output": "2"})
    assert check(tmp_path, path, "--verifier_function", "accuracy_reward") == 2
    told = capsys.readouterr().err
    assert 'has no "question" and no "answer", its keys are instruction, output' in told
    assert "name those that hold them with question=instruction,answer=output in rl_config" in told
    keys = ["--rl_config.dataset_map_keys", "question=instruction,answer=output"]
    assert check(tmp_path, path, "--verifier_function", "accuracy_reward", *keys) == 0


VERL_REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert (data_source, ground_truth) == ("sums", ["2"]) and extra_info == {"index": 5}, data_source
    return {"score": 1.0, "acc": True}
"""


def test_verls_rows_and_reward_need_neither_map_nor_wrapper(tmp_path: Path) -> None:
    asked = [{"role": "user", "content": "1+1?"}]
    gold = {"reward_model": {"style": "rule", "ground_truth": ["2"]}, "extra_info": {"index": 5}}
    path = write_parquet(
        tmp_path / "verl.parquet", [{"data_source": "sums", "prompt": asked} | gold]
    )
    (tmp_path / "verl_reward.py").write_text(VERL_REWARD)
    assert check(tmp_path, path, "--verifier_function", "accuracy_reward") == 0
    reward = f"{tmp_path}/verl_reward.py:compute_score"
    assert check(tmp_path, path, "--verifier_function", reward) == 0


def levels(completions: Sequence[str], level: Any, source: Any) -> list[float]:
    return [0.0] * len(completions)


def tags(completions: Sequence[str], answers: Any, tag: Any) -> list[float]:
    return [0.0] * len(completions)


def refused(function: Any, unanswered: str = "") -> str:
    columns = {"question": ["q", "q"], "prompts": ["p", "p"]}
    functions = function if isinstance(function, list) else [function]
    scorer = Scorer(functions, facts={"max_completion_length": 9})
    try:
        with pytest.raises(UserError) as caught:
            scorer.dry_run(["a", "b"], ["1", "2"], columns, *([unanswered] if unanswered else []))
    finally:
        scorer.close()
    return str(caught.value)


def test_all_columns_that_rewards_lack_are_named_at_once_and_all_that_there_are() -> None:
    said = refused([levels, tags])
    assert "levels wants 'level', 'source' and tags wants 'tag', which the data" in said
    assert "(it has answers, question, prompts, max_completion_length)" in said
    said = refused([levels, tags], "name it with --answer-column")
    assert "levels wants 'level', 'source' and tags wants 'answers', 'tag', which the data" in said
    assert "(it has question, prompts, max_completion_length); name it with --answer-column" in said


def wordy(completions: Sequence[str]) -> list[str]:
    return ["good"] * len(completions)


def short(completions: Sequence[str]) -> list[float]:
    return [1.0]


def broken(completions: Sequence[str]) -> list[float]:
    raise KeyError("level")


def test_what_a_reward_did_wrong_is_said_without_a_tail_that_does_not_fit() -> None:
    assert "wordy returned a list holding a str; it must return a list with" in refused(wordy)
    assert "short returned 1 values for 2 completions; it must return a list" in refused(short)
    said = refused(broken)
    assert "fails on each of 2 samples: KeyError" in said and "must return" not in said


def test_score_reads_what_a_run_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, write in FORMATS.items():
        path = write(tmp_path / name, ROWS["prompt and answer"])
        assert main(["score", "--reward", "accuracy_reward", "--data", str(path)]) == 0, name
        assert "accuracy_reward: mean 1.0000 of 4; no failures" in capsys.readouterr().out
    rows = [
        {"problem": "1+1?", "result": {"value": "2"}},
        {"problem": "1?", "result": {"value": 1}},
    ]
    words = ["score", "--reward", "accuracy_reward", "--data"]
    words.append(str(write_lines(tmp_path / "mapped.jsonl", *rows)))
    assert main([*words, "--map-keys", "question=problem,answer=result.value"]) == 0
    assert "accuracy_reward: mean 1.0000 of 2; no failures" in capsys.readouterr().out
    assert main([*words, "--map-keys", "answer"]) == 2
    assert "'answer' in --map-keys maps nothing" in capsys.readouterr().err
