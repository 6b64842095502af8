"""Chooses chat templates by name: those of templates/, a tokenizer's own named ones, and those of a user's file.

A templates file is JSON: {"name": "jinja text"}, [{"name", "template"}], or the list of `format_user` entries that
other trainers keep.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindgrpo import strict_files
from mindgrpo.errors import UserError
from mindgrpo.strict_files import NotJson, parse_json

MAX_TEMPLATE_BYTES = 1 << 20
SHIPPED = Path(__file__).parent / "templates"
SETTING = "rl_config.chat_template"
JINJA_SUFFIXES = (".jinja", ".jinja2", ".j2")
TURN_END = re.compile(r"A turn ends with (<\S+>)")
MARKER = re.compile(r"<\|[^|<>\s]+\|>|<｜[^｜<>\s]+｜>")


@dataclass(frozen=True)
class ChatTemplate:
    """`origin` says where it comes from; `stop` is the token that ends a turn, where that is known.

    Of one that was `chosen` by name, every <|marker|> must be a token of the tokenizer.
    """

    text: str
    origin: str
    stop: str | None = None
    chosen: bool = False

    @property
    def markers(self) -> list[str]:
        return sorted(set(MARKER.findall(self.text))) if self.chosen else []


def shipped_names() -> list[str]:
    return sorted(path.stem for path in SHIPPED.glob("*.jinja"))


def choose_template(value: str, own: Mapping[str, str]) -> ChatTemplate:
    """Returns what `value` names: one of `own` or of those shipped, FILE.jinja, or FILE.json:NAME. Raises UserError."""
    if value in own:
        return ChatTemplate(own[value], f"the tokenizer's chat template {value}")
    if value in shipped_names():
        text = (SHIPPED / f"{value}.jinja").read_text(encoding="utf-8")
        return named(text, f"the chat template {value}")
    path, colon, name = value.rpartition(":")
    if colon and path.endswith(".json"):
        return from_file(Path(path), name)
    if value.endswith(".json"):
        return from_file(Path(value), None)
    if value.endswith(JINJA_SUFFIXES) or "/" in value:
        return ChatTemplate(read_text(Path(value)), f"the chat template {value}")
    names = ", ".join(dict.fromkeys([*own, *shipped_names()]))
    raise UserError(
        f"there is no chat template {value!r}; set {SETTING} to one of {names}, to a FILE.jinja or to "
        "FILE.json:NAME"
    )


def named(text: str, origin: str) -> ChatTemplate:
    end = TURN_END.search(text)
    return ChatTemplate(text, origin, end[1] if end else None, chosen=True)


def from_file(path: Path, name: str | None) -> ChatTemplate:
    try:
        content = parse_json(read_text(path).encode())
    except NotJson as error:
        raise UserError(f"the templates file {path} is not JSON: {error}; correct it") from error
    entries = entries_of(content, path)
    if name is None and len(entries) == 1:
        name = next(iter(entries))
    if name not in entries:
        wanted = "needs a name after a colon" if name is None else f"has no template {name!r}"
        raise UserError(
            f"the templates file {path} {wanted}; set {SETTING} to {path}:NAME with one of {', '.join(entries)}"
        )
    entry, origin = entries[name], f"the chat template {name} of {path}"
    if isinstance(entry, str):
        return named(entry, origin)
    return ChatTemplate(jinja_of_slots(entry, origin), origin, turn_end(entry), chosen=True)


def entries_of(content: object, path: Path) -> dict[str, Any]:
    """Returns jinja text or a `format_user` entry, by name. Raises UserError."""
    if (
        isinstance(content, dict)
        and content
        and all(isinstance(text, str) for text in content.values())
    ):
        return dict(content)
    if isinstance(content, list) and content and all(is_entry(entry) for entry in content):
        return {entry["name"]: entry.get("template", entry) for entry in content}
    raise UserError(
        f'the templates file {path} must hold {{"name": "jinja text"}} or a list of objects with "name" and '
        '"template" or "format_user"; correct it'
    )


def is_entry(entry: object) -> bool:
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
        return False
    return isinstance(entry.get("template"), str) or "format_user" in entry


def turn_end(entry: Mapping[str, Any]) -> str | None:
    words = entry.get("stop_words") or []
    return str(words[0]) if isinstance(words, list) and words else None


def jinja_of_slots(entry: Mapping[str, Any], origin: str) -> str:
    """Writes jinja for slots: texts around {{content}}; the user's holds what opens the assistant's turn, too."""

    def slots(key: str, content: str, default: object = "{{content}}") -> str:
        held = entry.get(key) or {}
        texts = held.get("slots", [default]) if isinstance(held, dict) else held
        return expression(texts, content, f"{origin}, {key}")

    end = literal(turn_end(entry)) if turn_end(entry) else token_named("eos_token")
    answer = slots("format_assistant", "message.content")
    if "format_assistant" not in entry:
        answer = f"{answer} + {end} + {slots('format_separator', literal(''), '')}"
    default = literal(entry.get("default_system") or "")
    return "\n".join(
        [
            f"{{{{- {slots('format_prefix', literal(''), '')} }}}}",
            '{%- set has_system = messages[0].role == "system" %}',
            f"{{%- set first = messages[0].content if has_system else {default} %}}",
            f"{{%- if first %}}{{{{- {slots('format_system', 'first')} }}}}{{% endif %}}",
            "{%- for message in messages[1 if has_system else 0:] %}",
            f'{{%- if message.role == "assistant" %}}{{{{- {answer} }}}}',
            f"{{%- else %}}{{{{- {slots('format_user', 'message.content')} }}}}{{% endif %}}",
            "{%- endfor %}",
        ]
    )


def expression(slots: object, content: str, origin: str) -> str:
    """Writes jinja for texts with {{content}} in them, ["bos_token"] and {"token": "<...>"}. Raises UserError."""
    terms = []
    for slot in slots if isinstance(slots, list) else [slots]:
        if isinstance(slot, str):
            terms.append(f" + {content} + ".join(map(literal, slot.split("{{content}}"))))
        elif isinstance(slot, list):
            terms += [token_named(str(name)) for name in slot]
        elif isinstance(slot, dict) and isinstance(slot.get("token"), str):
            terms.append(literal(slot["token"]))
        else:
            raise UserError(f"{origin} holds {slot!r}, which is no slot; correct it")
    return " + ".join(terms) or literal("")


def literal(text: object) -> str:
    return json.dumps(text, ensure_ascii=False)


def token_named(name: str) -> str:
    if not name.isidentifier():
        raise UserError(
            f"{name!r} is no name of a token such as bos_token; correct the templates file"
        )
    return f'({name} | default(""))'


def read_text(path: Path) -> str:
    return strict_files.read_text(path, SETTING, "give the path of a text file", MAX_TEMPLATE_BYTES)
