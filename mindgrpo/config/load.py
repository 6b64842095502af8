"""From a YAML file, flags and overrides to one Config, and where each of its values came from.

Refuses what the schema does not know, with the place and the nearest name; changes no given value.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from pydantic import ValidationError

from mindgrpo.config.command_line import FLAGS, key_of, parse_command_line, split_overrides
from mindgrpo.config.names import SECTIONS, unknown
from mindgrpo.config.retired import PENDING, RETIRED, retired_key
from mindgrpo.config.schema import LIVE, Config, values_by_key
from mindgrpo.config.section import Section
from mindgrpo.config.sentences import explain, kinds
from mindgrpo.config.source import Entry, flatten, parse_value, read_yaml
from mindgrpo.errors import UserError
from mindgrpo.strict_files import no_path

__all__ = ["FLAGS", "Loaded", "load_config", "parse_command_line", "require_run_keys"]
__all__ += ["write_resolved"]

Entries = dict[str, Entry]
Notices = dict[str, str]

# What a run cannot start without; `plan` and its like can.
RUN_KEYS: dict[str, str] = {
    "actor_config.load": "the Hugging Face directory of the model",
    "rl_config.dataset_file": "the training data",
    "reward_config.verifier_function": "the reward functions",
}
_IS_PATH = re.compile(r"(load|dir|file|path|save|model_config|resume_training|chat_template)$")
_PLACEHOLDER = "/path/"
# One that separates words, not arguments in brackets.
_COMMA = re.compile(r",(?![^(\[{]*[)\]}])")


@dataclass(frozen=True)
class Loaded:
    """`origins` has every live key: a file and line, the command line, or "default"."""

    config: Config
    origins: dict[str, str]
    notices: list[str]


def load_config(
    path: str | Path,
    overrides: Sequence[str] = (),
    flags: Mapping[str, object] | None = None,
) -> Loaded:
    """The file, then `flags` (key -> Python value), then `overrides` (command-line words)."""
    entries = read_yaml(Path(path))
    for name, value in (flags or {}).items():
        _override(entries, key_of(f"--{name}"), value, f"argument {name}")
    for flag, text in split_overrides(overrides):
        key = key_of(flag)
        _override(entries, key, _value_of(text, key), f"command line {flag}")
    live, notices = _sort(entries)
    origins = {key: live[key].origin if key in live else "default" for key in LIVE}
    return Loaded(_build(live), origins, notices)


def require_run_keys(
    loaded: Loaded,
    *,
    rewards_in_code: bool = False,
    needed: Mapping[str, str] = RUN_KEYS,
) -> None:
    """Name all the settings at once that a run needs and the user has still to make.

    `needed` has a few words for each key; of a program with other needs than a run, no other key matters.
    """
    missing = []
    for key, value in values_by_key(loaded.config).items():
        if key not in needed and needed is not RUN_KEYS:
            continue
        in_code = rewards_in_code and key.startswith("reward_config.")
        if key in needed and not value and not in_code:
            missing.append(f"{key} ({needed[key]}) is not set")
        elif isinstance(value, str) and value.startswith(_PLACEHOLDER):
            missing.append(f"{key} is still '{value}' ({loaded.origins[key]})")
    if missing:
        raise UserError(
            f"Before this can run, {', '.join(missing)}; set each in the file or as --KEY VALUE."
        )


def write_resolved(loaded: Loaded, path: str | Path) -> None:
    """Every live key with its value and, as a comment, where the value came from."""
    lines = _resolved_lines(loaded.config, "", loaded.origins)
    Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")


def _override(entries: Entries, key: str, value: object, origin: str) -> None:
    if value is None and key in SECTIONS:
        for name in [name for name in entries if name.startswith(key + ".")]:
            del entries[name]
        return
    for name, entry in flatten(value, key, origin).items():
        entries[name] = entry


def _value_of(text: str, key: str) -> object:
    """A word of the command line as YAML, except where its key takes text or a list."""
    try:
        value = parse_value(text)
    except yaml.YAMLError:
        value = text
    if key not in LIVE:
        return value
    wanted = kinds(LIVE[key].field.annotation)
    inside = next((get_args(kind)[0] for kind in wanted if get_origin(kind) is list), None)
    if inside is not None and not isinstance(value, list) and value is not None:
        if type(value) in wanted:
            return value
        words = [word.strip() for word in _COMMA.split(text)]
        return words if inside is str else [_parsed(word) for word in words]
    if str in wanted and not isinstance(value, str):
        # A path such as 2024 is text; an empty one is "not set", as in the file.
        return None if value is None and text else text
    return value


def _parsed(word: str) -> object:
    try:
        return parse_value(word)
    except yaml.YAMLError:
        return word


def _sort(entries: Entries) -> tuple[Entries, list[str]]:
    """The live entries, and one notice for each retired key and each that a run goes on without."""
    live: Entries = {}
    notices: Notices = {}
    for key, entry in entries.items():
        retired = retired_key(key)
        if key in LIVE:
            live[key] = entry
        elif retired is not None:
            notices.setdefault(
                retired, f"{retired} has no effect ({entry.origin}): {RETIRED[retired]}."
            )
        elif key in PENDING:
            notices |= _refuse_active(key, entry)
        elif key not in SECTIONS:
            raise UserError(f"{unknown(key, entry.value == {})} ({entry.origin}).")
        elif entry.value is not None and entry.value != {}:
            raise UserError(
                f"{key} is a section of keys and cannot be {entry.value!r}; write "
                f"'{key.rpartition('.')[2]}:' and its keys indented below ({entry.origin})."
            )
    return live, list(notices.values())


def _refuse_active(key: str, entry: Entry) -> Notices:
    pending = PENDING[key]
    if pending.accepts(entry.value):
        return {}
    asked = f"{key} {entry.value!r} asks for {pending.feature}, which {pending.verdict}"
    if pending.may_go_on(entry.value):
        return {key: f"{asked}: {pending.goes_on} ({entry.origin})."}
    raise UserError(f"{asked}; set it to {pending.set_to!r} ({entry.origin}).")


def _build(live: Entries) -> Config:
    tree: dict[str, Any] = {}
    for key, entry in live.items():
        *sections, leaf = key.split(".")
        place = tree
        for section in sections:
            place = place.setdefault(section, {})
        place[leaf] = entry.value
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        raise UserError(explain(error, live)) from None
    for key, value in values_by_key(config).items():
        if not isinstance(value, str) or not _IS_PATH.search(key):
            continue
        reason = no_path(value)
        if reason is not None:
            raise UserError(
                f"{key} is '{value[:60]}', but {reason}; correct it ({live[key].origin})."
            )
    return config


def _resolved_lines(section: Section, prefix: str, origins: Mapping[str, str]) -> list[str]:
    lines: list[str] = []
    indent = "  " * prefix.count(".")
    for name, field in type(section).model_fields.items():
        leaf, value = field.alias or name, getattr(section, name)
        key = prefix + leaf
        if isinstance(value, Section):
            lines += [f"{indent}{leaf}:", *_resolved_lines(value, key + ".", origins)]
        else:
            lines.append(f"{indent}{leaf}: {_as_yaml(value)}  # {origins.get(key, 'default')}")
    return lines


def _as_yaml(value: object) -> str:
    if isinstance(value, str):
        return yaml.safe_dump(value, default_style='"', width=10**9, allow_unicode=True).strip()
    return yaml.safe_dump([value], default_flow_style=True, width=10**9).strip()[1:-1]
