"""Reads what a user wrote for a reward: where it is, its name and its arguments. Imports nothing of the user's."""

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

    @property
    def is_quick(self) -> bool:
        return not self.source and BUILTINS[self.name].quick


def parse(text: str) -> Spec:
    """Read `name`, `module:name` or `file.py:name`, each with `(key=value, ...)` behind it or not."""
    target, arguments = text.strip(), {}
    call = CALL.fullmatch(target)
    if call:
        target, arguments = call["name"], read_arguments(call["arguments"], text)
    if target in BUILTINS:
        return Spec(text, "", target, arguments)
    source, colon, name = target.rpartition(":")
    if not (colon and source and name):
        raise unknown_name(target)
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


def reference_to(reward: Callable[..., Any]) -> Spec | None:
    """Return how another process finds a callable: its module and name, or None.

    None for closures, lambdas, bound methods and whatever the program itself defines.
    """
    module, name = getattr(reward, "__module__", None), getattr(reward, "__qualname__", "")
    if module in (None, "__main__", "builtins") or "." in name or not name.isidentifier():
        return None
    if getattr(sys.modules.get(module), name, None) is not reward:
        return None
    return Spec(f"{module}:{name}", module, name)


def unknown_name(target: str) -> UserError:
    if target.endswith(".py"):
        return UserError(
            f"reward function {target!r} names a file only; write {target}:function in {WHERE}"
        )
    return UserError(
        f"reward function {target!r} is not built in{nearest(target, BUILTINS)}; use one of "
        f"{', '.join(BUILTINS)}, package.module:function or path/to/file.py:function in {WHERE}"
    )


def nearest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" (the nearest name is {close[0]!r})" if close else ""
