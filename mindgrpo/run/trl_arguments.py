"""Translates TRL's arguments of GRPOTrainer into configuration keys: a model, and data sets in memory."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mindgrpo.backend.kernels.native.library import cache_directory, make_cache_directory
from mindgrpo.config import Config, Loaded, config_with
from mindgrpo.config.foreign import with_row_length
from mindgrpo.config.load import entries_of
from mindgrpo.config.names import suggestion
from mindgrpo.data.hub_names import hub_name
from mindgrpo.data.image_prompts import IMAGE_COLUMNS
from mindgrpo.data.images import SOURCE_KEYS, images_as_text
from mindgrpo.data.row_files import plain_row
from mindgrpo.data.sources import FOR_EVALUATION, FOR_TRAINING
from mindgrpo.errors import UserError, counted
from mindgrpo.rewards.builtin import BUILTINS
from mindgrpo.rewards.load import reference_to
from mindgrpo.run.trl_config import adapters_of, settings_of

WEIGHTS = "reward_config.verifier_weight"
Rows = Iterable[Mapping[str, Any]] | Mapping[str, Iterable[Mapping[str, Any]]]


def refuse(function: str, others: Mapping[str, object]) -> None:
    """Raises UserError for arguments that `function` does not have, and names the replacements."""
    for name in others:
        raise UserError(f"{function} takes no argument '{name}'; {suggestion(name)}.")


def with_arguments(
    config: Config | Loaded | Mapping[str, Any] | None,
    model: str | Path | None,
    train_dataset: str | Path | Rows | None,
    eval_dataset: str | Path | Rows | None,
    is_supervised: bool = False,
    environment: str | Sequence[str] | Callable[..., Any] | None = None,
    args: object = None,
    peft_config: object = None,
    has_rewards: bool = False,
    models: Mapping[int, str] = MappingProxyType({}),
    reward_weights: Sequence[float] | None = None,
) -> Config | Loaded:
    """Returns the configuration with a model and data sets of its own, for GRPO or not. Raises UserError.

    A data set is a path, or rows (of one split, or by split), which are written to a file of the user's cache that is
    named by their content: ranks and a resumed run find them there. `config` may also be a mapping, as a file has it;
    None has the defaults. `environment` is as its key has it, or a class or function that a module holds. `args` is a
    GRPOConfig, whose values win over those of `config`, and `peft_config` as `adapters_of` takes it. Reward functions
    that are given beside it take the place of `config`'s (`has_rewards`), to which `args` may have their weights. Of
    them, `models` are reward models, by their positions; `reward_weights` are those of all.
    """
    if config is not None and not isinstance(config, Config | Loaded | Mapping):
        raise UserError(
            f"config is {config!r:.60}, but must be a configuration or a mapping of its sections; write "
            "config=load_config(FILE), or model=DIRECTORY for a model."
        )
    values, notices = ({}, []) if args is None else _of_args(args, config, has_rewards)
    if models:
        values |= _of_models(models, reward_weights or values.get(WEIGHTS))
    if peft_config is not None:
        values |= adapters_of(peft_config)
    if model is not None:
        values["actor_config.load"] = str(model)
    for name, key, data, choice in (
        ("train_dataset", "rl_config.dataset_file", train_dataset, FOR_TRAINING),
        ("eval_dataset", "rl_config.eval_dataset_file", eval_dataset, FOR_EVALUATION),
    ):
        if isinstance(data, str | Path):
            values[key] = str(data)
        elif isinstance(data, Mapping):
            split = replace(choice, key=name).choose(list(data), name)
            values[key] = str(_written(name, data[split]))
        elif data is not None:
            values[key] = str(_written(name, data))
    if environment is not None:
        values["rl_config.environment"] = _named(environment)
    has_form = isinstance(config, Loaded) and config.is_supervised
    if has_form and not is_supervised:
        raise UserError(
            "config was loaded for supervised training (is_supervised=True), which leaves out what GRPO reads; load it "
            "without, or give it to SFTTrainer."
        )
    if (
        isinstance(config, Config | Loaded)
        and not (values or notices)
        and has_form == is_supervised
    ):
        return config
    loaded = config_with(config, values, is_supervised)
    return replace(loaded, notices=[*loaded.notices, *notices])


def _of_args(
    args: object, config: Config | Loaded | Mapping[str, Any] | None, has_rewards: bool
) -> tuple[dict[str, object], list[str]]:
    """Returns the values of a GRPOConfig by key, with the length of rows that they need, and its notices."""
    settings = settings_of(args)
    of_config = {key: entry.value for key, entry in entries_of(config).items()}
    values = settings.values | with_row_length(settings.values, of_config)
    if has_rewards and WEIGHTS in values:
        values["reward_config.verifier_function"] = []
    return values, settings.notices


def split_models(
    rewards: Sequence[str | Callable[..., Any]],
) -> tuple[list[str | Callable[..., Any]], dict[int, str]]:
    """Returns the functions and, by position, the reward models: folders with a config.json, or names on a hub."""
    models = {i: own for i, own in enumerate(rewards) if isinstance(own, str) and _is_model(own)}
    return [own for i, own in enumerate(rewards) if i not in models], models


def _is_model(text: str) -> bool:
    if Path(text, "config.json").is_file():
        return True
    return text not in BUILTINS and ":" not in text and hub_name(text) is not None


def _of_models(models: Mapping[int, str], weights: object) -> dict[str, object]:
    """Returns the values of reward models, with their part of the `weights` of all rewards."""
    if not isinstance(weights, Sequence):
        return {"reward_config.models": [{"load": load} for load in models.values()]}
    if max(models) >= len(weights):
        raise UserError(
            f"{counted(len(weights), 'reward weight was', 'reward weights were')} given, but reward {max(models) + 1} "
            "has none; give one for each reward."
        )
    own = [{"load": load, "weight": float(weights[i])} for i, load in models.items()]
    left = [weight for i, weight in enumerate(weights) if i not in models]
    return {"reward_config.models": own, WEIGHTS: left or None}


def _named(environment: str | Sequence[str] | Callable[..., Any]) -> list[str]:
    """Returns the texts under which another process imports the environment."""
    if isinstance(environment, str | Sequence):
        return [environment] if isinstance(environment, str) else [*environment]
    spec = reference_to(environment)
    if spec is None:
        raise UserError(
            f"environment is {environment!r:.60}, but each conversation has a process of its own, which imports it; "
            "write a class or function at the top of a module, or file.py:Class as text."
        )
    return [spec.text]


def _with_images_as_text(row: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Returns a row whose images, in their columns and in messages, are texts."""
    own = {
        key: images_as_text(row[key], f"{where}: column {key!r}")
        for key in IMAGE_COLUMNS
        if key in row
    }
    for key, value in row.items():
        if isinstance(value, list) and any(map(_has_parts, value)):
            own[key] = [_with_parts_as_text(message, where) for message in value]
    return {**row, **own}


def _has_parts(message: object) -> bool:
    return isinstance(message, Mapping) and isinstance(message.get("content"), list)


def _with_parts_as_text(message: Any, where: str) -> Any:
    if not _has_parts(message):
        return message
    content = [
        {
            key: images_as_text(value, where) if key in SOURCE_KEYS else value
            for key, value in part.items()
        }
        if isinstance(part, Mapping)
        else part
        for part in message["content"]
    ]
    return {**message, "content": content}


def _written(name: str, rows: Iterable[Mapping[str, Any]]) -> Path:
    lines = []
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise UserError(
                f'{name}: row {number} is {row!r:.60}; give rows such as {{"prompt": "...", "answer": "..."}}.'
            )
        where = f"{name}: row {number}"
        plain = plain_row(_with_images_as_text(row, where), where, "leave such columns out.")
        lines.append(json.dumps(plain, ensure_ascii=False) + "\n")
    if not lines:
        raise UserError(f"{name} has no rows; give at least one.")
    # What is no UTF-8 is refused with its row when it is read.
    content = "".join(lines).encode("utf-8", "surrogatepass")
    folder = cache_directory() / "data_sets"
    path = folder / f"{name}-{hashlib.sha256(content).hexdigest()[:16]}.jsonl"
    if not path.exists():
        partial = path.with_name(f"{path.name}.{os.getpid()}")
        try:
            make_cache_directory()
            folder.mkdir(exist_ok=True)
            partial.write_bytes(content)
            partial.replace(path)
        except OSError as error:
            raise UserError(
                f"{name} cannot be written to {folder} ({error.strerror}); make it writable, or set XDG_CACHE_HOME."
            ) from None
    return path
