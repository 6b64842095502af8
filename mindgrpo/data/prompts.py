"""Rendered, encoded prompts and the order they are used in.

Each example goes through the chat template once, on one rank; what every rank keeps are the token ids. Text, answer
and columns of a prompt are read again where they are asked for. The order of an epoch is a pure function of (seed,
epoch), and steps follow one another through the epochs without losing a row. A prompt that is too long is an error
unless `overflow` says otherwise, and then it is counted.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, overload

import numpy as np

from mindgrpo.data.examples import Example, Message
from mindgrpo.data.sources import ALONE, Examples, Ranks
from mindgrpo.data.tokenizer import Tokenizer
from mindgrpo.errors import UserError

# Reading every example again would take as long as reading them did.
ANSWERS_IN_FINGERPRINT = 64
OVERFLOWS = ("error", "drop", "left", "right")


@dataclass(frozen=True)
class Fitted:
    """A prompt that fits. `example` is as it is asked, which is shorter than as it stood if `is_cut`."""

    example: Example
    text: str
    ids: tuple[int, ...]
    is_cut: bool = False


@dataclass(frozen=True)
class PromptForm:
    """How a example becomes a prompt: template, system prompt, length rule.

    `system_prompt` stands before every prompt that has no system message of its own. `overflow` "left" takes away a
    conversation's oldest turns and then the start of the last message, "right" the end of the last message; both
    leave the template whole.
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

    def render(self, example: Example) -> str:
        messages = example.messages
        if self.system_prompt and messages[0]["role"] != "system":
            messages = ({"role": "system", "content": self.system_prompt}, *messages)
        return self.tokenizer.render(messages)

    def encoded(self, example: Example) -> Fitted:
        text = self.render(example)
        return Fitted(example, text, tuple(self.tokenizer.encode(text)))

    def fits(self, fitted: Fitted) -> bool:
        return len(fitted.ids) <= self.max_prompt_length

    def fit(self, example: Example, where: str) -> Fitted | None:
        """None where the prompt is dropped; raises UserError where a long one is an error."""
        whole = self.encoded(example)
        if self.fits(whole):
            return whole
        if self.overflow == "error":
            raise self.too_long(where, len(whole.ids))
        if self.overflow == "drop":
            return None
        return replace(self.cut(example, where), is_cut=True)

    def too_long(self, where: str, num_tokens: int) -> UserError:
        return UserError(
            f"{where}: the prompt is {num_tokens} tokens long and max_prompt_length is "
            f"{self.max_prompt_length}; raise max_prompt_length or set prompt_overflow to "
            "drop, left or right"
        )

    def cut(self, example: Example, where: str) -> Fitted:
        """The most of the example that fits."""
        if self.overflow == "left":
            for shorter in without_oldest_turns(example):
                fitted = self.encoded(shorter)
                if self.fits(fitted):
                    return fitted
                example = shorter
        best = self.encoded(with_question(example, ""))
        if not self.fits(best):
            raise self.too_long(f"{where} (without its question)", len(best.ids))
        question = example.question
        low, high = 0, len(question)
        while high - low > 1:
            middle = (low + high) // 2
            start = len(question) - middle if self.overflow == "left" else 0
            tried = self.encoded(with_question(example, question[start : start + middle]))
            if self.fits(tried):
                low, best = middle, tried
            else:
                high = middle
        return best


def with_question(example: Example, question: str) -> Example:
    last: Message = {**example.messages[-1], "content": question}
    return replace(example, messages=(*example.messages[:-1], last))


def without_oldest_turns(example: Example) -> Iterator[Example]:
    """Ever shorter; each starts with a message of the user's, after the system message if there is one."""
    kept = 1 if example.messages[0]["role"] == "system" else 0
    head, turns = example.messages[:kept], example.messages[kept:]
    for start in range(1, len(turns)):
        if turns[start]["role"] == "user":
            yield replace(example, messages=(*head, *turns[start:]))


class Prompt:
    """`index` counts the rows of the data set and `ids` int32 [n] are its tokens; the rest is read when asked for."""

    def __init__(self, owner: PromptSet, index: int, ids: np.ndarray) -> None:
        self._owner, self.index, self.ids = owner, index, ids

    @cached_property
    def example(self) -> Example:
        return self._owner.examples[self.index]

    @cached_property
    def text(self) -> str:
        owner = self._owner
        if self.index not in owner.cut_indices:
            return owner.form.render(self.example)
        return owner.form.cut(self.example, owner.examples.where(self.index)).text

    @property
    def question(self) -> str:
        """As the data set has it, also where the prompt is cut."""
        return self.example.question

    @property
    def answer(self) -> str:
        return self.example.answer

    @property
    def columns(self) -> dict[str, Any]:
        """Every column of the data set; None where this row lacks it."""
        return {name: self.example.columns.get(name) for name in self._owner.column_names}


@dataclass(frozen=True)
class Share:
    """What one rank made of its places: int32 ids of all kept prompts in a row, lengths [n], places [n]."""

    ids: np.ndarray
    lengths: np.ndarray
    places: np.ndarray
    cut_indices: list[int]
    column_names: list[str]
    num_dropped: int
    error: str | None


def encode_share(examples: Examples, form: PromptForm, start: int, stop: int) -> Share:
    ids, lengths, places = array("i"), array("i"), array("i")
    names: dict[str, None] = {}
    cut_indices: list[int] = []
    error = None
    try:
        for place, example in enumerate(examples.read(start, stop), start=start):
            names.update(dict.fromkeys(example.columns))
            fitted = form.fit(example, examples.where(place))
            if fitted is not None:
                cut_indices += [place] if fitted.is_cut else []
                ids.extend(fitted.ids)
                lengths.append(len(fitted.ids))
                places.append(place)
    except UserError as refused:  # told on every rank, so that none waits for this one
        error = str(refused)
    return Share(
        ids=np.array(ids, np.int32),
        lengths=np.array(lengths, np.int32),
        places=np.array(places, np.int32),
        cut_indices=cut_indices,
        column_names=list(names),
        num_dropped=stop - start - len(places),
        error=error,
    )


class PromptSet(Sequence[Prompt]):
    """All prompts of a data set. Each of `ranks` encodes its share and every one ends with the same set."""

    def __init__(self, examples: Examples, form: PromptForm, ranks: Ranks = ALONE) -> None:
        self.examples, self.form = examples, form
        shares: list[Share] = ranks.gather(
            encode_share(examples, form, *ranks.slice_of(len(examples)))
        )
        for share in shares:
            if share.error is not None:
                raise UserError(share.error)
        self.num_dropped = sum(share.num_dropped for share in shares)
        self.cut_indices = frozenset(place for share in shares for place in share.cut_indices)
        self.column_names = list(
            dict.fromkeys(name for share in shares for name in share.column_names)
        )
        self._ids = np.concatenate([share.ids for share in shares])
        self._ends = np.cumsum(np.concatenate([share.lengths for share in shares]), dtype=np.int64)
        self._places = np.concatenate([share.places for share in shares])
        if not len(self):
            raise UserError(
                f"no prompt is left of {len(examples)} rows ({self.num_dropped} were longer than "
                f"max_prompt_length {form.max_prompt_length}); give another data set or raise it"
            )

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, place: int) -> Prompt: ...
    @overload
    def __getitem__(self, place: slice) -> list[Prompt]: ...
    def __getitem__(self, place: int | slice) -> Prompt | list[Prompt]:
        if isinstance(place, slice):
            return [self[index] for index in range(*place.indices(len(self)))]
        place = range(len(self))[place]
        start = self._ends[place - 1] if place else 0
        return Prompt(self, int(self._places[place]), self._ids[start : self._ends[place]])

    @cached_property
    def fingerprint(self) -> str:
        """A digest of every prompt's tokens in the data set's order, and of some answers."""
        digest = hashlib.sha256(self._ids.tobytes())
        digest.update(self._ends.tobytes())
        for place in range(0, len(self), max(1, len(self) // ANSWERS_IN_FINGERPRINT)):
            digest.update(self[place].answer.encode() + b"\0")
        return digest.hexdigest()

    @property
    def num_cut(self) -> int:
        return len(self.cut_indices)

    @property
    def longest(self) -> int:
        return int(np.diff(self._ends, prepend=0).max())

    def report(self) -> str:
        """One line for people: what became of the rows."""
        rule = f"longer than {self.form.max_prompt_length} tokens"
        return (
            f"{len(self)} of {len(self.examples)} rows kept, {self.num_dropped} dropped and {self.num_cut} cut "
            f"({rule}); the longest prompt has {self.longest} tokens"
        )

    def order(self, seed: int, epoch: int) -> np.ndarray:
        return epoch_order(len(self), seed, epoch)

    def take(self, start: int, count: int, seed: int) -> tuple[list[Prompt], int]:
        """`count` prompts from the `start`th on, over all epochs, and the epoch of the first one."""
        size = len(self)
        positions = range(start, start + count)
        epochs = range(positions[0] // size, positions[-1] // size + 1)
        orders = {epoch: self.order(seed, epoch) for epoch in epochs}
        chosen = [orders[position // size][position % size] for position in positions]
        return [self[int(place)] for place in chosen], epochs[0]


def epoch_order(size: int, seed: int, epoch: int) -> np.ndarray:
    # One counter-based stream for each (seed, epoch): nothing to carry over, so nothing to resume.
    key = np.array([seed % 2**64, epoch], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key)).permutation(size)


def columns_of(prompts: Sequence[Prompt]) -> dict[str, list[Any]]:
    """Reward columns: those of the data set, and `question`."""
    columns: dict[str, list[Any]] = {}
    for prompt in prompts:
        for name, value in prompt.columns.items():
            columns.setdefault(name, []).append(value)
    columns["question"] = [prompt.question for prompt in prompts]
    return columns
