"""Loads YAML files, flags and overrides as one Config, and keeps where each of its values came from.

A key that the schema does not know is an error with its origin and the nearest name; a wrong value is one with the
rule, the remedy and its origin. No value of the user's is changed.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from mindgrpo.config.arithmetic import laid_out
from mindgrpo.config.checks import Contradiction
from mindgrpo.config.command_line import CONFIG, key_of, split_overrides
from mindgrpo.config.names import PENDING, RETIRED, SECTIONS, nearest, retired_key, unknown
from mindgrpo.config.schema import LIVE, Config, values_by_key
from mindgrpo.config.supervised import supervised
from mindgrpo.config.yaml_file import Sourced, flatten, parse_yaml, read_files
from mindgrpo.errors import UserError, error_of
from mindgrpo.settings.section import BOUNDS, Section, either, kinds, plain
from mindgrpo.strict_files import at_home, no_path

# What a run cannot start without; `plan` and its like can.
RUN_KEYS: dict[str, str] = {
    "actor_config.load": "the Hugging Face directory of the model",
    "rl_config.dataset_file": "the training data",
    "reward_config.verifier_function": "the reward functions",
}
IN_CODE = "given in code"
_IS_PATH = re.compile(r"(load|dir|file|path|save|model_config|resume_training|chat_template)$")
_PLACEHOLDER = "/path/"
# Sections of which there may be several, and the key of these.
OF_LISTS = {"reward_config.model": "reward_config.models"}
# One that separates words, not arguments in brackets.
_COMMA = re.compile(r",(?![^(\[{]*[)\]}])")


@dataclass(frozen=True)
class Loaded:
    """`origins` has every live key: a file and line, the command line, or "default"."""

    config: Config
    origins: dict[str, str]
    notices: list[str]
    is_supervised: bool = False

    def on_ranks(self, world_size: int | None) -> Loaded:
        """Returns this with the data_parallel of layouts that leave it to the run's ranks; None: none are named."""
        config = laid_out(self.config, world_size)
        values, before = values_by_key(config), values_by_key(self.config)
        filled = {key for key, value in values.items() if value != before[key]}
        origins = self.origins | dict.fromkeys(filled, "the run's ranks")
        return replace(self, config=config, origins=origins)


def load_config(
    path: str | Path | Sequence[str | Path],
    overrides: Sequence[str] = (),
    flags: Mapping[str, object] | None = None,
    *,
    is_supervised: bool = False,
) -> Loaded:
    """Loads the file, then `flags` (key -> Python value), then `overrides` (command-line words). Raises UserError.

    Of several files each adds to those before it, and wins where both have a key. `overrides` may be all that a
    program gets, `sys.argv[1:]`: files behind --config are read instead of `path`. `is_supervised`: for supervised
    training.
    """
    pairs = split_overrides(overrides)
    own = [path] if isinstance(path, str | Path) else path
    entries = read_files(
        [
            Path(at_home(str(file)))
            for file in [text for flag, text in pairs if flag == CONFIG] or own
        ]
    )
    for name, value in (flags or {}).items():
        _override(entries, key_of(f"--{name}"), value, f"argument {name}")
    for flag, text in pairs:
        if flag != CONFIG:
            key = key_of(flag)
            _override(entries, key, value_of(text, key), f"command line {flag}")
    return _loaded(entries, is_supervised)


def config_with(
    config: Config | Loaded | Mapping[str, Any] | None,
    values: Mapping[str, object],
    is_supervised: bool = False,
) -> Loaded:
    """Returns `config` with new `values` by key. A mapping is read like a file; None: defaults. Raises UserError.

    One that was loaded for supervised training stays so.
    """
    is_supervised |= isinstance(config, Loaded) and config.is_supervised
    if isinstance(config, Config) and not values and not is_supervised:
        return Loaded(config, dict.fromkeys(LIVE, IN_CODE), [])
    entries = entries_of(config)
    for key, value in values.items():
        _override(entries, key, value, IN_CODE)
    return _loaded(entries, is_supervised)


def entries_of(config: Config | Loaded | Mapping[str, Any] | None) -> dict[str, Sourced]:
    """Returns what a configuration sets, by key: no defaults."""
    if isinstance(config, Loaded):
        return {
            key: Sourced(value, config.origins[key])
            for key, value in values_by_key(config.config).items()
            if config.origins[key] != "default"
        }
    if isinstance(config, Config):
        config = config.model_dump(by_alias=True, exclude_unset=True)
    entries: dict[str, Sourced] = {}
    for section, inner in (config or {}).items():
        entries |= flatten(inner, str(section), IN_CODE)
    return entries


def _loaded(entries: dict[str, Sourced], is_supervised: bool = False) -> Loaded:
    notices: dict[str, str] = {}
    unread: list[str] = []
    if is_supervised:
        entries = supervised(entries, unread)
    live: dict[str, Sourced] = {}
    refused: dict[str, str] = {}
    for key, entry in entries.items():
        if isinstance(entry.value, list):
            key = OF_LISTS.get(key, key)
        try:
            live |= {key: entry} if _is_live(key, entry, notices) else {}
        except UserError as error:
            # Keys of an unknown section say the same at different lines.
            refused.setdefault(str(error).partition(" (")[0], str(error))
    config = _build(live, refused.values())
    origins = {key: live[key].origin if key in live else "default" for key in LIVE}
    return Loaded(config, origins, [*notices.values(), *unread], is_supervised)


def require_run_keys(
    loaded: Loaded, *, rewards_in_code: bool = False, needed: Mapping[str, str] = RUN_KEYS
) -> None:
    """Raises UserError with all of `missing_keys`."""
    if missing := missing_keys(loaded, rewards_in_code=rewards_in_code, needed=needed):
        raise UserError(
            f"Before this can run, {', '.join(missing.values())}; set each in the file or as --KEY VALUE."
        )


def missing_keys(
    loaded: Loaded, *, rewards_in_code: bool = False, needed: Mapping[str, str] = RUN_KEYS
) -> dict[str, str]:
    """Returns the keys that a run needs and the user has still to set, and what is to be said of each.

    `needed` describes each key; of a program with other needs than a run, no other key matters.
    """
    missing = {}
    for key, value in values_by_key(loaded.config).items():
        if key not in needed and needed is not RUN_KEYS:
            continue
        # A teacher trains without rewards, but to evaluate is to score.
        is_judged = loaded.config.may_lack_functions and needed is RUN_KEYS
        elsewhere = rewards_in_code or is_judged or loaded.config.scores_without_functions
        is_made = elsewhere and key.startswith("reward_config.")
        of_rows = ("rl_config.dataset_file", "rl_config.eval_dataset_file")
        is_made |= key in of_rows and loaded.config.rl_config.uses_seeds
        if key in needed and not value and not is_made:
            missing[key] = f"{key} ({needed[key]}) is not set"
        elif isinstance(value, str) and value.startswith(_PLACEHOLDER):
            missing[key] = f"{key} is still '{value}' ({loaded.origins[key]})"
    return missing


def write_resolved(loaded: Loaded, path: str | Path) -> None:
    """Writes every live key with its value and, as a comment, where the value came from."""
    lines = _resolved_lines(loaded.config, "", loaded.origins)
    Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")


def _override(entries: dict[str, Sourced], key: str, value: object, origin: str) -> None:
    if value is None and key in SECTIONS:
        for name in [name for name in entries if name.startswith(key + ".")]:
            del entries[name]
    else:
        entries.update(flatten(value, key, origin))


def value_of(text: str, key: str) -> object:
    """Reads a word of the command line as YAML, except where its key takes text or a list."""
    value = parsed(text)
    wanted = kinds(LIVE[key].field.annotation) if key in LIVE else ()
    inner = next((get_args(kind)[0] for kind in wanted if get_origin(kind) is list), None)
    if inner is not None and not isinstance(value, list) and value is not None:
        if type(value) in wanted:
            return value
        words = [word.strip() for word in _COMMA.split(text)]
        return words if inner is str else [parsed(word) for word in words]
    if str in wanted and not isinstance(value, str):
        # A path such as 2024 is text; an empty one is "not set", as in the file.
        return None if value is None and text else text
    return value


def parsed(text: str) -> object:
    """Reads YAML; what is none is text."""
    try:
        return parse_yaml(text)
    except yaml.YAMLError:
        return text


def _is_live(key: str, entry: Sourced, notices: dict[str, str]) -> bool:
    """Returns whether a key is live; adds a notice for a retired one."""
    if key in LIVE:
        return True
    retired = retired_key(key)
    if retired is not None:
        notice = f"{retired} has no effect ({entry.origin}): {RETIRED[retired]}."
        notices.setdefault(retired, notice)
    elif key in PENDING:
        pending = PENDING[key]
        if not pending.accepts(entry.value):
            refusal = pending.refusal(key, shown(entry.value))
            raise UserError(f"{refusal}; set it to {pending.inactive!r} ({entry.origin}).")
    elif key not in SECTIONS:
        raise UserError(f"{unknown(key, entry.value == {})} ({entry.origin}).")
    elif entry.value is not None and entry.value != {}:
        raise UserError(
            f"{key} is a section of keys and cannot be {shown(entry.value)}; write "
            f"'{key.rpartition('.')[2]}:' and its keys indented below ({entry.origin})."
        )
    return False


def _build(live: dict[str, Sourced], refused: Collection[str] = ()) -> Config:
    """Builds the configuration. Raises UserError for wrong values, with what was `refused` before."""
    tree: dict[str, Any] = {}
    for key, entry in live.items():
        *sections, leaf = key.split(".")
        section = tree
        for name in sections:
            section = section.setdefault(name, {})
        section[leaf] = _expanded(entry.value)
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        # Keys that do not go together might, once those that are refused are right.
        wrong = [] if refused and _is_of_several_keys(error) else explain(error, live)
        raise error_of([*refused, *wrong]) from None
    if refused:
        raise error_of(refused)
    for key, value in values_by_key(config).items():
        if isinstance(value, str) and _IS_PATH.search(key) and (reason := no_path(value)):
            raise UserError(
                f"{key} is '{value[:60]}', but {reason}; correct it ({live[key].origin})."
            )
    return config


def _expanded(value: object) -> object:
    """Expands ~/, as a shell does, in a text or a list of texts."""
    if isinstance(value, list):
        return [_expanded(one) for one in value]
    return at_home(value) if isinstance(value, str) and value.startswith("~/") else value


def _resolved_lines(section: Section, prefix: str, origins: Mapping[str, str]) -> Iterator[str]:
    indent = "  " * prefix.count(".")
    for name, field in type(section).model_fields.items():
        leaf, value = field.alias or name, getattr(section, name)
        if isinstance(value, Section):
            yield f"{indent}{leaf}:"
            yield from _resolved_lines(value, f"{prefix}{leaf}.", origins)
        else:
            yield f"{indent}{leaf}: {as_yaml(plain(value))}  # {origins.get(prefix + leaf, 'default')}"


def as_yaml(value: object) -> str:
    """Returns a value as it stands behind its key, in one line."""
    if isinstance(value, str):
        return yaml.safe_dump(value, default_style='"', width=10**9, allow_unicode=True).strip()
    return yaml.safe_dump([value], default_flow_style=True, width=10**9).strip()[1:-1]


def shown(value: object) -> str:
    return "null" if value is None else repr(value)


def explain(error: ValidationError, live: Mapping[str, Sourced]) -> list[str]:
    """Returns a sentence for each key that pydantic refuses. `live` has the user's keys."""
    sentences: dict[str, str] = {}
    for each in error.errors():
        cause = each.get("ctx", {}).get("error")
        if isinstance(cause, Contradiction):
            keys = re.findall(r"\w+(?:\.\w+)*", str(cause))
            origins = dict.fromkeys(live[key].origin for key in keys if key in live)
            sentences[str(cause)] = f"{cause} ({', '.join(origins) or 'by default'})."
            continue
        location = [str(name) for name in each["loc"]]
        prefixes = (".".join(location[:end]) for end in range(len(location), 0, -1))
        key = next(prefix for prefix in prefixes if prefix in LIVE)
        field, (value, origin) = LIVE[key].field, live[key]
        # Of the kinds that a key may be of, the first one's.
        sentences.setdefault(
            key,
            f"{key} is {shown(value)}, but {_rule(each, field)}; {_remedy(value, field)} ({origin}).",
        )
    return list(sentences.values())


def _is_of_several_keys(error: ValidationError) -> bool:
    return any(
        isinstance(each.get("ctx", {}).get("error"), Contradiction) for each in error.errors()
    )


def _rule(error: Any, field: FieldInfo) -> str:
    kind, context = error["type"], error.get("ctx", {})
    if kind in BOUNDS:
        words, name = BOUNDS[kind]
        return f"must be {words} {context[name]}"
    if kind == "value_error":
        return str(context["error"])
    return "must be " + ("a finite number" if kind == "finite_number" else either(field.annotation))


def _remedy(value: object, field: FieldInfo) -> str:
    wanted = kinds(field.annotation)
    choices = [text for kind in wanted if get_origin(kind) is Literal for text in get_args(kind)]
    if isinstance(value, str):
        spelled = value.lower().replace("++", "_plus_plus").replace("-", "_")
        if near := nearest(spelled, [text for text in choices if isinstance(text, str)]):
            return f"did you mean {near!r}"
    if isinstance(value, str) and str not in wanted and _unquoted(value, wanted):
        return f"write {value} without quotes"
    if str in wanted and isinstance(value, (int, float)):
        return "put it in quotes"
    if any(get_origin(kind) is list for kind in wanted) and isinstance(value, (str, int, float)):
        return f"write [{value}]"
    if value is None and any(get_origin(kind) is list for kind in wanted):
        return "write [] for none, or leave it out"
    default = "the default" if field.default in (None, "", []) else repr(field.default)
    return f"leave it out for {default}"


def _unquoted(text: str, wanted: tuple[Any, ...]) -> bool:
    try:
        value = parse_yaml(text)
    except yaml.YAMLError:
        return False
    return type(value) in wanted or (type(value) is int and float in wanted)
