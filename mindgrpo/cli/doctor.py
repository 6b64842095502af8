"""Prints what this machine lacks for a run, with remedies."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from mindgrpo.errors import UserError
from mindgrpo.run.machine_checks import findings


def main(argv: Sequence[str]) -> None:
    if argv:
        raise UserError(f"doctor takes no arguments, but was given '{argv[0]}'.")
    checks = findings()
    print("\n".join(str(finding) for finding in checks))
    if any(finding.level == "error" for finding in checks):
        sys.exit(1)
