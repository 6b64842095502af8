"""Reads the command line of `eval`: short flags, dotted overrides, and flags that only it has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mindgrpo.config.command_line import parse_command_line, split_overrides
from mindgrpo.errors import UserError

VERB = "eval"
SHORT = {
    "--data": "--rl_config.eval_dataset_file",
    "--num_generations": "--rl_config.eval_num_generations",
    "--samples": "--rl_config.eval_samples",
}
MODES = {"true": "greedy", "false": "sampled"}


@dataclass(frozen=True)
class EvaluationLine:
    """`overrides` are words for load_config. `step` seeds the sampling: an evaluation during a run has its step's.

    `output` gets the figures as JSON, `completions` the completions as JSONL; None: neither is written.
    """

    config: Path
    overrides: list[str]
    step: int
    output: Path | None
    completions: Path | None


def parse_evaluation(argv: Sequence[str]) -> EvaluationLine:
    """Parses `argv` without the verb. Raises UserError."""
    words: list[str] = []
    own = {"--step": "0", "--output": "", "--completions": ""}
    for flag, value in split_overrides(argv, switches=("--greedy",)):
        if flag in own:
            own[flag] = value
        elif flag == "--model":
            # Who names a model for all roles has it for the generator, too.
            words += [f"--actor_config.load={_model_in(value)}", "--generate_config.load="]
        elif flag == "--greedy":
            if value.lower() not in MODES:
                raise UserError(
                    f"--greedy is '{value}', but must be true or false; write --greedy."
                )
            words.append(f"--rl_config.eval_modes={MODES[value.lower()]}")
        else:
            words.append(f"{SHORT.get(flag, flag)}={value}")
    config, overrides = parse_command_line(words)
    step, output, completions = own.values()
    if not step.isdecimal():
        raise UserError(
            f"--step is '{step}', but must be a whole number from 0 up; write --step 24."
        )
    return EvaluationLine(
        config,
        overrides,
        int(step),
        Path(output) if output else None,
        Path(completions) if completions else None,
    )


def configuration_words(argv: Sequence[str]) -> tuple[Path, list[str]]:
    """Returns file and overrides of a program's arguments, which may begin with the verb of an evaluation."""
    if list(argv[:1]) == [VERB]:
        line = parse_evaluation(argv[1:])
        return line.config, line.overrides
    return parse_command_line(argv)


def _model_in(path: str) -> str:
    """Returns the folder of a run's model, hf/, where `path` is a run's."""
    inside = Path(path) / "hf"
    return str(inside) if inside.is_dir() and not (Path(path) / "config.json").is_file() else path
