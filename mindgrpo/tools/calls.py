"""Tool calls in a turn's text, in the forms that models are trained on; a user may name a parser of his own.

hermes: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them (Hermes 2 Pro, Qwen 2.5 and 3).
llama3: the whole turn is `{"name": ..., "parameters": {...}}`, after `<|python_tag|>` or not (Llama 3.1 to 3.3).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mindgrpo.errors import UserError
from mindgrpo.user_code import Kind, describe, import_named

PARSER = Kind("tool parser", "rl_config.tool_parser")
MALFORMED, OVER_LIMIT = "malformed", "over_limit"
HERMES_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
PYTHON_TAG = "<|python_tag|>"


@dataclass(frozen=True)
class ToolCall:
    """`error` says why it is not run, `failure` of what kind that is; what is malformed may have no name."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    failure: str = MALFORMED


Parser = Callable[[str], list[ToolCall]]


def find_parser(name: str) -> Parser:
    """Returns the parser `hermes`, `llama3`, or a user's `module:function` or `file.py:function`.

    A parser takes a turn's text and returns [{"name": ..., "arguments": {...}}]. Raises UserError.
    """
    if name in PARSERS:
        return PARSERS[name]
    source, colon, function = name.rpartition(":")
    if not (colon and source and function):
        raise UserError(
            f"{PARSER.key} {name!r} is unknown; use one of auto, {', '.join(PARSERS)}, package.module:function or "
            "path/to/file.py:function"
        )
    return _OwnParser(name, import_named(PARSER, name, source, function))


def parser_for(template: str) -> str | None:
    """Returns the name of the parser for the calls that a chat template asks for, None where it shows none."""
    if "<tool_call>" in template:
        return "hermes"
    return "llama3" if '"parameters"' in template or PYTHON_TAG in template else None


def parse_hermes(text: str) -> list[ToolCall]:
    return [_call_in(match[1], "arguments") for match in HERMES_CALL.finditer(text)]


def parse_llama3(text: str) -> list[ToolCall]:
    own = text.strip().removeprefix(PYTHON_TAG).strip()
    return [_call_in(own, "parameters")] if own.startswith("{") else []


def _call_in(text: str, key: str) -> ToolCall:
    try:
        call = json.loads(text)
    except ValueError as error:
        return ToolCall("", error=f"the call is not JSON: {error}")
    except RecursionError:
        return ToolCall("", error="the call is nested too deeply")
    return _checked(call, key)


def _checked(call: object, key: str = "arguments") -> ToolCall:
    name = call.get("name") if isinstance(call, dict) else None
    if not isinstance(name, str) or not isinstance(call, dict):
        return ToolCall("", error='a call is an object with a "name"')
    arguments = call.get(key, {})
    if not isinstance(arguments, dict):
        return ToolCall(name, error=f'the "{key}" of a call are an object')
    return ToolCall(name, arguments)


class _OwnParser:
    """A failure of the user's function ends the run: what it would have found is not known."""

    def __init__(self, text: str, function: Callable[[str], Sequence[Any]]) -> None:
        self._text, self._function = text, function

    def __call__(self, text: str) -> list[ToolCall]:
        try:
            return [_checked(call) for call in self._function(text)]
        except Exception as error:
            raise UserError(
                f"{PARSER.what} {self._text!r} failed: {describe(error)}; correct it ({PARSER.key})"
            ) from error


PARSERS: dict[str, Parser] = {"hermes": parse_hermes, "llama3": parse_llama3}
