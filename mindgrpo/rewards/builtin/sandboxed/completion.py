"""Runs a completion's program, then answers the judge's questions about what it has defined.

Everything here may be changed by the program, which shares the process; the judge relies on nothing of it.
"""

from __future__ import annotations

from plain_data import NotPlain, decode, encode, receive, send

TYPE_CHECKING = False  # importing typing would take a tenth of the process's start
if TYPE_CHECKING:
    from typing import Any


def run(code: str) -> dict[str, Any]:
    """Return the namespace after the program. Raises whatever the program raises."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(code, "completion", "exec"), namespace)  # noqa: S102
    return namespace


def answer_questions(namespace: dict[str, Any], questions: int, replies: int) -> None:
    """Answer until the judge ends. A reply repeats its question's nonce."""
    while True:
        nonce, *question = receive(questions)
        try:
            send(replies, [nonce, *answer(namespace, question)])
        except OSError:
            return
        except BaseException as error:
            # What the function returned could be too deep, too large or worse to be sent.
            send(replies, [nonce, "object", str(error)])


def answer(namespace: dict[str, Any], question: list[Any]) -> list[Any]:
    """For ["look", name] and ["call", name, arguments, keywords]; see judge.py for the replies."""
    kind, name, *given = question
    if name not in namespace:
        return ["missing"]
    value = namespace[name]
    if kind == "look":
        return describe(value)
    arguments, keywords = decode(given[0]), decode(given[1])
    try:
        result = value(*arguments, **keywords)
    except BaseException as error:
        return ["raised", type(error).__name__, str(error)]
    # A function that returns nothing works by changing its arguments.
    changed = [encode(argument, exact=False) for argument in arguments] if result is None else []
    return ["value", encode(result, exact=False), changed]


def describe(value: Any) -> list[Any]:
    if isinstance(value, type):
        return ["object", "class"]
    try:
        return ["value", encode(value, exact=False), []]
    except NotPlain as error:
        return ["callable"] if callable(value) else ["object", str(error)]
