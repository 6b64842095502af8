"""Rendered, encoded prompts and the order they are used in.

Each record goes through the chat template once. The order of an epoch is a pure function of
(seed, epoch), and steps follow one another through the epochs without losing a row. A prompt that
is too long is an error unless `overflow` says otherwise, and then it is counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mindgrpo.data.records import Record
from mindgrpo.data.tokenizer import Tokenizer
from mindgrpo.errors import UserError

OVERFLOWS = ("error", "drop", "left", "right")
OWN_KEYS = ("question", "answer")


@dataclass(frozen=True)
class Prompt:
    """`index` is the record's place in the data set; `columns` are its other keys."""

    index: int
    ids: tuple[int, ...]
    text: str
    question: str
    answer: str
    columns: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PromptForm:
    """How a question becomes a prompt: template, system prompt, length rule.

    `overflow` "left" and "right" cut the question at that end and leave the template whole.
    """

    tokenizer: Tokenizer
    max_prompt_length: int
    overflow: str = "error"
    system_prompt: str = ""

    def __post_init__(self) -> None:
        if self.overflow not in OVERFLOWS:
            raise UserError(
                f"prompt_overflow {self.overflow!r} is unknown; use one of {', '.join(OVERFLOWS)}"
            )
        if self.max_prompt_length < 1:
            raise UserError(
                f"max_prompt_length is {self.max_prompt_length}; it must be at least 1 token"
            )

    def render(self, question: str) -> str:
        messages = [{"role": "user", "content": question}]
        if self.system_prompt:
            messages.insert(0, {"role": "system", "content": self.system_prompt})
        return self.tokenizer.render(messages)

    def encode(self, question: str) -> tuple[str, tuple[int, ...]]:
        text = self.render(question)
        return text, tuple(self.tokenizer.encode(text))

    def fits(self, question: str, where: str) -> bool:
        """Whether the prompt is kept as it is; raises where `overflow` is "error"."""
        num_tokens = len(self.encode(question)[1])
        if num_tokens <= self.max_prompt_length:
            return True
        if self.overflow == "error":
            raise self.too_long(where, num_tokens)
        return False

    def too_long(self, where: str, num_tokens: int) -> UserError:
        return UserError(
            f"{where}: the prompt is {num_tokens} tokens long and max_prompt_length is "
            f"{self.max_prompt_length}; raise max_prompt_length or set prompt_overflow to "
            "drop, left or right"
        )

    def shorten(self, question: str, where: str) -> tuple[str, tuple[int, ...]]:
        """The most of the question that fits, found by halving."""

        def cut(num_characters: int) -> tuple[str, tuple[int, ...]]:
            start = len(question) - num_characters if self.overflow == "left" else 0
            return self.encode(question[start : start + num_characters])

        best = cut(0)
        if len(best[1]) > self.max_prompt_length:
            raise self.too_long(f"{where} (without its question)", len(best[1]))
        low, high = 0, len(question)
        while high - low > 1:
            middle = (low + high) // 2
            tried = cut(middle)
            if len(tried[1]) <= self.max_prompt_length:
                low, best = middle, tried
            else:
                high = middle
        return best


class PromptSet:
    """All prompts of a data set. `template`, if given, replaces the tokenizer's own."""

    def __init__(
        self,
        records: Sequence[Record],
        tokenizer: Tokenizer,
        max_prompt_length: int,
        overflow: str = "error",
        system_prompt: str = "",
        template: str | None = None,
    ) -> None:
        self.form = PromptForm(
            tokenizer.with_template(template), max_prompt_length, overflow, system_prompt
        )
        self.num_dropped = 0
        self.num_shortened = 0
        self.prompts: list[Prompt] = []
        for index, record in enumerate(records):
            self._add(index, record)
        if not self.prompts:
            raise UserError(
                f"no prompt is left of {len(records)} rows ({self.num_dropped} were longer than "
                f"max_prompt_length {max_prompt_length}); give another data set or raise it"
            )

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def longest(self) -> int:
        return max(len(prompt.ids) for prompt in self.prompts)

    def _add(self, index: int, record: Record) -> None:
        question = record["question"]
        where = f"row {index} of the data set"
        text, ids = self.form.encode(question)
        if len(ids) > self.form.max_prompt_length:
            if self.form.overflow == "error":
                raise self.form.too_long(where, len(ids))
            if self.form.overflow == "drop":
                self.num_dropped += 1
                return
            text, ids = self.form.shorten(question, where)
            self.num_shortened += 1
        columns = {key: value for key, value in record.items() if key not in OWN_KEYS}
        self.prompts.append(Prompt(index, ids, text, question, record["answer"], columns))

    def order(self, seed: int, epoch: int) -> np.ndarray:
        return epoch_order(len(self.prompts), seed, epoch)

    def take(self, step: int, prompts_per_step: int, seed: int) -> tuple[list[Prompt], int]:
        """The prompts of a step (from 0) and the epoch of its first one."""
        size = len(self.prompts)
        positions = range(step * prompts_per_step, (step + 1) * prompts_per_step)
        epochs = range(positions[0] // size, positions[-1] // size + 1)
        orders = {epoch: self.order(seed, epoch) for epoch in epochs}
        chosen = [orders[position // size][position % size] for position in positions]
        return [self.prompts[place] for place in chosen], epochs[0]


def epoch_order(size: int, seed: int, epoch: int) -> np.ndarray:
    # One counter-based stream for each (seed, epoch): nothing to carry over, so nothing to resume.
    key = np.array([seed % 2**64, epoch], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key)).permutation(size)


def columns_of(prompts: Sequence[Prompt]) -> dict[str, list[Any]]:
    """Reward columns: every extra key (None where a row lacks it), and `question`."""
    keys = dict.fromkeys(key for prompt in prompts for key in prompt.columns)
    columns = {key: [prompt.columns.get(key) for prompt in prompts] for key in keys}
    columns["question"] = [prompt.question for prompt in prompts]
    return columns
