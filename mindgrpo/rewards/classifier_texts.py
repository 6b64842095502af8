"""Writes a prompt and its completion as the tokens that a reward model scores: a conversation whose last turn it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mindgrpo.data.messages import Message
from mindgrpo.data.tokenizer import Tokenizer
from mindgrpo.errors import UserError

# What a template writes around an answer does not depend on the answer.
_ASKED: tuple[Message, ...] = ({"role": "user", "content": "a"},)
_ANSWER = "b"


@dataclass(frozen=True)
class Completed:
    """A sample: its prompt as `messages`, as `text` and as `prompt_ids`, and its completion.

    `turns` are the messages behind the prompt: the turns of a conversation with the answers of tools, or one turn with
    the text of the completion.
    """

    messages: Sequence[Message]
    text: str
    prompt_ids: np.ndarray
    completion: str
    completion_ids: np.ndarray
    turns: Sequence[Message]


class ClassifierTexts:
    """Renders with `tokenizer`, a reward model's, and its template; without a template, texts follow each other.

    Tokens of `policy`'s tokenizer are reused if the two tokenizers and their templates are equal; None: they never are.
    `pad_id` is that of the model's config.json: transformers scores the last token that is no padding.
    """

    def __init__(self, tokenizer: Tokenizer, policy: Tokenizer | None, pad_id: int | None) -> None:
        self.tokenizer, self._policy, self._pad_id = tokenizer, policy, pad_id

    def ids(self, sample: Completed) -> list[int]:
        """Returns the tokens of a sample. Raises UserError if the template cannot render it."""
        tokens = self._reused(sample) if self._closing is not None else None
        if tokens is None:
            tokens = self.tokenizer.encode(self._rendered(sample))
        end = len(tokens)
        while end > 1 and tokens[end - 1] == self._pad_id:
            end -= 1
        return tokens[:end]

    def _rendered(self, sample: Completed) -> str:
        if self.tokenizer.template is None:
            return sample.text + sample.completion
        messages = [*sample.messages, *sample.turns]
        return self.tokenizer.render(messages, add_generation_prompt=False)

    def _reused(self, sample: Completed) -> list[int]:
        """Returns the tokens that the policy had and wrote, with what the template puts behind a turn."""
        written = sample.completion_ids.tolist()
        assert self._closing is not None and self._policy is not None
        if written and written[-1] in self._policy.stop_ids:
            written.pop()
        return [*sample.prompt_ids.tolist(), *written, *self._closing]

    @cached_property
    def _closing(self) -> list[int] | None:
        """Returns the tokens that end a turn, [] without a template; None if the policy's tokens are others."""
        own, policy = self.tokenizer, self._policy
        if policy is None or own.codec.to_str() != policy.codec.to_str():
            return None
        if own.template is None or policy.template is None:
            return [] if own.template is policy.template else None
        if own.template.text != policy.template.text:
            return None
        try:
            begun = own.render(_ASKED, add_generation_prompt=True) + _ANSWER
            whole = own.render(
                [*_ASKED, {"role": "assistant", "content": _ANSWER}], add_generation_prompt=False
            )
        except UserError:
            return None
        # A template may write an earlier turn otherwise than it is generated, as one without its thoughts.
        return own.encode(whole.removeprefix(begun)) if whole.startswith(begun) else None
