"""The configuration as one frozen value, with every live key and its default.

Retired and pending keys are not here (names.py): what is an attribute of Config has an effect.
"""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import model_validator

from mindgrpo.config import checks
from mindgrpo.config.algorithm_checks import algorithm_contradictions
from mindgrpo.config.context import Context
from mindgrpo.config.observation import MonitorConfig, MsprobeConfig, ProfilerConfig
from mindgrpo.config.rl import RewardConfig, RLConfig
from mindgrpo.config.roles import (
    ActorConfig,
    CriticConfig,
    GenerateConfig,
    ParallelConfig,
    RefConfig,
    RewardModelConfig,
    ScoreParallelConfig,
)
from mindgrpo.settings.section import Key, OptionalText, Section, keys_of, plain


class Config(Section):
    output_dir: OptionalText = None
    """output folder of the run; null: output/<config name>/<time>"""
    verbose: bool = False
    """print the memory of each phase at startup"""
    rl_config: RLConfig = RLConfig()
    actor_config: ActorConfig = ActorConfig()
    ref_config: RefConfig = RefConfig()
    critic_config: CriticConfig = CriticConfig()
    reward_config: RewardConfig = RewardConfig()
    generate_config: GenerateConfig = GenerateConfig()
    context: Context = Context()
    monitor_config: MonitorConfig = MonitorConfig()
    profiler_config: ProfilerConfig = ProfilerConfig()
    msprobe_config: MsprobeConfig = MsprobeConfig()

    @model_validator(mode="after")
    def _keys_agree(self) -> Config:
        for sentence in self._contradictions():
            raise checks.Contradiction(sentence)
        return self

    def _contradictions(self) -> Iterator[str]:
        rl, actor, generate = self.rl_config, self.actor_config, self.generate_config
        ref, ref_parallel = self.ref_config, self.reference_parallel
        yield from checks.model_contradictions(actor, ref, ref_parallel, generate)
        yield from checks.batch_contradictions(rl)
        yield from checks.length_contradictions(rl, generate)
        yield from checks.data_contradictions(rl, self.reward_config)
        yield from checks.reward_model_contradictions(self.reward_config)
        yield from checks.critic_contradictions(rl, self.critic_config, self.critic_parallel)
        yield from checks.evaluation_contradictions(rl)
        yield from checks.per_token_contradictions(rl, self.monitor_config)
        yield from checks.profiler_contradictions(self.profiler_config)
        yield from checks.tracker_contradictions(rl, self.monitor_config)
        yield from algorithm_contradictions(rl)
        yield from checks.partial_contradictions(rl, generate.sampling_config)
        yield from checks.conversation_contradictions(rl, self.reward_config)

    @property
    def longest_context(self) -> int:
        """Returns the tokens that a generation may begin with: a prompt, and a partial conversation or completion."""
        longest = self.generate_config.max_prompt_length
        if self.rl_config.has_conversations or self.rl_config.partial_rollout:
            longest += self.generate_config.sampling_config.max_tokens
        return longest

    @property
    def tokenizer_dir(self) -> str:
        return self.rl_config.tokenizer_dir or self.actor_config.load

    @property
    def reference_load(self) -> str:
        return self.ref_config.load or self.actor_config.load

    @property
    def has_reference(self) -> bool:
        return self.rl_config.beta > 0 or self.rl_config.distillation_coef > 0

    @property
    def may_lack_functions(self) -> bool:
        """Returns whether samples are judged without a reward function: by a model, their environment or a teacher."""
        return self.scores_without_functions or self.rl_config.distillation_coef > 0

    @property
    def scores_without_functions(self) -> bool:
        return self.rl_config.environment is not None or bool(self.reward_config.models_by_key)

    @property
    def reference_parallel(self) -> ParallelConfig:
        return self.ref_config.parallel_config or self.actor_config.parallel_config

    @property
    def critic_load(self) -> str:
        return self.critic_config.load or self.actor_config.load

    @property
    def critic_parallel(self) -> ScoreParallelConfig:
        return self.critic_config.parallel_config or self.actor_config.parallel_config

    @property
    def has_critic(self) -> bool:
        return self.rl_config.estimator.needs_critic

    def parallel_of(self, model: RewardModelConfig) -> ParallelConfig:
        """Returns the layout of a reward model."""
        return model.parallel_config or self.actor_config.parallel_config

    @property
    def verifier_weights(self) -> list[float]:
        weights = self.reward_config.verifier_weight
        return weights if weights is not None else [1.0] * len(self.reward_config.verifier_function)


LIVE: dict[str, Key] = dict(keys_of(Config))


def values_by_key(config: Config) -> dict[str, object]:
    """Returns every value by its dotted key, defaults included; None for those of an optional section that is unset."""
    values: dict[str, object] = {}
    for key, known in LIVE.items():
        value: object = config
        for name in known.path:
            value = getattr(value, name, None)
        values[key] = plain(value)
    return values
