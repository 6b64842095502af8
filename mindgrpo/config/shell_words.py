"""Reads the words of a shell script, with the variables that it sets itself and those of the environment.

Runs nothing: what a command prints, and variables that nobody has set, stay as they are written.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping

from mindgrpo.config.python_values import calculated
from mindgrpo.errors import UserError, whole_number

_PART = re.compile(
    r"""(?P<end>[\n;&|]|\#[^\n]*)|(?P<blank>[^\S\n]+)|(?P<joined>\\\n)|'(?P<single>[^']*)'|"(?P<double>(?:\\.|[^"\\])*)"
    |\\(?P<escaped>.)|(?P<sum>\$\(\((?:[^$`]|\$\w)*?\)\)(?!\)))|(?P<variable>\$\{[^}]*\}|\$\w+)|(?P<plain>[^\s;&|'"\\$]+|\$|["'\\])""",
    re.VERBOSE | re.DOTALL,
)
_INSIDE = re.compile(r"\$\(\((?:[^$`]|\$\w)*?\)\)(?!\))|\$\{[^}]*\}|\$\w+|\\[$\"\\`]|\\\n")
_VARIABLE = re.compile(r"\$\{?(?P<name>[A-Za-z_]\w*)(?::?[-=](?P<other>[^}]*))?\}?")
_ASSIGNED = re.compile(r"(?P<name>[A-Za-z_]\w*)=(?P<value>.*)", re.DOTALL)
# They come before assignments of variables.
_DECLARING = {"export", "declare", "local", "readonly", "typeset"}


def commands(text: str, file: str) -> Iterator[list[str]]:
    """Yields the words of each command, without assignments of variables. Raises UserError for an open quote."""
    variables: dict[str, str] = {}
    words: list[str] = []
    word: str | None = None
    position = 0
    while position <= len(text):
        match = _PART.match(text, position)
        kind = match.lastgroup if match else "end"
        position = match.end() if match else position + 1
        # A comment begins a word; within one the sign is a letter.
        if match and match[0][0] == "#" and word is not None:
            kind, position = "letter", match.start() + 1
        if kind in ("end", "blank"):
            if word is not None and not _is_assignment(word, words, variables):
                words.append(word)
            word = None
        if kind == "end":
            if words and words[0] not in _DECLARING:
                yield words
            words = []
        elif kind == "letter":
            word = f"{word}#"
        elif kind not in ("blank", "joined") and match:
            if match[0] in ("'", '"'):
                line = text.count("\n", 0, match.start()) + 1
                raise UserError(f"{file} line {line}: a quote is not closed; correct that line.")
            word = (word or "") + _expanded(kind, match, variables)


def _is_assignment(word: str, before: list[str], variables: dict[str, str]) -> bool:
    """Sets a variable where a word of a command does, which stands before the command or behind export."""
    match = _ASSIGNED.fullmatch(word)
    if match is None or (before and before[0] not in _DECLARING):
        return False
    variables[match["name"]] = match["value"]
    return True


def _expanded(kind: str | None, match: re.Match[str], variables: Mapping[str, str]) -> str:
    if kind in ("single", "escaped"):
        return str(match[kind])
    if kind == "double":
        return _INSIDE.sub(lambda one: _value(one[0], variables), match["double"])
    return _value(match[0], variables)


def _value(text: str, variables: Mapping[str, str]) -> str:
    """Returns the value of a variable, a sum or an escaped letter; anything else as it is."""
    if text.startswith("$(("):
        numbers = {name: _number(value) for name, value in variables.items()}
        result = calculated(text[3:-2].replace("/", "//"), numbers)
        return text if result is None else str(result)
    if text.startswith("\\"):
        return text[1:].replace("\n", "")
    match = _VARIABLE.fullmatch(text)
    if match is None:
        return text
    value = variables.get(match["name"], os.environ.get(match["name"]))
    if not value and match["other"] is not None:
        value = _INSIDE.sub(lambda one: _value(one[0], variables), match["other"].strip("'\""))
    return text if value is None else value


def _number(text: str) -> object:
    is_number = whole_number(text.removeprefix("-")) is not None
    return int(text) if is_number else text
