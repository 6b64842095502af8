"""`python FOLDER run|answer|judge ORDER [QUESTIONS REPLIES]`, where the last three are open descriptors.

Limits itself to what its order allows before anything of the order runs. `run` runs a completion's program; `answer`
then answers the judge's questions about what it has defined. Everything here may be changed by the program, which
shares the process; the judge relies on nothing of it.
"""

from __future__ import annotations

import builtins
import marshal
import os
import resource
import sys
from _sitebuiltins import Quitter

from plain_data import encode, receive, send

TYPE_CHECKING = False  # importing typing would take a tenth of the process's start
if TYPE_CHECKING:
    from typing import Any


def answer_questions(namespace: dict[str, Any], questions: int, replies: int) -> None:
    """Answers until the judge ends. A reply repeats its question's nonce; judge.py says what else is in it."""
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


role, order_descriptor, *pipes = sys.argv[1], *map(int, sys.argv[2:])
with os.fdopen(order_descriptor, "rb") as file:
    order = marshal.load(file)
for limit, most in (
    (resource.RLIMIT_AS, order["memory"]),
    (resource.RLIMIT_CPU, int(order["seconds"]) + 2),
    (resource.RLIMIT_FSIZE, order["output"]),
    (resource.RLIMIT_NOFILE, 64),
    (resource.RLIMIT_CORE, 0),
):
    resource.setrlimit(limit, (most, most))
if hasattr(sys, "set_int_max_str_digits"):  # since Python 3.10.7
    sys.set_int_max_str_digits(0)
# As Python's `site` does, which would take as long as all the rest.
builtins.exit, builtins.quit = Quitter("exit", "EOF"), Quitter("quit", "EOF")
sys.argv = ["completion"]

if role == "judge":
    import judge

    verdicts = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.path[:1] = order["path"]
    judge.judge_all(order, judge.CompletionPipes(*pipes), verdicts)
    os._exit(0)

sys.path[:1] = order["path"]
namespace: dict[str, Any] = {"__name__": "__main__"}
exec(compile(order["code"], "completion", "exec"), namespace)  # noqa: S102
if role == "answer":
    answer_questions(namespace, *pipes)
