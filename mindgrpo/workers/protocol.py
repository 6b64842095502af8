"""Defines what a rank asks a worker process, and how asking can fail."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

RAISED, BAD_RESULT, NOT_FINITE = "exceptions", "bad_results", "nan"
TIMEOUT, EXIT, MEMORY = "timeouts", "exits", "memory"
REFUSED = "refused"


@dataclass(frozen=True)
class CallFailure:
    """Why a call of a user's code has no result: a kind, such as TIMEOUT, and a sentence."""

    kind: str
    message: str


@dataclass(frozen=True)
class CallLimits:
    """`deadline` seconds of one call; `memory` bytes of all processes together."""

    deadline: float
    memory: int


@dataclass(frozen=True)
class Task:
    """Asks for `answer(content)` in the worker itself, or where `session` is a number in a process forked from it.

    A task that `opens` its session starts the process, one that `closes` it ends the process after the answer. In
    between, the process keeps what the user's code remembers.
    """

    content: Any
    session: int | None = None
    opens: bool = True
    closes: bool = True


class Service(Protocol):
    """The user's code as a worker has loaded it."""

    @property
    def description(self) -> Any:
        """Returns JSON that the rank gets when the code is loaded."""

    def answer(self, content: Any) -> Any:
        """Returns JSON, or a CallFailure; raises nothing that the user's code raises."""


def to_message(answer: Any) -> dict[str, Any]:
    if isinstance(answer, CallFailure):
        return {"failed": [answer.kind, answer.message]}
    return {"value": answer}


def from_message(message: Mapping[str, Any]) -> Any:
    """Reads a message. Raises KeyError, TypeError or ValueError for what `to_message` did not make."""
    if "failed" in message:
        kind, text = message["failed"]
        return CallFailure(str(kind), str(text))
    return message["value"]
