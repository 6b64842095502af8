"""Parses command lines with plain flags: argparse that raises UserError."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NoReturn

from mindgrpo.errors import UserError, one_line
from mindgrpo.strict_files import at_home, no_path


def path(text: str) -> Path:
    """Converts a flag to a path that a system can have."""
    reason = no_path(text)
    if reason is not None:
        raise argparse.ArgumentTypeError(f"{one_line(text)[:60]!r} is not a path: {reason}")
    return Path(at_home(text))


@contextmanager
def naming(flags: Mapping[str, str]) -> Iterator[None]:
    """Lets a UserError from inside name flags that the user typed instead of the keys that they stand for."""
    try:
        yield
    except UserError as error:
        sentence = str(error)
        for key, flag in flags.items():
            sentence = sentence.replace(key, flag)
        raise UserError(sentence) from error


def taken(
    argv: Sequence[str], flags: Collection[str], switches: Collection[str] = ()
) -> tuple[dict[str, str], list[str]]:
    """Returns the values of `flags` (`--flag VALUE` or `--flag=VALUE`) and of `switches` (""), and all other words.

    They may stand anywhere; of one that is repeated the last counts.
    """
    values: dict[str, str] = {}
    words, others = list(argv), []
    while words:
        word = words.pop(0)
        flag, equals, value = word.partition("=")
        if word in switches:
            values[word] = ""
        elif flag in flags:
            values[flag] = value if equals or not words else words.pop(0)
        else:
            others.append(word)
    return values, others


class Arguments(argparse.ArgumentParser):
    """Parses flags; `flags_help` describes each of them."""

    @property
    def flags_help(self) -> str:
        self.usage, self.description = argparse.SUPPRESS, None
        self.formatter_class = partial(argparse.HelpFormatter, max_help_position=32)
        return self.format_help().strip()

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see {self.prog} --help.")
