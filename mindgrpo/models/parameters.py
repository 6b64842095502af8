"""Every tensor of a decoder by its Hugging Face name, and how it is cut over ranks: one ParameterSpec each."""

from __future__ import annotations

from math import prod
from typing import Any

from mindgrpo.models.decoder_config import DecoderConfig, MoeConfig
from mindgrpo.parallel.mesh import DENSE_DATA, EXPERT_DATA
from mindgrpo.parallel.sharding import ParameterSpec, Split

# Of gradients of which each rank of a model group sees a part.
PARTIAL = DENSE_DATA | {"mp"}


def parameter_specs(
    config: DecoderConfig, splits_tokens: bool = False
) -> tuple[ParameterSpec, ...]:
    """Returns all parameters, in model order.

    With `splits_tokens`, ranks of a model group have tokens of their own between products, and so the gradients of what
    is used there are sums over them.
    """
    tied = config.tie_word_embeddings
    # Kept [vocabulary, hidden]: rows are gathered by token id.
    table: dict[str, Any] = {
        "shape": (config.vocab_size, config.hidden_size),
        "splits": (Split("mp", 0),),
        "decay": True,
    }
    first: Any = "first_and_last" if tied else "first"
    specs = [ParameterSpec("model.embed_tokens.weight", position=first, **table)]
    for layer in range(config.num_hidden_layers):
        specs += _layer_specs(config, layer, PARTIAL if splits_tokens else DENSE_DATA)
    specs.append(_whole("model.norm.weight", config.hidden_size, "last"))
    if not tied:
        specs.append(ParameterSpec("lm_head.weight", position="last", **table))
    return tuple(specs)


def num_parameters(config: DecoderConfig) -> int:
    return sum(prod(spec.shape) for spec in parameter_specs(config))


def num_active_parameters(config: DecoderConfig) -> int:
    """Counts the parameters that a token passes: of experts, those that it chooses."""
    if config.moe is None:
        return num_parameters(config)
    total = 0
    for spec in parameter_specs(config):
        is_expert = len(spec.shape) > 2
        total += prod(spec.shape[1:]) * config.moe.per_token if is_expert else prod(spec.shape)
    return total


def _whole(name: str, extent: int, position: Any, **options: Any) -> ParameterSpec:
    return ParameterSpec(name, (extent,), position=position, decay=False, **options)


def _layer_specs(config: DecoderConfig, layer: int, between: frozenset[str]) -> list[ParameterSpec]:
    """`between`: the axes over which gradients of what lies between products are summed."""
    norms = config.family.norms

    def norm(name: str | None) -> list[ParameterSpec]:
        full = f"model.layers.{layer}.{name}.weight"
        return [_whole(full, config.hidden_size, layer, summed_over=between)] if name else []

    attention = _attention_specs(config, layer, between)
    mlp = _feed_forward_specs(config, layer, between)
    attention = [*norm(norms.attention_in), *attention, *norm(norms.attention_out)]
    return [*attention, *norm(norms.mlp_in), *mlp, *norm(norms.mlp_out)]


def _attention_specs(
    config: DecoderConfig, layer: int, between: frozenset[str]
) -> list[ParameterSpec]:
    prefix, unit = f"model.layers.{layer}.self_attn.", config.head_dim
    heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads}
    sizes = {name: count * unit for name, count in heads.items()}
    sizes["v"] = sizes["k"]

    def by_heads(name: str, shape: tuple[int, ...], dim: int = 0, **options: Any) -> ParameterSpec:
        # Keys and values may have fewer heads than there are ranks.
        if shared := name[0] in "kv":
            options["summed_over"] = PARTIAL
        is_matrix, splits = len(shape) > 1, (Split("mp", dim, unit, shared),)
        options |= {"position": layer, "decay": is_matrix, "transposed": is_matrix}
        return ParameterSpec(prefix + name, shape, splits, **options)

    specs = []
    for name, size in sizes.items():
        for kind, shape in (("weight", (size, config.hidden_size)), ("bias", (size,))):
            if kind == "weight" or config.qkv_bias:
                key = f"{prefix}qkv_proj.{kind}"
                specs.append(by_heads(f"{name}_proj.{kind}", shape, fused_key=key))
    if config.family.qk_norm == "head":
        # A norm inside heads sees only the rank's own heads.
        specs += [
            _whole(f"{prefix}{name}_norm.weight", unit, layer, summed_over=PARTIAL) for name in "qk"
        ]
    elif config.family.qk_norm == "projection":
        specs += [by_heads(f"{name}_norm.weight", (sizes[name],)) for name in "qk"]
    specs.append(by_heads("o_proj.weight", (config.hidden_size, sizes["q"]), dim=1))
    if config.output_bias:
        # Added to the sum over the group.
        specs.append(_whole(prefix + "o_proj.bias", config.hidden_size, layer, summed_over=between))
    return specs


def _feed_forward_specs(
    config: DecoderConfig, layer: int, between: frozenset[str]
) -> list[ParameterSpec]:
    if (moe := config.moe_of(layer)) is not None:
        return _expert_specs(moe, config.hidden_size, layer, between)
    hidden, inner = config.hidden_size, config.intermediate_size
    prefix = f"model.layers.{layer}.mlp."
    more: dict[str, Any] = {"position": layer, "decay": True, "transposed": True}
    fused = {"splits": (Split("mp", 0),), "fused_key": f"{prefix}gate_up_proj.weight", **more}
    return [
        ParameterSpec(f"{prefix}gate_proj.weight", (inner, hidden), **fused),
        ParameterSpec(f"{prefix}up_proj.weight", (inner, hidden), **fused),
        ParameterSpec(f"{prefix}down_proj.weight", (hidden, inner), (Split("mp", 1),), **more),
    ]


def _expert_specs(
    moe: MoeConfig, hidden: int, layer: int, between: frozenset[str]
) -> list[ParameterSpec]:
    """The matrices of a layer's experts are one parameter [experts, out, in]."""
    prefix = f"model.layers.{layer}.mlp."
    more: dict[str, Any] = {"position": layer, "decay": True, "transposed": True}
    router = (moe.num_experts, hidden)
    inward, outward = (moe.num_experts, moe.inner, hidden), (moe.num_experts, hidden, moe.inner)

    def experts(name: str, shape: tuple[int, ...], dim: int, fused_key: str = "") -> ParameterSpec:
        splits = (Split("ep", 0), Split("emp", dim))
        options = {"summed_over": EXPERT_DATA, "fused_key": fused_key, **more}
        return ParameterSpec(f"{prefix}experts.{name}_proj.weight", shape, splits, **options)

    fused_key = f"{prefix}experts.gate_up_proj.weight"
    return [
        ParameterSpec(f"{prefix}gate.weight", router, summed_over=between, **more),
        experts("gate", inward, 1, fused_key),
        experts("up", inward, 1, fused_key),
        experts("down", outward, 2),
    ]
