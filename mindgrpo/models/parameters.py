"""Every tensor of a decoder by its Hugging Face name, and how it is cut over ranks: one ParameterSpec each."""

from __future__ import annotations

from math import prod
from typing import Any

from mindgrpo.models.decoder_config import DecoderConfig
from mindgrpo.parallel.sharding import ParameterSpec


def parameter_specs(config: DecoderConfig) -> tuple[ParameterSpec, ...]:
    """In model order."""
    hidden, vocab = config.hidden_size, config.vocab_size
    tied = config.tie_word_embeddings
    specs = [
        ParameterSpec(
            name="model.embed_tokens.weight",
            shape=(vocab, hidden),
            dim=0,
            position="first_and_last" if tied else "first",
            decay=True,
        )
    ]
    for layer in range(config.num_hidden_layers):
        specs += _layer_specs(config, layer)
    specs.append(_whole("model.norm.weight", hidden, "last"))
    if not tied:
        specs.append(
            ParameterSpec(
                name="lm_head.weight", shape=(vocab, hidden), dim=0, position="last", decay=True
            )
        )
    return tuple(specs)


def num_parameters(config: DecoderConfig) -> int:
    return sum(prod(spec.shape) for spec in parameter_specs(config))


def _whole(name: str, extent: int, position: Any, partial: bool = False) -> ParameterSpec:
    return ParameterSpec(
        name=name,
        shape=(extent,),
        dim=None,
        position=position,
        decay=False,
        partial_gradient=partial,
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
    q_size, kv_size = config.num_attention_heads * unit, config.num_key_value_heads * unit

    def by_heads(name: str, shape: tuple[int, ...], is_query: bool) -> ParameterSpec:
        return ParameterSpec(
            name=prefix + name,
            shape=shape,
            dim=0,
            unit=unit,
            replicate=not is_query,
            position=layer,
            decay=len(shape) > 1,
        )

    specs = []
    for name, size in (("q", q_size), ("k", kv_size), ("v", kv_size)):
        specs.append(by_heads(f"{name}_proj.weight", (size, config.hidden_size), name == "q"))
        if config.qkv_bias:
            specs.append(by_heads(f"{name}_proj.bias", (size,), name == "q"))
    if config.family.qk_norm == "head":
        # A norm inside heads sees only the rank's own heads.
        specs += [_whole(f"{prefix}{name}_norm.weight", unit, layer, partial=True) for name in "qk"]
    elif config.family.qk_norm == "projection":
        specs.append(by_heads("q_norm.weight", (q_size,), is_query=True))
        specs.append(by_heads("k_norm.weight", (kv_size,), is_query=False))
    specs.append(
        ParameterSpec(
            name=prefix + "o_proj.weight",
            shape=(config.hidden_size, q_size),
            dim=1,
            unit=unit,
            position=layer,
            decay=True,
        )
    )
    if config.output_bias:
        specs.append(_whole(prefix + "o_proj.bias", config.hidden_size, layer))
    return specs


def _mlp_specs(config: DecoderConfig, layer: int) -> list[ParameterSpec]:
    hidden, inner = config.hidden_size, config.intermediate_size
    matrices = {
        "gate_proj": ((inner, hidden), 0),
        "up_proj": ((inner, hidden), 0),
        "down_proj": ((hidden, inner), 1),
    }
    return [
        ParameterSpec(
            name=f"model.layers.{layer}.mlp.{name}.weight",
            shape=shape,
            dim=dim,
            position=layer,
            decay=True,
        )
        for name, (shape, dim) in matrices.items()
    ]
