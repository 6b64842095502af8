"""Command lines of programs with plain flags: argparse whose complaints are one sentence.

Refuses to end the program itself for what the user got wrong.
"""

from __future__ import annotations

import argparse
from typing import NoReturn

from mindgrpo.errors import UserError


class Arguments(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see {self.prog} --help.")
