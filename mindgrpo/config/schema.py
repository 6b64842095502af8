"""The configuration as one frozen value, with every live key and its default.

Refuses unknown keys, wrong types and keys that contradict each other. Retired and pending keys are
not here (retired.py): what is an attribute of Config has an effect.
"""

from __future__ import annotations

from pydantic import Field, model_validator

from mindgrpo.config.checks import CHECKS
from mindgrpo.config.context import Context
from mindgrpo.config.observation import MonitorConfig, MsprobeConfig, ProfilerConfig
from mindgrpo.config.rewards import RewardConfig
from mindgrpo.config.rl import RLConfig
from mindgrpo.config.roles import ActorConfig, GenerateConfig, ParallelConfig, RefConfig
from mindgrpo.config.section import Key, OptionalText, Section, keys_of


class Config(Section):
    output_dir: OptionalText = Field(None, description="null: output/<config name>/<time>")
    rl_config: RLConfig = RLConfig()
    actor_config: ActorConfig = ActorConfig()
    ref_config: RefConfig = RefConfig()
    reward_config: RewardConfig = RewardConfig()
    generate_config: GenerateConfig = GenerateConfig()
    context: Context = Context()
    monitor_config: MonitorConfig = MonitorConfig()
    profiler_config: ProfilerConfig = ProfilerConfig()
    msprobe_config: MsprobeConfig = MsprobeConfig()

    @model_validator(mode="after")
    def _keys_agree(self) -> Config:
        for check in CHECKS:
            check(self)
        return self

    @property
    def tokenizer_dir(self) -> str:
        return self.rl_config.tokenizer_dir or self.actor_config.load

    @property
    def reference_load(self) -> str:
        return self.ref_config.load or self.actor_config.load

    @property
    def reference_parallel(self) -> ParallelConfig:
        return self.ref_config.parallel_config or self.actor_config.parallel_config

    @property
    def verifier_weights(self) -> list[float]:
        weights = self.reward_config.verifier_weight
        return weights if weights is not None else [1.0] * len(self.reward_config.verifier_function)


LIVE: dict[str, Key] = dict(keys_of(Config))


def values_by_key(config: Config) -> dict[str, object]:
    """Every value by its dotted key, defaults included."""
    values: dict[str, object] = {}
    for key, known in LIVE.items():
        value: object = config
        for attribute in known.path:
            value = getattr(value, attribute, None)
        values[key] = value
    return values
