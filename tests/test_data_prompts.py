"""Prompts: rendered, fitted to their length, shared out over ranks, read lazily, and put in order.

Does NOT prove: that sharing works between processes; tests of the trainer on several ranks do.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from data_sets import MODEL, examples_of, questions, write_lines, write_parquet

from mindgrpo.config import load_config
from mindgrpo.data.examples import Example, RowForm
from mindgrpo.data.prompt_source import PromptSource, epoch_order
from mindgrpo.data.prompts import Fitted, PromptForm, PromptSet, columns_of
from mindgrpo.data.row_files import ListedRows
from mindgrpo.data.sources import ALONE, Examples, Ranks, open_examples
from mindgrpo.data.tokenizer import Tokenizer, load_tokenizer
from mindgrpo.errors import UserError
from mindgrpo.plan.run_plan import RunPlan
from mindgrpo.run.preflight import prepare

FIRST_ORDER = [5, 0, 6, 1, 7, 2, 4, 3]
LONG = [{"question": "1?", "answer": "1"}, {"question": "abcd " * 40, "answer": "2"}]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(MODEL)


def prompt_set(
    rows: list[dict[str, Any]], tokenizer: Tokenizer, length: int = 64, *form: str
) -> PromptSet:
    return PromptSet(examples_of(rows), PromptForm(tokenizer, length, *form))


def test_prompts_carry_everything_once(tokenizer: Tokenizer) -> None:
    rows = [{"question": "1+1?", "answer": "2", "level": 3}, {"question": "2+2?", "answer": "4"}]
    prompts = prompt_set(rows, tokenizer, 64, "error", "Be brief.")
    assert prompts[0].text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n")
    assert prompts[0].ids.tolist() == tokenizer.encode(prompts[0].text)
    assert prompts[0].ids.dtype == np.int32
    assert (prompts[1].index, prompts[1].question, prompts[1].answer) == (1, "2+2?", "4")
    assert columns_of(prompts[:]) == {"level": [3, None], "question": ["1+1?", "2+2?"]}
    assert columns_of(prompts[1:]) == {"level": [None], "question": ["2+2?"]}
    assert prompts[-1].index == 1
    with pytest.raises(IndexError):
        prompts[2]


def test_a_row_keeps_its_own_system_message(tokenizer: Tokenizer) -> None:
    messages = [{"role": "system", "content": "Own."}, {"role": "user", "content": "x"}]
    prompts = prompt_set([{"messages": messages, "answer": ""}], tokenizer, 64, "error", "Ours.")
    assert "Own." in prompts[0].text and "Ours." not in prompts[0].text


def test_long_prompts_are_an_error_or_counted(tokenizer: Tokenizer) -> None:
    with pytest.raises(UserError, match=r"rows row 2: .* tokens long and max_prompt_length is 20"):
        prompt_set(LONG, tokenizer, 20)
    dropped = prompt_set(LONG, tokenizer, 20, "drop")
    assert (len(dropped), dropped.num_dropped, dropped[0].index) == (1, 1, 0)
    assert dropped.report().startswith(
        "1 of 2 rows kept, 1 dropped and 0 cut (longer than 20 tokens)"
    )
    for overflow in ("left", "right"):
        cut = prompt_set(LONG, tokenizer, 20, overflow)
        assert (len(cut), cut.num_cut, cut.longest) == (2, 1, 20)
        assert cut[1].text.endswith("<|im_end|>\n<|im_start|>assistant\n")
        assert tokenizer.encode(cut[1].text) == cut[1].ids.tolist()
        assert cut[1].question == LONG[1]["question"]
    with pytest.raises(UserError, match="without its question"):
        prompt_set(LONG, tokenizer, 5, "left")
    with pytest.raises(UserError, match="no prompt is left of 2 rows"):
        prompt_set(LONG, tokenizer, 3, "drop")
    with pytest.raises(UserError, match="'cut' is unknown"):
        prompt_set(LONG, tokenizer, 20, "cut")
    with pytest.raises(UserError, match="max_prompt_length is 0"):
        prompt_set(LONG, tokenizer, 0)


def test_cutting_keeps_the_other_end_of_the_question(tokenizer: Tokenizer) -> None:
    rows = [{"question": "".join(str(n % 10) for n in range(60)) + "!", "answer": ""}]
    form = PromptForm(tokenizer, 30, "left")

    def kept(overflow: str) -> str:
        text = prompt_set(rows, tokenizer, 30, overflow)[0].text
        return text.removeprefix("<|im_start|>user\n").partition("<|im_end|>")[0]

    left, right = kept("left"), kept("right")
    assert rows[0]["question"].endswith(left) and rows[0]["question"].startswith(right)
    for text in (left, right):
        fitted = form.encoded(examples_of([{"question": text, "answer": ""}])[0])
        assert text and isinstance(fitted, Fitted) and len(fitted.ids) == 30


def conversation(*turns: str) -> list[dict[str, str]]:
    roles = ["user", "assistant"] * len(turns)
    told = [{"role": role, "content": text} for role, text in zip(roles, turns, strict=False)]
    return [{"role": "system", "content": "S"}, *told]


def test_cutting_a_conversation_drops_its_oldest_turns_first(tokenizer: Tokenizer) -> None:
    messages = conversation("a" * 9, "b" * 9, "c" * 9, "d" * 9, "1234")
    example = examples_of([{"messages": messages, "answer": ""}])[0]

    def fitted(length: int, overflow: str) -> Fitted:
        result = PromptForm(tokenizer, length, overflow).fit(example)
        assert result is not None and len(result.ids) <= length
        return result

    whole = len(fitted(999, "error").ids)
    two = fitted(whole - 1, "left")
    assert [message["content"] for message in two.example.messages] == [
        "S",
        "c" * 9,
        "d" * 9,
        "1234",
    ]
    assert two.is_cut and not fitted(whole, "left").is_cut
    one = fitted(len(two.ids) - 1, "left")
    assert [message["content"] for message in one.example.messages] == ["S", "1234"]
    assert fitted(len(one.ids) - 2, "left").example.question == "34"
    assert fitted(whole - 2, "right").example.question == "12"
    with pytest.raises(UserError, match="without its question"):
        fitted(whole - 5, "right")


def as_ranks(size: int, work: Callable[[Ranks], Any]) -> list[Any]:
    """What `work` gives on each of `size` ranks that run at once, each a thread."""
    barrier = threading.Barrier(size, timeout=20)
    shelf: list[Any] = [None] * size
    results: list[Any] = [None] * size

    def gather_for(rank: int) -> Callable[[Any], list[Any]]:
        def gather(value: Any) -> list[Any]:
            shelf[rank] = value
            barrier.wait()
            everyone = list(shelf)
            barrier.wait()
            return everyone

        return gather

    def run(rank: int) -> None:
        try:
            results[rank] = work(Ranks(rank, size, gather_for(rank)))
        except UserError as error:
            results[rank] = str(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    return results


class Watched(Examples):
    """Examples that remember which of them were read."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        super().__init__(ListedRows(rows, "rows"), RowForm())
        self.indices: list[int] = []

    def read(self, start: int, stop: int) -> Iterator[Example]:
        self.indices += range(start, stop)
        return super().read(start, stop)


@pytest.mark.parametrize("size", [1, 3, 8])
def test_every_rank_reads_its_share_and_has_the_whole_set(size: int, tokenizer: Tokenizer) -> None:
    rows = [*questions(11), LONG[1], {"question": "last?", "answer": "", "level": 1}]
    form = PromptForm(tokenizer, 40, "drop")
    alone = PromptSet(examples_of(rows), form)
    watched = [Watched(rows) for _ in range(size)]
    made = as_ranks(size, lambda ranks: PromptSet(watched[ranks.rank], form, ranks))
    assert sorted(index for one in watched for index in one.indices) == list(range(13))
    assert max(len(one.indices) for one in watched) <= -(-13 // size)
    for prompts, one in zip(made, watched, strict=True):
        one.indices.clear()
        assert [p.index for p in prompts] == [p.index for p in alone] == [*range(11), 12]
        assert [p.ids.tolist() for p in prompts] == [p.ids.tolist() for p in alone]
        assert (prompts.num_dropped, prompts.column_names) == (1, ["level"])
        assert one.indices == []
        assert prompts[11].columns == {"level": 1} and one.indices == [12]


def test_what_one_rank_finds_wrong_every_rank_says(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "rows.jsonl", *questions(5), {"target": "x"}, {"answer": "y"})
    form = PromptForm(tokenizer, 64)
    said = as_ranks(4, lambda ranks: PromptSet(open_examples(path, ranks=ranks), form, ranks))
    assert len(set(said)) == 1 and said[0].startswith(f'{path}:6 has no "question"')
    broken = tmp_path / "rows.json"
    broken.write_text("[")
    said = as_ranks(4, lambda ranks: open_examples(broken, ranks=ranks))
    assert len(set(said)) == 1 and "is not JSON" in said[0]


def test_a_file_that_is_read_whole_is_read_by_one_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(questions(4)))
    reads = []
    whole = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda self: reads.append(self) or whole(self))
    made = as_ranks(3, lambda ranks: [r.answer for r in open_examples(path, ranks=ranks)])
    assert made == [["1", "2", "3", "4"]] * 3 and reads == [path]


def test_the_order_is_a_function_of_seed_and_epoch_alone() -> None:
    first = epoch_order(100, seed=3, epoch=2)
    np.random.default_rng(0).random(5)
    np.testing.assert_array_equal(first, epoch_order(100, seed=3, epoch=2))
    assert sorted(first) == list(range(100))
    for seed, epoch in ((3, 1), (2, 2), (2, 3)):
        assert list(first) != list(epoch_order(100, seed, epoch))
    # Guards resumed runs: another stream would replay or skip rows.
    assert epoch_order(8, seed=0, epoch=0).tolist() == FIRST_ORDER


@pytest.mark.parametrize(
    ("max_steps", "epochs", "num_steps"), [(None, 1, 4), (None, 3, 12), (200, 1, 200), (2, 3, 2)]
)
def test_max_steps_takes_precedence_over_epochs(
    max_steps: int | None, epochs: int, num_steps: int
) -> None:
    """As TRL's max_steps and verl's total_training_steps do."""
    rl, batch = (
        SimpleNamespace(max_steps=max_steps, epochs=epochs),
        SimpleNamespace(prompts_per_step=3),
    )
    plan: Any = SimpleNamespace(config=SimpleNamespace(rl_config=rl), batch=batch)
    assert RunPlan.num_steps(plan, 10) == num_steps


def test_steps_cross_epochs_without_losing_a_row(tokenizer: Tokenizer) -> None:
    prompts = prompt_set(questions(7), tokenizer)
    sampler = PromptSource(prompts, 5, 3)
    steps = [[prompt.index for prompt in sampler.take(3)] for _ in range(7)]
    drawn = [index for step in steps for index in step]
    for epoch in range(3):
        assert drawn[7 * epoch : 7 * epoch + 7] == epoch_order(7, 5, epoch).tolist()
    assert len(PromptSource(prompts, 5, 3).take(16)) == 16
    # A run that continues at step 4 draws what the first one would have drawn.
    again = PromptSource(prompt_set(questions(7), tokenizer), 5, 3, position=12)
    assert [prompt.index for prompt in again.take(3)] == steps[4]


def test_a_sampler_goes_on_where_its_position_says(tokenizer: Tokenizer) -> None:
    prompts = prompt_set(questions(7), tokenizer)
    whole = [prompt.index for prompt in PromptSource(prompts, 5, 3).take(20)]
    sampler = PromptSource(prompts, 5, 3)
    drawn = [prompt.index for count in (3, 1, 6) for prompt in sampler.take(count)]
    assert (sampler.position, sampler.epoch) == (10, 1)
    resumed = PromptSource(prompts, 5, 3, sampler.position)
    assert drawn + [prompt.index for prompt in resumed.take(10)] == whole


def test_rows_that_are_solved_are_passed_over_until_none_is_left(tokenizer: Tokenizer) -> None:
    prompts = prompt_set(questions(7), tokenizer)
    sampler = PromptSource(prompts, 5, 3)
    orders = [epoch_order(7, 5, epoch).tolist() for epoch in range(9)]
    first = [prompt.index for prompt in sampler.begin_step(0)]
    sampler.solve([0, 2])
    assert sampler.solved == {first[0], first[2]}
    expected = orders[0][3:] + [row for row in orders[1] if row not in sampler.solved]
    assert [prompt.index for prompt in sampler.take(9)] == expected
    again = PromptSource(prompts, 5, 3, sampler.position)
    again.solved = set(sampler.solved)
    assert [p.index for p in again.take(4)] == [p.index for p in sampler.take(4)]
    # All seven: then every row is drawn again, from where the run is.
    sampler.solved = set(range(7))
    at = sampler.position
    assert sampler.next_positions(3) == [at, at + 1, at + 2] and not sampler.solved


class Numbered(Sequence[Any]):
    """Prompts of rows 0, 2, 4, ... of a data set, which counts what is taken of them."""

    def __init__(self, size: int) -> None:
        self.indices, self.taken = 2 * np.arange(size, dtype=np.int32), 0

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, number: Any) -> Any:
        self.taken += 1
        return SimpleNamespace(index=int(self.indices[number]))


def test_what_is_solved_of_a_large_data_set_is_passed_over_without_a_look_at_it() -> None:
    prompts: Any = Numbered(5000)
    sampler, left = PromptSource(prompts, 5, 3), {8, 4000, 9998}
    sampler.solved = set(prompts.indices.tolist()) - left
    epoch_order.cache_clear()
    drawn = [prompt.index for _ in range(4) for prompt in sampler.take(2)]
    orders = [2 * epoch_order(5000, 5, epoch) for epoch in range(3)]
    expected = [row for order in orders for row in order.tolist() if row in left]
    assert drawn == expected[:8] and prompts.taken == 8
    # An epoch has one order, however often it is asked for.
    assert epoch_order.cache_info().misses == 3
    at = np.flatnonzero(orders[2] == expected[7])[0]
    assert sampler.position == 2 * 5000 + at + 1


def config(tmp_path: Path, text: str, *overrides: str) -> Any:
    path = tmp_path / "run.yaml"
    path.write_text("rl_config:\n" + text)
    return load_config(path, overrides).config.rl_config


def test_keys_of_the_configuration_say_how_data_is_read(tmp_path: Path) -> None:
    rl = config(
        tmp_path,
        "  dataset_type: openR1math\n  dataset_map_keys: question=q,answer=a\n  dataset_columns: [x, y]\n"
        "  prompt_overflow: left\n  chat_template: qwen_r1\n",
    )
    assert (rl.dataset_type, rl.dataset_map_keys) == ("openr1math", ["question=q", "answer=a"])
    assert (rl.dataset_columns, rl.prompt_overflow, rl.chat_template) == (
        ["x", "y"],
        "left",
        "qwen_r1",
    )
    line = config(tmp_path, "  epochs: 1\n", "--rl_config.dataset_map_keys", "answer=solution")
    assert (line.dataset_map_keys, line.dataset_columns) == (["answer=solution"], None)
    for text, said in (
        ("  dataset_map_keys: [question]\n", "must be NAME=KEY pairs"),
        ("  dataset_map_keys: [a=b, a=c]\n", "with each NAME once"),
        ("  dataset_type: gsm9k\n", "dataset_type"),
        ("  prompt_overflow: cut\n", "prompt_overflow"),
        (
            "  dataset_file: a.mindrecord\n  dataset_type: gsm8k\n",
            "rows were settled when it was converted",
        ),
        ("  prompt_type: qwen_r1\n", "it is called rl_config.chat_template here"),
    ):
        with pytest.raises(UserError, match=said):
            config(tmp_path, text)


def test_one_rank_is_alone() -> None:
    assert ALONE.slice_of(7) == (0, 7) and ALONE.gather("x") == ["x"]
    assert ALONE.by_one(lambda: 3) == 3


def test_a_run_is_prepared_from_any_data_set(tmp_path: Path) -> None:
    rows = [{"task": f"What is {n}+1?", "gold": n + 1, "level": n, "x": 0} for n in range(6)]
    write_parquet(tmp_path / "train-00000-of-00001.parquet", [*rows, {"task": "?" * 80, "gold": 0}])
    write_parquet(tmp_path / "test-00000-of-00001.parquet", rows[:2])
    example = MODEL.parent / "grpo_config.yaml"
    overrides = {
        "actor_config.load": MODEL,
        "rl_config.dataset_file": tmp_path,
        "rl_config.eval_dataset_file": tmp_path,
        "rl_config.dataset_map_keys": "question=task,answer=gold",
        "rl_config.dataset_columns": "level",
        "rl_config.prompt_overflow": "drop",
        "rl_config.chat_template": "qwen3_no_think",
    }
    words = [word for key, value in overrides.items() for word in (f"--{key}", str(value))]
    inputs = prepare(load_config(example, words).config, None)
    assert (len(inputs.prompts), inputs.prompts.num_dropped) == (6, 1)
    assert inputs.held_out is not None and len(inputs.held_out) == 2
    first = inputs.prompts[0]
    assert first.text.endswith("</think>\n\n")
    assert (first.answer, first.columns) == ("1", {"level": 0})
    assert inputs.tokenizer.eos_id in inputs.sampling.stop_ids
    words += ["--rl_config.eval_dataset_split", "dev"]
    with pytest.raises(
        UserError, match="and no 'dev'; set rl_config.eval_dataset_split to one of them"
    ):
        prepare(load_config(example, words).config, None)
