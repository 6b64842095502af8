"""Decides what a setting of another trainer means here: values of our keys, nothing and why, or a refusal and why.

Reads the tables of aliases.yaml, and the rules for values that depend on other settings or count in other units.
`config --explain` and mindgrpo.GRPOConfig decide by it alike.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import Enum
from typing import Any

from mindgrpo.config.command_line import FLAGS
from mindgrpo.config.foreign_trl import TRL_RULES
from mindgrpo.config.foreign_verl import VERL_RULES
from mindgrpo.config.meanings import (
    AS_HERE,
    Ignored,
    Meaning,
    Others,
    Refused,
    Values,
    by_tables,
)
from mindgrpo.config.names import PENDING, RETIRED, aliases, leaf_of, retired_key, suggestion
from mindgrpo.config.schema import LIVE

LENGTHS = ("generate_config.max_prompt_length", "generate_config.sampling_config.max_tokens")
SEQ_LENGTH = "rl_config.seq_length"
RULES = {**TRL_RULES, **VERL_RULES}


def meaning(name: str, value: Any, others: Others) -> Meaning:
    """Returns what a setting means; `others` has all settings that are given with it."""
    table, full = aliases(), aliases().in_full(name)
    value = value.value if isinstance(value, Enum) else value
    if name in LIVE or name in PENDING or f"--{name}" in FLAGS:
        return {FLAGS.get(f"--{name}", name): value}
    if retired := retired_key(name):
        return Ignored(RETIRED[retired])
    if value in table.unset.get(full, ()):
        return AS_HERE
    if value is not None and (idle := others.without_effect_on(full)):
        return idle
    if full in RULES:
        return RULES[full](value, others)
    if table.key_of(full):
        return by_tables(full, value)
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
