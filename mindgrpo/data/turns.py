"""Computes the token ids between the turns of a conversation from the chat template, without rendering turns again.

What the policy wrote is not decoded and encoded again: a turn's tokens stay as they were sampled, and those of the
template and the tools follow as a suffix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mindgrpo.data.messages import Message
from mindgrpo.data.tokenizer import Tokenizer
from mindgrpo.errors import UserError

# Stands for a turn of the policy; no template writes it.
TURN = "mindgrpo-turn"
QUESTION: Message = {"role": "user", "content": "mindgrpo-question"}


class TurnSuffix:
    """Makes the suffix of a turn that ended with one of the tokenizer's stop ids, from messages of `role`.

    Raises UserError where the template cannot be extended so.
    """

    def __init__(
        self, tokenizer: Tokenizer, tools: Sequence[Mapping[str, Any]] = (), role: str = "tool"
    ) -> None:
        self._tokenizer = tokenizer
        self._variables: dict[str, Any] = {"tools": list(tools)} if tools else {}
        plain = tokenizer.render([QUESTION], **self._variables)
        self._before = tokenizer.render([QUESTION], False, **self._variables)
        if not plain.startswith(self._before):
            raise self._error("what it opens an answer with does not come last")
        if tools and self._before == tokenizer.render([QUESTION], False):
            raise self._error("it shows no tools")
        message = {"role": role, "content": "mindgrpo-answer"}
        if role == "tool":
            message["name"] = "tool"
        self.end_id = self._checked(message)

    def ids(self, messages: Sequence[Message]) -> list[int]:
        """Encodes `messages`, from tools or the user, up to where the policy continues.

        `end_id`, which ended the turn before, is not included.
        """
        return self._after_turn(messages)[1]

    def _after_turn(self, messages: Sequence[Message]) -> tuple[str, list[int], int]:
        """Returns the text up to the turn's end, the ids after it, and the id that ends it."""
        turn: Message = {"role": "assistant", "content": TURN}
        text = self._tokenizer.render([QUESTION, turn, *messages], **self._variables)
        head, mark, rest = text.partition(TURN)
        if not mark or TURN in rest:
            raise self._error("it does not write an assistant's content once, as it is")
        ends = {i: self._tokenizer.codec.id_to_token(i) or "" for i in self._tokenizer.stop_ids}
        for end_id, end in ends.items():
            if end and rest.startswith(end):
                return head + mark + end, self._tokenizer.encode(rest.removeprefix(end)), end_id
        raise self._error(
            f"an assistant's turn does not end with one of {', '.join(ends.values())}"
        )

    def _checked(self, message: Message) -> int:
        """Returns the id that ends a turn. Checks that a conversation's ids are its beginning and the suffix."""
        beginning, suffix, end_id = self._after_turn([message])
        if not beginning.startswith(self._before):
            raise self._error("it renders a question otherwise once an answer follows")
        turn: Message = {"role": "assistant", "content": TURN}
        whole = self._tokenizer.render([QUESTION, turn, message], **self._variables)
        if message["content"] not in whole:
            raise self._error(f"it does not write messages of the role {message['role']}")
        if self._tokenizer.encode(whole) != self._tokenizer.encode(beginning) + suffix:
            raise self._error("its tokens after an answer depend on those before")
        return end_id

    def _error(self, why: str) -> UserError:
        template = self._tokenizer.template
        origin = "the chat template" if template is None else template.origin
        return UserError(
            f"{origin} cannot go on after an answer, as conversations do: {why}; set "
            "rl_config.chat_template to one that can, such as qwen_tools"
        )
