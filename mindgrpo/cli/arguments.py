"""Parses command lines with plain flags: argparse that raises UserError."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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


class Arguments(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see {self.prog} --help.")
