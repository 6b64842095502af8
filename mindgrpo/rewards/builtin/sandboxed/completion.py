"""Runs a completion's program, then answers the judge's questions about what it has defined.

Everything here may be changed by the program, which shares the process; the judge relies on nothing of it.
"""

from __future__ import annotations

from plain_data import encode, receive, send

TYPE_CHECKING = False  # importing typing would take a tenth of the process's start
if TYPE_CHECKING:
    from typing import Any


def run(code: str) -> dict[str, Any]:
    """Return the namespace after the program. Raises whatever the program raises."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(code, "completion", "exec"), namespace)  # noqa: S102
    return namespace


def answer_questions(namespace: dict[str, Any], questions: int, replies: int) -> None:
    """Answer until the judge ends. A reply repeats its question's nonce; judge.py says what else is in it."""
    while True:
        nonce, kind, *question = receive(questions)
        reply = look(namespace, *question) if kind == "look" else call(namespace, *question)
        try:
            send(replies, encode([nonce, *reply], exact=False))
        except OSError:
            return
        except BaseException:
            # Not plain, too deep, too large, or its methods raise.
            send(replies, encode([nonce, "object"]))


def look(namespace: dict[str, Any], name: str) -> list[Any]:
    if name not in namespace:
        return ["missing"]
    value = namespace[name]
    if callable(value):
        return ["object" if isinstance(value, type) else "callable"]
    return ["value", value, []]


def call(
    namespace: dict[str, Any], name: str, arguments: list[Any], keywords: dict[str, Any]
) -> list[Any]:
    try:
        result = namespace[name](*arguments, **keywords)
    except BaseException as error:
        return ["raised", type(error).__name__, str(error)]
    # A function that returns nothing works by changing its arguments.
    return ["value", result, arguments if result is None else []]
