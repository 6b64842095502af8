"""What a MindFormers model YAML says of dtypes: honoured, or refused in a sentence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mindgrpo.backend.dtypes import ITEM_BYTES
from mindgrpo.config import Config
from mindgrpo.errors import UserError
from mindgrpo.grpo.mindformers_yaml import read_section

# Computed in float32 whatever the compute dtype is.
ALWAYS_FLOAT32 = {
    "layernorm_compute_type": "norms",
    "softmax_compute_type": "softmax",
    "rotary_dtype": "rotary positions",
}
FLASH = "use_flash_attention"


@dataclass(frozen=True)
class StatedDtypes:
    """Of a configuration's model YAMLs, None where none says it; `path` is the file that says `compute_dtype`."""

    compute_dtype: str | None = None
    path: str = ""
    flash_attention: bool | None = None


def stated_dtypes(config: Config) -> StatedDtypes:
    """Raises UserError for what is not computed, and for files that contradict each other."""
    dtype, path, flash = None, "", None
    for own, section in _sections(config):
        _check(own, section)
        other = section.get("compute_dtype")
        if dtype is not None and other is not None and other != dtype:
            raise UserError(
                f"compute_dtype is '{other}' in model_config '{own}' and '{dtype}' in '{path}', but trainer, reference "
                "and generator compute in one dtype; make them equal."
            )
        if other is not None:
            dtype, path = other, own
        flash = section.get(FLASH, flash)
    return StatedDtypes(dtype, path, flash)


def _sections(config: Config) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for role in (config.actor_config, config.ref_config, config.generate_config):
        if role.model_yaml:
            yield role.model_yaml, read_section(role.model_yaml)


def _check(path: str, section: Mapping[str, Any]) -> None:
    for key in ("compute_dtype", "param_init_type", *ALWAYS_FLOAT32):
        value = section.get(key)
        if value is not None and value not in ITEM_BYTES:
            raise UserError(
                f"model_config '{path}' has {key} {value!r}, which is none of {', '.join(ITEM_BYTES)}; correct it."
            )
    for key, what in ALWAYS_FLOAT32.items():
        if section.get(key, "float32") != "float32":
            raise UserError(
                f"model_config '{path}' has {key} '{section[key]}', but {what} are computed in float32; set it to "
                "float32 or leave it out."
            )
    kept = section.get("param_init_type", "float32")
    if kept not in ("float32", section.get("compute_dtype", kept)):
        raise UserError(
            f"model_config '{path}' has param_init_type '{kept}' and compute_dtype '{section['compute_dtype']}', but "
            "weights are kept in float32 and in the compute dtype; set it to one of the two or leave it out."
        )
    if not isinstance(section.get(FLASH, True), bool):
        raise UserError(
            f"model_config '{path}' has {FLASH} {section[FLASH]!r}; set it to true or false."
        )
