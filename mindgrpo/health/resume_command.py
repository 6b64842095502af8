"""The command that resumes this run, as the user would type it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

# What stands before the program on the launcher's command line, quoted for a shell.
PREFIX_VARIABLE = "MINDGRPO_LAUNCH_PREFIX"
FLAGS = ("--resume_training", "--rl_config.resume_training", "--output_dir")


def resuming(command: Sequence[str], directory: Path | str) -> tuple[str, ...]:
    """The words of `command` without those that say where to resume from, and then the run in `directory`."""
    words, kept = list(command), []
    while words:
        word = words.pop(0)
        flag, equals, _ = word.partition("=")
        if flag not in FLAGS:
            kept.append(word)
        elif not equals and words and not words[0].startswith("--"):
            words.pop(0)
    return (*kept, "--resume_training", "true", "--output_dir", str(directory))


def resume_command(
    argv: Sequence[str], orig_argv: Sequence[str], environment: Mapping[str, str], directory: Path
) -> str:
    """`argv` and `orig_argv` are those of sys: the first counts where the launcher has started this."""
    prefix = environment.get(PREFIX_VARIABLE)
    command = shlex.join(resuming(argv if prefix else ("python", *orig_argv[1:]), directory))
    return f"{prefix} {command}" if prefix else command
