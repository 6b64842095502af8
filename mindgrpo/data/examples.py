"""Makes examples from rows: the messages of a prompt, its gold answer, and columns for rewards.

`dataset_type` says where the question and the gold answer are, a key map renames other keys. A row without a question
is an error, one without a gold answer only where a reward asks for it, which the rows do not know. null, NaN and an
empty text are no question and no answer. Where two columns could be meant, a prompt that is a list of messages is;
otherwise the user is asked. No column is lost: one whose name is taken becomes original_NAME.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mindgrpo.data.image_prompts import IMAGE_COLUMNS, image_column, text_of, with_images
from mindgrpo.data.images import ImageFile
from mindgrpo.data.messages import Message, is_answered, messages_of, written_messages
from mindgrpo.data.row_files import Row
from mindgrpo.errors import UserError

GOLD_MARK = "####"
DATASET_TYPES = ("gsm8k", "openr1math", "plain")
# Of these it is known that `answer`, beside any `solution`, is the gold one.
KNOWN_ANSWERS = ("gsm8k", "openr1math")
# The worked solution that the gold answer was taken from, where it differs.
WORKED_COLUMN = "full_answer"
# Rewards get the completions and the gold answers under these names.
RESERVED = ("completions", "answers")
QUESTION_KEYS: Mapping[str | None, tuple[str, ...]] = {
    "openr1math": ("problem", "question", "prompt")
}
DEFAULT_QUESTION_KEYS = ("question", "prompt", "messages")
# Under other names than the first the gold answer stays a column, too: rewards may know it by its own name.
ANSWER_KEYS = ("answer", "solution", "ground_truth")
# Where verl's rows have the gold answer, of any type: reward_model["ground_truth"].
VERL_COLUMN, VERL_ANSWER = "reward_model", "ground_truth"
# Where other data sets keep them, for the remedy in a sentence.
LIKELY_KEYS = {
    "question": ("problem", "query", "instruction", "input", "conversations"),
    "answer": ("target", "label", "response", "output"),
}
MAP_WHERE = "rl_config.dataset_map_keys"


@dataclass(frozen=True)
class Example:
    """`messages` are the whole prompt, oldest first; the last one asks. `where` is the row's file and line.

    `unanswered` is what to do about a row that has no gold answer, if a reward asks for it; "" where it has one.
    `read_from` says which columns prompt and answer are; "" where that was settled at a conversion.
    `is_conversation` is whether the row has its prompt as messages, not as a text. `images` are those of the messages,
    in order.
    """

    messages: tuple[Message, ...]
    answer: str
    columns: Mapping[str, Any] = field(default_factory=dict)
    where: str = ""
    unanswered: str = ""
    read_from: str = ""
    is_conversation: bool = False
    images: tuple[ImageFile, ...] = ()

    @property
    def question(self) -> str:
        return text_of(self.messages[-1]["content"])

    @property
    def is_question(self) -> bool:
        """Returns whether it is one message of the user's and nothing else."""
        return len(self.messages) == 1 and set(self.messages[0]) == {"role", "content"}


def single_turn(question: str, answer: str, columns: Mapping[str, Any] | None = None) -> Example:
    """Makes an example of one message of the user's."""
    return Example(({"role": "user", "content": question},), answer, columns or {})


def gold_answer(answer: str, dataset_type: str | None = None) -> str:
    """Returns the text after the last `####` (gsm8k; by default where there is one), else the answer."""
    if dataset_type in (None, "gsm8k") and GOLD_MARK in answer:
        return answer.rpartition(GOLD_MARK)[2].strip()
    return answer.strip()


def parse_key_map(pairs: Sequence[str]) -> dict[str, str]:
    """Reads `question=problem` pairs as {"question": "problem"}. Raises UserError."""
    key_map: dict[str, str] = {}
    for pair in pairs:
        name, equals, source = (word.strip() for word in pair.partition("="))
        if not (name and equals) or (not source and name != "answer"):
            raise UserError(
                f"{pair!r} in {MAP_WHERE} maps nothing; write NAME=KEY, as in question=problem,answer=solution"
            )
        if name in key_map:
            raise UserError(f"{name} is mapped twice in {MAP_WHERE}; keep one of them")
        key_map[name] = source
    return key_map


@dataclass(frozen=True)
class RowForm:
    """How rows become examples.

    `key_map` is NAME -> key of the row, or path of keys with dots; an empty one for `answer` says that there is no
    gold answer. `columns` are those that rewards get; None means all. `keeps_answer` is whether they get the column
    `answer` as the row has it, as in TRL, and not the gold answer. `sees_images`: the columns `images` and `image`, and
    parts of messages, are images, whose relative paths start at `folder`.
    """

    dataset_type: str | None = None
    key_map: Mapping[str, str] = field(default_factory=dict)
    columns: Sequence[str] | None = None
    keeps_answer: bool = False
    sees_images: bool = False
    folder: Path = Path()

    def __post_init__(self) -> None:
        if self.dataset_type not in (None, *DATASET_TYPES):
            raise UserError(
                f"dataset_type {self.dataset_type!r} is unknown; use one of {', '.join(DATASET_TYPES)}"
            )

    @property
    def question_keys(self) -> tuple[str, ...]:
        return QUESTION_KEYS.get(self.dataset_type, DEFAULT_QUESTION_KEYS)

    def keys_read(self) -> list[str] | None:
        """Returns the row's keys that an example is made of; None where all are."""
        if self.columns is None:
            return None
        sources = [
            key for source in self.key_map.values() for key in (source, source.split(".")[0])
        ]
        own = [*self.question_keys, *ANSWER_KEYS, VERL_COLUMN, *self.image_columns, *sources]
        return list(dict.fromkeys([*own, *self.columns]))

    @property
    def image_columns(self) -> tuple[str, ...]:
        """Returns the row's keys that may hold images, which need not be JSON."""
        if not self.sees_images:
            return ()
        renamed = [self.key_map[name] for name in IMAGE_COLUMNS if name in self.key_map]
        return (*IMAGE_COLUMNS, *renamed)

    def example(self, row: Any, where: str) -> Example:
        """Makes an example of a row that stands at `where`. Raises UserError."""
        if not isinstance(row, dict):
            raise UserError(
                f'{where} holds a {type(row).__name__}; each row must be an object with "question" and "answer"'
            )
        row = self.renamed(row, where)
        row = row | written_messages(row, self.question_keys, where)
        question_key, answer_key = self._question_key(row, where), self._answer_key(row, where)
        lacking = [] if answer_key else ["answer"]
        if question_key is None:
            missing = " and no ".join(f'"{name}"' for name in (self.question_keys[0], *lacking))
            empty = "".join(f', "{key}" is empty' for key in self.question_keys if key in row)
            raise UserError(
                f"{where} has no {missing}, its keys are {', '.join(row) or 'none'}{empty}; "
                f"{remedy(('question', *lacking), row)}"
            )
        messages = messages_of(row[question_key], f'{where}: "{question_key}"')
        messages, images = self.with_images(messages, row, where)
        columns = {
            key: None if is_nan(value) else value
            for key, value in row.items()
            if key != question_key and (key != "answer" or self.keeps_answer)
        }
        if not is_missing(columns.pop("question", None)):
            columns["original_question"] = row["question"]
        is_conversation = isinstance(row[question_key], list)
        if is_conversation:
            if "messages" in columns:
                columns["original_messages"] = columns["messages"]
            columns["messages"] = [dict(message) for message in messages]
        answer = self._answer(row, answer_key, columns, where) if answer_key else ""
        unanswered = self._unanswered(row, columns, where) if lacking else ""
        if self.columns is not None:
            kept = [*self.columns, *(["messages"] if is_conversation else [])]
            kept += ["answer"] if self.keeps_answer else []
            columns = {key: value for key, value in columns.items() if key in kept}
        for name in RESERVED:
            if name in columns:
                raise UserError(
                    f"{where} has a column {name!r}, a name under which rewards get something else; rename it "
                    f"with my_{name}={name} in {MAP_WHERE} or leave it out with rl_config.dataset_columns"
                )
        read_from = self._read_from(row, question_key, answer_key)
        read = unanswered, read_from, is_conversation
        return Example(messages, answer, columns, where, *read, images)

    def with_images(
        self, messages: tuple[Message, ...], row: Row, where: str
    ) -> tuple[tuple[Message, ...], tuple[ImageFile, ...]]:
        """Returns the messages with places of images, and the images. Raises UserError."""
        if self.sees_images:
            return with_images(messages, image_column(row), where, self.folder)
        if any(not isinstance(message["content"], str) for message in messages):
            raise UserError(
                f"{where} has images in its messages, but the model in actor_config.load sees none; train a "
                "vision-language model (qwen2_5_vl), or leave the images out"
            )
        return messages, ()

    def seen(self, example: Example) -> Example:
        """Returns an example of a converted row with the images of its columns."""
        messages, images = self.with_images(example.messages, dict(example.columns), example.where)
        return replace(example, messages=messages, images=images)

    def renamed(self, row: Row, where: str) -> Row:
        """Returns the row with the keys that the map names, and verl's gold answer. Raises UserError."""
        mapped = self.mapped(row, where)
        return mapped if "answer" in self.key_map else with_verl_answer(mapped)

    def mapped(self, row: Row, where: str) -> Row:
        """Returns the row with the keys that the map names. Raises UserError."""
        if not self.key_map:
            return row
        values = {
            name: at_path(row, source, where) for name, source in self.key_map.items() if source
        }
        renamed = {
            f"original_{key}" if key in self.key_map else key: value
            for key, value in row.items()
            if key not in self.key_map.values()
        }
        return renamed | values

    def _question_key(self, row: Row, where: str) -> str | None:
        keys = [key for key in self.question_keys if not is_missing(row.get(key))]
        keys = [key for key in keys if key != "messages" or isinstance(row[key], list)]
        if len(keys) > 1:
            # A conversation that was answered is no prompt.
            keys = [key for key in keys if key != "messages" or not is_answered(row[key])]
        named = [key for key in keys if key in self.key_map]
        conversations = [key for key in keys if isinstance(row[key], list)]
        likely = named or conversations or keys
        for other in likely[1:]:
            if row[other] != row[likely[0]]:
                raise two_columns("the prompt", "question", likely[0], other, where)
        return next(iter(likely), None)

    def _answer_key(self, row: Row, where: str) -> str | None:
        if self.key_map.get("answer") == "":
            return "answer"
        golds = {
            key: gold_answer(str(row[key]), self.dataset_type)
            for key in ANSWER_KEYS
            if is_answer(row.get(key))
        }
        if "answer" in self.key_map or not is_missing(verl_answer(row)):
            return "answer" if "answer" in golds else None
        if self.dataset_type in KNOWN_ANSWERS:
            return next(iter(golds), None)
        first = next(iter(golds), "")
        for other, text in golds.items():
            # A worked solution beside its answer is none by itself.
            is_longer = len(text.split()) > len(golds[first].split())
            is_worked = golds[first] in text or (other == "solution" and is_longer)
            if not is_worked:
                raise two_columns("the gold answer", "answer", first, other, where)
        return first or None

    def _unanswered(self, row: Row, columns: dict[str, Any], where: str) -> str:
        """Says what to do about a row without a gold answer, and keeps what stands in its place."""
        odd = [key for key in ANSWER_KEYS if not (is_missing(row.get(key)) or is_answer(row[key]))]
        if not odd:
            return f"{remedy(['answer'], row)} ({where} has {', '.join(row)})"
        kept = "original_answer" if odd[0] == "answer" else odd[0]
        columns[kept] = row[odd[0]]
        return (
            f'{where}: "{odd[0]}" is {shown(row[odd[0]])}, but a gold answer is a text or a number: write it as one, '
            f"or set answer= in {MAP_WHERE} and let a reward read the column {kept}"
        )

    def _read_from(self, row: Row, question: str, answer: str | None) -> str:
        """Says which columns prompt and answer are, by the names that the data has for them."""
        text = f"prompts are {self._own_name(question)!r}"
        others = [key for key in self.question_keys if key != question and key in row]
        if others and question not in self.key_map:
            text += f", not {' or '.join(map(repr, others))}"
        if answer is None or self.key_map.get("answer") == "":
            return text
        is_verl = "answer" not in self.key_map and not is_missing(verl_answer(row))
        name = f"{VERL_COLUMN}.{VERL_ANSWER}" if is_verl else self._own_name(answer)
        return f"{text}, gold answers {name!r}"

    def _own_name(self, key: str) -> str:
        return self.key_map.get(key) or key

    def _answer(self, row: Row, key: str, columns: dict[str, Any], where: str) -> str:
        if self.key_map.get("answer") == "":
            return ""
        answer = row[key]
        text = str(answer)
        if self.dataset_type == "gsm8k" and GOLD_MARK not in text:
            raise UserError(
                f'{where}: "{key}" has no {GOLD_MARK} before its gold answer, which gsm8k asks for; correct the '
                "row or use the dataset_type plain"
            )
        gold = gold_answer(text, self.dataset_type)
        if gold != text.strip():
            columns.setdefault(WORKED_COLUMN, answer)
        return gold


def verl_answer(row: Row) -> Any:
    held = row.get(VERL_COLUMN)
    return held.get(VERL_ANSWER) if isinstance(held, Mapping) else None


def with_verl_answer(row: Row) -> Row:
    """Returns verl's rows with their gold answer as text: JSON where it is no text or number; others as they are."""
    gold = verl_answer(row)
    if is_missing(gold):
        return row
    kept = {f"original_{key}" if key == "answer" else key: value for key, value in row.items()}
    return {**kept, "answer": gold if is_answer(gold) else json.dumps(gold, ensure_ascii=False)}


def at_path(row: Row, source: str, where: str) -> Any:
    """Returns the value of a key, or of keys inside one another: reward_model.ground_truth. Raises UserError."""
    if source in row:
        return row[source]
    value: Any = row
    for key in source.split("."):
        if value is None:
            return None
        if not isinstance(value, Mapping) or key not in value:
            raise UserError(
                f"{where} has no {source!r}, its keys are {', '.join(row) or 'none'}; correct {MAP_WHERE}"
            )
        value = value[key]
    return value


def is_nan(value: object) -> bool:
    return isinstance(value, float) and math.isnan(value)


def is_missing(value: object) -> bool:
    return value is None or value == "" or is_nan(value)


def is_answer(value: object) -> bool:
    is_plain = isinstance(value, str | int | float) and not isinstance(value, bool)
    return is_plain and not is_missing(value)


def shown(value: object) -> str:
    return f"{str(value)[:60]} ({type(value).__name__})"


def two_columns(what: str, name: str, first: str, other: str, where: str) -> UserError:
    return UserError(
        f'{where} has two columns that could be {what}, "{first}" and "{other}", and they differ; name the one that is '
        f"with {name}={first} or {name}={other} in {MAP_WHERE}"
    )


def remedy(names: Sequence[str], row: Row) -> str:
    """Says how to name the keys of a row that hold what it lacks under `names`, question or answer."""
    pairs = ",".join(f"{name}={likely_key(name, row)}" for name in names)
    whose = "the one that holds it" if len(names) == 1 else "those that hold them"
    return f"name {whose} with {pairs} in {MAP_WHERE}"


def likely_key(name: str, row: Row) -> str:
    for path in LIKELY_KEYS[name]:
        outer, dot, inner = path.partition(".")
        held = row.get(outer)
        if outer in row and (not dot or (isinstance(held, Mapping) and inner in held)):
            return path
    return "KEY"
