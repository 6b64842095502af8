"""What a user wrote for a reward: a name, its place and its arguments, without importing anything.

Refuses arguments that are not plain values.
"""

from __future__ import annotations

import ast
import difflib
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from mindgrpo.errors import UserError
from mindgrpo.rewards.builtin import BUILTINS

WHERE = "reward_config.verifier_function"
CALL = re.compile(r"(?P<name>(?:[^:]*:)?\s*[^\W\d]\w*)\s*(?P<arguments>\(.*\))", re.DOTALL)


@dataclass(frozen=True)
class Spec:
    """`source` is "" for a built-in, else a module or a .py file that holds `name`.

    `text` is what the user wrote, `arguments` what stands in brackets behind it.
    """

    text: str
    source: str
    name: str
    arguments: dict[str, Any] = field(default_factory=dict)


def parse(text: str) -> Spec:
    """`name`, `module:name` or `file.py:name`, each with `(key=value, ...)` behind it or not."""
    place, arguments = text.strip(), {}
    found = CALL.fullmatch(place)
    if found:
        place, arguments = found["name"], read_arguments(found["arguments"], text)
    if place in BUILTINS:
        return Spec(text, "", place, arguments)
    source, colon, name = place.rpartition(":")
    if not (colon and source and name):
        raise unknown_name(place)
    return Spec(text, source, name, arguments)


def read_arguments(written: str, text: str) -> dict[str, Any]:
    try:
        call = ast.parse(f"f{written}", mode="eval").body
        assert isinstance(call, ast.Call)
        if call.args:
            raise ValueError(f"{ast.unparse(call.args[0])} has no name")
        return {str(word.arg): ast.literal_eval(word.value) for word in call.keywords if word.arg}
    except (SyntaxError, ValueError, AssertionError) as error:
        raise UserError(
            f"reward function {text!r}: {written} cannot be read as arguments "
            f"({getattr(error, 'msg', None) or error}); write (name=value, ...) with plain values in {WHERE}"
        ) from None


def reference_to(given: Callable[..., Any]) -> Spec | None:
    """How another process finds what was given in code: its module and name, or None.

    None for closures, lambdas, bound methods and whatever the program itself defines.
    """
    module, name = getattr(given, "__module__", None), getattr(given, "__qualname__", "")
    if module in (None, "__main__", "builtins") or "." in name or not name.isidentifier():
        return None
    if getattr(sys.modules.get(module), name, None) is not given:
        return None
    return Spec(f"{module}:{name}", module, name)


def unknown_name(place: str) -> UserError:
    if place.endswith(".py"):
        return UserError(
            f"reward function {place!r} names a file only; write {place}:function in {WHERE}"
        )
    return UserError(
        f"reward function {place!r} is not built in{nearest(place, BUILTINS)}; use one of "
        f"{', '.join(BUILTINS)}, package.module:function or path/to/file.py:function in {WHERE}"
    )


def nearest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" (the nearest name is {close[0]!r})" if close else ""
