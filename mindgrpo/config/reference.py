"""The configuration in words, made from the schema: one key (`explain`), or every key as a page of Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from mindgrpo.config.command_line import FLAGS
from mindgrpo.config.error_messages import takes
from mindgrpo.config.names import (
    KNOWN,
    PENDING,
    RETIRED,
    SECTIONS,
    aliases,
    leaf_of,
    retired_key,
    suggestion,
)
from mindgrpo.config.schema import LIVE
from mindgrpo.errors import UserError

_HEAD = """# Configuration

Every key of the YAML file, made from the schema by

    python -m mindgrpo config --reference > docs/configuration.md

`python -m mindgrpo config --explain KEY` explains one key; KEY may also be a flag, or the name that another trainer
has for it. Any key can be given on the command line by its path: `--rl_config.max_steps 3`. A key that is not listed
on this page is an error that names the nearest key, the file and the line.
"""


def _written(value: object) -> str:
    if value is None:
        return "null"
    return f'"{value}"' if isinstance(value, str) else str(value)


def explain(name: str) -> str:
    """Explains a key, flag, section, or another trainer's name. Raises UserError for any other."""
    key = FLAGS.get(name, name.removeprefix("--")).strip(".")
    if key not in KNOWN:
        sections = [known for known in sorted(SECTIONS) if f".{known}".endswith(f".{key}")]
        if sections:
            return "\n\n".join(_explain_section(section) for section in sections)
        if ours := aliases().ours(key):
            return f"{name} is called {ours} here.\n\n{explain(ours)}"
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
        f"  default  {_written(field.default)}",
        f"  flag     {', '.join([*flags, '--' + key])}",
    ]
    if elsewhere := aliases().names_of(key):
        lines.append(f"  elsewhere called {', '.join(elsewhere)}")
    return "\n".join(lines)


def _pending(key: str) -> str:
    pending = PENDING[key]
    instead = f"leave it at {_written(pending.inactive)}"
    if pending.goes_on:
        instead = f"where it is asked for, {pending.goes_on}"
    return f"{key} asks for {pending.feature}, which {pending.verdict}; {instead}."


def reference() -> str:
    """Returns the whole page."""
    return "\n".join([_HEAD, *_live(), *_flags(), *_inactive(), *_elsewhere()])


def _live() -> Iterator[str]:
    section = None
    for key, known in LIVE.items():
        above, _, leaf = key.rpartition(".")
        if above != section:
            section = above
            yield from ("", f"## {section or 'Top level'}", "")
            yield from ("| key | takes | default | meaning |", "| --- | --- | --- | --- |")
        default = _written(known.field.default)
        cells = (f"`{leaf}`", takes(known.field), f"`{default}`", known.meaning)
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _table(first: str, second: str, rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    yield from ("", f"| {first} | {second} |", "| --- | --- |")
    yield from (f"| `{left}` | {right} |" for left, right in rows)


def _flags() -> Iterator[str]:
    yield from ("", "## Flags of the programs")
    flags = [(flag, f"`{key}`") for flag, key in FLAGS.items()]
    yield from _table("flag", "key", [("--config", "the YAML file"), *flags])


def _inactive() -> Iterator[str]:
    yield from ("", "## Retired keys", "")
    yield "Accepted without effect, and listed once at start."
    yield from _table("key", "why, and what instead", RETIRED.items())
    yield from ("", "## Keys of what is not available yet", "")
    yield from (f"- {_pending(key).replace(key, f'`{key}`', 1)}" for key in PENDING)


def _elsewhere() -> Iterator[str]:
    yield from ("", "## Names that other trainers have", "")
    yield "An error that names our key; values may count in another unit there."
    names = ((key, aliases().names_of(key)) for key in KNOWN)
    rows = [(key, ", ".join(f"`{name}`" for name in theirs)) for key, theirs in names if theirs]
    yield from _table("here", "elsewhere", rows)
    yield from _table("name without a key here", "why", aliases().absent.items())
