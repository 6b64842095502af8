"""Defines an environment: the class that a user names, what it is asked, and what its methods may return."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mindgrpo.data.image_prompts import text_of
from mindgrpo.data.images import image_files
from mindgrpo.data.messages import Message, message_of
from mindgrpo.environments.packages import PACKAGES
from mindgrpo.errors import UserError
from mindgrpo.rewards.call import BadResult, as_float
from mindgrpo.user_code import CALL, Kind, describe, import_named, read_arguments
from mindgrpo.workers.protocol import CallFailure

ENVIRONMENT = Kind("environment", "rl_config.environment")
METHODS = {"reset": "row", "step": "completion"}
# Of all messages of one reset or step: no conversation has room for more.
MOST_LETTERS = 1 << 18
OPENING_ROLES = ("system", "user", "assistant", "tool")
STEP_ROLES = ("user", "tool")
STEP_CONTRACT = "(messages, reward, done)"
EXAMPLE, PARAMETERS = "gem:game:GuessTheNumber-v0-easy", "parameter=value, ..."


def load_environment(text: str) -> Callable[[], Any]:
    """Returns what makes an environment: a class or function of the user's, or of a package. Raises UserError.

    `text` is package.module:Class, path/to/file.py:Class or, of PACKAGES, kind:name, each optionally followed by
    `(argument=value, ...)`.
    """
    kind, _, name = text.strip().partition(":")
    if kind in PACKAGES and name:
        return _of_package(text, kind, name)
    call, arguments = CALL.fullmatch(text.strip()), {}
    target = text.strip()
    if call:
        target, arguments = (
            call["name"],
            read_arguments(ENVIRONMENT, call["arguments"], text),
        )
    source, colon, name = target.rpartition(":")
    if not (colon and source and name):
        raise UserError(
            f"environment {text!r} does not name a class; write package.module:Class or path/to/file.py:Class, or an "
            f"environment of {', '.join(PACKAGES)}, such as {EXAMPLE}, in {ENVIRONMENT.key}"
        )
    made = import_named(ENVIRONMENT, text, source, name)
    if not callable(made):
        raise UserError(
            f"environment {text!r} is a {type(made).__name__}, not a class or a function that makes an environment; "
            f"correct {ENVIRONMENT.key}"
        )
    if not _takes(made, 0, arguments):
        how = f"with the arguments {', '.join(arguments)}" if arguments else "without arguments"
        raise UserError(
            f"environment {text!r} cannot be made {how}; write ({PARAMETERS}) behind it in {ENVIRONMENT.key}, "
            "or give the parameters defaults"
        )
    for method, argument in METHODS.items() if isinstance(made, type) else ():
        function = vars(made).get(method) or getattr(made, method, None)
        if not callable(function):
            raise UserError(
                f"environment {text!r} has no method {method}; give it {method}(self, {argument})"
            )
        if inspect.isfunction(function) and not _takes(function, 2):
            raise UserError(
                f"environment {text!r}: {method}{inspect.signature(function)} cannot be called with one argument; make "
                f"it {method}(self, {argument})"
            )
    return partial(made, **arguments)


def _of_package(text: str, kind: str, name: str) -> Callable[[], Any]:
    """Makes the environment once, to see that it can be made; a conversation's process has a copy of it."""
    made, distribution = PACKAGES[kind]
    name, bracket, rest = name.partition("(")
    arguments = read_arguments(ENVIRONMENT, bracket + rest, text) if bracket else {}
    try:
        environment = made(name.strip(), **arguments)
    except ModuleNotFoundError as error:
        extra = kind.replace("_", "-")
        raise UserError(
            f"environment {text!r} needs the package {distribution}, and {error.name} is not installed; run "
            f"`pip install 'mindgrpo[{extra}]'` or correct {ENVIRONMENT.key}"
        ) from None
    except Exception as error:  # the package's or server's own
        raise UserError(
            f"environment {text!r} cannot be made: {describe(error)}; correct {ENVIRONMENT.key}"
        ) from error
    return lambda: environment


def _takes(function: Any, count: int, arguments: Mapping[str, Any] = MappingProxyType({})) -> bool:
    """Returns whether the function can be called with `count` positional arguments and these by name."""
    try:
        inspect.signature(function).bind(*[None] * count, **arguments)
    except TypeError:
        return False
    except ValueError:  # it is written in C
        return True
    return True


@dataclass(frozen=True)
class Opening:
    """Asks for a new environment's `reset(row)`; its random numbers are seeded with `seed` first.

    `draw` seeds the choice among several environments; it is the same whenever a run meets the row.
    """

    row: Mapping[str, Any]
    seed: str
    draw: str = ""


@dataclass(frozen=True)
class Closing:
    """Asks for the end of an environment, whose conversation has ended before it was done."""


# A text is a completion, for `step`.
Question = Opening | Closing | str


@dataclass(frozen=True)
class Observation:
    """What an environment returned; `reward` and `is_done` of a step."""

    messages: tuple[Message, ...]
    reward: float = 0.0
    is_done: bool = False

    def as_json(self) -> dict[str, Any]:
        return {"messages": list(self.messages), "reward": self.reward, "done": self.is_done}

    @classmethod
    def from_json(cls, value: Any) -> Observation:
        """Reads an Observation. Raises KeyError, TypeError or ValueError for what `as_json` did not make."""
        messages, reward, is_done = value["messages"], value["reward"], value["done"]
        for message in messages:
            content = message.get("content")
            own = content if isinstance(content, list) else [{"text": content}]
            for texts in ({**message, "content": ""}, *own):
                if not all(isinstance(text, str) for pair in texts.items() for text in pair):
                    raise TypeError(message)
            if not {"role", "content"} <= message.keys():
                raise KeyError(message)
        return cls(tuple(messages), float(reward), bool(is_done))


Result = Observation | CallFailure


def opening_of(returned: Any) -> Observation:
    """Returns the messages that `reset` returned, alone or as Gymnasium's (observation, info). Raises BadResult.

    The content of one that has images is a list of parts, those of images with a path or a data URI as `source`.
    """
    is_pair = isinstance(returned, tuple) and len(returned) == 2
    if is_pair and isinstance(returned[1], Mapping) and "role" not in returned[1]:
        returned = returned[0]
    messages = checked_messages(returned, OPENING_ROLES, may_have_images=True)
    if not messages or messages[-1]["role"] in ("system", "assistant"):
        raise BadResult("no messages that end with one of the user's")
    return Observation(messages)


def step_of(returned: object) -> Observation:
    """Returns what `step` returned, its own form or Gymnasium's five values, as an Observation. Raises BadResult."""
    if isinstance(returned, tuple) and len(returned) == 5:
        messages, reward, terminated, truncated, _ = returned
        returned = messages, reward, bool(terminated) or bool(truncated)
    if not isinstance(returned, tuple | list) or len(returned) != 3:
        raise BadResult(f"{_shown(returned)}, not {STEP_CONTRACT}")
    given_messages, reward, done = returned
    done = done.item() if callable(getattr(done, "item", None)) else done
    if not isinstance(done, bool):
        raise BadResult(f"{_shown(done)} for done, which is True or False")
    messages = checked_messages(given_messages, STEP_ROLES)
    if not messages and not done:
        raise BadResult("no messages, but is not done")
    try:
        value = 0.0 if reward is None else as_float(reward)
    except BadResult:
        raise BadResult(f"{_shown(reward)} for reward, which is a number or None") from None
    return Observation(messages, value, done)


def checked_messages(
    value: object, roles: Sequence[str], may_have_images: bool = False
) -> tuple[Message, ...]:
    """Returns messages of the user's: a text becomes one message, None becomes none. Raises BadResult."""
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if value is None:
        value = []
    if not isinstance(value, tuple | list):
        raise BadResult(f"{_shown(value)} for messages, which are a list")
    messages = tuple(_message_of(message, roles, may_have_images) for message in value)
    letters = sum(len(text_of(message["content"])) for message in messages)
    if letters > MOST_LETTERS:
        raise BadResult(f"messages of {letters} letters; {MOST_LETTERS} are the most")
    return messages


def _message_of(value: object, roles: Sequence[str], may_have_images: bool) -> Message:
    try:
        message = message_of(value, "")
        texts = {key: message[key] for key in ("role", "content", "name") if key in message}
        if not isinstance(texts.get("name", ""), str):
            raise UserError("")
    except UserError:
        sentence = f"{_shown(value)} for a message, which has role and content"
        raise BadResult(sentence) from None
    if texts["role"] not in roles:
        raise BadResult(f"a message of the role {texts['role']!r}; roles are {', '.join(roles)}")
    content = texts["content"]
    for text in (texts["role"], texts.get("name", ""), text_of(content)):
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:  # half of a surrogate pair has no tokens
            raise BadResult("a message that cannot be written as UTF-8") from None
    if isinstance(content, str):
        return texts
    if not may_have_images:
        raise BadResult("an image, which only the messages of reset can have")
    return {**texts, "content": [*map(_sent_part, content)]}


def _sent_part(part: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a part with its image as text. Raises BadResult for what is no image."""
    if part["type"] != "image":
        return part
    try:
        (image,) = image_files([part.get("source")], "its message", Path())
    except UserError as error:
        raise BadResult(str(error)) from None
    return {"type": "image", "source": image.as_text()}


def _shown(value: object) -> str:
    if isinstance(value, str | int | float | None):
        text = repr(value)
        return text if len(text) < 60 else f"{text[:60]}..."
    return f"a {type(value).__name__}"
