"""Model families as declared data over one decoder, read from a Hugging Face `config.json`.

Out come the decoder's dimensions and one ParameterSpec a tensor. Refuses architectures and options that the decoder
does not compute exactly; never guesses a missing dimension.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from mindgrpo.errors import UserError
from mindgrpo.parallel.sharding import ParameterSpec
from mindgrpo.strict_files import read_object

MAX_CONFIG_BYTES = 1 << 20
# Far beyond any model; within them every product of two fits in 64 bits and every list of tensors in memory.
MAX_SIZE, MAX_LAYERS = 1 << 24, 4096


@dataclass(frozen=True, kw_only=True)
class Family:
    """What distinguishes one architecture from the others that the decoder computes."""

    architecture: str
    qkv_bias: bool
    qk_norm: bool
    # Architectures whose config.json may switch the q/k/v bias on or off.
    bias_key: str | None = None


FAMILIES: dict[str, Family] = {
    "qwen2": Family(architecture="Qwen2ForCausalLM", qkv_bias=True, qk_norm=False),
    "llama": Family(
        architecture="LlamaForCausalLM", qkv_bias=False, qk_norm=False, bias_key="attention_bias"
    ),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM", qkv_bias=False, qk_norm=True, bias_key="attention_bias"
    ),
}


ROPE_FACTORS = (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
)


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Dimensions of a dense decoder; `raw` is the config.json they came from, for writing it back."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Mapping[str, Any] | None
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    qk_norm: bool
    raw: Mapping[str, Any]

    @property
    def num_parameters(self) -> int:
        total = 0
        for spec in parameter_specs(self):
            count = 1
            for extent in spec.shape:
                count *= extent
            total += count
        return total


def read_config(directory: str | Path) -> DecoderConfig:
    """The decoder of a Hugging Face directory. Raises UserError where it cannot be computed exactly."""
    path = Path(directory) / "config.json"
    if not Path(directory).is_dir():
        raise UserError(
            f"The model directory '{directory}' does not exist; give a Hugging Face directory "
            "(config.json, *.safetensors, tokenizer.json) in actor_config.load."
        )
    if not path.exists():
        raise UserError(
            f"'{directory}' has no config.json, so it is not a Hugging Face model directory; "
            "set actor_config.load to one."
        )
    raw = read_object(path, "the model's", "restore it from its source.", MAX_CONFIG_BYTES)
    return decoder_config(raw, str(path))


def decoder_config(raw: Mapping[str, Any], where: str) -> DecoderConfig:
    """`raw` (the fields of config.json) as a DecoderConfig; `where` is named in errors."""
    family = _family(raw, where)
    heads = _positive(raw, "num_attention_heads", where)
    hidden = _positive(raw, "hidden_size", where)
    head_dim = _positive(raw, "head_dim", where) if raw.get("head_dim") is not None else None
    if head_dim is None:
        if hidden % heads:
            raise UserError(
                f"{where}: hidden_size {hidden} is not a multiple of num_attention_heads {heads} and no "
                "head_dim is given; correct the file."
            )
        head_dim = hidden // heads
    kv_heads = heads
    if raw.get("num_key_value_heads") is not None:
        kv_heads = _positive(raw, "num_key_value_heads", where)
    if heads % kv_heads:
        raise UserError(
            f"{where}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}; "
            "correct the file."
        )
    _refuse_inexact(raw, where)
    bias = _switch(raw, family.bias_key, where) if family.bias_key else family.qkv_bias
    rope = raw.get("rope_parameters") or {}
    if not isinstance(rope, Mapping):
        raise UserError(f"{where}: rope_parameters is {rope!r}, but must be an object.")
    theta = raw if raw.get("rope_theta") else rope
    positions = "max_position_embeddings"
    return DecoderConfig(
        model_type=raw["model_type"],
        vocab_size=_positive(raw, "vocab_size", where),
        hidden_size=hidden,
        intermediate_size=_positive(raw, "intermediate_size", where),
        num_hidden_layers=_positive(raw, "num_hidden_layers", where, MAX_LAYERS),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=_number(raw, "rms_norm_eps", where, 1e-6),
        rope_theta=_number(theta, "rope_theta", where, 10000.0),
        rope_scaling=_rope_scaling(raw, where),
        max_position_embeddings=(
            _positive(raw, positions, where, 1 << 40) if positions in raw else 32768
        ),
        tie_word_embeddings=_switch(raw, "tie_word_embeddings", where),
        qkv_bias=bias,
        output_bias=bias and family.bias_key is not None,
        qk_norm=family.qk_norm,
        raw=dict(raw),
    )


def _family(raw: Mapping[str, Any], where: str) -> Family:
    kind = str(raw.get("model_type"))
    if kind in FAMILIES:
        return FAMILIES[kind]
    near = get_close_matches(kind[:100], FAMILIES, 1, 0.5)
    hint = f" (nearest: {near[0]})" if near else ""
    raise UserError(
        f"{where}: model_type '{kind}' is not one of {', '.join(FAMILIES)}{hint}; use a model of these families."
    )


def _positive(raw: Mapping[str, Any], key: str, where: str, most: int = MAX_SIZE) -> int:
    value = raw.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= most:
        raise UserError(
            f"{where}: {key} is {value!r}, but must be a whole number above 0 and at most {most}."
        )
    return value


def _number(raw: Mapping[str, Any], key: str, where: str, default: float) -> float:
    value = raw.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise UserError(f"{where}: {key} is {value!r}, but must be a number above 0.")
    return float(value)


def _switch(raw: Mapping[str, Any], key: str, where: str) -> bool:
    value = raw.get(key)
    if not isinstance(value, bool | None):
        raise UserError(f"{where}: {key} is {value!r}, but must be true or false.")
    return bool(value)


def _refuse_inexact(raw: Mapping[str, Any], where: str) -> None:
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise UserError(f"{where}: hidden_act '{activation}' is not computed here; only 'silu' is.")
    if raw.get("use_sliding_window"):
        raise UserError(
            f"{where}: use_sliding_window is true, but only full attention is computed; set it to false if the "
            "sequences stay below the window."
        )
    if raw.get("mlp_bias"):
        raise UserError(f"{where}: mlp_bias is true, but a bias in the MLP is not computed here.")


def _rope_scaling(raw: Mapping[str, Any], where: str) -> Mapping[str, Any] | None:
    scaling = raw.get("rope_scaling") or raw.get("rope_parameters")
    if not scaling:
        return None
    if not isinstance(scaling, Mapping):
        raise UserError(f"{where}: rope_scaling is {scaling!r}, but must be an object.")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise UserError(
            f"{where}: rope_scaling type '{kind}' is not computed here; only 'llama3' and none are."
        )
    for factor in ROPE_FACTORS:
        _number({factor: scaling.get(factor)}, factor, f"{where}: rope_scaling", 1.0)
    return dict(scaling)


def parameter_specs(config: DecoderConfig) -> tuple[ParameterSpec, ...]:
    """Every tensor of the model by its Hugging Face name, in model order."""
    hidden, vocab = config.hidden_size, config.vocab_size
    tied = config.tie_word_embeddings
    specs = [
        ParameterSpec(
            name="model.embed_tokens.weight",
            shape=(vocab, hidden),
            dim=0,
            place="first_and_last" if tied else "first",
            decay=True,
        )
    ]
    for layer in range(config.num_hidden_layers):
        specs.extend(_layer_specs(config, layer))
    specs.append(_norm("model.norm.weight", hidden, "last"))
    if not tied:
        specs.append(
            ParameterSpec(
                name="lm_head.weight", shape=(vocab, hidden), dim=0, place="last", decay=True
            )
        )
    return tuple(specs)


def _norm(name: str, extent: int, place: Any, partial: bool = False) -> ParameterSpec:
    return ParameterSpec(
        name=name, shape=(extent,), dim=None, place=place, decay=False, partial_gradient=partial
    )


def _layer_specs(config: DecoderConfig, layer: int) -> list[ParameterSpec]:
    prefix = f"model.layers.{layer}."
    hidden, inner, unit = config.hidden_size, config.intermediate_size, config.head_dim
    q_size, kv_size = config.num_attention_heads * unit, config.num_key_value_heads * unit
    specs = [_norm(prefix + "input_layernorm.weight", hidden, layer)]
    for name, size in (("q", q_size), ("k", kv_size), ("v", kv_size)):
        shapes = {"weight": (size, hidden)} | ({"bias": (size,)} if config.qkv_bias else {})
        for kind, shape in shapes.items():
            specs.append(
                ParameterSpec(
                    name=f"{prefix}self_attn.{name}_proj.{kind}",
                    shape=shape,
                    dim=0,
                    unit=unit,
                    replicate=name != "q",
                    place=layer,
                    decay=kind == "weight",
                )
            )
    if config.qk_norm:
        # Norms inside a head see only the rank's own heads.
        specs.append(_norm(prefix + "self_attn.q_norm.weight", unit, layer, partial=True))
        specs.append(_norm(prefix + "self_attn.k_norm.weight", unit, layer, partial=True))

    def matrix(name: str, shape: tuple[int, int], dim: int, unit: int = 1) -> ParameterSpec:
        return ParameterSpec(
            name=prefix + name, shape=shape, dim=dim, unit=unit, place=layer, decay=True
        )

    specs.append(matrix("self_attn.o_proj.weight", (hidden, q_size), 1, unit))
    if config.output_bias:
        specs.append(_norm(prefix + "self_attn.o_proj.bias", hidden, layer))
    specs.append(_norm(prefix + "post_attention_layernorm.weight", hidden, layer))
    specs.append(matrix("mlp.gate_proj.weight", (inner, hidden), 0))
    specs.append(matrix("mlp.up_proj.weight", (inner, hidden), 0))
    specs.append(matrix("mlp.down_proj.weight", (hidden, inner), 1))
    return specs
