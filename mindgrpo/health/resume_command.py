"""The command that resumes this run, as the user would type it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

# What stands before the program on the launcher's command line, quoted for a shell.
PREFIX_VARIABLE = "MINDGRPO_LAUNCH_PREFIX"
FLAGS = ("--resume_training", "--output_dir")


def resume_command(
    argv: Sequence[str], orig_argv: Sequence[str], environment: Mapping[str, str], directory: Path
) -> str:
    """`argv` and `orig_argv` are those of sys; all flags are kept but those that say where to resume from."""
    prefix = environment.get(PREFIX_VARIABLE)
    words = list(argv if prefix else ["python", *orig_argv[1:]])
    kept: list[str] = []
    while words:
        word = words.pop(0)
        flag, equals, _ = word.partition("=")
        if flag not in FLAGS:
            kept.append(word)
        elif not equals and words and not words[0].startswith("--"):
            words.pop(0)
    command = shlex.join([*kept, "--resume_training", "--output_dir", str(directory)])
    return f"{prefix} {command}" if prefix else command
