"""Reads lists of messages as data sets write them: under several names, as text in CSV, with nulls that tables add."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from mindgrpo.data.row_files import Row
from mindgrpo.errors import UserError
from mindgrpo.strict_files import NotJson, parse_json

Message = Mapping[str, Any]

# How texts begin that other programs write for a list of messages into CSV: as JSON, or as Python shows it.
WRITTEN_MESSAGES = re.compile(r"""\s*\[\s*\{\s*["'](?:role|content|from|value)["']\s*:""")
IMAGE_PARTS = ("image", "image_url", "input_image")
ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant"}


def messages_of(value: object, where: str) -> tuple[Message, ...]:
    """Makes one message of a question, and takes a list of messages as it is. Raises UserError."""
    if isinstance(value, str) and value.strip():
        return ({"role": "user", "content": value},)
    if not isinstance(value, list):
        raise UserError(f"{where} is {value!r}; it must be a non-empty text or a list of messages")
    messages = tuple(
        message_of(message, f"{where} message {number}")
        for number, message in enumerate(value, start=1)
    )
    if not messages:
        raise UserError(f"{where} is an empty list; it must hold at least one message")
    last = messages[-1]
    text = last["content"]
    if last["role"] in ("assistant", "system"):
        raise UserError(
            f"{where} ends with the {last['role']} message, which leaves nothing to answer; end it with the user's last"
        )
    if not (text.strip() if isinstance(text, str) else text):
        raise UserError(f"{where} ends with an empty {last['role']} message; it must ask something")
    return messages


def is_answered(messages: Sequence[Any]) -> bool:
    """Returns whether a conversation ends with what the assistant says."""
    last = messages[-1] if messages else None
    role = last.get("role", last.get("from")) if isinstance(last, Mapping) else None
    return isinstance(role, str) and ROLES.get(role, role) == "assistant"


def written_messages(row: Row, keys: Sequence[str], where: str) -> Row:
    """Returns, by key, the lists of messages that a row holds as text, as CSV must. Raises UserError."""
    texts = {
        key: row[key]
        for key in keys
        if isinstance(row.get(key), str) and WRITTEN_MESSAGES.match(row[key])
    }
    return {key: read_messages(text, f'{where}: "{key}"') for key, text in texts.items()}


def read_messages(text: str, where: str) -> Any:
    try:
        return parse_json(text.encode())
    except NotJson as error:
        reason = error
    try:
        return parse_json(json.dumps(ast.literal_eval(text.strip())).encode())
    except (TypeError, ValueError, SyntaxError, MemoryError, RecursionError):
        raise UserError(
            f"{where} looks like a list of messages, but is not JSON: {reason}; write it as JSON, "
            '[{"role": "user", "content": "..."}]'
        ) from None


def without_nulls(value: Any) -> Any:
    """Returns a value without keys that are null, at any depth: tables give each row the keys of all others."""
    if isinstance(value, Mapping):
        return {key: without_nulls(held) for key, held in value.items() if held is not None}
    return [without_nulls(held) for held in value] if isinstance(value, list) else value


def parts_of(content: Sequence[Any], where: str) -> str | list[dict[str, Any]]:
    """Reads a content of parts: returns text where it has no image, else {"type": "text", "text"} and {"type": "image"}
    parts, the latter with their `source` unless a column holds it. Raises UserError for videos and others."""
    made: list[dict[str, Any]] = []
    for number, part in enumerate(content, 1):
        kind = part.get("type") if isinstance(part, Mapping) else "text"
        text = part.get("text") if isinstance(part, Mapping) else part
        if isinstance(text, str) and kind in (None, "text", "input_text"):
            made.append({"type": "text", "text": text})
        elif isinstance(part, Mapping) and kind in IMAGE_PARTS:
            has_source = any(key != "type" and value is not None for key, value in part.items())
            made.append({"type": "image", **({"source": dict(part)} if has_source else {})})
        else:
            raise UserError(
                f"{where}: part {number} of its content is {part!r:.60}; parts must be texts or images, as "
                '{"type": "text", "text": "..."} and {"type": "image"}'
            )
    if any(part["type"] == "image" for part in made):
        return made
    return "".join(part["text"] for part in made)


def message_of(value: object, where: str) -> Message:
    if isinstance(value, Mapping):
        rest = without_nulls(value)
        role, content = rest.get("role", rest.get("from")), rest.get("content", rest.get("value"))
        if content is None and rest.get("tool_calls"):
            content = ""
        if isinstance(content, list):
            content = parts_of(content, where)
        if isinstance(role, str) and role and isinstance(content, str | list) and content != []:
            for key in ("role", "from", "content", "value"):
                rest.pop(key, None)
            return {"role": ROLES.get(role, role), "content": content, **rest}
    raise UserError(f'{where} is {value!r}; it must be an object with a text "role" and "content"')
