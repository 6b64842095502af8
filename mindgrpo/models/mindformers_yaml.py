"""Reads model YAMLs of MindFormers (`model: model_config:`): dimensions, which config.json must confirm, and dtypes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from mindgrpo.backend.dtypes import ITEM_BYTES
from mindgrpo.config import Config
from mindgrpo.config.yaml_file import MAX_YAML_BYTES, parse_yaml
from mindgrpo.errors import UserError
from mindgrpo.models.decoder_config import ROPE_FACTORS, DecoderConfig, decoder_config
from mindgrpo.strict_files import read_text

REMEDY = "give a MindFormers model YAML or leave model_config out."
# MindFormers' key -> config.json's key.
REQUIRED = {
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "vocab_size": "vocab_size",
    "intermediate_size": "intermediate_size",
}
OPTIONAL = {
    "n_kv_heads": "num_key_value_heads",
    "rms_norm_eps": "rms_norm_eps",
    "theta": "rope_theta",
    "seq_length": "max_position_embeddings",
    "tie_word_embeddings": "tie_word_embeddings",
    "head_dim": "head_dim",
    "qkv_has_bias": "attention_bias",
}
# The same of layers with experts; of these, what a file states is compared.
EXPERTS = {
    "num_experts": "num_experts",
    "num_experts_chosen": "num_experts_per_tok",
    "moe_intermediate_size": "moe_intermediate_size",
    "norm_topk_prob": "norm_topk_prob",
    "decoder_sparse_step": "decoder_sparse_step",
    "mlp_only_layers": "mlp_only_layers",
}
COMPARED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rope_theta",
    "rope_scaling",
    "qkv_bias",
)


def read_section(path: str | Path) -> Mapping[str, Any]:
    """Reads the file's model: model_config:. Raises UserError where it has none."""
    return _section(read_text(Path(path), "model_config", REMEDY, MAX_YAML_BYTES), str(path))


@cache
def _section(text: str, path: str) -> Mapping[str, Any]:
    """A plan asks for it hundreds of times."""
    try:
        document = parse_yaml(text)
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"model_config '{path}' cannot be read as YAML ({reason}); {REMEDY}"
        ) from None
    section: Any = document
    for key in ("model", "model_config"):
        section = section.get(key) if isinstance(section, dict) else None
    if not isinstance(section, dict):
        raise UserError(
            f"model_config '{path}' has no section model: model_config:, where MindFormers keeps the shapes; give "
            "such a file or leave model_config out."
        )
    return section


def read_model_yaml(path: str | Path, model: DecoderConfig | None = None) -> DecoderConfig:
    """Reads a decoder's dimensions. Raises UserError where the file does not give them.

    What it does not say of experts is that of `model`.
    """
    section = read_section(path)
    missing = [key for key in REQUIRED if key not in section]
    if missing:
        raise UserError(f"model_config '{path}' lacks model.model_config.{missing[0]}; add it.")
    raw = {target: section[key] for key, target in REQUIRED.items()}
    raw |= {target: section[key] for key, target in OPTIONAL.items() if key in section}
    raw |= _experts_in(model.raw) if model is not None else {}
    raw |= {target: section[key] for key, target in EXPERTS.items() if key in section}
    raw |= _rope_scaling(section, str(path))
    bias = bool(section.get("qkv_has_bias", False))
    raw["model_type"] = section.get("model_type") or ("qwen2" if bias else "llama")
    if raw["model_type"] == "qwen2":
        raw.pop("attention_bias", None)
    return decoder_config(raw, str(path))


def _rope_scaling(section: Mapping[str, Any], path: str) -> dict[str, Any]:
    method = section.get("extend_method") or "None"
    if method == "None":
        return {}
    factors = section.get("scaling_factor")
    if method != "LLAMA3" or not isinstance(factors, dict) or set(ROPE_FACTORS) - set(factors):
        raise UserError(
            f"model_config '{path}' has extend_method '{method}', but only LLAMA3 with a scaling_factor of "
            f"{', '.join(ROPE_FACTORS)} is computed here; correct the YAML or leave model_config out."
        )
    return {"rope_scaling": {"rope_type": "llama3", **factors}}


def _stated(config: DecoderConfig, name: str) -> Any:
    value = getattr(config, name)
    if name != "rope_scaling" or value is None:
        return value
    return {factor: float(value[factor]) for factor in ROPE_FACTORS}


def _experts_in(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a config.json says of experts."""
    experts = {name: raw[name] for name in EXPERTS.values() if name in raw}
    if raw.get("num_local_experts") is not None:
        experts["num_experts"] = raw["num_local_experts"]
    return experts


def check_agreement(model: DecoderConfig, model_yaml: str, directory: str) -> None:
    """Raises UserError naming the first dimension in which the YAML and config.json differ."""
    stated, section = read_model_yaml(model_yaml, model), read_section(model_yaml)
    pairs = [(name, _stated(stated, name), _stated(model, name)) for name in COMPARED]
    own = _experts_in(model.raw)
    pairs += [
        (key, section[key], own.get(name))
        for key, name in EXPERTS.items()
        # Of dense models some files say that they have one.
        if key in section and (model.moe is not None or section[key] not in (None, 0, 1))
    ]
    for name, mine, theirs in pairs:
        if mine != theirs:
            raise UserError(
                f"{name} is {mine} in model_config '{model_yaml}' but {theirs} in {directory}/config.json; the "
                "model's own file decides, so correct the YAML or leave model_config out."
            )


# Computed in float32 whatever the compute dtype is.
ALWAYS_FLOAT32 = {
    "layernorm_compute_type": "norms",
    "softmax_compute_type": "softmax",
    "rotary_dtype": "rotary positions",
}
FLASH = "use_flash_attention"


@dataclass(frozen=True)
class StatedDtypes:
    """Holds what a configuration's model YAMLs state, None where none does; `path` is the file with `compute_dtype`."""

    compute_dtype: str | None = None
    path: str = ""
    flash_attention: bool | None = None


def stated_dtypes(config: Config) -> StatedDtypes:
    """Reads the model YAMLs' dtypes. Raises UserError for dtypes that are not computed, and for files that disagree."""
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
