"""Lays out the models beside the policy that only compute forward passes: the reference, and reward models. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from mindgrpo.algorithm.packing import MicroShape
from mindgrpo.config import Config
from mindgrpo.config.roles import LoraConfig, TrainParallelConfig
from mindgrpo.errors import UserError
from mindgrpo.memory.residency import REFERENCE, reward_model_role
from mindgrpo.models.decoder_config import DecoderConfig
from mindgrpo.parallel.sharding import Layout
from mindgrpo.plan.micro_shapes import reference_shape, reward_model_shape
from mindgrpo.plan.role_layouts import layout_of


@dataclass(frozen=True)
class ModelRole:
    """A model in `load` beside the policy. `name` is its role in memory, and its phase; `key` its section.

    Texts have at most `longest` tokens.
    """

    name: str
    key: str
    load: str
    model: DecoderConfig
    layout: Layout
    longest: int
    shape: partial[MicroShape]

    def widest(self, ragged: bool) -> MicroShape:
        """Returns the widest shape of its micro-batches on each data-parallel rank; `ragged` is the kernels'."""
        return self.shape(ragged=ragged)


@dataclass(frozen=True)
class OtherModels:
    """The shapes of models that differ from the policy's: of a `teacher`, of reward models by the key of their section,
    and of a `critic`."""

    teacher: DecoderConfig | None = None
    reward_models: Mapping[str, DecoderConfig] = field(default_factory=dict)
    critic: DecoderConfig | None = None


NO_OTHERS = OtherModels()


def reference_role(config: Config, model: DecoderConfig) -> ModelRole | None:
    """Returns the reference, of shapes `model`; None if the loss needs none. Raises UserError."""
    if not config.has_reference:
        return None
    key = "ref_config" if config.ref_config.parallel_config else "actor_config"
    layout = layout_of(
        config.reference_parallel, model, config.ref_config.offset, f"{key}.parallel_config"
    )
    shape = partial(reference_shape, config)
    return ModelRole(
        REFERENCE,
        "ref_config",
        config.reference_load,
        model,
        layout,
        config.rl_config.seq_length,
        shape,
    )


def as_trained(config: Config) -> Config:
    """Returns `config` with the critic's keys in place of the actor's, for what trains the critic."""
    own, actor = config.critic_config, config.actor_config
    degrees = config.critic_parallel.model_dump()
    changes = {
        "load": config.critic_load,
        "offset": 0,
        "parallel_config": TrainParallelConfig(**degrees),
        "recompute_config": own.recompute_config,
        "enable_parallel_optimizer": own.enable_parallel_optimizer,
        "optimizer": own.optimizer,
        "lr_schedule": own.lr_schedule,
        "lora": LoraConfig(),
    }
    return config.model_copy(update={"actor_config": actor.model_copy(update=changes)})


def critic_layout(config: Config, model: DecoderConfig) -> Layout:
    """Lays out the critic. Raises UserError."""
    if model.moe is not None:
        raise UserError(
            f"rl_config.advantage_estimator is {config.rl_config.advantage_estimator}, whose critic in "
            f"'{config.critic_load}' has experts ({model.model_type}), which are not trained there yet; name a dense "
            "model in critic_config.load."
        )
    key = "critic_config" if config.critic_config.parallel_config else "actor_config"
    return layout_of(config.critic_parallel, model, where=f"{key}.parallel_config")


def reward_model_roles(
    config: Config, models: Mapping[str, DecoderConfig]
) -> tuple[ModelRole, ...]:
    """Returns the reward models, of shapes `models` by the key of their section. Raises UserError."""
    roles = []
    for key, own in config.reward_config.models_by_key.items():
        model, parallel = models[key], config.parallel_of(own)
        where = key if own.parallel_config else "actor_config"
        layout = layout_of(parallel, model, where=f"{where}.parallel_config")
        length = own.max_length
        if length is not None and length > model.max_position_embeddings:
            raise UserError(
                f"{key}.max_length is {length}, but the model in '{own.load}' knows positions up to "
                f"{model.max_position_embeddings} (max_position_embeddings); lower it."
            )
        longest = min(model.max_position_embeddings, length or config.rl_config.seq_length)
        if model.sliding_window is not None:
            longest = min(longest, model.sliding_window)
        shape = partial(reward_model_shape, config, own, longest)
        name = reward_model_role(own.score_name)
        roles.append(ModelRole(name, key, str(own.load), model, layout, longest, shape))
    return tuple(roles)
