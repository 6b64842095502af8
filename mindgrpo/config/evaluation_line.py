"""The command line of `eval`: short flags and dotted overrides as a configuration's words, and what is only its own.

Refuses flags that neither know.
"""

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
OWN = ("--step", "--output", "--completions")


@dataclass(frozen=True)
class EvaluationLine:
    """`overrides` are words for load_config. `step` chooses the noise: an evaluation of a run has its step's.

    `output` gets the figures as JSON, `completions` what was answered as JSONL; None: neither is written.
    """

    config: Path
    overrides: list[str]
    step: int = 0
    output: Path | None = None
    completions: Path | None = None


def parse_evaluation(argv: Sequence[str]) -> EvaluationLine:
    """`argv` without the verb. Raises UserError."""
    words: list[str] = []
    own: dict[str, str] = {}
    for flag, value in split_overrides(_with_switch(list(argv))):
        if flag == "--model":
            # Who names a model for all roles has it for the generator, too.
            words += [f"--actor_config.load={_model_in(value)}", "--generate_config.load="]
        elif flag == "--greedy":
            words.append(f"--rl_config.eval_modes={_modes(value)}")
        elif flag in OWN:
            own[flag] = value
        else:
            words.append(f"{SHORT.get(flag, flag)}={value}")
    config, overrides = parse_command_line(words)
    step = own.get("--step", "0")
    if not step.isdecimal():
        raise UserError(
            f"--step is '{step}', but must be a whole number from 0 up; write --step 24."
        )
    output, completions = (own.get(flag) for flag in ("--output", "--completions"))
    return EvaluationLine(
        config,
        overrides,
        int(step),
        Path(output) if output else None,
        Path(completions) if completions else None,
    )


def configuration_words(argv: Sequence[str]) -> tuple[Path, list[str]]:
    """File and overrides of a program's arguments, which may begin with the verb of an evaluation."""
    if list(argv[:1]) == [VERB]:
        line = parse_evaluation(argv[1:])
        return line.config, line.overrides
    return parse_command_line(argv)


def _with_switch(words: list[str]) -> list[str]:
    """`--greedy` may stand alone and then means true."""
    return [
        "--greedy=true" if word == "--greedy" and (not after or after.startswith("--")) else word
        for word, after in zip(words, [*words[1:], ""], strict=True)
    ]


def _modes(value: str) -> str:
    if value.lower() not in ("true", "false"):
        raise UserError(f"--greedy is '{value}', but must be true or false; write --greedy.")
    return "greedy" if value.lower() == "true" else "sampled"


def _model_in(given: str) -> str:
    """A run's folder holds its model in hf/."""
    inside = Path(given) / "hf"
    return str(inside) if inside.is_dir() and not (Path(given) / "config.json").is_file() else given
