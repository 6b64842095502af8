"""Shows the Python that would run vLLM, or installs vLLM into an environment of its own.

`engine` and `engine show` start nothing: they name the interpreter, its versions, and whether these were tried.
`engine install` makes the environment from the lock file: 1.8 GB where pip's indexes have torch's build without
accelerators, more elsewhere. An environment that is there already is left as it is.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from mindgrpo.cli.arguments import Arguments
from mindgrpo.cli.arguments import path as path_of
from mindgrpo.rollout.vllm.environment import FOLDER, KEY, find_python, read_versions, untried
from mindgrpo.rollout.vllm.install import install

INTERRUPTED = 130


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = Arguments(prog="mindgrpo engine")
    actions = parser.add_subparsers(dest="action", parser_class=Arguments)
    shown = actions.add_parser("show")
    shown.add_argument("--python", help=f"as {KEY}")
    installed = actions.add_parser("install")
    text = f"folder of the environment (default: {FOLDER} in the present one)"
    installed.add_argument("--target", type=path_of, default=Path(FOLDER), help=text)
    return parser.parse_args(list(argv) or ["show"])


def main(argv: Sequence[str]) -> None:
    flags = arguments(argv)
    if flags.action == "show":
        show(flags.python)
        return
    try:
        install(flags.target, os.environ)
    except KeyboardInterrupt:
        print("mindgrpo: interrupted; nothing was installed.", file=sys.stderr)
        sys.exit(INTERRUPTED)


def show(configured: str | None) -> None:
    """Shows the environment. Raises UserError where there is no vLLM."""
    python = find_python(configured, os.environ)
    versions = read_versions(python)
    print(f"vLLM runs with {python}")
    print(versions)
    print(untried(versions) or "These versions were tried with mindgrpo.")
