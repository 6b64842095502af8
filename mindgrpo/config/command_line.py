"""Reads the command lines of the programs: users' flags, dotted overrides, and the flags that only `eval` has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mindgrpo.config.names import SECTIONS, aliases, nearest, suggestion
from mindgrpo.config.schema import LIVE
from mindgrpo.config.supervised import is_of_supervised
from mindgrpo.errors import UserError, error_of, whole_number
from mindgrpo.settings.section import kinds

CONFIG = "--config"
FLAGS: dict[str, str] = {
    "--model_name": "rl_config.model_name",
    "--dataset_file": "rl_config.dataset_file",
    "--resume_training": "rl_config.resume_training",
    "--tokenizer_type": "rl_config.tokenizer_type",
    "--tokenizer_dir": "rl_config.tokenizer_dir",
    "--actor_checkpoint_path": "actor_config.load",
    "--ref_checkpoint_path": "ref_config.load",
    "--generate_checkpoint_path": "generate_config.load",
    "--verifier_function": "reward_config.verifier_function",
    "--verifier_weight": "reward_config.verifier_weight",
    "--tensorboard": "rl_config.tensorboard",
    "--tensorboard_dir": "rl_config.tensorboard_dir",
    "--tensorboard_queue_size": "rl_config.tensorboard_queue_size",
    "--save_strategy_dir": "rl_config.save_strategy_dir",
    "--save_checkpoint_dir": "actor_config.save",
    "--output_dir": "output_dir",
    "--verbose": "verbose",
}

# Of the launcher alone, which starts programs and verbs on ranks.
OF_LAUNCH = ("--ranks", "--max_restarts", "--hosts", "--host_index", "--master", "--cluster")


def split_overrides(argv: Sequence[str], switches: Sequence[str] = ()) -> list[tuple[str, str]]:
    """Returns `--flag value` and `--flag=value` as (flag, value); a switch may stand alone. Raises UserError."""
    pairs: list[tuple[str, str]] = []
    words = list(argv)
    while words:
        flag, equals, value = words.pop(0).partition("=")
        if not flag.startswith("--") or flag == "--":
            # Hydra's form, which verl's scripts have.
            theirs = aliases().remedy(flag.removeprefix("+"), "--") if equals else None
            remedy = theirs or "write --key value, and quote values that hold spaces"
            if flag.endswith((".yaml", ".yml")):
                remedy = f"write {CONFIG} {flag}"
            raise UserError(f"'{flag}' on the command line belongs to no flag; {remedy}.")
        if not equals:
            if words and not words[0].startswith("--"):
                value = words.pop(0)
            elif flag in switches or _may_be_true(FLAGS.get(flag, flag[2:])):
                value = "true"
            elif theirs := aliases().remedy(flag[2:], "--"):
                raise UserError(f"{flag} is no flag of this program; {theirs}.")
            else:
                raise UserError(f"{flag} on the command line has no value; write {flag} VALUE.")
        pairs.append((flag, value))
    return pairs


def _may_be_true(key: str) -> bool:
    return key in LIVE and bool in kinds(LIVE[key].field.annotation)


def key_of(flag: str) -> str:
    """Returns the dotted key of a flag; whether a key with dots exists is checked with the file's. Raises UserError."""
    if flag in FLAGS:
        return FLAGS[flag]
    name = flag[2:]
    if "." in name or name in SECTIONS or name in LIVE:
        return name
    if flag in OF_LAUNCH:
        raise UserError(
            f"{flag} is no flag of this program; start it with mindgrpo launch --ranks N, which takes {flag}."
        )
    near = nearest(flag, [CONFIG, *FLAGS], cutoff=0.8)
    is_near = near and not aliases().remedy(name)
    meant = f"did you mean {near}" if is_near else suggestion(name, "--")
    raise UserError(f"{flag} is no flag of this program; {meant}.")


def parse_command_line(argv: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Returns the paths behind --config, and all other arguments for load_config's `overrides`. Raises UserError."""
    files: list[Path] = []
    overrides: list[str] = []
    refused: list[str] = []
    for flag, value in split_overrides(argv):
        if flag == CONFIG:
            files.append(Path(value))
            continue
        try:
            key_of(flag)
        except UserError as error:
            refused.append(str(error))
        overrides += [flag, value] if not value.startswith("--") else [f"{flag}={value}"]
    if not files:
        refused.append("No configuration is given; add --config FILE.yaml.")
    if refused:
        raise error_of(refused)
    return files, overrides


VERB = "eval"
SHORT = {
    "--data": "--rl_config.eval_dataset_file",
    "--num_generations": "--rl_config.eval_num_generations",
    "--samples": "--rl_config.eval_samples",
}
# What a run writes all values to.
RESOLVED = "config_resolved.yaml"
MODES = {"true": "greedy", "false": "sampled"}


@dataclass(frozen=True)
class EvaluationLine:
    """`overrides` are words for load_config. `step` seeds the sampling: an evaluation during a run has its step's.

    `output` gets the metrics as JSON, `completions` the completions as JSONL; None: not written. `flags` are those that
    set another key, by the key.
    """

    files: list[Path]
    overrides: list[str]
    step: int
    output: Path | None
    completions: Path | None
    flags: Mapping[str, str]


def parse_evaluation(argv: Sequence[str]) -> EvaluationLine:
    """Parses `argv` without the verb; a model in a run's folder has the run's configuration. Raises UserError."""
    words: list[str] = []
    own_config: list[Path] = []
    flags: dict[str, str] = {}
    own = {"--step": "0", "--output": "", "--completions": ""}
    for flag, value in split_overrides(argv, switches=("--greedy",)):
        if flag in own:
            own[flag] = value
        elif flag == "--model":
            # A model for all roles is the generator's, too.
            words += [f"--actor_config.load={model_in(value)}", "--generate_config.load="]
            flags["actor_config.load"] = flag
            own_config = _configurations_of(value)
        elif flag == "--greedy":
            if value.lower() not in MODES:
                raise UserError(
                    f"--greedy is '{value}', but must be true or false; write --greedy."
                )
            words.append(f"--rl_config.eval_modes={MODES[value.lower()]}")
        else:
            words.append(f"{SHORT.get(flag, flag)}={value}")
    has_config = any(word.startswith(f"{CONFIG}=") for word in words)
    if not has_config:
        _refuse_supervised(own_config)
    files, overrides = parse_command_line(
        words if has_config else [*(f"{CONFIG}={path}" for path in own_config), *words]
    )
    step, *written = own.values()
    number = whole_number(step)
    if number is None:
        raise UserError(
            f"--step is '{step}', but must be a whole number from 0 up; write --step 24."
        )
    output, completions = (Path(name) if name else None for name in written)
    return EvaluationLine(files, overrides, number, output, completions, flags)


def configuration_words(argv: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Returns files and overrides of a program's arguments, which may begin with the verb of an evaluation."""
    if list(argv[:1]) == [VERB]:
        line = parse_evaluation(argv[1:])
        return line.files, line.overrides
    return parse_command_line(argv)


def _configurations_of(model: str) -> list[Path]:
    """Returns the file with a run's resolved configuration, where `model` is a run's folder or in it."""
    folder = Path(model).absolute()
    folders = [folder, folder.parent]
    if folder.parent.name == "checkpoints":
        folders.append(folder.parent.parent)
    paths = [one / RESOLVED for one in folders]
    return [path for path in paths if path.is_file()][:1]


def _refuse_supervised(paths: Sequence[Path]) -> None:
    """Raises UserError for a configuration that does not say how to generate, as supervised training generates none."""
    for path in paths:
        if is_of_supervised(path.read_text("utf-8", errors="replace")):
            raise UserError(
                f"--model is of supervised training, whose configuration ({path}) does not say how to generate; add "
                "--config FILE.yaml with generate_config, such as the one of the run of GRPO that is to follow."
            )


def model_in(path: str) -> str:
    """Returns the folder of a run's model, hf/, where `path` is a run's."""
    is_run = Path(path, "hf").is_dir() and not Path(path, "config.json").is_file()
    return f"{path}/hf" if is_run else path
