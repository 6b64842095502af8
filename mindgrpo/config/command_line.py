"""Reads the command line of the programs: users' flags and dotted overrides, as (key, text) pairs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mindgrpo.config.aliases import aliases
from mindgrpo.config.names import SECTIONS, nearest, suggestion
from mindgrpo.config.schema import LIVE
from mindgrpo.errors import UserError
from mindgrpo.strict_files import no_path

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
}
# These may stand without a value and then mean true.
_SWITCHES = ("rl_config.resume_training",)


def split_overrides(argv: Sequence[str], switches: Sequence[str] = ()) -> list[tuple[str, str]]:
    """Returns `--flag value` and `--flag=value` as (flag, value); a switch may stand alone. Raises UserError."""
    pairs: list[tuple[str, str]] = []
    words = list(argv)
    while words:
        flag, equals, value = words.pop(0).partition("=")
        if not flag.startswith("--") or flag == "--":
            raise UserError(
                f"'{flag}' on the command line belongs to no flag; write --key value, and quote "
                "values that hold spaces."
            )
        if not equals:
            if words and not words[0].startswith("--"):
                value = words.pop(0)
            elif flag in switches or _may_stand_alone(flag):
                value = "true"
            else:
                raise UserError(f"{flag} on the command line has no value; write {flag} VALUE.")
        pairs.append((flag, value))
    return pairs


def key_of(flag: str) -> str:
    """Returns the dotted key of a flag; whether a key with dots exists is checked with the file's. Raises UserError."""
    if flag in FLAGS:
        return FLAGS[flag]
    name = flag[2:]
    if "." in name or name in SECTIONS or name in LIVE:
        return name
    raise UserError(f"{flag} is no flag of this program; {_flag_suggestion(name)}.")


def parse_command_line(argv: Sequence[str]) -> tuple[Path, list[str]]:
    """Returns the path behind --config, and all other arguments for load_config's `overrides`. Raises UserError."""
    config: Path | None = None
    overrides: list[str] = []
    for flag, value in split_overrides(argv):
        if flag == "--config":
            reason = no_path(value)
            if reason is not None:
                raise UserError(f"--config is '{value[:60]}', but {reason}; give a YAML file.")
            config = Path(value)
            continue
        key_of(flag)
        overrides += [flag, value] if not value.startswith("--") else [f"{flag}={value}"]
    if config is None:
        raise UserError("No configuration is given; add --config FILE.yaml.")
    return config, overrides


def _may_stand_alone(flag: str) -> bool:
    key = FLAGS.get(flag, flag[2:])
    return key in _SWITCHES or (key in LIVE and LIVE[key].field.annotation is bool)


def _flag_suggestion(name: str) -> str:
    near = nearest(f"--{name}", ["--config", *FLAGS], cutoff=0.8)
    return f"did you mean {near}" if near and not aliases().remedy(name) else suggestion(name, "--")
