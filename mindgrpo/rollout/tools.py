"""Answers turns with tools: runs the calls in a turn, and reads metrics from the conversations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mindgrpo.algorithm.sample import Messages
from mindgrpo.config import Config, memory_bytes
from mindgrpo.data.messages import Message
from mindgrpo.data.tokenizer import Tokenizer
from mindgrpo.data.turns import TurnSuffix
from mindgrpo.errors import UserError
from mindgrpo.rollout.conversations import Reply
from mindgrpo.tools.calls import (
    MALFORMED,
    OVER_LIMIT,
    PARSER,
    PARSERS,
    Parser,
    ToolCall,
    find_parser,
    parser_for,
)
from mindgrpo.tools.pool import UNKNOWN, ToolAnswer, ToolPool, load_tools
from mindgrpo.workers.protocol import CallLimits


@dataclass(frozen=True)
class ToolTurns:
    """`pool` is on one rank alone; a conversation has at most `max_tool_calls` calls (None: no limit)."""

    parser: Parser
    pool: ToolPool | None
    max_tool_calls: int | None = None
    _asked: dict[int, Sequence[ToolCall]] = field(default_factory=dict)

    @property
    def runs_here(self) -> bool:
        return self.pool is not None

    @property
    def answers_every_turn(self) -> bool:
        return False

    def asks(
        self, turn: dict[str, Any], before: Sequence[Message], written: str
    ) -> list[ToolCall] | None:
        calls = self.parser(written)
        if not calls:
            return None
        turn["tool_calls"] = [{"name": call.name, "arguments": call.arguments} for call in calls]
        return self._within_limit(sum(len(m.get("tool_calls", ())) for m in before), calls)

    def _within_limit(self, before: int, calls: list[ToolCall]) -> list[ToolCall]:
        most = self.max_tool_calls
        if most is None or before + len(calls) <= most:
            return calls
        allowed = max(0, most - before)
        refused = f"no more than {most} calls are allowed"
        return [
            *calls[:allowed],
            *(replace(call, error=refused, failure=OVER_LIMIT) for call in calls[allowed:]),
        ]

    def answer(self, asked: Mapping[int, Sequence[ToolCall]], patience: float) -> dict[int, Reply]:
        assert self.pool is not None
        self._asked.update(asked)
        return {
            sample: Reply([*map(_message, self._asked.pop(sample), answers)])
            for sample, answers in self.pool.ask(asked, patience).items()
        }

    def end_rollout(self) -> None:
        self._asked.clear()
        if self.pool is not None:
            self.pool.end_all()

    def close(self) -> None:
        if self.pool is not None:
            self.pool.close()


def _message(call: ToolCall, answer: ToolAnswer) -> dict[str, str | None]:
    return {
        "role": "tool",
        "name": call.name,
        "content": answer.text,
        "failure": answer.failure,
    }


# Failures of calls that reached no tool.
NOT_RUN = (MALFORMED, UNKNOWN, OVER_LIMIT)


@dataclass(frozen=True)
class Toolbox:
    """Holds what every rank knows of rl_config.tools: names and schemas, the template's suffix, the parser of calls."""

    names: tuple[str, ...]
    schemas: tuple[dict[str, Any], ...]
    suffix: TurnSuffix
    parser: Parser


def read_toolbox(config: Config, tokenizer: Tokenizer) -> Toolbox | None:
    """Reads the settings and imports the users' modules; None without tools. Raises UserError."""
    rl = config.rl_config
    if not rl.tools:
        return None
    tools = load_tools(rl.tools)
    schemas = tuple(tool.schema() for tool in tools)
    suffix = TurnSuffix(tokenizer, schemas)
    return Toolbox(
        tuple(tool.name for tool in tools), schemas, suffix, _parser(rl.tool_parser, tokenizer)
    )


def _parser(name: str, tokenizer: Tokenizer) -> Parser:
    if name != "auto":
        return find_parser(name)
    template = tokenizer.template
    chosen = parser_for(template.text) if template is not None else None
    if chosen is None:
        raise UserError(
            f"{PARSER.key} is auto, but {template.origin if template else 'the chat template'} does not show how a "
            f"tool is called; set it to {', '.join(PARSERS)} or file.py:function."
        )
    return find_parser(chosen)


def tool_turns(config: Config, toolbox: Toolbox, runs_here: bool) -> ToolTurns:
    rl = config.rl_config
    pool = None
    if runs_here:
        limits = CallLimits(rl.tool_deadline, memory_bytes(config.reward_config.memory))
        pool = ToolPool(rl.tools, toolbox.names, limits)
    return ToolTurns(toolbox.parser, pool, rl.max_tool_calls)


def tool_metrics(messages: Sequence[Messages], names: Sequence[str] = ()) -> dict[str, float]:
    """Counts turns of the policy, calls, and failures by tool and by why none was run, as means per conversation."""
    count = max(1, len(messages))
    answers = [message for one in messages for message in one if message.get("role") == "tool"]
    turns = sum(message["role"] == "assistant" for one in messages for message in one)
    called = sum(any(message["role"] == "tool" for message in one) for one in messages)
    metrics = {
        "tools/turns": turns / count,
        "tools/calls": len(answers) / count,
        "tools/called_fraction": called / count,
    }
    for name in names:
        own = [a for a in answers if a["name"] == name and a["failure"] not in NOT_RUN]
        metrics[f"tools/{name}/calls"] = len(own) / count
        metrics[f"tools/{name}/failures"] = sum(a["failure"] is not None for a in own) / count
    for kind in NOT_RUN:
        metrics[f"tools/{kind}"] = sum(a["failure"] == kind for a in answers) / count
    return metrics
