"""The keys of `rl_config` that make conversations: tools, the form of their calls, and how far a conversation goes."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from mindgrpo.config.section import BEFORE_LIST, Section


class ToolKeys(Section):
    tools: Annotated[list[str], BEFORE_LIST] = []
    """tools that completions may call: calculator, python, module:function or file.py:function; functions with type
    hints and a docstring with an Args: section"""
    tool_parser: str = "auto"
    """form of the calls. hermes: <tool_call> tags around JSON (Qwen); llama3: the turn is JSON with a name and
    parameters; module:function or file.py:function: a function from a turn's text to a list of objects with name and
    arguments; auto: hermes or llama3, as the chat template shows them"""
    tool_deadline: float = Field(10.0, gt=0)
    """seconds of one call; one that takes longer is terminated, and the model reads that it failed"""
    max_turns: int = Field(8, ge=1)
    """turns of the policy in a conversation with tools; calls of the last one are not run"""
    max_tool_calls: int | None = Field(None, ge=0)
    """calls in a conversation; further ones are answered with an error; null: no limit"""
