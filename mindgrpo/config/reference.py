"""Describes the configuration, from the schema: one key (`explain`), or every key as help or as a page of Markdown.

`reference` is docs/configuration.md; `other_trainers` is docs/from_other_trainers.md, from aliases.yaml.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby

from mindgrpo.config.adapters import TAKEN
from mindgrpo.config.command_line import FLAGS
from mindgrpo.config.names import (
    KNOWN,
    PENDING,
    RETIRED,
    SECTIONS,
    aliases,
    leaf_of,
    retired_key,
    section_suggestion,
    suggestion,
)
from mindgrpo.config.schema import LIVE
from mindgrpo.errors import UserError
from mindgrpo.settings.section import takes

_HEAD = """# Configuration reference

Every key of the YAML file. This page is generated from the schema:

```bash
python -m mindgrpo config --reference > docs/configuration.md
```

`python -m mindgrpo config --explain KEY` explains one key. KEY can also be a command-line flag or another trainer's
name for the key ([from_other_trainers.md](from_other_trainers.md)). Any key can be set on the command line by its path:
`--rl_config.max_steps 3`. A key that is not on this page is an error, which names the nearest key, the file and the
line.
"""
_HEAD_OTHER_TRAINERS = """# Coming from MindRLHF, verl or TRL

Names of other trainers' settings beside the keys of this project. This page is generated from
`mindgrpo/config/aliases.yaml`:

```bash
python -m mindgrpo config --other_trainers > docs/from_other_trainers.md
```

Another trainer's name in a configuration or on the command line is an error that names the key to use.
`python -m mindgrpo config --explain NAME` explains the key. A run converts no value of a file or a command line: a
value can have another unit (samples instead of prompts, a ratio instead of a rate), so read the key's description in
[configuration.md](configuration.md).

Settings with values are translated as a whole. `--explain` prints the YAML that they mean here, and as comments
whatever has no key, no effect, or another meaning. It reads `name=value` words, and files: a shell script with the
variables that it sets, a Python program with calls of `GRPOConfig`, `LoraConfig` and `GRPOTrainer`, and YAML:

```bash
python -m mindgrpo config --explain data.train_batch_size=64 actor_rollout_ref.actor.ppo_mini_batch_size=16
```

```yaml
rl_config:
  prompts_per_step: 64  # data.train_batch_size
  updates_per_rollout: 4  # actor_rollout_ref.actor.ppo_mini_batch_size
```

`config --explain run_grpo.sh > my.yaml` begins a configuration with a script of verl's, and `config --explain train.py
num_processes=8 > my.yaml` with a program of TRL's that `accelerate` starts 8 times. Keys that they leave out have the
defaults of this project.

- **MindRLHF**: `same` means that the key has the same path. MindRLHF configurations load unchanged; keys that have no
  effect here are listed at startup ([configuration.md](configuration.md), "Retired keys").
- **TRL**: fields of `GRPOConfig` (with `TrainingArguments`), `ScriptArguments` and `ModelConfig`, and arguments of
  `GRPOTrainer`. `mindgrpo.GRPOConfig` takes the same fields and decides on them as `--explain` does: values are taken
  or converted, those without effect are listed at startup, and all others are refused with the key to use. A device of
  TRL's is a rank here: `per_device_train_batch_size=8, gradient_accumulation_steps=4, num_generations=8` is
  `prompts_per_step: 4` on one rank. Fields that are left out have the defaults of this project. `args=GRPOConfig(...)`
  and `config={...}`, a mapping of the configuration's sections, may be given together; `args` wins.
- **others**: OpenRLHF, slime, MindSpeed-RL, Megatron, NeMo-RL and older releases.
"""
TRAINERS = {"mindrlhf": "MindRLHF", "verl": "verl", "trl": "TRL", "others": "others"}


def written(value: object) -> str:
    """Returns a default as the pages write it."""
    if value is None:
        return "null"
    return f'"{value}"' if isinstance(value, str) else str(value)


def explain(name: str) -> str:
    """Explains a key, flag, section, or another trainer's name. Raises UserError for any other."""
    # Also as it stands on a command line: --name, or name=value and +name=value where Hydra reads it.
    name = name.partition("=")[0].removeprefix("+")
    key = FLAGS.get(name, name.removeprefix("--")).strip(".")
    if key not in KNOWN:
        sections = [known for known in sorted(SECTIONS) if f".{known}".endswith(f".{key}")]
        if sections:
            return "\n\n".join(_explain_section(section) for section in sections)
        if ours := aliases().ours(key):
            return f"{name} is {aliases().called(key)}.\n\n{explain(ours)}"
        if why_absent := aliases().remedy(key):
            return f"{name} is no key here: {why_absent}."
    keys = [key]
    if key not in KNOWN and not retired_key(key):
        keys = [known for known in KNOWN if leaf_of(known) == key]
    if not keys:
        raise UserError(f"'{name}' is no key of the configuration; {suggestion(key)}.")
    return "\n\n".join(_explain_known(each) for each in keys)


def _explain_section(section: str) -> str:
    inside = [key for key in KNOWN if key.startswith(section + ".") and key not in RETIRED]
    return "\n".join([f"{section} is a section of", *(f"  {key}" for key in inside)])


def _explain_known(key: str) -> str:
    retired = retired_key(key)
    if retired:
        return f"{retired} is retired, it has no effect: {RETIRED[retired]}."
    if key in PENDING:
        return _pending(key)
    known, field = LIVE[key], LIVE[key].field
    flags = [flag for flag, target in FLAGS.items() if target == key]
    lines = [
        f"{key}: {known.meaning}",
        f"  takes    {takes(field)}",
        f"  default  {written(field.default)}",
        f"  flag     {', '.join([*flags, '--' + key])}",
    ]
    theirs = aliases().by_key.get(key, {})
    lines += [
        f"  in {title}: {', '.join(theirs[trainer])}"
        for trainer, title in TRAINERS.items()
        if trainer in theirs
    ]
    return "\n".join(lines)


def _pending(key: str) -> str:
    pending = PENDING[key]
    why = pending.rule or f"asks for {pending.feature}, which {pending.verdict}"
    return f"{key} {why}; leave it at {written(pending.inactive)}."


def reference() -> str:
    """Returns docs/configuration.md."""
    return "\n".join([_HEAD, *_live(), *_flags(), *_inactive()])


def short_flags(is_read: Callable[[str], bool] = lambda key: True) -> str:
    """Lists the flags that stand for keys, of those that a program reads."""
    return "\n".join(f"  {flag:<28}{key}" for flag, key in FLAGS.items() if is_read(key))


def keys_by_section(
    width: int, section: str = "", is_read: Callable[[str], bool] = lambda key: True
) -> str:
    """Lists the keys that a program reads, with their meanings; of one section, or of all. Raises UserError."""
    if section and section not in SECTIONS:
        raise UserError(f"'{section}' is no section; {section_suggestion(section)}.")
    keys = [
        key for key in filter(is_read, LIVE) if f"{key}.".startswith(f"{section}." * bool(section))
    ]
    if not keys:
        raise UserError(f"this verb reads no key of the section '{section}'; leave it out.")
    lines: list[str] = []
    indent = " " * 6
    for title, inside in groupby(keys, _section_of):
        lines += ["", f"{title or 'top level'}:"]
        for key in inside:
            field, meaning = LIVE[key].field, LIVE[key].meaning
            lines.append(f"  --{key}  ({takes(field)}; default {written(field.default)})")
            lines += textwrap.wrap(meaning, width, initial_indent=indent, subsequent_indent=indent)
    return "\n".join(lines[1:])


def _section_of(key: str) -> str:
    return key.rpartition(".")[0]


def other_trainers() -> str:
    """Returns docs/from_other_trainers.md."""
    return "\n".join([_HEAD_OTHER_TRAINERS, *_their_names(), *_without_a_key()])


def _live() -> Iterator[str]:
    for section, keys in groupby(LIVE, _section_of):
        yield from ("", f"## {section or 'Top level'}", "")
        yield from ("| key | takes | default | meaning |", "| --- | --- | --- | --- |")
        for key in keys:
            field = LIVE[key].field
            default = f"`{written(field.default)}`"
            cells = (f"`{leaf_of(key)}`", takes(field), default, LIVE[key].meaning)
            yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _table(first: str, second: str, rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    yield from ("", f"| {first} | {second} |", "| --- | --- |")
    yield from (f"| `{left}` | {right} |" for left, right in rows)


def _flags() -> Iterator[str]:
    yield from ("", "## Flags of the programs")
    flags = [(flag, f"`{key}`") for flag, key in FLAGS.items()]
    yield from _table(
        "flag", "key", [("--config", "a YAML file; each one adds to those before it"), *flags]
    )


def _inactive() -> Iterator[str]:
    yield from ("", "## Retired keys", "")
    yield "Accepted without effect; a run lists those that its configuration sets, once, at startup."
    yield from _table("key", "why, and what instead", RETIRED.items())
    yield from ("", "## Keys that take one value", "")
    yield from (f"- {_pending(key).replace(key, f'`{key}`', 1)}" for key in PENDING)


def _their_names() -> Iterator[str]:
    yield f"| mindgrpo | {' | '.join(TRAINERS.values())} |"
    yield "| --- |" + " --- |" * len(TRAINERS)
    for key in KNOWN:
        theirs = aliases().by_key.get(key, {})
        cells = {trainer: [f"`{name}`" for name in theirs.get(trainer, ())] for trainer in TRAINERS}
        if key in aliases().same_in_mindrlhf:
            cells["mindrlhf"].insert(0, "same")
        if any(cells.values()):
            yield f"| `{key}` | {' | '.join(map(', '.join, cells.values()))} |"


def _without_a_key() -> Iterator[str]:
    table = aliases()
    yield from ("", "## Settings without a key here", "")
    yield "`.*` stands for all names of a section. Values in brackets change nothing here; others do not exist."
    rows = [
        (name, why + _values_of(table.harmless.get(name, ())))
        for name, why in table.absent.items()
        if name not in table.ignored
    ]
    yield from _table("name", "what instead", rows)
    yield from ("", "## Settings without an effect here", "")
    ignored = [(name, why) for name, why in table.absent.items() if name in table.ignored]
    yield from _table("name", "why", ignored)
    yield from ("", "## Values that differ", "")
    yield "What the value of a name means for the key that takes its place."
    yield from _table("name", "difference", table.differences.items())
    yield from ("", "## Fields of PEFT's LoraConfig", "")
    yield (
        f"`peft_config` takes {', '.join(TAKEN)}. Of other fields the values in brackets change nothing here, and "
        "others are refused."
    )
    fields = [(name, _values_of(values).strip()) for name, values in table.peft["refused"].items()]
    whys = [(name, group["why"]) for group in table.peft["ignored"] for name in group["names"]]
    yield from _table("field", "values", [*fields, *whys])
    yield from ("", "## Sections", "")
    yield "Where the settings of another trainer's section are in this project's configuration."
    yield from _table("section", "here", table.sections.items())


def _values_of(values: Iterable[object]) -> str:
    return f" ({', '.join(map(written, [None, *values]))})"
