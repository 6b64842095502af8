"""The bundled example's data, completions and tokenizer.

Does NOT prove: that a model can learn from them, nor how often a warm-started one is right.
"""

from __future__ import annotations

import importlib
import json
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from mindgrpo.data.tokenizer import load_tokenizer
from mindgrpo.rewards.builtin.accuracy import accuracy_reward
from mindgrpo.rewards.builtin.formats import format_reward
from mindgrpo.weights.model_files import SafetensorsDirectory

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "grpo" / "tiny_arithmetic"


@pytest.fixture(scope="module")
def make_data() -> Iterator[ModuleType]:
    sys.path.insert(0, str(EXAMPLE))
    yield importlib.import_module("make_data")
    sys.path.remove(str(EXAMPLE))


def rows(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (EXAMPLE / name).read_text("utf-8").splitlines()]


def test_rows_have_gsm8ks_form_and_right_sums() -> None:
    for row in rows("train.jsonl") + rows("heldout.jsonl"):
        assert set(row) == {"question", "answer"}
        *steps, last = row["answer"].split("\n")
        assert steps and re.fullmatch(r"#### \d{1,2}", last)
        for step in steps:
            left, operator, right, total = re.fullmatch(  # type: ignore[union-attr]
                r"(\d+)([+-])(\d+)=(\d{1,2})", step
            ).groups()
            signed = int(right) if operator == "+" else -int(right)
            assert int(left) + signed == int(total)
        assert last == f"#### {total}"


def test_held_out_questions_and_numbers_are_nowhere_in_the_training_split() -> None:
    train, heldout = rows("train.jsonl"), rows("heldout.jsonl")
    assert (len(train), len(heldout)) == (2000, 200)
    assert len({row["question"] for row in train + heldout}) == 2200

    def numbers(row: dict[str, str]) -> tuple[int, ...]:
        return tuple(sorted(int(digits) for digits in re.findall(r"\d+", row["question"])))

    assert not {numbers(row) for row in train} & {numbers(row) for row in heldout}


def test_fresh_problems_keep_out_what_they_are_told(make_data: ModuleType) -> None:
    train, heldout = make_data.make_splits()
    assert [problem.row() for problem in heldout] == rows("heldout.jsonl")
    keep_out = {problem.key for problem in heldout}
    assert not keep_out & {problem.key for problem in train}
    rng = random.Random(1)
    fresh = [make_data.sample_problem(rng, keep_out) for _ in range(5000)]
    assert not keep_out & {problem.key for problem in fresh}


def test_only_the_careful_path_earns_the_format_reward(make_data: ModuleType) -> None:
    train, heldout = make_data.make_splits()
    rng = random.Random(2)
    for problem in train + heldout:
        gold = [str(problem.result)]
        careful = [make_data.careful(problem, rng)]
        assert format_reward(careful, gold) == accuracy_reward(careful, gold) == [1.0]
        assert format_reward([make_data.careless(problem, rng)], gold) == [0.0]
        assert accuracy_reward([make_data.guessed(problem, rng)], gold) == [0.0]
        assert accuracy_reward([make_data.unformatted(problem, rng)], gold) == [1.0]


def test_the_tokenizer_is_small_short_and_loses_nothing(make_data: ModuleType) -> None:
    tokenizer = load_tokenizer(EXAMPLE / "model")
    assert tokenizer.vocab_size == 352
    assert tokenizer.decode(tokenizer.stop_ids, skip_special_tokens=False) == (
        "<|im_end|><|endoftext|>"
    )
    rng = random.Random(3)
    for row in rows("train.jsonl")[:200]:
        prompt = tokenizer.render([{"role": "user", "content": row["question"]}])
        assert len(tokenizer.encode(prompt)) <= 45
    for problem in make_data.make_splits()[0][:200]:
        for completion in (make_data.careful(problem, rng), make_data.careless(problem, rng)):
            ids = tokenizer.encode(completion)
            assert len(ids) <= 30
            assert tokenizer.decode(ids) == completion
    assert len(tokenizer.encode("1234")) == 4
    assert tokenizer.decode(tokenizer.encode("日本 ü\n")) == "日本 ü\n"


def test_making_everything_again_gives_the_same_bytes(
    make_data: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["make_data.py", "--output_dir", str(tmp_path)])
    make_data.main()
    model = tmp_path / "model"
    monkeypatch.setattr(sys, "argv", ["make_tokenizer.py", "--output_dir", str(model)])
    importlib.import_module("make_tokenizer").main()
    made = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(made) == 6
    for path in made:
        assert path.read_bytes() == (EXAMPLE / path.relative_to(tmp_path)).read_bytes(), path.name


def test_the_warm_start_learns_from_its_first_steps(tmp_path: Path) -> None:
    # Does not prove that a whole warm start ends with the model that is bundled.
    bundled = EXAMPLE.parent / "tiny_moe" / "model"
    command = [sys.executable, EXAMPLE / "warm_start.py", "--config", bundled / "config.json"]
    ended = subprocess.run(
        [*command, "--steps", "11", "--output_dir", tmp_path],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    losses = [float(loss) for loss in re.findall(r"^step \d+/8  loss (\S+)", ended.stdout, re.M)]
    assert len(losses) == 8 and losses[-1] < 0.6 * losses[0]
    assert (tmp_path / "config.json").read_bytes() == (bundled / "config.json").read_bytes()
    files = SafetensorsDirectory(tmp_path), SafetensorsDirectory(bundled)
    made, theirs = (
        {
            name: (tensor.shape, tensor.dtype)
            for name, own in each.slices.items()
            for _, tensor in own
        }
        for each in files
    )
    assert made == theirs and {dtype for _, dtype in made.values()} == {"BF16"}
