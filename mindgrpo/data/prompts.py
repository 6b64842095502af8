"""Turns examples into prompts: rendered with the chat template, encoded, and fitted to the longest length allowed.

Each example goes through the template once, on one rank; what every rank keeps are the token ids. Text, answer and
columns of a prompt are read again when they are asked for. A prompt that is too long is an error unless `overflow` says
otherwise, and then it is counted.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, overload

import numpy as np

from mindgrpo.data.examples import Example
from mindgrpo.data.image_prompts import UNNUMBERED, RunImages, SizedImage
from mindgrpo.data.images import ImageFile
from mindgrpo.data.messages import Message
from mindgrpo.data.sources import ALONE, Examples, Ranks
from mindgrpo.data.tokenizer import Tokenizer
from mindgrpo.errors import UserError, counted

# Reading every example again would take as long as reading them did.
ANSWERS_IN_FINGERPRINT = 64
OVERFLOWS = ("error", "drop", "left", "right")
ENCODED_LETTERS = 1 << 20  # whatever max_prompt_length is
LETTERS_PER_TOKEN = 64


@dataclass(frozen=True)
class Fitted:
    """A rendered prompt and its token ids. `example` is the one that was rendered: a shorter one where `is_cut`.

    Features of its `images` are UNNUMBERED in ids.
    """

    example: Example
    text: str
    ids: tuple[int, ...]
    is_cut: bool = False
    images: tuple[SizedImage, ...] = ()


@dataclass(frozen=True)
class PromptForm:
    """How an example becomes a prompt: template, system prompt, schemas of tools, length rule.

    `system_prompt` stands before every prompt that has no system message of its own. `max_prompt_length` counts
    tokens. `overflow` "left" takes away a conversation's oldest turns and then the start of the last message, "right"
    the end of the last message; both leave the template whole. `images` are those of the run, None for a model that
    sees none. Raises UserError for other words.
    """

    tokenizer: Tokenizer
    max_prompt_length: int
    overflow: str = "error"
    system_prompt: str = ""
    tools: Sequence[Mapping[str, Any]] = ()
    images: RunImages | None = None

    def __post_init__(self) -> None:
        if self.overflow not in OVERFLOWS:
            raise UserError(
                f"prompt_overflow {self.overflow!r} is unknown; use one of {', '.join(OVERFLOWS)}"
            )
        if self.max_prompt_length < 1:
            raise UserError(
                f"max_prompt_length is {self.max_prompt_length}; it must be at least 1 token"
            )

    def with_system(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        if self.system_prompt and messages[0]["role"] != "system":
            return ({"role": "system", "content": self.system_prompt}, *messages)
        return messages

    @property
    def length_rule(self) -> str:
        return f"max_prompt_length is {self.max_prompt_length}"

    def render(self, example: Example) -> str:
        messages = self.with_system(example.messages)
        variables: dict[str, Any] = {"tools": [*self.tools]} if self.tools else {}
        return self.tokenizer.render(messages, **variables)

    def encoded(self, example: Example) -> Fitted | str:
        """Returns the prompt where it fits, else how long it is.

        Text of more than LETTERS_PER_TOKEN letters a token allowed is not encoded: that takes seconds and hundreds of
        megabytes per million letters, and without memory the library ends the process.
        """
        text = self.render(example)
        if len(text) > max(ENCODED_LETTERS, LETTERS_PER_TOKEN * self.max_prompt_length):
            return f"{len(text)} letters"
        ids, images = self.with_images(self.tokenizer.encode(text), example)
        is_long = len(ids) > self.max_prompt_length
        of_images = f" ({sum(own < 0 for own in ids)} of images)" if images else ""
        if is_long:
            return f"{len(ids)} tokens{of_images}"
        return Fitted(example, text, tuple(ids), images=images)

    def with_images(
        self, ids: list[int], example: Example
    ) -> tuple[list[int], tuple[SizedImage, ...]]:
        """Returns the ids of a rendered example with places for its images' features, and the images.

        Raises UserError for an image that cannot be read, or without a place.
        """
        if self.images is None:
            return ids, ()
        sized = tuple(map(self.images.sized, example.images))
        return self.images.expanded(ids, sized, example.where), sized

    def fit(self, example: Example) -> Fitted | None:
        """Returns None where the prompt is dropped; raises UserError, with the row, where a long one is an error."""
        with naming_row(example):
            whole = self.encoded(example)
            if isinstance(whole, Fitted):
                return whole
            if self.overflow == "error" or (example.images and self.overflow != "drop"):
                raise self.too_long(example.where, whole)
            return None if self.overflow == "drop" else self.cut(example)

    def too_long(self, where: str, length: str) -> UserError:
        words = "drop, left or right"
        if "images" in length:
            words = "drop (a prompt with images is not cut), or lower rl_config.max_pixels"
        return UserError(
            f"{where}: the prompt is {length} long and {self.length_rule}; raise "
            f"{self.length_rule.partition(' ')[0]} or set prompt_overflow to {words}"
        )

    def cut(self, example: Example) -> Fitted:
        """Returns the most of the example that fits. Raises UserError where nothing does."""
        if self.overflow == "left":
            for shorter in without_oldest_turns(example):
                fitted = self.encoded(shorter)
                if isinstance(fitted, Fitted):
                    return replace(fitted, is_cut=True)
                example = shorter
        best = self.encoded(with_question(example, ""))
        if isinstance(best, str):
            raise self.too_long(f"{example.where} (without its question)", best)
        # Letters of the question: `fitting` fit, `beyond` do not.
        question, fitting, beyond = example.question, 0, len(example.question)
        while beyond - fitting > 1:
            # From below first: most of a question that is far too long is never encoded.
            letters = min((fitting + beyond) // 2, 2 * max(fitting, self.max_prompt_length))
            start = len(question) - letters if self.overflow == "left" else 0
            tried = self.encoded(with_question(example, question[start : start + letters]))
            if isinstance(tried, Fitted):
                fitting, best = letters, tried
            else:
                beyond = letters
        return replace(best, is_cut=True)


@contextmanager
def naming_row(example: Example) -> Iterator[None]:
    """Lets a UserError from inside begin with where the example's row is."""
    try:
        yield
    except UserError as error:
        if not example.where or str(error).startswith(example.where):
            raise
        raise UserError(f"{example.where}: {error}") from error


def with_question(example: Example, question: str) -> Example:
    last: Message = {**example.messages[-1], "content": question}
    return replace(example, messages=(*example.messages[:-1], last))


def without_oldest_turns(example: Example) -> Iterator[Example]:
    """Yields ever shorter ones; each starts with a message of the user's, after the system message if there is one."""
    kept = 1 if example.messages[0]["role"] == "system" else 0
    head, turns = example.messages[:kept], example.messages[kept:]
    for start in range(1, len(turns)):
        if turns[start]["role"] == "user":
            yield replace(example, messages=(*head, *turns[start:]))


class Prompt:
    """A prompt by its row's `index`, with its token `ids`, int32 [n].

    The rest is read again when asked for: `example` costs a read of the row, `text` also a rendering of the template.
    """

    def __init__(self, owner: PromptSet, index: int, ids: np.ndarray) -> None:
        self._owner, self.index, self.ids = owner, index, ids

    @cached_property
    def example(self) -> Example:
        return self._owner.examples[self.index]

    @cached_property
    def text(self) -> str:
        return self._owner.form.render(self._rendered)

    @cached_property
    def images(self) -> dict[str, ImageFile]:
        """Returns the prompt's images by their digests, of which a file's bytes and the pixel rule are part."""
        images = self._owner.form.images
        return (
            {} if images is None else {own.digest(images.rule): own for own in self.example.images}
        )

    @property
    def messages(self) -> list[dict[str, Any]]:
        """Returns what the template renders, system prompt included."""
        return [dict(message) for message in self._owner.form.with_system(self._rendered.messages)]

    @cached_property
    def _rendered(self) -> Example:
        """Returns the example, or the shorter one where the prompt is cut."""
        owner = self._owner
        is_cut = self.index in owner.cut_indices
        return owner.form.cut(self.example).example if is_cut else self.example

    @property
    def question(self) -> str:
        """Returns the last message as the data set has it, even where the prompt is cut."""
        return self.example.question

    @property
    def answer(self) -> str:
        return self.example.answer

    @property
    def columns(self) -> dict[str, Any]:
        """Returns every column of the data set, None where this row lacks it."""
        return {name: self.example.columns.get(name) for name in self._owner.column_names}

    @property
    def row(self) -> dict[str, Any]:
        """Returns what an environment begins with: the columns, `question`, `answer` and the prompt's `messages`.

        Parts of messages have their images, and `images` all of them: an absolute path or the bytes of a file each.
        """
        images = [image.path or image.data for image in self.example.images]
        waiting = iter(images)
        messages = [
            message
            if isinstance(message["content"], str)
            else {
                **message,
                "content": [_with_source(part, waiting) for part in message["content"]],
            }
            for message in map(dict, self.example.messages)
        ]
        own = {"question": self.question, "answer": self.answer, "messages": messages}
        return self.columns | own | ({"images": images} if images else {})


@dataclass(frozen=True)
class Share:
    """One rank's prompts: int32 ids of all kept ones concatenated, lengths [n] and indices [n].

    `images` are those of the prompts, in order, with the index of the row and their number in it.
    """

    ids: np.ndarray
    lengths: np.ndarray
    indices: np.ndarray
    cut_indices: list[int]
    column_names: list[str]
    unanswered: str
    read_from: list[str]
    error: str | None
    images: list[tuple[SizedImage, int, int]]


def encode_share(examples: Examples, form: PromptForm, start: int, stop: int) -> Share:
    ids, lengths, indices = array("i"), array("i"), array("i")
    names: dict[str, None] = {}
    read_from: dict[str, None] = {}
    cut_indices: list[int] = []
    images: list[tuple[SizedImage, int, int]] = []
    unanswered, error = "", None
    try:
        for index, example in enumerate(examples.read(start, stop), start=start):
            names.update(dict.fromkeys(example.columns))
            read_from[example.read_from] = None
            unanswered = unanswered or example.unanswered
            fitted = form.fit(example)
            if fitted is not None:
                cut_indices += [index] if fitted.is_cut else []
                ids.extend(fitted.ids)
                lengths.append(len(fitted.ids))
                indices.append(index)
                images += [(own, index, k) for k, own in enumerate(fitted.images)]
    except UserError as refused:  # raised on every rank, so that none waits for this one
        error = str(refused)
    return Share(
        ids=np.array(ids, np.int32),
        lengths=np.array(lengths, np.int32),
        indices=np.array(indices, np.int32),
        cut_indices=cut_indices,
        column_names=list(names),
        unanswered=unanswered,
        read_from=list(filter(None, read_from)),
        error=error,
        images=images,
    )


def _with_source(part: Mapping[str, Any], images: Iterator[Any]) -> dict[str, Any]:
    return {**part, "image": next(images)} if part["type"] == "image" else dict(part)


class PromptSet(Sequence[Prompt]):
    """All prompts of a data set. Each of `ranks` encodes its share and every one ends with the same set.

    `indices` int32 [prompts] are the numbers of their rows, of which those of dropped rows are missing.
    Raises UserError on every rank for what is wrong in one rank's share, and where no prompt is left.
    """

    def __init__(self, examples: Examples, form: PromptForm, ranks: Ranks = ALONE) -> None:
        self.examples, self.form = examples, form
        shares: list[Share] = ranks.gather(
            encode_share(examples, form, *ranks.slice_of(len(examples)))
        )
        for share in shares:
            if share.error is not None:
                raise UserError(share.error)
        self.cut_indices = frozenset(index for share in shares for index in share.cut_indices)
        self.column_names = list(
            dict.fromkeys(name for share in shares for name in share.column_names)
        )
        # What to do about the first row without a gold answer, if a reward asks for it.
        self.unanswered = next((share.unanswered for share in shares if share.unanswered), "")
        self._read_from = dict.fromkeys(text for share in shares for text in share.read_from)
        self._ids = np.concatenate([share.ids for share in shares])
        self._number_images([image for share in shares for image in share.images])
        self._ends = np.cumsum(np.concatenate([share.lengths for share in shares]), dtype=np.int64)
        self.indices = np.concatenate([share.indices for share in shares])
        self.num_dropped = len(examples) - len(self)
        if not len(self):
            raise UserError(
                f"no prompt is left of {len(examples)} rows ({self.num_dropped} were too long: {form.length_rule}); "
                "give another data set or raise it"
            )

    def _number_images(self, images: Sequence[tuple[SizedImage, int, int]]) -> None:
        """Numbers the images of all prompts and writes their features' ids; alike on every rank."""
        if self.form.images is None or not images:
            return
        run, ids = self.form.images, []
        for image, index, k in images:
            read = partial(_image_of, self.examples, index, k)
            ids.append(run.table.ids(run.number(image, read)))
        self._ids[self._ids == UNNUMBERED] = np.concatenate(ids)

    def __len__(self) -> int:
        return len(self.indices)

    @overload
    def __getitem__(self, number: int) -> Prompt: ...
    @overload
    def __getitem__(self, number: slice) -> list[Prompt]: ...
    def __getitem__(self, number: int | slice) -> Prompt | list[Prompt]:
        if isinstance(number, slice):
            return [self[each] for each in range(*number.indices(len(self)))]
        number = range(len(self))[number]
        start = self._ends[number - 1] if number else 0
        return Prompt(self, int(self.indices[number]), self._ids[start : self._ends[number]])

    @cached_property
    def fingerprint(self) -> str:
        """Returns a SHA-256 digest of every prompt's tokens in the data set's order, and of some answers and images."""
        digest = hashlib.sha256(self._ids.tobytes())
        digest.update(self._ends.tobytes())
        for prompt in self[:: max(1, len(self) // ANSWERS_IN_FINGERPRINT)]:
            digest.update(prompt.answer.encode() + b"\0")
            if self.form.images is not None:
                for image in prompt.example.images:
                    digest.update(image.digest(self.form.images.rule).encode())
        return digest.hexdigest()

    @property
    def num_cut(self) -> int:
        return len(self.cut_indices)

    @property
    def longest(self) -> int:
        """Returns the tokens of the longest prompt."""
        return int(np.diff(self._ends, prepend=0).max())

    @property
    def kept(self) -> str:
        return f"{len(self)} of {len(self.examples)} rows kept"

    def _images_text(self) -> str:
        """Says how many images the prompts have; "" for a model that sees none."""
        if self.form.images is None:
            return ""
        table = self.form.images.table
        numbers = {image.number for image in table.places(self._ids)}
        sizes = [*map(table.num_features, numbers)]
        longest = f", the longest of {max(sizes)} tokens" if sizes else ""
        return f"; {counted(len(sizes), 'image')}{longest}"

    def report(self) -> str:
        """Says in one line what became of the rows, and which of their columns are prompts and gold answers."""
        rule = f"longer than {self.form.max_prompt_length} tokens"
        read_from = "".join(f"; {text}" for text in self._read_from)
        return (
            f"{self.kept}, {self.num_dropped} dropped and {self.num_cut} cut ({rule}); the longest one has "
            f"{self.longest} tokens{self._images_text()}{read_from}"
        )


def _image_of(examples: Examples, index: int, number: int) -> ImageFile:
    return examples[index].images[number]


def columns_of(prompts: Sequence[Prompt]) -> dict[str, list[Any]]:
    """Returns the columns that rewards get, one value per prompt: those of the data set, and `question`."""
    columns: dict[str, list[Any]] = {}
    for prompt in prompts:
        for name, value in prompt.columns.items():
            columns.setdefault(name, []).append(value)
    columns["question"] = [prompt.question for prompt in prompts]
    return columns
