"""Which column of a row is meant, and what is missing: two that could be the prompt, nulls, and lists as text.

Does NOT prove that a column holds what its name says.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from data_sets import MODEL, examples_of, flat, write_arrow, write_lines, write_parquet
from tables import each_row

from mindgrpo.cli.verbs import main
from mindgrpo.data.examples import Example, RowForm, parse_key_map
from mindgrpo.data.prompts import PromptForm, PromptSet
from mindgrpo.data.sources import open_examples
from mindgrpo.data.supervised import SupervisedRowForm
from mindgrpo.data.tokenizer import load_tokenizer
from mindgrpo.errors import UserError

Row = dict[str, Any]
ASKED = [{"role": "system", "content": "S"}, {"role": "user", "content": "q?"}]
TALK = [*ASKED, {"role": "assistant", "content": "1"}]
OTHER = [{"role": "user", "content": "r?"}]
NAN = float("nan")


def example(row: Row, *pairs: str, dataset_type: str | None = None) -> Example:
    return RowForm(dataset_type, parse_key_map(pairs)).example(row, "rows row 3")


@each_row(
    ("row", "asked", "read_from"),
    [
        ({"question": "q?", "prompt": ASKED}, ASKED, "prompts are 'prompt', not 'question'"),
        ({"question": "q?", "messages": ASKED}, ASKED, "prompts are 'messages', not 'question'"),
        ({"prompt": "q?", "messages": ASKED}, ASKED, "prompts are 'messages', not 'prompt'"),
        ({"question": ASKED, "prompt": "q?"}, ASKED, "prompts are 'question', not 'prompt'"),
        ({"prompt": ASKED, "messages": TALK}, ASKED, "prompts are 'prompt', not 'messages'"),
        ({"question": "q?", "messages": TALK}, "q?", "prompts are 'question', not 'messages'"),
        ({"question": "q?", "prompt": "q?"}, "q?", "prompts are 'question', not 'prompt'"),
        ({"prompt": ASKED, "messages": ASKED}, ASKED, "prompts are 'prompt', not 'messages'"),
    ],
)
def test_a_prompt_that_is_a_list_of_messages_goes_before_a_text(
    row: Row, asked: Any, read_from: str
) -> None:
    made = example({**row, "answer": "1"})
    text = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
    assert [dict(message) for message in made.messages] == text
    assert made.read_from == f"{read_from}, gold answers 'answer'"


@each_row(
    ("row", "said"),
    [
        ({"question": "q?", "prompt": "p"}, "question=question or question=prompt"),
        ({"prompt": ASKED, "messages": OTHER}, "question=prompt or question=messages"),
        (
            {"question": "q", "answer": "the sum is 4", "solution": "4"},
            "answer=answer or answer=sol",
        ),
        ({"question": "q", "answer": "4", "solution": "5"}, "answer=answer or answer=solution"),
        ({"question": "q", "answer": "7", "ground_truth": "10"}, "answer=answer or answer=ground"),
        ({"question": "q", "solution": "4", "ground_truth": "5"}, "answer=solution or answer=gro"),
    ],
)
def test_of_two_columns_that_differ_the_user_names_one(row: Row, said: str) -> None:
    with pytest.raises(UserError, match=f"rows row 3 has two columns that .* with {said}"):
        example(row)
    for pair in said.split(" or "):
        if pair in ("question=question", "question=prompt", "answer=answer", "answer=solution"):
            assert example(row, pair).messages


@each_row(
    ("row", "gold"),
    [
        ({"answer": "42", "solution": "We add 30 and 12 and get 42."}, "42"),
        ({"answer": "1/2", "solution": r"So the half, which is \boxed{\frac12}, is right."}, "1/2"),
        ({"answer": "42", "solution": r"\boxed{42}"}, "42"),
        ({"answer": "3+4\n#### 7", "solution": "7"}, "7"),
        ({"answer": "7", "ground_truth": 7}, "7"),
        ({"answer": 7, "solution": NAN, "ground_truth": None}, "7"),
    ],
)
def test_a_worked_solution_beside_its_answer_is_a_column(row: Row, gold: str) -> None:
    assert example({"question": "q", **row}).answer == gold


def test_a_question_that_is_not_the_prompt_stays_a_column() -> None:
    made = example({"question": "q?", "prompt": ASKED, "answer": "1"})
    assert made.columns == {"original_question": "q?", "messages": ASKED}
    named = example({"question": "q?", "prompt": "p", "answer": "1"}, "question=prompt")
    assert named.question == "p" and named.columns == {"original_question": "q?"}
    assert named.read_from == "prompts are 'prompt', gold answers 'answer'"


def test_the_report_of_a_run_says_which_columns_are_meant() -> None:
    rows = [{"question": "q?", "prompt": ASKED, "solution": "1"}, {"prompt": "p", "answer": "2"}]
    prompts = PromptSet(examples_of(rows), PromptForm(load_tokenizer(MODEL), 64))
    said = (
        "prompts are 'prompt', not 'question', gold answers 'solution'; prompts are 'prompt', gold"
    )
    assert said in prompts.report()


MISSING = {"absent": {}, "null": {"x": None}, "NaN": {"x": NAN}, "empty": {"x": ""}}


@each_row("spelling", MISSING)
def test_every_spelling_of_a_missing_value_is_missing(spelling: str) -> None:
    (x,) = MISSING[spelling].values() or [None]
    assert example({"question": x, "prompt": "p", "answer": "1"}).question == "p"
    assert example({"question": "q", "answer": x, "solution": "1"}).answer == "1"
    lacking = example({"question": "q", "answer": x, "level": x})
    assert lacking.answer == "" and "answer=KEY in rl_config.dataset_map_keys" in lacking.unanswered
    assert lacking.columns["level"] in (None, "")
    verl = example({"prompt": ASKED, "reward_model": {"ground_truth": x}, "answer": "1"})
    assert verl.answer == "1" and not verl.unanswered
    assert example({"prompt": "p", "gold": {"of": x}}, "answer=gold.of").unanswered
    assert example({"prompt": "p", "gold": None}, "answer=gold.of").unanswered
    with pytest.raises(UserError, match='rows row 3 has no "question" and no "answer"'):
        example({"question": x, "answer": x})
    learnt = SupervisedRowForm().example({"messages": x, "prompt": "p", "completion": "c"}, "row")
    assert [message["content"] for message in learnt.messages] == ["p", "c"]


def test_empty_fields_of_csv_and_nulls_of_tables_are_missing(tmp_path: Path) -> None:
    rows = [{"question": "q", "answer": "1"}, {"question": "r", "answer": None}]
    (tmp_path / "rows.csv").write_text("question,answer\nq,1\nr,\n")
    write_parquet(tmp_path / "rows.parquet", rows)
    write_lines(tmp_path / "rows.jsonl", *rows)
    numbers = pa.table({"question": ["q", "r"], "answer": [1.5, NAN]})
    pa.parquet.write_table(numbers, tmp_path / "nan.parquet")
    for name in ("rows.csv", "rows.parquet", "rows.jsonl", "nan.parquet"):
        first, second = open_examples(tmp_path / name)
        assert first.answer in ("1", "1.5") and not first.unanswered
        assert second.answer == "" and "answer=KEY" in second.unanswered


def check(path: Path, reward: str, *words: str) -> int:
    config = str(MODEL.parent / "grpo_config.yaml")
    given = ["check", "--config", config, "--dataset_file", str(path), *words]
    given += ["--rl_config.eval_steps", "0", "--rl_config.eval_dataset_file", "null"]
    given += ["--reward_config.verifier_weight", "null", "--verifier_function", reward]
    return main(given)


def test_a_missing_answer_is_asked_for_only_if_a_reward_asks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, odd in (("null", None), ("list", ["1"]), ("truth", True)):
        rows = [{"prompt": "p", "answer": "1"}, {"prompt": "q", "answer": odd}]
        path = write_lines(tmp_path / f"{name}.jsonl", *rows)
        assert check(path, "format_reward") == 0
        assert "gold answers 'answer'" in capsys.readouterr().out
        assert check(path, "accuracy_reward") == 2
        said = capsys.readouterr().err
        assert f"{path}:2" in said and said.count("\n") == 1


@each_row("odd", [["1", "one"], True, {"x": 1}])
def test_an_answer_that_is_neither_text_nor_number_stays_a_column(odd: Any) -> None:
    made = example({"question": "q", "answer": odd})
    assert made.columns == {"original_answer": odd}
    assert f'rows row 3: "answer" is {odd} ({type(odd).__name__})' in made.unanswered
    assert "answer= in rl_config.dataset_map_keys" in made.unanswered
    kept = example({"question": "q", "answer": odd}, "answer=")
    assert kept.columns == {"original_answer": odd} and not kept.unanswered
    assert example({"question": "q", "solution": odd}).columns == {"solution": odd}


CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
OTHER_CALL = {"type": "function", "function": {"name": "g", "arguments": {"y": "z"}}}
CALLING = [
    {"role": "user", "content": "f?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL, OTHER_CALL]},
    {"role": "tool", "content": "2"},
]
SCHEMA = {
    "name": "f",
    "parameters": {"properties": {"x": {"type": "integer", "enum": [1, None]}}, "required": ["x"]},
}
OTHER_SCHEMA = {"name": "g", "parameters": {"properties": {"y": {"type": "string"}}}}


def test_nulls_that_a_schema_adds_go_at_every_depth(tmp_path: Path) -> None:
    wanted = json.loads(json.dumps(CALLING))
    wanted[1]["content"] = ""
    path = write_parquet(tmp_path / "rows.parquet", [{"messages": CALLING, "answer": "1"}])
    arrow = write_arrow(tmp_path / "rows.arrow", [{"messages": CALLING, "answer": "1"}])
    for file in (path, arrow):
        (made,) = open_examples(file)
        assert [dict(message) for message in made.messages] == wanted
        assert made.columns["messages"] == wanted
    rows = [{"messages": [*CALLING, TALK[-1]], "tools": [SCHEMA, OTHER_SCHEMA]}]
    (learnt,) = open_examples(write_parquet(tmp_path / "tools.parquet", rows), SupervisedRowForm())
    assert [dict(message) for message in learnt.messages] == [*wanted, TALK[-1]]
    assert learnt.columns["tools"] == [SCHEMA, OTHER_SCHEMA]


def test_a_message_without_content_and_calls_is_refused() -> None:
    with pytest.raises(UserError, match='"messages" message 1 is .* a text "role" and "content"'):
        example({"messages": [{"role": "user", "content": None}]})


@each_row(
    "text", [json.dumps(ASKED), json.dumps(ASKED, indent=1), repr(ASKED), f" {repr(ASKED)}\n"]
)
def test_messages_written_as_text_are_messages(text: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    quoted = text.replace('"', '""')
    path.write_text(f'prompt,answer\n"{quoted}",1\n')
    (made,) = open_examples(path)
    assert [dict(message) for message in made.messages] == ASKED
    assert flat(made)["messages"] == ASKED
    talk = json.dumps(TALK)
    learnt = SupervisedRowForm().example({"messages": talk}, "row")
    assert [dict(message) for message in learnt.messages] == TALK


def test_a_text_that_only_looks_like_messages_is_refused_with_its_row() -> None:
    text = "[{'role': 'user', 'content': 'q?'}\n {'role': 'user', 'content': 'r?'}]"
    with pytest.raises(UserError, match='rows row 3: "prompt" looks like a list of messages, but'):
        example({"prompt": text, "answer": "1"})
    assert example({"prompt": "[{x: 1}] is JSON?", "answer": "1"}).question == "[{x: 1}] is JSON?"


@each_row(
    ("row", "said"),
    [
        (
            {"question": "q", "answer": "4", "solution": "so 4"},
            "completion=answer or completion=so",
        ),
        ({"messages": TALK, "prompt": "p", "completion": "c"}, "messages=messages or completion=c"),
        (
            {"question": "q", "prompt": "p", "completion": "c"},
            "question=question or question=prompt",
        ),
    ],
)
def test_of_two_conversations_to_learn_the_user_names_one(row: Row, said: str) -> None:
    with pytest.raises(UserError, match=f"rows row 3 has two .* with {said}"):
        SupervisedRowForm().example(row, "rows row 3")
    for pair in ("completion=solution", "messages=messages"):
        if pair.partition("=")[2] in row:
            form = SupervisedRowForm(None, parse_key_map([pair]))
            assert form.example(row, "rows row 3").messages[-1]["content"] in ("so 4", "1")
    both = {"prompt": "p", "completion": "c", "answer": "1"}
    assert SupervisedRowForm().example(both, "row").messages[-1]["content"] == "c"


def test_the_row_is_named_for_which_a_template_fails(tmp_path: Path) -> None:
    template = tmp_path / "strict.jinja"
    template.write_text(
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    tokenizer = load_tokenizer(MODEL).with_template(str(template))
    rows = [{"question": "q", "answer": "1"}] * 2
    rows += [{"messages": [{"role": "tool", "content": "x"}], "answer": "1"}]
    path = write_lines(tmp_path / "rows.jsonl", *rows)
    for overflow in ("error", "left"):
        with pytest.raises(UserError, match=f"^{path}:3: the chat template .* cannot render"):
            PromptSet(open_examples(path), PromptForm(tokenizer, 64, overflow))
