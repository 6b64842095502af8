"""The keys of `rl_config` that make conversations: tools or an environment, and how far a conversation goes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from mindgrpo.config.section import BEFORE_LIST, OptionalText, Section

if TYPE_CHECKING:
    from mindgrpo.config.rewards import RewardConfig
    from mindgrpo.config.rl import RLConfig


class ConversationKeys(Section):
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
    """turns of the policy in a conversation with tools or an environment; tools that the last one calls are not run"""
    max_tool_calls: int | None = Field(None, ge=0)
    """calls in a conversation; further ones are answered with an error; null: no limit"""
    environment: OptionalText = None
    """module:Class or file.py:Class with reset(row) and step(completion), which gives every conversation its prompt,
    answers its turns and rewards them; null: none"""
    environment_deadline: float = Field(10.0, gt=0)
    """seconds of one reset or step; an environment that takes longer is terminated, and its conversation ends as
    failed"""
    turn_advantages: bool = False
    """an advantage for each turn, from the environment's rewards of this and the later turns; false: one a
    conversation, from their sum"""

    @property
    def has_conversations(self) -> bool:
        return bool(self.tools) or self.environment is not None


def conversation_contradictions(rl: RLConfig, rewards: RewardConfig) -> Iterator[str]:
    if rl.environment is not None and rl.tools:
        yield (
            f"rl_config.environment is {rl.environment} and rl_config.tools is {rl.tools}, but either an environment "
            "answers a turn or tools do; leave one of them out, and call the tools in the environment's step"
        )
    if rl.environment is not None and any(map(_is_environment, rewards.verifier_function)):
        yield (
            "reward_config.verifier_function has a function named environment, which is the name of the rewards of "
            "rl_config.environment; rename the function"
        )
    if not rl.turn_advantages:
        return
    if rl.environment is None:
        yield (
            "rl_config.turn_advantages is true, but only an environment rewards single turns and rl_config.environment "
            "is null; set turn_advantages to false or name an environment"
        )
    for key, value, needed in (
        ("advantage_estimator", rl.advantage_estimator, "grpo"),
        ("importance_sampling_level", rl.importance_sampling_level, "token"),
        ("kl_in_reward", rl.kl_in_reward, False),
    ):
        if value != needed:
            yield (
                f"rl_config.turn_advantages gives every turn an advantage of its own, which rl_config.{key} {value} "
                f"does not do; set {key} to {needed} or turn_advantages to false"
            )


def _is_environment(function: str) -> bool:
    return function.partition("(")[0].rpartition(":")[2].strip() == "environment"
