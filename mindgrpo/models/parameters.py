"""Every tensor of a decoder by its Hugging Face name, and how it is cut over ranks: one ParameterSpec each."""

from __future__ import annotations

from math import prod
from typing import Any

from mindgrpo.models.decoder_config import DecoderConfig
from mindgrpo.parallel.sharding import ParameterSpec


def parameter_specs(config: DecoderConfig) -> tuple[ParameterSpec, ...]:
    """In model order."""
    tied = config.tie_word_embeddings
    table: dict[str, Any] = {
        "shape": (config.vocab_size, config.hidden_size),
        "dim": 0,
        "decay": True,
    }
    first: Any = "first_and_last" if tied else "first"
    specs = [ParameterSpec("model.embed_tokens.weight", position=first, **table)]
    for layer in range(config.num_hidden_layers):
        specs += _layer_specs(config, layer)
    specs.append(_whole("model.norm.weight", config.hidden_size, "last"))
    if not tied:
        specs.append(ParameterSpec("lm_head.weight", position="last", **table))
    return tuple(specs)


def num_parameters(config: DecoderConfig) -> int:
    return sum(prod(spec.shape) for spec in parameter_specs(config))


def _whole(name: str, extent: int, position: Any, partial: bool = False) -> ParameterSpec:
    return ParameterSpec(
        name, (extent,), None, position=position, decay=False, partial_gradient=partial
    )


def _layer_specs(config: DecoderConfig, layer: int) -> list[ParameterSpec]:
    norms = config.family.norms

    def norm(name: str | None) -> list[ParameterSpec]:
        full = f"model.layers.{layer}.{name}.weight"
        return [_whole(full, config.hidden_size, layer)] if name else []

    attention, mlp = _attention_specs(config, layer), _mlp_specs(config, layer)
    attention = [*norm(norms.attention_in), *attention, *norm(norms.attention_out)]
    return [*attention, *norm(norms.mlp_in), *mlp, *norm(norms.mlp_out)]


def _attention_specs(config: DecoderConfig, layer: int) -> list[ParameterSpec]:
    prefix, unit = f"model.layers.{layer}.self_attn.", config.head_dim
    heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads}
    sizes = {name: count * unit for name, count in heads.items()}
    sizes["v"] = sizes["k"]

    def by_heads(name: str, shape: tuple[int, ...], dim: int = 0) -> ParameterSpec:
        # Keys and values may have fewer heads than there are ranks.
        shared, decay = name[0] in "kv", len(shape) > 1
        return ParameterSpec(prefix + name, shape, dim, unit, shared, position=layer, decay=decay)

    specs = []
    for name, size in sizes.items():
        specs.append(by_heads(f"{name}_proj.weight", (size, config.hidden_size)))
        if config.qkv_bias:
            specs.append(by_heads(f"{name}_proj.bias", (size,)))
    if config.family.qk_norm == "head":
        # A norm inside heads sees only the rank's own heads.
        specs += [_whole(f"{prefix}{name}_norm.weight", unit, layer, partial=True) for name in "qk"]
    elif config.family.qk_norm == "projection":
        specs += [by_heads(f"{name}_norm.weight", (sizes[name],)) for name in "qk"]
    specs.append(by_heads("o_proj.weight", (config.hidden_size, sizes["q"]), dim=1))
    if config.output_bias:
        specs.append(_whole(prefix + "o_proj.bias", config.hidden_size, layer))
    return specs


def _mlp_specs(config: DecoderConfig, layer: int) -> list[ParameterSpec]:
    hidden, inner = config.hidden_size, config.intermediate_size
    prefix = f"model.layers.{layer}.mlp."
    more: dict[str, Any] = {"position": layer, "decay": True}
    return [
        ParameterSpec(f"{prefix}gate_proj.weight", (inner, hidden), 0, **more),
        ParameterSpec(f"{prefix}up_proj.weight", (inner, hidden), 0, **more),
        ParameterSpec(f"{prefix}down_proj.weight", (hidden, inner), 1, **more),
    ]
