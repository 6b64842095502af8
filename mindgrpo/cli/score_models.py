"""Scores completions of a file with reward models, on one rank, as a run does: `mindgrpo score --reward-model DIR`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mindgrpo.backend.connect import connect
from mindgrpo.config import config_with
from mindgrpo.data.messages import Message
from mindgrpo.grpo.build import fill_forward, runtime_settings
from mindgrpo.grpo.reward_model import make_reward_models
from mindgrpo.memory.residency import Residency
from mindgrpo.plan.model_roles import reward_model_roles
from mindgrpo.rewards.call import RewardResult
from mindgrpo.rewards.classifier_texts import Completed
from mindgrpo.run.named_sources import REWARD_MODELS, with_local_paths
from mindgrpo.run.preflight import read_classifier_texts, read_reward_models
from mindgrpo.weights.pretrained import check_tensors

# The longest conversation, if neither max_length nor the model's positions say less.
LONGEST = 8192
_NO_IDS = np.zeros(0, np.int32)


def results_of(
    models: Sequence[Mapping[str, Any]],
    prompts: Sequence[Sequence[Message]],
    completions: Sequence[str],
    turns: Sequence[Sequence[Message]],
) -> dict[str, tuple[float, RewardResult]]:
    """Returns by name each model's weight and its scores; `models` are sections like reward_config.model.

    `prompts` are the messages before each completion, and `turns` those of the completion. Raises UserError.
    """
    alone = {"parallel_config": {"data_parallel": 1}}
    values: dict[str, object] = {
        "reward_config.models": [{**own, **alone} for own in models],
        "rl_config.seq_length": LONGEST,
    }
    config = with_local_paths(config_with(None, values), (REWARD_MODELS,)).config
    shapes = read_reward_models(config)
    texts = read_classifier_texts(config, None, shapes)
    roles = reward_model_roles(config, shapes)
    for role in roles:
        check_tensors(role.load, role.layout.specs)
    samples = [
        Completed(asked, _text(asked), _NO_IDS, text, _NO_IDS, own)
        for asked, text, own in zip(prompts, completions, turns, strict=True)
    ]
    backend = connect(config.context.target, dict(os.environ), runtime_settings(config))
    # As in a run, so that scores have the same bits.
    backend.kernels.batch_invariant = backend.kernels.has_slots
    residency = Residency(config.context.max_device_bytes)
    results = {}
    for model, role in zip(make_reward_models(config, roles, texts, backend), roles, strict=True):
        fill_forward(model.weights, role.load, config)
        residency.add({model.role: [model.weights.pool]})
        results[model.name] = (
            model.weight,
            model.score(backend, residency.activate, lambda: samples),
        )
    backend.close()
    return results


def _text(messages: Sequence[Message]) -> str:
    """Returns what stands before a completion where no template renders it."""
    return "".join(str(message["content"]) for message in messages)
