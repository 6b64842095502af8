"""Rows of any names as examples: questions, gold answers, columns, conversations, and what is refused.

Does NOT prove: that a data set's own names say what they hold.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from data_sets import questions, read_rows, write_lines, write_parquet

from mindgrpo.data.examples import RowForm, gold_answer, parse_key_map, with_verl_answer
from mindgrpo.data.sources import open_examples
from mindgrpo.errors import UserError


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "is not a line of JSON"),
        ("[1]", "holds a list"),
        (
            '{"problem": "x", "answer": "1"}',
            'no "question", its keys are problem, answer; .* question=problem in',
        ),
        (
            '{"problem": "x", "target": "1"}',
            'no "question" and no "answer", .* question=problem,answer=target in',
        ),
        (
            '{"question": "", "answer": "1"}',
            'no "question", its keys are question, answer, "question" is empty; name the one',
        ),
        ('{"question": " ", "answer": "1"}', "must be a non-empty text"),
        (
            '{"question": "x", "answer": "1", "answers": []}',
            "has a column 'answers', a name under which",
        ),
    ],
)
def test_a_bad_line_is_named_with_its_place(line: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('\ufeff{"question": "q", "answer": "1"}\n\n' + line + "\n", "utf-8")
    with pytest.raises(UserError, match=said) as caught:
        read_rows(path)
    assert f"{path}:3" in str(caught.value)


def test_gold_answers() -> None:
    assert gold_answer("2+2=4\n#### 1,004 ") == "1,004"
    assert gold_answer("4") == "4"
    assert gold_answer("a #### b", "plain") == "a #### b"


def test_dataset_types_say_where_question_and_answer_are(tmp_path: Path) -> None:
    plain = write_lines(tmp_path / "rows.jsonl", *questions(1))
    with pytest.raises(UserError, match="has no ####"):
        read_rows(plain, "gsm8k")
    with pytest.raises(UserError, match="'gsm9k' is unknown; use one of gsm8k, openr1math, plain"):
        read_rows(plain, "gsm9k")
    talk = [{"role": "user", "content": "p"}, {"role": "assistant", "content": "s"}]
    row = {"problem": "p", "answer": "#### 1", "solution": "s", "messages": talk}
    openr1 = write_lines(tmp_path / "open.jsonl", row)
    kept = {"question": "p", "answer": "#### 1", "solution": "s", "messages": talk}
    assert read_rows(openr1, "openr1math") == [kept]


VERL = {
    "data_source": "math",
    "prompt": [{"role": "system", "content": "S"}, {"role": "user", "content": "q"}],
    "reward_model": {"style": "rule", "ground_truth": "7"},
    "answer": "long",
}


def test_key_maps_rename_reach_inside_and_lose_nothing(tmp_path: Path) -> None:
    swapped = write_lines(tmp_path / "swap.jsonl", {"question": "a", "answer": "b", "x": "#### c"})
    assert read_rows(swapped, "plain", "question=answer", "answer=question") == [
        {"question": "b", "answer": "a", "x": "#### c"}
    ]
    assert read_rows(swapped, None, "answer=x") == [
        {"question": "a", "answer": "c", "original_answer": "b", "full_answer": "#### c"}
    ]
    assert read_rows(swapped, None, "answer=") == [
        {"question": "a", "answer": "", "original_answer": "b", "x": "#### c"}
    ]
    verl = write_parquet(tmp_path / "verl.parquet", [VERL])
    # verl's form is known without a map.
    for pairs in (["question=prompt", "answer=reward_model.ground_truth"], ["question=prompt"], []):
        example = open_examples(verl, RowForm(None, parse_key_map(pairs)))[0]
        assert [dict(message) for message in example.messages] == VERL["prompt"]
        assert (example.question, example.answer) == ("q", "7")
        assert example.columns == {
            "data_source": "math",
            "reward_model": VERL["reward_model"],
            "original_answer": "long",
            "messages": VERL["prompt"],
        }
    several = VERL | {"reward_model": {"ground_truth": ["7", "seven"]}}
    assert with_verl_answer(several)["answer"] == '["7", "seven"]'
    with pytest.raises(
        UserError, match="has no 'reward_model.truth', its keys are data_source, prompt"
    ):
        read_rows(verl, None, "answer=reward_model.truth")
    for pairs, said in (
        (["question"], "maps nothing"),
        (["a=b", "a=c"], "mapped twice"),
        (["x="], "maps nothing"),
    ):
        with pytest.raises(UserError, match=said):
            parse_key_map(pairs)


def talk(*pairs: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in pairs]


def test_conversations_are_prompts_as_they_stand(tmp_path: Path) -> None:
    messages = talk(("user", "a"), ("assistant", "b"), ("user", "c"))
    share_gpt = [
        {"from": "human", "value": "a"},
        {"from": "gpt", "value": "b"},
        {"from": "human", "value": "c"},
    ]
    path = write_lines(
        tmp_path / "rows.jsonl",
        {"messages": messages, "answer": "1"},
        {"messages": share_gpt, "answer": "2"},
        {"question": "q", "messages": "a text", "answer": "3"},
        {"question": messages, "messages": 5, "answer": "4"},
    )
    first, second, third, fourth = open_examples(path)
    assert [dict(message) for message in first.messages] == messages
    assert first.messages == second.messages
    assert (first.question, first.columns) == ("c", {"messages": messages})
    assert (third.question, third.columns) == ("q", {"messages": "a text"})
    assert fourth.columns == {"messages": messages, "original_messages": 5}


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], "is an empty list"),
        (
            talk(("user", "a"), ("assistant", "b")),
            "ends with the assistant message, which leaves nothing",
        ),
        (talk(("user", " ")), "ends with an empty user message"),
        ([{"role": "user"}], 'message 1 is .* a text "role" and "content"'),
        ([{"role": "user", "content": [{"type": "text"}]}], "message 1: part 1 of its"),
        (["a"], "message 1 is 'a'"),
    ],
)
def test_conversations_without_a_question_are_refused(
    messages: Any, said: str, tmp_path: Path
) -> None:
    path = write_lines(tmp_path / "rows.jsonl", {"messages": messages, "answer": "1"})
    with pytest.raises(UserError, match=said) as caught:
        read_rows(path)
    assert str(caught.value).startswith(f'{path}:1: "messages"')
