"""Turns rows of conversations into token ids for supervised training, and marks those that the model learns.

A row has `messages` that end with an answer, or `prompt` and `completion`, or `question` and `answer`, as GRPO's rows
do. The model learns what it would have to write: the assistant's turns of `messages`, and of the others the completion,
each with the token that ends it. What it would be given, it gets encoded as in a rollout: by the chat template, apart
from what it writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mindgrpo.algorithm.sample import STOPPED, Sample
from mindgrpo.data.examples import (
    ANSWER_KEYS,
    MAP_WHERE,
    Example,
    RowForm,
    is_answer,
    is_missing,
    two_columns,
)
from mindgrpo.data.image_prompts import text_of
from mindgrpo.data.messages import Message, message_of, without_nulls, written_messages
from mindgrpo.data.prompts import Fitted, PromptForm
from mindgrpo.data.row_files import Row
from mindgrpo.errors import UserError

CONVERSATION_KEYS = ("messages", "conversations")
# Beyond any token's id.
LEARNED = 1 << 30
COMPLETION_KEYS = ("completion", "response", *ANSWER_KEYS)


@dataclass(frozen=True)
class SupervisedExample(Example):
    """`messages` are a whole conversation, of which the assistant's turns from number `first_learned` on are learnt.

    The column `tools` has the schemas that the template shows.
    """

    first_learned: int = 0


@dataclass(frozen=True)
class SupervisedRowForm(RowForm):
    """How rows become conversations; the answer is the whole text, with what leads to a gold answer."""

    def keys_read(self) -> list[str] | None:
        return None

    def example(self, row: Any, where: str) -> SupervisedExample:
        """Makes a conversation of a row that stands at `where`. Raises UserError."""
        if not isinstance(row, dict):
            raise UserError(f"{where} holds a {type(row).__name__}; each row must be an object.")
        row = self.mapped(row, where)
        names = [f"{key} (empty)" if is_missing(value) else key for key, value in row.items()]
        row = {key: value for key, value in row.items() if not is_missing(value)}
        keys = (*self.question_keys, *CONVERSATION_KEYS, *COMPLETION_KEYS)
        row |= written_messages(row, keys, where)
        messages, first, read_from = self._conversation(row, where, names)
        messages, images = self.with_images(messages, row, where)
        if not any(
            m["role"] == "assistant" and text_of(m["content"]).strip() for m in messages[first:]
        ):
            raise UserError(
                f"{where} has no answer of the assistant to learn; give its conversation one, or leave the row out."
            )
        tools = row.get("tools") or []
        if not isinstance(tools, list):
            raise UserError(f'{where}: "tools" is {tools!r:.60}; it must be a list of schemas.')
        columns = {"tools": without_nulls(tools)}
        return SupervisedExample(
            messages,
            "",
            columns,
            where,
            read_from=read_from,
            images=images,
            first_learned=first,
        )

    def _conversation(
        self, row: Row, where: str, names: Sequence[str]
    ) -> tuple[tuple[Message, ...], int, str]:
        """Returns the messages, the number of those that are given, and which columns they are, of all `names`."""
        answer = self._completion_key(row, where)
        question = None if answer is None else self._question_key(row, where)
        whole = next((key for key in CONVERSATION_KEYS if isinstance(row.get(key), list)), None)
        is_pair = question not in (None, *CONVERSATION_KEYS) and answer is not None
        if whole is not None and is_pair and not {question, answer} & self.key_map.keys():
            if whole not in self.key_map:
                raise UserError(
                    f'{where} has two conversations to learn, "{whole}" and "{question}" with "{answer}"; name the '
                    f"one that is meant with {whole}={whole} or completion={answer} in {MAP_WHERE}."
                )
            is_pair = False
        if question is not None and answer is not None and is_pair:
            asked = _messages(row[question], "user", f'{where}: "{question}"')
            completion = _messages(row[answer], "assistant", f'{where}: "{answer}"')
            read_from = f"prompts are {question!r}, completions {answer!r}"
            return (*asked, *completion), len(asked), read_from
        if whole is not None:
            messages = _messages(row[whole], "user", f'{where}: "{whole}"')
            return messages, 0, f"conversations are {whole!r}"
        raise UserError(
            f'{where} has neither "messages" nor "prompt" and "completion", its keys are {", ".join(names) or "none"}; '
            "name those that hold them with prompt=KEY,completion=KEY in rl_config.dataset_map_keys."
        )

    def _completion_key(self, row: Row, where: str) -> str | None:
        keys = [key for key in COMPLETION_KEYS if key in row]
        named = [key for key in keys if key == COMPLETION_KEYS[0] or key in self.key_map]
        for other in [] if named else keys[1:]:
            if row[other] != row[keys[0]]:
                raise two_columns("the completion", COMPLETION_KEYS[0], keys[0], other, where)
        return next(iter(named or keys), None)


def _messages(value: object, role: str, where: str) -> tuple[Message, ...]:
    if isinstance(value, list) and value:
        return tuple(message_of(one, f"{where} message {i}") for i, one in enumerate(value, 1))
    if is_answer(value) and str(value).strip():
        return ({"role": role, "content": str(value)},)
    raise UserError(f"{where} is {value!r:.60}; it must be a non-empty text or a list of messages.")


@dataclass(frozen=True)
class SupervisedForm(PromptForm):
    """How a conversation becomes tokens; `max_prompt_length` is of the whole row.

    Ids of tokens that are learnt are stored with LEARNED added: see `as_sample`. `overflow` "left" and "right" cut a
    row's tokens at that end.
    """

    @property
    def length_rule(self) -> str:
        return f"rl_config.seq_length is {self.max_prompt_length}"

    def encoded(self, example: Example) -> Fitted | str:
        ids, text = self._ids(example), self.render(example)
        ids, images = self.with_images(ids, example)
        if len(ids) > self.max_prompt_length:
            return f"{len(ids)} tokens{' with images' if images else ''}"
        return Fitted(example, text, tuple(ids), images=images)

    def render(self, example: Example) -> str:
        return self._rendered(example, self.with_system(example.messages))

    def _rendered(self, example: Example, messages: Sequence[Message], opens: bool = False) -> str:
        """Renders `messages`, the first of the example's, up to where the model continues if it `opens` a turn."""
        variables = {"tools": example.columns["tools"]} if example.columns.get("tools") else {}
        return self.tokenizer.render(messages, opens, **variables)

    def fit(self, example: Example) -> Fitted | None:
        fitted = super().fit(example)
        # A row that was cut may have nothing left to learn, or to learn it from.
        return fitted if fitted is not None and _is_learnable(fitted.ids) else None

    def cut(self, example: Example) -> Fitted:
        ids, longest = self._ids(example), self.max_prompt_length
        kept = ids[-longest:] if self.overflow == "left" else ids[:longest]
        return Fitted(example, self.render(example), tuple(kept), is_cut=True)

    def _ids(self, example: Example) -> list[int]:
        ids: list[int] = []
        for text, is_learned in self._pieces(example):
            own = self.tokenizer.encode(text)
            ids += [LEARNED + i for i in own] if is_learned else own
        # A template that ends no answer leaves it to the model's own end.
        has_end = ids[-1] - LEARNED in self.tokenizer.stop_ids
        return ids if has_end else [*ids, LEARNED + self.tokenizer.eos_id]

    def _pieces(self, example: Example) -> Iterator[tuple[str, bool]]:
        """Yields the conversation's text in pieces, up to the end of its last turn that is learnt.

        Raises UserError where the template writes a turn otherwise once others follow.
        """
        if not isinstance(example, SupervisedExample):
            raise UserError(
                "rl_config.dataset_file is a MindRecord, whose rows are prompts and gold answers; give supervised "
                "training the file that it was converted from."
            )
        messages = self.with_system(example.messages)
        first = example.first_learned + len(messages) - len(example.messages)
        whole, done = self._rendered(example, messages), 0
        for number, message in enumerate(messages):
            if number < first or message["role"] != "assistant":
                continue
            before = self._rendered(example, messages[:number], opens=True)
            turn = self._rendered(example, messages[: number + 1])
            if not whole.startswith(before) or not whole.startswith(turn.rstrip()):
                raise UserError(
                    f"{example.where}: the chat template does not open turn {number + 1} with what a model is given to "
                    "continue, or writes it otherwise once others follow; end the row with that turn, or set "
                    "rl_config.chat_template to a template that does not."
                )
            yield whole[done : len(before)], False
            done = self._end_of_turn(turn, len(before))
            yield whole[len(before) : done], True

    def _end_of_turn(self, turn: str, begin: int) -> int:
        """Returns where the answer ends that begins there: behind its stop token, if the template writes one."""
        ends = (self.tokenizer.codec.id_to_token(i) or "" for i in self.tokenizer.stop_ids)
        return max(
            (at + len(end) for end in ends if end and (at := turn.rfind(end, begin)) >= 0),
            default=len(turn),
        )


def _is_learnable(ids: Sequence[int]) -> bool:
    return ids[0] < LEARNED and any(i >= LEARNED for i in ids)


def as_sample(number: int, ids: np.ndarray) -> Sample:
    """Makes sample `number` of a row's int32 ids: its prompt ends where what is learnt begins.

    The action mask is of the tokens that are learnt.
    """
    mask = ids >= LEARNED
    first, last = int(mask.argmax()), mask.size - int(mask[::-1].argmax())
    tokens = np.where(mask, ids - LEARNED, ids)
    logps = np.zeros(last - first, np.float32)
    drawn = Sample.drawn(number, tokens[:first], tokens[first:last], STOPPED, 0, logps=logps)
    return replace(drawn, action_mask=mask[first:last])
