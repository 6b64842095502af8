"""Command lines of programs with plain flags: argparse that raises UserError."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NoReturn

from mindgrpo.errors import UserError, one_line
from mindgrpo.strict_files import no_path


def path(text: str) -> Path:
    """A flag's `type`: a path that a system can have."""
    reason = no_path(text)
    if reason is not None:
        raise argparse.ArgumentTypeError(f"{one_line(text)[:60]!r} is no path: {reason}")
    return Path(text)


class Arguments(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see {self.prog} --help.")
