"""Chooses chat templates by name, and renders them with the code of transformers, within limits of time and memory.

Names are those of templates/, a tokenizer's own named ones, and those of a user's file of JSON: {"name": "jinja text"},
[{"name", "template"}], or the list of `format_user` entries that other trainers keep. A rendered text is that of
`apply_chat_template`, byte for byte: same sandbox, same filters, same variables. transformers (without torch) takes
0.6 s of a core to import, so a rank does it for its first prompt, and the fork server once for all ranks.
"""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from mindgrpo import strict_files
from mindgrpo.errors import UserError
from mindgrpo.strict_files import NotJson, parse_json
from mindgrpo.user_code import OutOfTime, limits

# Without torch transformers prints advice that has nothing to do with templates or tokenizers.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

MAX_TEMPLATE_BYTES = 1 << 20
# Limits of rendering one prompt.
MAX_SECONDS = 3.0
MAX_GIB = 2
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
    path, _, name = value.rpartition(":")
    if path.endswith(".json") or value.endswith(".json"):
        return from_file(Path(path), name) if path.endswith(".json") else from_file(Path(value))
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


def from_file(path: Path, name: str | None = None) -> ChatTemplate:
    """Reads the template `name` of a templates file, or its only one. Raises UserError."""
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
    if isinstance(content, dict) and content and set(map(type, content.values())) == {str}:
        return content
    if isinstance(content, list) and content and all(is_entry(entry) for entry in content):
        return {entry["name"]: entry.get("template", entry) for entry in content}
    raise UserError(
        f'the templates file {path} must hold {{"name": "jinja text"}} or a list of objects with "name" and '
        '"template" or "format_user"; correct it'
    )


def is_entry(entry: object) -> bool:
    held = entry if isinstance(entry, dict) else {}
    has_text = isinstance(held.get("template"), str) or "format_user" in held
    return isinstance(held.get("name"), str) and has_text


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
            raise UserError(f"{origin} holds {slot!r}, which is not a slot; correct it")
    return " + ".join(terms) or literal("")


def literal(text: object) -> str:
    return json.dumps(text, ensure_ascii=False)


def token_named(name: str) -> str:
    if not name.isidentifier():
        raise UserError(
            f"{name!r} is not the name of a token such as bos_token; correct the templates file"
        )
    return f'({name} | default(""))'


def read_text(path: Path) -> str:
    return strict_files.read_text(path, SETTING, "give the path of a text file", MAX_TEMPLATE_BYTES)


def tool_schema(function: Callable[..., Any]) -> dict[str, Any]:
    """Returns what templates take in `tools`, a JSON schema, from type hints and docstring.

    Raises what transformers raises.
    """
    from transformers.utils.chat_template_utils import get_json_schema

    schema: dict[str, Any] = get_json_schema(function)
    return schema


@contextmanager
def _same_draws(seed: str) -> Iterator[None]:
    """Has the templates' filter `random` draw by `seed` alone; what others draw goes on as if nothing had been."""
    state = random.getstate()
    random.seed(seed)
    try:
        yield
    finally:
        random.setstate(state)


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    date: datetime | None = None,
    **variables: Any,
) -> str:
    """Returns the text of a conversation.

    It is a function of the arguments: `strftime_now` tells `date` (None: the present), and what is drawn at random
    depends on the template and the messages.

    `variables` are those of `apply_chat_template`: add_generation_prompt, tools, documents (None where a conversation
    has none), special tokens. Raises jinja2.TemplateSyntaxError for text that is no template, jinja2.TemplateError
    beyond the limits, and whatever the template's operations raise.
    """
    from transformers.utils.chat_template_utils import (
        _compile_jinja_template,
        render_jinja_template,
    )

    try:
        with limits(MAX_SECONDS, MAX_GIB << 30), _same_draws(f"{template}{messages!r}"):
            # The one that is rendered: it is kept by its text. No argument could replace a function.
            _compile_jinja_template(template).globals["strftime_now"] = (
                date or datetime.now()
            ).strftime
            rendered: Any = render_jinja_template(
                [[dict(message) for message in messages]],
                chat_template=template,
                **{"tools": None, "documents": None, **variables},
            )
    except OutOfTime as error:
        raise TemplateError(
            f"it takes more than {MAX_SECONDS:g} s of processor time for one prompt"
        ) from error
    except MemoryError as error:
        raise TemplateError(f"it takes more than {MAX_GIB} GiB of memory for one prompt") from error
    text: str = rendered[0][0]
    return text
