"""The keys of vLLM as the generator."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, field_validator

from mindgrpo.config.section import AFTER_SIZE, BEFORE_LIST, OptionalText, Section


class VllmConfig(Section):
    python: OptionalText = None
    """Python of an environment that has vLLM; null: .venv-vllm, which `bash scripts/setup_env.sh --vllm` makes"""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """in which vLLM computes; null: the run's compute dtype; the policy's float32 weights are rounded to it when they
    are handed over"""
    kv_cache_memory: Annotated[str | None, AFTER_SIZE] = None
    """size of each engine's KV cache such as 4GB, over all its workers; null: what max_num_seqs samples of full length
    need, or on a device what gpu_memory_utilization leaves"""
    max_silence_seconds: float = Field(300.0, gt=0)
    """an engine that answers nothing for so long ends the job"""
    max_start_seconds: float = Field(900.0, gt=0)
    """an engine that is not ready after so long ends the job: on a busy machine it takes minutes to start"""
    arguments: Annotated[list[str], BEFORE_LIST] = []
    """further arguments of vLLM's LLM class by their names there, each as name=value: [swap_space=4]"""

    @field_validator("arguments")
    @classmethod
    def _are_named(cls, values: list[str]) -> list[str]:
        for text in values:
            name, sign, value = text.partition("=")
            if not name.strip().isidentifier() or not sign or not value.strip():
                raise ValueError(f"must be a list of name=value, which '{text}' is not")
        return values

    @property
    def parsed_arguments(self) -> dict[str, Any]:
        """By name; values are read as YAML is."""
        pairs = (text.partition("=") for text in self.arguments)
        return {name.strip(): yaml.safe_load(value) for name, _, value in pairs}
