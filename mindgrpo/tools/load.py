"""From what a user wrote for a tool to a function and its schema, made as transformers makes it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mindgrpo.errors import UserError
from mindgrpo.tools.builtin import BUILTINS
from mindgrpo.user_code import Kind, describe, import_named, nearest

TOOL = Kind("tool", "rl_config.tools")


@dataclass(frozen=True)
class Tool:
    """`text` is what the user wrote."""

    text: str
    name: str
    function: Callable[..., Any]

    def schema(self) -> dict[str, Any]:
        """The JSON schema that chat templates take in `tools`. Raises UserError."""
        # Imports transformers, which a worker need not wait for.
        from mindgrpo.data.chat_template import tool_schema

        try:
            return tool_schema(self.function)
        except Exception as error:  # of a docstring or of type hints
            raise UserError(
                f"tool {self.text!r} has no schema: {describe(error)}; give it a docstring with a line for itself and "
                "an Args: section with a line for each argument, and type hints"
            ) from error


def load_tools(texts: Sequence[str]) -> list[Tool]:
    """Imports the users' modules. Raises UserError, also for two tools of one name."""
    tools = [_load(text.strip()) for text in texts]
    names = [tool.name for tool in tools]
    for name in names:
        if names.count(name) > 1:
            raise UserError(
                f"{TOOL.key} has two tools named {name!r}; rename one of the functions."
            )
    return tools


def _load(text: str) -> Tool:
    if text in BUILTINS:
        function = BUILTINS[text]
    else:
        source, colon, name = text.rpartition(":")
        if not (colon and source and name):
            raise UserError(
                f"tool {text!r} is not built in{nearest(text, BUILTINS)}; use one of {', '.join(BUILTINS)}, "
                f"package.module:function or path/to/file.py:function in {TOOL.key}"
            )
        function = import_named(TOOL, text, source, name)
    if not inspect.isfunction(function):
        raise UserError(
            f"tool {text!r} is a {type(function).__name__}, not a function; correct {TOOL.key}"
        )
    return Tool(text, function.__name__, function)
