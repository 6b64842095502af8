"""Makes conversations of what the configuration asks for: tools, an environment, or nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from mindgrpo.algorithm.sample import Messages
from mindgrpo.backend.contract import Backend
from mindgrpo.config import Config
from mindgrpo.data.image_prompts import RunImages
from mindgrpo.data.tokenizer import Tokenizer
from mindgrpo.rollout.conversations import Conversations
from mindgrpo.rollout.environment import (
    EnvironmentForm,
    environment_metrics,
    environment_turns,
    read_environment,
    turns_of,
)
from mindgrpo.rollout.tools import Toolbox, read_toolbox, tool_metrics, tool_turns

Turns = Toolbox | EnvironmentForm


def read_turns(
    config: Config, tokenizer: Tokenizer, images: RunImages | None = None
) -> Turns | None:
    """Reads the settings and imports the users' modules; None where completions have one turn. Raises UserError."""
    return read_toolbox(config, tokenizer) or read_environment(config, tokenizer, images)


def make_conversations(
    config: Config,
    tokenizer: Tokenizer,
    turns: Turns | None,
    backend: Backend,
    encode: Callable[[Sequence[np.ndarray]], None] | None = None,
) -> Conversations | None:
    """Makes the conversations, None where completions have one turn; the first rank runs the tools or environments.

    `encode` makes features of the images of prompts during a rollout, on all ranks together.
    """
    if turns is None:
        return None
    most, gather = config.rl_config.max_turns, backend.world.gather_objects
    runs_here = backend.rank == 0
    if isinstance(turns, Toolbox):
        responder = tool_turns(config, turns, runs_here)
        return Conversations(tokenizer, turns.suffix, responder, most, gather=gather)
    answering = environment_turns(turns, runs_here)
    return Conversations(tokenizer, turns.suffix, answering, most, turns.form, gather, encode)


def turn_metrics(
    conversations: Sequence[Messages], tool_names: Sequence[str] = ()
) -> dict[str, float]:
    """Returns metrics of conversations, those of environments where turns have rewards, else those of tools."""
    if any("reward" in turn for messages in conversations for turn in turns_of(messages)):
        return environment_metrics(conversations)
    return tool_metrics(conversations, tool_names)
