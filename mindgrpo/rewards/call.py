"""Calls a reward: passes the arguments that it takes, checks what it returns, and names the kind of a failure.

Passes the completions first; `answers`, columns and facts by name and only if the signature accepts them.
"""

from __future__ import annotations

import copy
import inspect
import math
import re
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from inspect import Parameter
from typing import TYPE_CHECKING, Any

from mindgrpo.errors import UserError
from mindgrpo.rewards.load import WHERE, RewardFunction, Spec, resolve
from mindgrpo.rewards.verl_forms import BadResult
from mindgrpo.user_code import describe
from mindgrpo.workers.protocol import (
    BAD_RESULT,
    EXIT,
    MEMORY,
    NOT_FINITE,
    RAISED,
    REFUSED,
    TIMEOUT,
    CallFailure,
    from_message,
    to_message,
)

# Of a reward model: a conversation is longer than its tokens.
TOO_LONG = "too_long"
KINDS = (RAISED, BAD_RESULT, NOT_FINITE, TIMEOUT, EXIT, MEMORY)
IN_WORDS = {
    RAISED: "raised",
    BAD_RESULT: "returned something else",
    NOT_FINITE: "not finite",
    TIMEOUT: "timed out",
    EXIT: "ended their process",
    MEMORY: "ran out of memory",
    REFUSED: "refused",
    TOO_LONG: "too long",
}


class Score(float):
    """A reward with counts of what happened on the way, which become metrics of its function."""

    counts: Mapping[str, int]

    def __new__(cls, value: float, counts: Mapping[str, int]) -> Score:
        score = super().__new__(cls, value)
        score.counts = counts
        return score


Outcome = float | None | CallFailure


def to_json(outcome: Outcome) -> dict[str, Any]:
    message = to_message(outcome)
    return {**message, "counts": outcome.counts} if isinstance(outcome, Score) else message


def from_json(message: Mapping[str, Any]) -> Outcome:
    """Reads an outcome. Raises KeyError, TypeError or ValueError for what `to_json` did not make."""
    outcome: Outcome = from_message(message)
    if isinstance(outcome, CallFailure) or "counts" not in message:
        return outcome
    return Score(message["value"], dict(message["counts"]))


@dataclass
class RewardResult:
    """What became of a function's samples, by index.

    `together_failure` is why they could not be scored in one call; `seconds` the time until the last was scored.
    """

    values: dict[int, float | None] = field(default_factory=dict)
    failures: dict[int, CallFailure] = field(default_factory=dict)
    together_failure: CallFailure | None = None
    printed: str = ""
    printed_bytes: int = 0
    seconds: float = 0.0
    restarts: int = 0

    def record(self, index: int, outcome: Outcome) -> None:
        if isinstance(outcome, CallFailure):
            self.failures[index] = outcome
        else:
            self.values[index] = outcome

    def rest(self, indices: Sequence[int]) -> list[int]:
        """Returns those of `indices` without an outcome."""
        return [i for i in indices if i not in self.values and i not in self.failures]

    def part(self, indices: range) -> RewardResult:
        """Returns what became of the samples at `indices`, numbered from 0."""
        values = {i - indices.start: own for i, own in self.values.items() if i in indices}
        failures = {i - indices.start: own for i, own in self.failures.items() if i in indices}
        return RewardResult(values, failures)

    def fail(self, indices: Sequence[int], failure: CallFailure) -> None:
        """Gives `failure` to those of `indices` without an outcome."""
        self.failures |= dict.fromkeys(self.rest(indices), failure)

    def add(self, other: RewardResult) -> None:
        self.values |= other.values
        self.failures |= other.failures
        self.together_failure = self.together_failure or other.together_failure
        self.printed += other.printed
        self.printed_bytes += other.printed_bytes
        self.restarts += other.restarts
        self.seconds = max(self.seconds, other.seconds)


if TYPE_CHECKING:
    import asyncio

Columns = Mapping[str, Sequence[Any]]
CONTRACT = "a list with one float or None for each completion"
# Makes a built-in fill, once and before it is forked, the caches that its first call fills.
WARM_UP = r"\boxed{(x + 1)^2}", "x^2 + 2x + 1"
LARGEST = 3.4028234663852886e38  # totals are float32
COMPLETIONS, COMPLETIONS_KEY = "completions", "reward_config.completions"
# What the gold answers are called by functions written for other programs.
ANSWER_WORDS = ("answer", "solution", "ground_truth")
VARIADIC = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


@dataclass(frozen=True)
class Samples:
    """One completion, answer and value of each column a sample; `facts` are the same for all.

    `as_messages` are the completions, and prompts, that functions get which read messages; empty where all read texts.
    """

    completions: list[str]
    answers: list[str]
    columns: Columns
    facts: Mapping[str, Any] = field(default_factory=dict)
    as_messages: Columns = field(default_factory=dict)

    def __post_init__(self) -> None:
        named = [("answers", self.answers), *self.columns.items(), *self.as_messages.items()]
        wrong = [(name, len(values)) for name, values in named if len(values) != len(self)]
        assert not wrong, (len(self), wrong)

    def __len__(self) -> int:
        return len(self.completions)

    def select(self, indices: Iterable[int]) -> Samples:
        chosen = list(indices)

        def of_chosen(values: Sequence[Any]) -> list[Any]:
            return [values[i] for i in chosen]

        return Samples(
            of_chosen(self.completions),
            of_chosen(self.answers),
            {name: of_chosen(values) for name, values in self.columns.items()},
            self.facts,
            {name: of_chosen(values) for name, values in self.as_messages.items()},
        )

    def only(self, names: Sequence[str]) -> Samples:
        """Returns the samples with the columns and facts of these names only, which is less to send."""
        columns = {name: self.columns[name] for name in names if name in self.columns}
        facts = {name: self.facts[name] for name in names if name in self.facts}
        kept = (COMPLETIONS, *names)
        messages = {name: values for name, values in self.as_messages.items() if name in kept}
        return Samples(self.completions, self.answers, columns, facts, messages)


@dataclass(frozen=True)
class Signature:
    """What a reward can be given by name.

    `required` are those of `names` without a default; `others` is whether it takes names of any kind; `by_name`
    whether completions go to a parameter of that name, which need not be the first.
    """

    names: Sequence[str]
    required: Sequence[str]
    others: bool
    takes_completions: bool
    by_name: bool

    @classmethod
    def of(cls, function: RewardFunction) -> Signature:
        try:
            parameters = list(inspect.signature(function.call).parameters.values())
        except ValueError as error:  # it is written in C
            raise UserError(
                f"reward function {function.name}: {error}; wrap it in one ({WHERE})"
            ) from None
        others = any(p.kind is Parameter.VAR_KEYWORD for p in parameters)
        names = [p.name for p in parameters if p.kind not in (*VARIADIC, Parameter.POSITIONAL_ONLY)]
        # Functions that are called with names elsewhere often have the prompts first.
        by_name = COMPLETIONS in names or (others and names[:1] == ["prompts"])
        first = parameters[:1]
        bound = {*function.bound, COMPLETIONS}
        left = [p for p in parameters[0 if by_name else 1 :] if p.name not in bound]
        return cls(
            [p.name for p in left if p.name in names],
            [p.name for p in left if p.default is p.empty and p.kind not in VARIADIC],
            others,
            by_name
            or (
                bool(first) and first[0].kind not in (Parameter.KEYWORD_ONLY, Parameter.VAR_KEYWORD)
            ),
            by_name,
        )

    def accepted(self, samples: Samples) -> list[str]:
        """Returns names to pass. Facts, token ids and other words for answers go only to functions that name them."""
        offered = ["answers", *samples.columns]
        on_demand = [*samples.facts, *(w for w in ANSWER_WORDS if w not in samples.columns)]
        asked = [name for name in (*offered, *on_demand) if name in self.names]
        if not self.others:
            return asked
        return asked + [name for name in offered if name not in asked and name != "completion_ids"]

    def answers_asked(self, samples: Samples) -> list[str]:
        """Returns the parameters without a default that only a gold answer can fill."""
        words = [word for word in ("answers", *ANSWER_WORDS) if word not in samples.columns]
        return [name for name in self.required if name in words]

    def lacking(self, samples: Samples) -> list[str]:
        """Returns the parameters without a default that these samples cannot fill."""
        accepted = self.accepted(samples)
        return [name for name in self.required if name not in accepted]


class Caller:
    """Calls one function. All calls share an event loop, so that what an async function keeps open stays usable."""

    def __init__(self, function: RewardFunction) -> None:
        self.signature = Signature.of(function)
        self._function = function
        self._loop: asyncio.AbstractEventLoop | None = None

    def together(self, samples: Samples) -> list[Outcome] | CallFailure:
        """Returns the outcome of each sample of one call, or why there is none."""
        try:
            return [judged(value) for value in checked(self._call(samples), len(samples))]
        except UserError as error:
            return CallFailure(REFUSED, str(error))
        except BadResult as error:
            return CallFailure(BAD_RESULT, f"returned {error}")
        except MemoryError as error:
            return CallFailure(MEMORY, describe(error))
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # the user's own code
            return CallFailure(
                RAISED, f"{describe(error)}{hint(error, self._messages_of(samples))}"
            )

    def _messages_of(self, samples: Samples) -> Columns:
        return samples.as_messages if self._function.reads_messages else {}

    def _call(self, samples: Samples) -> Any:
        answers: dict[str, Sequence[Any]]
        answers = dict.fromkeys(("answers", *ANSWER_WORDS), samples.answers)
        messages = copy.deepcopy(dict(self._messages_of(samples)))
        offered = answers | dict(samples.columns) | messages
        # Copies: a function that changes its lists must not change them for a later call.
        named = {
            name: samples.facts[name] if name in samples.facts else list(offered[name])
            for name in self.signature.accepted(samples)
        }
        completions = list(messages.get(COMPLETIONS, samples.completions))
        if self.signature.by_name:
            returned = self._function.call(**{COMPLETIONS: completions}, **named)
        else:
            returned = self._function.call(completions, **named)
        return self._wait_for(returned) if inspect.isawaitable(returned) else returned

    def _wait_for(self, waiting: Awaitable[Any]) -> Any:
        async def wait() -> Any:
            return await waiting

        import asyncio  # takes as long to import as the rest of this room

        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        return self._loop.run_until_complete(wait())


class RewardService:
    """Serves a function in a worker process: samples that are scored in one call, an outcome in JSON each."""

    def __init__(self, function: RewardFunction) -> None:
        self.caller = Caller(function)
        self.description = asdict(self.caller.signature)

    def answer(self, content: Samples) -> list[dict[str, Any]] | CallFailure:
        outcomes = self.caller.together(content)
        if isinstance(outcomes, CallFailure):
            return outcomes
        return [to_json(outcome) for outcome in outcomes]


def load_reward(spec: Spec) -> RewardService:
    service = RewardService(resolve(spec))
    if not spec.source:
        completion, answer = WARM_UP
        service.caller.together(Samples([completion], [answer], {}))
    return service


READS_MESSAGES = re.compile("string indices must be integers|'str' object has no attribute 'get'")
READS_TEXTS = re.compile(
    "expected string|'list' object has no attribute|not \"?list|unhashable type: '(list|dict)'"
)


def hint(error: BaseException, messages: Columns) -> str:
    """Says what may be meant where a function reads completions in the other form than it gets them."""
    if not isinstance(error, TypeError | AttributeError):
        return ""
    if messages and READS_TEXTS.search(str(error)):
        return (
            ' (completions are lists of messages here, as TRL has them: read completion[0]["content"], or set '
            f"{COMPLETIONS_KEY} to text)"
        )
    if not messages and READS_MESSAGES.match(str(error)):
        return (
            f" (prompts and completions are texts here: set {COMPLETIONS_KEY} to messages, and they are lists of "
            "messages, as TRL has them)"
        )
    return ""


def checked(returned: object, num_samples: int) -> list[float | None]:
    """Returns the values, those that are not finite included. Raises BadResult."""
    # Arrays and tensors of any library turn into lists of Python's numbers so.
    as_list = getattr(returned, "tolist", None)
    if callable(as_list) and not isinstance(returned, list | tuple):
        returned = as_list()
    if not isinstance(returned, list | tuple):
        raise BadResult(f"a {type(returned).__name__}")
    if len(returned) != num_samples:
        raise BadResult(f"{len(returned)} values for {num_samples} completions")
    return [None if value is None else as_float(value) for value in returned]


def as_float(value: Any) -> float:
    if isinstance(value, Score):
        return value
    item = getattr(value, "item", None)  # a NumPy or tensor scalar
    if callable(item):
        value = item()
    if not isinstance(value, bool | int | float):
        raise BadResult(f"a list holding a {type(value).__name__}")
    try:
        return float(value)
    except OverflowError:  # an int beyond every float
        return math.inf


def judged(value: float | None) -> Outcome:
    if value is None or abs(value) <= LARGEST:
        return value
    return CallFailure(NOT_FINITE, f"returned {value}")
