"""Lists every parameter of a decoder by its Hugging Face name, with its sharding over ranks, as ParameterSpecs."""

from __future__ import annotations

from math import prod
from typing import Any

from mindgrpo.models.decoder_config import DecoderConfig, LatentConfig, MoeConfig
from mindgrpo.parallel.mesh import DENSE_DATA, EXPERT_DATA
from mindgrpo.parallel.sharding import ParameterSpec, Split
from mindgrpo.weights.expert_files import ADDENDS, BIAS
from mindgrpo.weights.model_files import SCORE

# The axes to sum gradients over if each tp rank computes only a partial gradient.
PARTIAL = DENSE_DATA | {"tp"}


def parameter_specs(
    config: DecoderConfig, splits_tokens: bool = False
) -> tuple[ParameterSpec, ...]:
    """Returns the specs of all parameters, in model order.

    With `splits_tokens` (sequence parallelism), activations between tensor-parallel GEMMs are sharded over tokens, so
    the gradients of parameters used there, such as norms, are summed over tp too.
    """
    # Stored [vocabulary, hidden], since rows are gathered by token id.
    table: dict[str, Any] = {
        "shape": (config.vocab_size, config.hidden_size),
        "splits": (Split("tp", 0),),
        "decay": True,
    }
    first: Any = "first_and_last" if config.has_table_in_head else "first"
    specs = [ParameterSpec("model.embed_tokens.weight", position=first, **table)]
    for layer in range(config.num_hidden_layers):
        specs += _layer_specs(config, layer, PARTIAL if splits_tokens else DENSE_DATA)
    specs.append(_whole("model.norm.weight", config.hidden_size, "last"))
    if config.head == "scalar":
        # Each rank of a model group has all of it, and computes the same with it.
        shape = 1, config.hidden_size
        specs.append(ParameterSpec(SCORE, shape, position="last", decay=True, transposed=True))
    elif not config.tie_word_embeddings:
        specs.append(ParameterSpec("lm_head.weight", position="last", **table))
    return tuple(specs)


def num_parameters(config: DecoderConfig) -> int:
    """Counts the language model's parameters, without those of a vision encoder."""
    return sum(map(_size, parameter_specs(config)))


def _size(spec: ParameterSpec) -> int:
    return prod(spec.shape) // (ADDENDS if spec.name.endswith(BIAS) else 1)


def num_active_parameters(config: DecoderConfig) -> int:
    """Returns the number of parameters that a token uses, with only the experts that it is routed to."""
    if config.moe is None:
        return num_parameters(config)
    total = 0
    for spec in parameter_specs(config):
        is_expert = len(spec.shape) > 2
        total += prod(spec.shape[1:]) * config.moe.per_token if is_expert else _size(spec)
    return total


def _whole(name: str, extent: int, position: Any, **options: Any) -> ParameterSpec:
    return ParameterSpec(name, (extent,), position=position, decay=False, **options)


def _layer_specs(config: DecoderConfig, layer: int, between: frozenset[str]) -> list[ParameterSpec]:
    """`between`: the axes to sum the gradients of parameters between tensor-parallel GEMMs over."""
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
    if config.latent is not None:
        return _latent_specs(config, config.latent, layer)
    prefix, unit = f"model.layers.{layer}.self_attn.", config.head_dim
    heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads}
    sizes = {name: count * unit for name, count in heads.items()}
    sizes["v"] = sizes["k"]

    def by_heads(name: str, shape: tuple[int, ...], dim: int = 0, **options: Any) -> ParameterSpec:
        # Key-value heads may be replicated, if there are fewer heads than tp ranks.
        if shared := name[0] in "kv":
            options["summed_over"] = PARTIAL
        is_matrix, splits = len(shape) > 1, (Split("tp", dim, unit, shared),)
        options |= {"position": layer, "decay": is_matrix, "transposed": is_matrix}
        return ParameterSpec(prefix + name, shape, splits, **options)

    specs = []
    for name, size in sizes.items():
        for kind, shape in (("weight", (size, config.hidden_size)), ("bias", (size,))):
            if kind == "weight" or config.qkv_bias:
                key = f"{prefix}qkv_proj.{kind}"
                specs.append(by_heads(f"{name}_proj.{kind}", shape, fused_key=key))
    if config.family.qk_norm == "head":
        # A per-head norm is replicated, but each rank applies it to its own heads only.
        specs += [
            _whole(f"{prefix}{name}_norm.weight", unit, layer, summed_over=PARTIAL) for name in "qk"
        ]
    elif config.family.qk_norm == "projection":
        specs += [by_heads(f"{name}_norm.weight", (sizes[name],)) for name in "qk"]
    specs.append(by_heads("o_proj.weight", (config.hidden_size, sizes["q"]), dim=1))
    if config.output_bias:
        # Added after the all-reduce over the tp group.
        specs.append(_whole(prefix + "o_proj.bias", config.hidden_size, layer, summed_over=between))
    return specs


def _latent_specs(config: DecoderConfig, latent: LatentConfig, layer: int) -> list[ParameterSpec]:
    """Returns the specs of latent attention: the down-projections are fused into one matrix, replicated over tp."""
    prefix, heads = f"model.layers.{layer}.self_attn.", config.num_attention_heads
    key = f"{prefix}qkv_a_proj.weight"

    def norm(name: str, extent: int) -> ParameterSpec:
        return _whole(f"{prefix}{name}_layernorm.weight", extent, layer, summed_over=PARTIAL)

    def matrix(
        name: str, shape: tuple[int, int], unit: int = 0, dim: int = 0, fused_key: str = ""
    ) -> ParameterSpec:
        """With a `unit`, the matrix is split along `dim` by heads of this size; else it is replicated."""
        split: dict[str, Any] = {"splits": (Split("tp", dim, unit),)} if unit else {}
        options: dict[str, Any] = {"position": layer, "decay": True, "transposed": True}
        options |= {"fused_key": fused_key}
        options |= split or {"summed_over": PARTIAL}
        return ParameterSpec(f"{prefix}{name}.weight", shape, **options)

    hidden, queries, values = config.hidden_size, config.head_dim, latent.nope_dim + latent.value
    if latent.query_rank is None:
        of_queries = [matrix("q_proj", (heads * queries, hidden), queries, fused_key=key)]
    else:
        of_queries = [
            matrix("q_a_proj", (latent.query_rank, hidden), fused_key=key),
            norm("q_a", latent.query_rank),
            matrix("q_b_proj", (heads * queries, latent.query_rank), queries),
        ]
    return [
        *of_queries,
        matrix("kv_a_proj_with_mqa", (latent.rank + latent.rope_dim, hidden), fused_key=key),
        norm("kv_a", latent.rank),
        matrix("kv_b_proj", (heads * values, latent.rank), values),
        matrix("o_proj", (hidden, heads * latent.value), latent.value, dim=1),
    ]


def _feed_forward_specs(
    config: DecoderConfig, layer: int, between: frozenset[str]
) -> list[ParameterSpec]:
    if (moe := config.moe_of(layer)) is not None:
        return _expert_specs(moe, config.hidden_size, layer, between)
    prefix = f"model.layers.{layer}.mlp."
    return _dense_specs(prefix, config.hidden_size, config.intermediate_size, layer)


def _dense_specs(
    prefix: str, hidden: int, inner: int, layer: int, whole_of: frozenset[str] | None = None
) -> list[ParameterSpec]:
    """`whole_of`: the axes to sum gradients over, for an MLP that is replicated over tp; None splits the MLP."""
    more: dict[str, Any] = {"position": layer, "decay": True, "transposed": True}
    if whole_of is not None:
        more["summed_over"] = whole_of
    rows, columns = (() if whole_of else (Split("tp", dim),) for dim in (0, 1))
    fused: dict[str, Any] = {"splits": rows, "fused_key": f"{prefix}gate_up_proj.weight", **more}
    return [
        ParameterSpec(f"{prefix}gate_proj.weight", (inner, hidden), **fused),
        ParameterSpec(f"{prefix}up_proj.weight", (inner, hidden), **fused),
        ParameterSpec(f"{prefix}down_proj.weight", (hidden, inner), columns, **more),
    ]


def _expert_specs(
    moe: MoeConfig, hidden: int, layer: int, between: frozenset[str]
) -> list[ParameterSpec]:
    """Stacks the matrices of a layer's experts in one parameter [experts, out, in]."""
    prefix = f"model.layers.{layer}.mlp."
    more: dict[str, Any] = {"position": layer, "decay": True, "transposed": True}
    router = (moe.num_experts, hidden)
    inward, outward = (moe.num_experts, moe.inner, hidden), (moe.num_experts, hidden, moe.inner)

    def experts(name: str, shape: tuple[int, ...], dim: int, fused_key: str = "") -> ParameterSpec:
        splits = (Split("ep", 0), Split("etp", dim))
        options = {"summed_over": EXPERT_DATA, "fused_key": fused_key, **more}
        return ParameterSpec(f"{prefix}experts.{name}_proj.weight", shape, splits, **options)

    fused_key = f"{prefix}experts.gate_up_proj.weight"
    choice, shared = [], []
    if moe.has_bias:
        # It has no gradient and is not optimized.
        shape = ADDENDS, moe.num_experts
        choice = [ParameterSpec(f"{prefix}{BIAS}", shape, position=layer, decay=False)]
    if moe.shared_inner:
        own = f"{prefix}shared_experts."
        shared = _dense_specs(own, hidden, moe.shared_inner, layer, whole_of=between)
    return [
        ParameterSpec(f"{prefix}gate.weight", router, summed_over=between, **more),
        *choice,
        experts("gate", inward, 1, fused_key),
        experts("up", inward, 1, fused_key),
        experts("down", outward, 2),
        *shared,
    ]
