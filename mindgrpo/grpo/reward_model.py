"""Reward models: sequence classifiers that score completions, in a layout of their own, as a role of the run.

A conversation's tokens are the prompt of a sample whose completion is one token that nobody reads: the position that
would predict it is the last token, whose value is the score (transformers' *ForSequenceClassification).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from mindgrpo.algorithm.packing import PackedRollout
from mindgrpo.algorithm.sample import LENGTH, Rollout
from mindgrpo.backend.contract import Backend
from mindgrpo.backend.rank_consistency import on_first_rank
from mindgrpo.config import Config
from mindgrpo.models.pipeline import ForwardPipeline, compute_log_probs
from mindgrpo.models.shard import Shard
from mindgrpo.plan.model_roles import ModelRole
from mindgrpo.rewards.call import TOO_LONG, RewardResult
from mindgrpo.rewards.classifier_texts import ClassifierTexts, Completed
from mindgrpo.weights.local_weights import Weights
from mindgrpo.workers.protocol import NOT_FINITE, CallFailure

Scale = Literal["none", "sigmoid", "batch"]


@dataclass(frozen=True)
class RewardModel:
    """A reward model on this rank; `pipeline` is None on ranks outside of its mesh.

    Conversations have at most `max_length` tokens; `weight` is that of its scores in the reward.
    """

    name: str
    role: str
    weight: float
    scale: Scale
    max_length: int
    texts: ClassifierTexts
    weights: Weights
    pipeline: ForwardPipeline | None

    def score(
        self,
        backend: Backend,
        enter: Callable[[str], None],
        samples: Callable[[], Sequence[Completed]],
    ) -> RewardResult:
        """Scores samples, which only rank 0 asks for. Collective, with the same result on every rank.

        `enter` brings a role to the device. Raises UserError if rank 0 cannot render a sample.
        """
        texts = on_first_rank(backend, lambda: [self.texts.ids(own) for own in samples()])
        result = RewardResult()
        fitting = [i for i, ids in enumerate(texts) if 0 < len(ids) <= self.max_length]
        for i, ids in enumerate(texts):
            if len(ids) > self.max_length:
                length = f"{len(ids)} tokens is longer than its max_length {self.max_length}"
                result.failures[i] = CallFailure(TOO_LONG, f"a conversation of {length}")
            elif not ids:
                result.failures[i] = CallFailure(TOO_LONG, "a conversation has no token")
        if not fitting:
            return result
        enter(self.role)
        with backend.computing():
            rollout = _as_prompts([texts[i] for i in fitting])
            mesh = self.weights.layout.mesh
            values = compute_log_probs(self.pipeline, mesh, backend, PackedRollout(rollout))
        scores = np.array([float(own[0]) for own in values])
        finite = np.isfinite(scores)
        scores[finite] = scaled(scores[finite], self.scale)
        for i, score, is_finite in zip(fitting, scores.tolist(), finite, strict=True):
            if is_finite:
                result.values[i] = score
            else:
                result.failures[i] = CallFailure(NOT_FINITE, f"its score is {score}")
        return result


def _as_prompts(texts: Sequence[Sequence[int]]) -> Rollout:
    count, unread = len(texts), np.zeros(1, np.int32)
    return Rollout.single_turn(
        tuple(np.array(ids, np.int32) for ids in texts),
        (unread,) * count,
        (LENGTH,) * count,
        (np.zeros(1, np.float32),) * count,
        range(count),
    )


def scaled(scores: np.ndarray, scale: Scale) -> np.ndarray:
    """Returns float64 scores [n] as reward_config.model.scale says."""
    if scale == "sigmoid":
        return np.asarray(0.5 * (1.0 + np.tanh(0.5 * scores)))
    if scale == "batch" and scores.size:
        deviation = scores.std()
        return np.asarray((scores - scores.mean()) / (deviation if deviation > 0 else 1.0))
    return scores


def make_reward_models(
    config: Config,
    roles: Sequence[ModelRole],
    texts: Mapping[str, ClassifierTexts],
    backend: Backend,
) -> list[RewardModel]:
    """Builds the reward models, without loading weights; `texts` are by the key of their section."""
    models = []
    for role in roles:
        own = config.reward_config.models_by_key[role.key]
        weights = Weights(
            role.layout, backend.rank, backend, role.name, dtype=backend.compute_dtype
        )
        pipeline = None
        if role.layout.mesh.holds(backend.rank):
            pipeline = ForwardPipeline(
                Shard(role.model, weights, backend),
                backend,
                role.name,
                role.widest(backend.kernels.ragged),
                role.longest,
                temperature=1.0,
            )
        models.append(
            RewardModel(
                own.score_name,
                role.name,
                own.weight,
                own.scale,
                role.longest,
                texts[role.key],
                weights,
                pipeline,
            )
        )
    return models
