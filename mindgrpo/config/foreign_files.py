"""Reads the settings that files of other trainers hold: Python programs, shell scripts and YAML files."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mindgrpo.config.command_line import FLAGS
from mindgrpo.config.load import parsed
from mindgrpo.config.names import aliases
from mindgrpo.config.python_values import Call, Program, read_program
from mindgrpo.config.schema import LIVE
from mindgrpo.config.shell_words import commands
from mindgrpo.config.yaml_file import flatten
from mindgrpo.errors import UserError
from mindgrpo.settings.section import kinds
from mindgrpo.strict_files import read_text

ASSIGNED = re.compile(r"(?:\+\+?|--)?(?P<name>[A-Za-z_][\w.]*)=(?P<value>.*)", re.DOTALL)
# Calls that hold settings -> the names of their arguments by position.
CALLS = {
    "GRPOConfig": ("output_dir",),
    "LoraConfig": (),
    "GRPOTrainer": ("model", "reward_funcs", "args", "train_dataset", "eval_dataset"),
}
# What GRPOTrainer's arguments are called where they are texts, and which of them are read by themselves.
TRAINER_NAMES = {"model": "model_name_or_path", "train_dataset": "dataset_name"}
_BY_THEMSELVES = ("args", "peft_config", "reward_funcs")
_LAUNCHERS = ("trl", "accelerate", "torchrun", "deepspeed")
_PROCESSES = ("num_processes", "nproc_per_node", "num_gpus")


@dataclass
class ForeignSettings:
    """Holds settings by name, fields of PEFT's LoraConfig (None: there is none) and what could not be read."""

    settings: dict[str, Any] = field(default_factory=dict)
    adapters: dict[str, Any] | None = None
    remarks: list[str] = field(default_factory=list)

    def add(self, other: ForeignSettings) -> None:
        self.settings |= other.settings
        self.adapters = self.adapters if other.adapters is None else other.adapters
        self.remarks += other.remarks

    @property
    def processes(self) -> int | None:
        """Returns the processes that a launcher of TRL's is told to start."""
        counts = (self.settings.get(name) for name in _PROCESSES)
        return next((one for one in counts if isinstance(one, int) and one > 0), None)


def read(path: Path) -> ForeignSettings:
    """Reads a Python program's calls, a YAML file's keys, or the words of a shell script. Raises UserError."""
    text = read_text(path, "the settings", "give a script, or a YAML file of settings.")
    if path.suffix == ".py":
        return of_program(read_program(text, str(path), CALLS), path)
    if path.suffix in (".yaml", ".yml"):
        return ForeignSettings(dict(of_yaml(text, path)))
    return ForeignSettings(
        {name: value for words in commands(text, str(path)) for name, value in of_words(words)}
    )


def of_yaml(text: str, path: Path) -> Iterator[tuple[str, Any]]:
    document = parsed(text)
    if not isinstance(document, dict):
        raise UserError(f"{path} holds no keys; give a YAML file of them, or a script.")
    for section, inner in document.items():
        # A mapping that is one value, as lr_scheduler_kwargs, has no sections of its own.
        is_value = str(section) in aliases().absent or str(section) in aliases().of_trl
        if isinstance(inner, dict) and inner and not is_value:
            yield from ((key, held.value) for key, held in flatten(inner, str(section), "").items())
        else:
            yield str(section), inner


def of_words(words: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yields `name=value` and `--name value` of a command; a flag alone is true."""
    is_run = words[0] in _LAUNCHERS or any(word.endswith(".py") for word in words)
    for position, word in enumerate(words):
        match = ASSIGNED.fullmatch(word)
        if match and (word.startswith("--") or "." in match["name"] or _is_known(match["name"])):
            yield match["name"], parsed(match["value"])
        elif word.startswith("--") and "=" not in word and word != "--":
            name = word[2:]
            if _is_known(name) or is_run:
                yield name, _value_behind(name, words[position + 1 :])


def _is_known(name: str) -> bool:
    table = aliases()
    ours = table.key_of(table.in_full(name))
    return bool(ours or name in LIVE or f"--{name}" in FLAGS or table.without_key(name))


def _value_behind(name: str, following: Sequence[str]) -> Any:
    """Returns what follows a flag: nothing is true; several words where the key takes a list."""
    end = next((i for i, word in enumerate(following) if word.startswith("--")), len(following))
    values = [parsed(word) for word in following[:end]]
    ours = aliases().key_of(aliases().in_full(name))
    is_list = ours in LIVE and any(
        "list" in str(kind) for kind in kinds(LIVE[ours].field.annotation)
    )
    if not values:
        return True
    return values if is_list and len(values) > 1 else values[0]


def of_program(program: Program, path: Path) -> ForeignSettings:
    theirs = ForeignSettings()
    for call in program.calls:
        if call.name == "LoraConfig":
            theirs.adapters = call.values
        elif call.name == "GRPOConfig":
            theirs.settings |= call.values
        else:
            names = {name: TRAINER_NAMES.get(name, name) for name in call.values}
            own = {names[name]: value for name, value in call.values.items()}
            theirs.settings |= own
            theirs.settings |= _rewards(call, program, path, theirs.remarks)
        theirs.remarks += [
            f"{call.name}({name}={ast.unparse(value)}): not a value that stands in {path.name}; write it out"
            for name, value in call.others.items()
            if call.name != "GRPOTrainer" or name not in _BY_THEMSELVES
        ]
    if not program.calls:
        theirs.remarks.append(f"{path.name} has no call of {', '.join(CALLS)}")
    return theirs


def _rewards(call: Call, program: Program, path: Path, remarks: list[str]) -> dict[str, Any]:
    """Returns the reward functions as texts that other processes import; adds a remark where they cannot."""
    functions = call.others.get("reward_funcs")
    if functions is None:
        return {}
    listed = functions.elts if isinstance(functions, ast.List | ast.Tuple) else [functions]
    texts = []
    for each in listed:
        name = ast.unparse(each)
        if isinstance(each, ast.Constant) and isinstance(each.value, str):
            texts.append(each.value)
        elif name in program.modules:
            texts.append(program.modules[name])
        elif name in program.functions and call.is_guarded:
            texts.append(f"{path}:{name}")
        else:
            remarks.append(
                f"reward_funcs={name}: an import of {path.name} would train; move the function to a file of its own, "
                f"and name it FILE.py:{name} in reward_config.verifier_function"
                if name in program.functions
                else f"reward_funcs={name}: name it FILE.py:FUNCTION in reward_config.verifier_function"
            )
    is_whole = len(texts) == len(listed)
    if texts and not is_whole:
        remarks.append(f"reward_funcs: {', '.join(texts)} come beside it")
    return {"reward_config.verifier_function": texts} if is_whole else {}
