"""Decides what a setting of another trainer means here: values of our keys, nothing and why, or a refusal and why.

Reads the tables of aliases.yaml, and the rules for values that depend on other settings or count in other units.
`config --explain` and mindgrpo.GRPOConfig decide by it alike.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from enum import Enum
from typing import Any, get_origin

from mindgrpo.config.command_line import FLAGS
from mindgrpo.config.foreign_trl import TRL_RULES
from mindgrpo.config.foreign_verl import VERL_RULES
from mindgrpo.config.meanings import AS_HERE, Ignored, Meaning, Others, Refused, Rule, Values
from mindgrpo.config.names import PENDING, RETIRED, aliases, leaf_of, retired_key, suggestion
from mindgrpo.config.schema import LIVE
from mindgrpo.settings.section import kinds

LENGTHS = ("generate_config.max_prompt_length", "generate_config.sampling_config.max_tokens")
SEQ_LENGTH = "rl_config.seq_length"
RULES: Mapping[str, Rule] = {**TRL_RULES, **VERL_RULES}
_PATHS = ("_file", ".load", "_dir")


def meaning(name: str, value: Any, others: Others) -> Meaning:
    """Returns what a setting means; `others` has all settings that are given with it."""
    table, full = aliases(), aliases().in_full(name)
    value = value.value if isinstance(value, Enum) else value
    if name in LIVE or name in PENDING or f"--{name}" in FLAGS:
        return {FLAGS.get(f"--{name}", name): value}
    if retired := retired_key(name):
        return Ignored(RETIRED[retired])
    if full in RULES:
        return RULES[full](value, others)
    if ours := table.key_of(full):
        return _by_table(full, ours, value)
    entry = table.without_key(name)
    if entry is None:
        return Refused(suggestion(name))
    if entry in table.ignored:
        return Ignored(table.absent[entry].removesuffix("; leave it out"))
    if value is None or value in table.harmless.get(entry, ()):
        return AS_HERE
    why = table.absent[entry]
    if entry.endswith("template_kwargs.*"):
        why = why.replace("NAME = VALUE", f"{leaf_of(name)} = {json.dumps(value, default=str)}")
    return Refused(why)


def _by_table(full: str, ours: str, value: Any) -> Meaning:
    table = aliases()
    words, difference = table.words.get(full), table.differences.get(full)
    if words is not None and not isinstance(value, list | dict) and value in words:
        return AS_HERE if words[value] == "unset" else {ours: words[value]}
    if value is None or value in table.unset.get(full, ()):
        return AS_HERE
    is_taken = "*" in words if words is not None else not difference or full in table.same
    if not is_taken:
        return Refused(f"{ours} here{f': {difference}' if difference else ''}")
    if isinstance(value, list) and ours.endswith("_file"):
        if len(value) > 1:
            return Refused(f"{ours} is one file or folder here; join these {len(value)}")
        value = next(iter(value), None)
    if isinstance(value, str) and ours.endswith(_PATHS):
        value = os.path.expanduser(value)
    wanted = kinds(LIVE[ours].field.annotation) if ours in LIVE else ()
    is_list = any(get_origin(kind) is list for kind in wanted)
    if isinstance(value, tuple) or (is_list and type(value) not in (list, *wanted)):
        value = list(value) if isinstance(value, tuple | set) else [value]
    return {ours: value}


def with_row_length(values: Mapping[str, object], set_elsewhere: Mapping[str, object]) -> Values:
    """Returns the length of packed rows that `values` need: others have no such limit."""
    known = {**set_elsewhere, **values}
    lengths = [known.get(key, LIVE[key].field.default) for key in LENGTHS]
    whole = [length for length in lengths if isinstance(length, int)]
    is_open = SEQ_LENGTH not in known and any(key in values for key in LENGTHS)
    if not is_open or len(whole) < len(lengths):
        return {}
    longest = sum(whole)
    is_known = all(key in known for key in LENGTHS)
    return {SEQ_LENGTH: longest} if is_known or longest > LIVE[SEQ_LENGTH].field.default else {}
