"""Rows of supervised training: which of their tokens are learnt, and what is said of rows that cannot be used."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from mindgrpo.data.supervised import LEARNED, SupervisedForm, SupervisedRowForm, as_sample
from mindgrpo.data.tokenizer import load_tokenizer
from mindgrpo.errors import UserError

MODEL = Path(__file__).resolve().parent.parent / "examples" / "grpo" / "tiny_arithmetic" / "model"
TOKENIZER = load_tokenizer(MODEL)
ASK, SAY = {"role": "user", "content": "2+3?"}, {"role": "assistant", "content": "it is 5"}
TURNS = [ASK, SAY, {"role": "user", "content": "1+3?"}, {"role": "assistant", "content": "4"}]
OPENED = "<|im_start|>user\n2+3?<|im_end|>\n<|im_start|>assistant\n"
BETWEEN = "\n<|im_start|>user\n1+3?<|im_end|>\n<|im_start|>assistant\n"


def pieces(row: dict[str, Any], **form: Any) -> list[tuple[bool, str]]:
    """The row's tokens as text, in runs of those that are learnt and those that are not."""
    fitted = SupervisedForm(TOKENIZER, form.pop("longest", 128), **form).fit(
        SupervisedRowForm().example(row, "rows.jsonl line 1")
    )
    assert fitted is not None
    sample = as_sample(0, np.array(fitted.ids, np.int32))
    ids = np.concatenate([sample.prompt, sample.tokens])
    mask = np.concatenate([np.zeros(len(sample.prompt), bool), sample.action_mask])
    ends = [*np.flatnonzero(np.diff(mask)) + 1, len(ids)]
    starts = [0, *ends[:-1]]
    return [
        (bool(mask[a]), TOKENIZER.decode(ids[a:b].tolist(), skip_special_tokens=False))
        for a, b in zip(starts, ends, strict=True)
    ]


ONE_TURN = [(False, OPENED), (True, "it is 5<|im_end|>")]


@pytest.mark.parametrize(
    "row",
    [
        {"question": "2+3?", "answer": "it is 5"},
        {"prompt": "2+3?", "completion": "it is 5"},
        {"prompt": [ASK], "completion": [SAY]},
        {"messages": [ASK, SAY]},
        {
            "conversations": [
                {"from": "human", "value": "2+3?"},
                {"from": "gpt", "value": "it is 5"},
            ]
        },
    ],
)
def test_answers_are_learnt_with_the_token_that_ends_them(row: dict[str, Any]) -> None:
    assert pieces(row) == ONE_TURN


def test_the_whole_answer_is_learnt_not_what_a_reward_compares() -> None:
    row = {"question": "2+3?", "answer": "2+3=5\n#### 5"}
    assert pieces(row)[1] == (True, "2+3=5\n#### 5<|im_end|>")


def test_of_conversations_every_turn_is_learnt_and_of_prompts_none() -> None:
    every = [*ONE_TURN, (False, BETWEEN), (True, "4<|im_end|>")]
    assert pieces({"messages": TURNS}) == every
    last = [(False, OPENED + "it is 5<|im_end|>" + BETWEEN), (True, "4<|im_end|>")]
    assert pieces({"prompt": TURNS[:3], "completion": TURNS[3:]}) == last


def test_tokens_are_those_of_transformers_up_to_the_end_of_the_last_answer() -> None:
    fitted = SupervisedForm(TOKENIZER, 128).fit(
        SupervisedRowForm().example({"messages": TURNS}, "rows.jsonl line 1")
    )
    assert fitted is not None
    ids = [i % LEARNED for i in fitted.ids]
    theirs = AutoTokenizer.from_pretrained(MODEL).apply_chat_template(TURNS, return_dict=False)
    assert ids == theirs[: len(ids)] and TOKENIZER.decode(theirs[len(ids) :], False) == "\n"


def test_a_system_prompt_stands_before_rows_without_one_of_their_own() -> None:
    (_, opened), _ = pieces({"messages": [ASK, SAY]}, system_prompt="Be brief.")
    assert opened == "<|im_start|>system\nBe brief.<|im_end|>\n" + OPENED


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ([1], "holds a list; each row must be an object"),
        ({"question": "a"}, 'neither "messages" nor "prompt" and "completion", its keys are quest'),
        ({"prompt": "a", "completion": ""}, "its keys are prompt, completion .empty.; name those"),
        ({"messages": [ASK]}, "has no answer of the assistant to learn"),
        ({"prompt": TURNS, "completion": [ASK]}, "has no answer of the assistant to learn"),
    ],
)
def test_rows_without_something_to_learn_are_refused(row: Any, sentence: str) -> None:
    with pytest.raises(UserError, match=f"rows.jsonl line 7.*{sentence}"):
        SupervisedRowForm().example(row, "rows.jsonl line 7")


def test_long_rows_are_refused_dropped_or_cut() -> None:
    example = SupervisedRowForm().example({"messages": TURNS}, "rows.jsonl line 1")
    whole = SupervisedForm(TOKENIZER, 128).fit(example)
    assert whole is not None
    limit = len(whole.ids) - 1
    with pytest.raises(
        UserError, match=f"{limit + 1} tokens long and rl_config.seq_length is {limit}"
    ):
        SupervisedForm(TOKENIZER, limit).fit(example)
    assert SupervisedForm(TOKENIZER, limit, "drop").fit(example) is None
    for overflow, kept in (("left", whole.ids[1:]), ("right", whole.ids[:-1])):
        cut = SupervisedForm(TOKENIZER, limit, overflow).fit(example)
        assert cut is not None and cut.is_cut and cut.ids == kept
    # Nothing to learn is left of it.
    assert SupervisedForm(TOKENIZER, 3, "right").fit(example) is None


def test_a_template_that_writes_turns_otherwise_once_others_follow_is_refused() -> None:
    template = TOKENIZER.template
    assert template is not None
    text = template.text.replace(
        "message['content']", "(message['content'] if loop.last else '...')"
    )
    assert text != template.text
    other = replace(TOKENIZER, template=replace(template, text=text))
    example = SupervisedRowForm().example({"messages": TURNS}, "rows.jsonl line 1")
    with pytest.raises(UserError, match="rows.jsonl line 1: the chat template .* turn 2"):
        SupervisedForm(other, 128).fit(example)
