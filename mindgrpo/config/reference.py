"""The configuration in words: one key (`explain`), or every key as a page of Markdown (`reference`).

Says what the schema says, so that neither can be out of date. Refuses to know more about a key.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mindgrpo.config.command_line import FLAGS
from mindgrpo.config.error_messages import takes
from mindgrpo.config.names import KNOWN, SECTIONS, suggestion
from mindgrpo.config.neighbours import NEIGHBOURS, WITHOUT_COUNTERPART
from mindgrpo.config.retired import PENDING, RETIRED, retired_key
from mindgrpo.config.schema import LIVE
from mindgrpo.errors import UserError

_HEAD = """# Configuration

Every key of the YAML file, made from the schema by

    python -m mindgrpo config --reference > docs/configuration.md

`python -m mindgrpo config --explain KEY` says the same of one key; KEY may also be a flag, or the name
that another trainer has for it. Any key can be given on the command line by its path:
`--rl_config.max_steps 3`. A key that is not listed on this page is refused, with the nearest name, the
file and the line.
"""


@dataclass(frozen=True)
class _Described:
    key: str
    takes: str
    default: str
    meaning: str
    flags: list[str]
    elsewhere: list[str]


def _describe(key: str) -> _Described:
    field = LIVE[key].field
    return _Described(
        key=key,
        takes=takes(field),
        default=_written(field.default),
        meaning=field.description or "",
        flags=[flag for flag, target in FLAGS.items() if target == key],
        elsewhere=[name for name, target in NEIGHBOURS.items() if target == key],
    )


def _written(value: object) -> str:
    if value is None:
        return "null"
    return f'"{value}"' if isinstance(value, str) else str(value)


def explain(name: str) -> str:
    """What is known of a key, flag, section, or another trainer's name. Raises UserError for any other."""
    key = FLAGS.get(name, name.removeprefix("--")).strip(".")
    leaf = key.rpartition(".")[2]
    sections = [known for known in sorted(SECTIONS) if f".{known}".endswith(f".{key}")]
    if sections and key not in KNOWN:
        return "\n\n".join(_explain_section(section) for section in sections)
    if key not in KNOWN and leaf in NEIGHBOURS:
        return f"{name} is called {NEIGHBOURS[leaf]} here.\n\n{explain(NEIGHBOURS[leaf])}"
    if key not in KNOWN and leaf in WITHOUT_COUNTERPART:
        return f"{name} is no key here: {WITHOUT_COUNTERPART[leaf]}."
    same = [known for known in KNOWN if known.rpartition(".")[2] == key]
    keys = [key] if key in KNOWN or retired_key(key) else same
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
    about = _describe(key)
    lines = [
        f"{key}: {about.meaning}",
        f"  takes    {about.takes}",
        f"  default  {about.default}",
        f"  flag     {', '.join([*about.flags, '--' + key])}",
    ]
    if about.elsewhere:
        lines.append(f"  elsewhere called {', '.join(about.elsewhere)}")
    return "\n".join(lines)


def _pending(key: str) -> str:
    pending = PENDING[key]
    if pending.set_to is None:
        return f"{key} is {pending.feature}."
    without = f" where it is asked for, {pending.goes_on}" if pending.goes_on else ""
    end = without or f" leave it at {_written(pending.set_to)}"
    return f"{key} asks for {pending.feature}, which {pending.verdict};{end}."


def reference() -> str:
    """The whole page."""
    return "\n".join([_HEAD, *_live(), *_flags(), *_told(), *_theirs()])


def _live() -> Iterator[str]:
    section = None
    for key in LIVE:
        above = key.rpartition(".")[0]
        if above != section:
            section = above
            yield from ("", f"## {section or 'Top level'}", "")
            yield from ("| key | takes | default | meaning |", "| --- | --- | --- | --- |")
        about = _describe(key)
        cells = (f"`{key.rpartition('.')[2]}`", about.takes, f"`{about.default}`", about.meaning)
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _flags() -> Iterator[str]:
    yield from ("", "## Flags of the programs", "", "| flag | key |", "| --- | --- |")
    yield "| `--config` | the YAML file |"
    for flag, key in FLAGS.items():
        yield f"| `{flag}` | `{key}` |"


def _told() -> Iterator[str]:
    yield from ("", "## Retired keys", "")
    yield "Accepted without effect, and told once at start."
    yield from ("", "| key | why, and what instead |", "| --- | --- |")
    for key, why in RETIRED.items():
        yield f"| `{key}` | {why} |"
    yield from ("", "## Keys of what is not available yet", "")
    yield from (f"- {_pending(key).replace(key, f'`{key}`', 1)}" for key in PENDING)


def _theirs() -> Iterator[str]:
    yield from ("", "## Names that other trainers have", "")
    yield "Refused, with our name; values may count in another unit there."
    yield from ("", "| here | elsewhere |", "| --- | --- |")
    for key in KNOWN:
        names = [name for name, target in NEIGHBOURS.items() if target == key]
        if names:
            yield f"| `{key}` | {', '.join(f'`{name}`' for name in names)} |"
    yield from ("", "| name without a key here | why |", "| --- | --- |")
    for name, why in WITHOUT_COUNTERPART.items():
        yield f"| `{name}` | {why} |"
