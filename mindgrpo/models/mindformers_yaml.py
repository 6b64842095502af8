"""Reads model YAMLs of MindFormers (`model: model_config:`): dimensions, which have to match config.json, and dtypes.

Before release 1.6, MindFormers' models have key names of their own, and those of experts in a section `moe_config:`.
Later models use the names of Hugging Face or Megatron. mindformers/parallel_core/transformer_config_utils.py lists the
equivalent names.
"""

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
from mindgrpo.models.decoder_config import (
    ROPE_FACTORS,
    YARN_FACTORS,
    DecoderConfig,
    decoder_config,
)
from mindgrpo.strict_files import read_text

REMEDY = "give a MindFormers model YAML or leave model_config out."
# MindFormers' key -> config.json's key, which later models use too.
REQUIRED = {
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "vocab_size": "vocab_size",
    "intermediate_size": "intermediate_size",
}
OPTIONAL = {
    "ffn_hidden_size": "intermediate_size",
    "n_kv_heads": "num_key_value_heads",
    "num_query_groups": "num_key_value_heads",
    "rms_norm_eps": "rms_norm_eps",
    "layernorm_epsilon": "rms_norm_eps",
    "theta": "rope_theta",
    "seq_length": "max_position_embeddings",
    "tie_word_embeddings": "tie_word_embeddings",
    "head_dim": "head_dim",
    "kv_channels": "head_dim",
    "qkv_has_bias": "attention_bias",
    "add_qkv_bias": "attention_bias",
}
# The same for layers with experts. All families read the number of experts as num_local_experts. Stated values are
# compared with config.json.
EXPERTS = {
    **dict.fromkeys(
        ("expert_num", "num_experts", "n_routed_experts", "num_moe_experts"), "num_local_experts"
    ),
    "num_experts_chosen": "num_experts_per_tok",
    "moe_router_topk": "num_experts_per_tok",
    "moe_intermediate_size": "moe_intermediate_size",
    "moe_ffn_hidden_size": "moe_intermediate_size",
    "norm_topk_prob": "norm_topk_prob",
    "decoder_sparse_step": "decoder_sparse_step",
    "mlp_only_layers": "mlp_only_layers",
    "shared_expert_num": "n_shared_experts",
    "first_k_dense_replace": "first_k_dense_replace",
    "n_group": "n_group",
    "moe_router_num_groups": "n_group",
    "topk_group": "topk_group",
    "moe_router_group_topk": "topk_group",
    "routed_scaling_factor": "routed_scaling_factor",
    "moe_router_topk_scaling_factor": "routed_scaling_factor",
    "use_gating_sigmoid": "scoring_func",
    "moe_router_score_function": "scoring_func",
}
# Keys of latent attention, which have the same names everywhere.
LATENTS = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
NAMES = {**REQUIRED, **OPTIONAL, **EXPERTS}
# MindFormers has no name for a vision encoder.
VISION = ("vision_config", "image_token_id")
NAMES |= {name: name for name in (*NAMES.values(), *LATENTS, "rope_scaling", *VISION)}
# Config classes of MindFormers that imply the model_type.
TYPES = {"DeepseekV3Config": "deepseek_v3"}
# extend_method -> the type and the factors of rope_scaling in config.json.
EXTENSIONS = {"LLAMA3": ("llama3", ROPE_FACTORS), "YARN": ("yarn", YARN_FACTORS)}
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
    "latent",
)


def read_section(path: str | Path) -> Mapping[str, Any]:
    """Reads the section model: model_config: of the file. Raises UserError if it has none."""
    return _section(read_text(Path(path), "model_config", REMEDY, MAX_YAML_BYTES), str(path))


@cache
def _section(text: str, path: str) -> Mapping[str, Any]:
    """Parses the section; cached, since a plan reads it hundreds of times."""
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
    experts = document.get("moe_config") or section.get("moe_config")
    return section | experts if isinstance(experts, dict) else section


def read_model_yaml(path: str | Path, model: DecoderConfig | None = None) -> DecoderConfig:
    """Reads a decoder's dimensions. Raises UserError if the file lacks required ones.

    Expert settings that the file does not state are taken from `model`.
    """
    section = read_section(path)
    stated = {name: value for _, name, value in _statements(section, str(path))}
    for key, name in REQUIRED.items():
        if name not in stated:
            raise UserError(f"model_config '{path}' lacks model.model_config.{key}; add it.")
    raw = (_experts_of(model) if model is not None else {}) | stated
    raw |= _rope_scaling(section, str(path))
    named = section.get("model_type") or TYPES.get(str(section.get("type")))
    if named is None and model is not None and model.moe is not None:
        named = model.model_type
    if named is None:
        named = "qwen2" if stated.get("attention_bias") else "llama"
        named = "mixtral" if _has_experts(stated) else named
    raw["model_type"] = named
    if named == "qwen2":
        raw.pop("attention_bias", None)
    return decoder_config(raw, str(path))


def _statements(section: Mapping[str, Any], path: str) -> list[tuple[str, str, Any]]:
    """Returns the settings of a file: (its key, config.json's key, value). Raises UserError for contradictory ones."""
    stated: dict[str, tuple[str, str, Any]] = {}
    for key, value in section.items():
        name = NAMES.get(key)
        if name is None or (value is None and name not in LATENTS):
            continue
        if name == "scoring_func" and isinstance(value, bool):
            value = "sigmoid" if value else "softmax"
        _, _, other = stated.get(name, ("", "", value))
        # seq_length may be smaller than max_position_embeddings.
        if other != value and name != "max_position_embeddings":
            raise UserError(
                f"model_config '{path}' has {stated[name][0]} {other!r} and {key} {value!r}, two names of one thing; "
                "leave out the wrong one."
            )
        stated[name] = key, name, value
    return [*stated.values()]


def _has_experts(stated: Mapping[str, Any]) -> bool:
    """Returns whether the file describes experts; some files of dense models state one expert."""
    return stated.get("num_local_experts", 0) not in (0, 1)


def _rope_scaling(section: Mapping[str, Any], path: str) -> dict[str, Any]:
    method = section.get("extend_method") or "None"
    if method == "None":
        return {}
    factors, known = section.get("scaling_factor"), EXTENSIONS.get(str(method))
    if known is None or not isinstance(factors, dict) or set(known[1]) - set(factors):
        computed = " or ".join(
            f"{name} with a scaling_factor of {', '.join(of_it)}"
            for name, (_, of_it) in EXTENSIONS.items()
        )
        raise UserError(
            f"model_config '{path}' has extend_method '{method}', but only {computed} is computed here; correct the "
            "YAML or leave model_config out."
        )
    return {"rope_scaling": {"rope_type": known[0], **factors}}


def _stated(config: DecoderConfig, name: str) -> Any:
    value = getattr(config, name)
    if name != "rope_scaling" or value is None:
        return value
    factors = ROPE_FACTORS if config.latent is None else YARN_FACTORS
    return {factor: float(value[factor]) for factor in factors}


def _experts_of(model: DecoderConfig) -> dict[str, Any]:
    """Returns the settings of a model's experts and latent attention, by their names in files."""
    known = {name: model.raw[name] for name in (*EXPERTS.values(), *LATENTS) if name in model.raw}
    if (moe := model.moe) is None:
        return known
    layers = enumerate(model.layers)
    dense = next((i for i, kind in layers if kind.has_experts), len(model.layers))
    return known | {
        "num_local_experts": moe.num_experts,
        "num_experts_per_tok": moe.per_token,
        "moe_intermediate_size": moe.inner,
        "norm_topk_prob": moe.renormalise,
        "n_shared_experts": moe.shared_inner // moe.inner,
        "first_k_dense_replace": dense,
        "n_group": moe.groups,
        "topk_group": moe.groups_taken,
        "routed_scaling_factor": moe.scaling,
        "scoring_func": moe.scores,
    }


def check_agreement(model: DecoderConfig, model_yaml: str, directory: str) -> None:
    """Raises UserError if the YAML and config.json differ, naming the first difference."""
    section, own = read_section(model_yaml), _experts_of(model)
    statements = _statements(section, model_yaml)
    if model.moe is not None or _has_experts({name: value for _, name, value in statements}):
        experts = frozenset(EXPERTS.values())
        pairs = [(key, value, own.get(name)) for key, name, value in statements if name in experts]
        _compare(pairs, model_yaml, directory)
    stated = read_model_yaml(model_yaml, model)
    pairs = [(name, _stated(stated, name), _stated(model, name)) for name in COMPARED]
    _compare(pairs, model_yaml, directory)


def _compare(pairs: list[tuple[str, Any, Any]], model_yaml: str, directory: str) -> None:
    for name, mine, theirs in pairs:
        if mine != theirs:
            raise UserError(
                f"{name} is {mine} in model_config '{model_yaml}' but {theirs} in {directory}/config.json; the "
                "model's own file decides, so correct the YAML or leave model_config out."
            )


# These are always computed in float32.
ALWAYS_FLOAT32 = {
    "layernorm_compute_type": "norms",
    "layernorm_compute_dtype": "norms",
    "softmax_compute_type": "softmax",
    "softmax_compute_dtype": "softmax",
    "rotary_dtype": "rotary positions",
}
KEPT_AS = ("param_init_type", "params_dtype")
FLASH = "use_flash_attention"


@dataclass(frozen=True)
class StatedDtypes:
    """The dtype settings of a configuration's model YAMLs, None if not stated; `path` is the file of compute_dtype."""

    compute_dtype: str | None = None
    path: str = ""
    flash_attention: bool | None = None


def stated_dtypes(config: Config) -> StatedDtypes:
    """Reads the dtype settings of the model YAMLs. Raises UserError for unsupported dtypes and for contradictions."""
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
    for key in ("compute_dtype", *KEPT_AS, *ALWAYS_FLOAT32):
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
    for key in KEPT_AS:
        kept = section.get(key, "float32")
        if kept not in ("float32", section.get("compute_dtype", kept)):
            raise UserError(
                f"model_config '{path}' has {key} '{kept}' and compute_dtype '{section['compute_dtype']}', but weights "
                "are kept in float32 and in the compute dtype; set it to one of the two or leave it out."
            )
    if not isinstance(section.get(FLASH, True), bool):
        raise UserError(
            f"model_config '{path}' has {FLASH} {section[FLASH]!r}; set it to true or false."
        )
