"""Makes of completions the messages that reward functions of TRL read (trl/trainer/grpo_trainer.py).

A completion of one turn is [{"role": "assistant", "content": ...}]. A turn with calls has them as `tool_calls`,
[{"type": "function", "function": {"name": ..., "arguments": {...}}}], and as content the text before them; then come
the answers, {"role": "tool", "name": ..., "content": ...}, and the next turn.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

# What begins the calls in a turn's text, in the forms of tools/calls.py.
CALLS = re.compile(r"\n?<tool_call>|<\|python_tag\|>|\A\s*\{")
KEYS = ("role", "name", "content")


def completion_messages(
    text: str, conversation: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Returns the messages of a completion; `conversation` is empty where it has one turn, which is `text`."""
    turns = conversation or [{"role": "assistant", "content": text}]
    return [_message(turn) for turn in turns]


def _message(turn: Mapping[str, Any]) -> dict[str, Any]:
    message = {key: turn[key] for key in KEYS if key in turn}
    if calls := turn.get("tool_calls"):
        message["content"] = CALLS.split(str(turn["content"]), maxsplit=1)[0]
        message["tool_calls"] = [{"type": "function", "function": dict(call)} for call in calls]
    return message
