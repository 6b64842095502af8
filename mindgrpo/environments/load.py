"""From what a user wrote for an environment to its class, which has `reset(row)` and `step(completion)`."""

from __future__ import annotations

import inspect
from typing import Any

from mindgrpo.errors import UserError
from mindgrpo.user_code import Kind, import_named

ENVIRONMENT = Kind("environment", "rl_config.environment")
METHODS = {"reset": "row", "step": "completion"}


def load_environment(text: str) -> type[Any]:
    """Imports the user's module. Raises UserError."""
    source, colon, name = text.strip().rpartition(":")
    if not (colon and source and name):
        raise UserError(
            f"environment {text!r} does not name a class; write package.module:Class or path/to/file.py:Class in "
            f"{ENVIRONMENT.key}"
        )
    made = import_named(ENVIRONMENT, text, source, name)
    if not isinstance(made, type):
        raise UserError(
            f"environment {text!r} is a {type(made).__name__}, not a class; correct {ENVIRONMENT.key}"
        )
    if not _takes(made, 0):
        raise UserError(
            f"environment {text!r} cannot be made without arguments; give the parameters of its __init__ defaults"
        )
    for method, argument in METHODS.items():
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
    return made


def _takes(function: Any, count: int) -> bool:
    """Whether it can be called with so many positional arguments."""
    try:
        inspect.signature(function).bind(*[None] * count)
    except TypeError:
        return False
    except ValueError:  # it is written in C
        return True
    return True
