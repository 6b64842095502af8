"""Translates settings of other trainers, `name=value` as on their command lines, to the YAML that they mean here.

Whatever is not taken becomes a comment with what is different, so that nothing is lost silently.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from mindgrpo.config.adapters import keys_of_adapters
from mindgrpo.config.foreign import meaning, with_row_length
from mindgrpo.config.foreign_files import ASSIGNED, ForeignSettings, read
from mindgrpo.config.foreign_verl import ranks
from mindgrpo.config.load import as_yaml, config_with, parsed
from mindgrpo.config.meanings import AS_HERE, Ignored, Meaning, Others, Refused, Values
from mindgrpo.config.schema import LIVE
from mindgrpo.errors import UserError, sentences_of

REWARDS = "reward_config.verifier_function"
_REFERENCE = re.compile(r"\$\{([A-Za-z_][\w.]*)\}")
_UNKNOWN = re.compile(r"\$[A-Za-z_{(]|`")


def is_setting(word: str) -> bool:
    """Says whether a word is `name=value` or names a file of such."""
    return bool(ASSIGNED.fullmatch(word)) or Path(word).is_file()


def translate(words: Sequence[str]) -> str:
    """Returns the YAML of `name=value` words and of files with them: scripts or YAML. Raises UserError."""
    theirs = ForeignSettings()
    for word in words:
        match = ASSIGNED.fullmatch(word)
        theirs.add(
            ForeignSettings({match["name"]: parsed(match["value"])}) if match else read(Path(word))
        )
    others = Others(theirs.settings, theirs.processes)
    values: Values = {}
    origins: dict[str, str] = {}
    remarks = theirs.remarks
    as_here = []
    for name, value in theirs.settings.items():
        meant = meaning_in_file(name, value, others)
        if meant is AS_HERE:
            as_here.append(f"{name}={value}")
        elif isinstance(meant, Ignored):
            remarks.append(f"{name}={value}: without effect, {meant}")
        elif isinstance(meant, Refused):
            remarks.append(f"{name}={value}: {meant}")
        else:
            values |= meant
            for key in meant:
                origins[key] = f"{origins[key]}, {name}" if key in origins else name
    if theirs.adapters is not None:
        try:
            adapters = keys_of_adapters(theirs.adapters, {})
            values |= adapters
            origins |= dict.fromkeys(adapters, "LoraConfig")
        except UserError as error:
            remarks.append(str(error))
    derived = with_row_length(values, {})
    values |= derived
    origins |= dict.fromkeys(derived, "the sum of both lengths")
    try:
        config_with(None, values)
    except UserError as error:
        remarks += [f"to be corrected: {sentence}" for sentence in sentences_of(error)]
    remarks += about_the_whole(values, others)
    if as_here:
        remarks.append(f"as it is here: {', '.join(as_here)}")
    return "\n".join([*(f"# {remark}" for remark in remarks), *lines_of(values, origins)])


def meaning_in_file(name: str, value: object, others: Others) -> Meaning:
    """Returns what a setting means whose value may refer to other settings, as ${data.seed}, or to variables."""
    if isinstance(value, str):
        value = _REFERENCE.sub(lambda match: str(others.get(match[1], match[0])), value)
        if "${oc." in value:
            return Ignored("it follows another setting")
        if _UNKNOWN.search(value):
            return Refused("a variable or a command whose value is not known here; write it out")
    return meaning(name, value, others)


def about_the_whole(values: Values, others: Others) -> Iterator[str]:
    """Yields what the settings together ask for that no key says."""
    if others.processes is None and "per_device_train_batch_size" in others:
        yield (
            "rl_config.prompts_per_step is that of one process; multiply it by the number of TRL's processes, or give "
            "num_processes=N with the settings"
        )
    if (world := ranks(others)) is not None and world > 1:
        yield f"start it with mindgrpo launch --ranks {world}, or change the layouts"
    if "data.train_files" in others and REWARDS not in values:
        yield (
            f"{REWARDS} has to be named: verl chooses by the column data_source; for openai/gsm8k that is "
            "[accuracy_reward], the number at the end, or a file's function, FILE.py:compute_score"
        )


def lines_of(values: Values, origins: Mapping[str, str]) -> Iterator[str]:
    """Yields YAML in the order of the schema, each value with the name that it is from."""
    above: list[str] = []
    for key in filter(values.__contains__, LIVE):
        *sections, leaf = key.split(".")
        for depth, section in enumerate(sections):
            if above[: depth + 1] != sections[: depth + 1]:
                yield f"{'  ' * depth}{section}:"
                above = sections[: depth + 1]
        above = sections
        origin = f"  # {origins[key]}" if origins[key] != key else ""
        yield f"{'  ' * len(sections)}{leaf}: {as_yaml(values[key])}{origin}"
