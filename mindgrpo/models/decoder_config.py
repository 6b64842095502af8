"""A decoder's dimensions and options, read from a Hugging Face `config.json`.

Raises UserError for architectures and options that the decoder does not compute exactly. Missing keys get the defaults
of the model's family (families.py), the same as in transformers; a missing key without a default is an error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from mindgrpo.backend.kernels.shapes import Activation
from mindgrpo.errors import UserError
from mindgrpo.models.families import (
    ACTIVATIONS,
    FAMILIES,
    NOT_COMPUTED,
    OTHER_ENCODERS,
    ExpertFamily,
    ExpertScores,
    Family,
)
from mindgrpo.models.vision_config import (
    VisionConfig,
    language_fields,
    read_vision,
    rope_sections,
)
from mindgrpo.strict_files import looked_at, read_object

MAX_CONFIG_BYTES = 1 << 20
# Limits far beyond any model, within which products of two sizes fit in 64 bits and lists of tensors in memory.
MAX_SIZE, MAX_LAYERS, MAX_EXPERTS = 1 << 24, 4096, 1 << 16
LLAMA3_FACTORS = ("factor", "low_freq_factor", "high_freq_factor")
ROPE_FACTORS = (*LLAMA3_FACTORS, "original_max_position_embeddings")
YARN_FACTORS = (
    *("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
    "original_max_position_embeddings",
)
ROPE_NAMES = ("rope_type", "type", "rope_theta")
# The only supported variant of group-limited routing.
GROUPED_ROUTING = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
FULL, LOCAL = "full_attention", "sliding_attention"
# A language model's head, or a sequence classifier's with one label: a value for each position.
Head = Literal["vocabulary", "scalar"]
CLASSIFIER = "ForSequenceClassification"
# Scores each step of a completion, by a head of several layers and two labels.
PROCESS_REWARD = "ForProcessRewardModel"


@dataclass(frozen=True)
class LayerKind:
    """The properties of a layer that differ within a model.

    A local layer attends to the last `sliding_window` tokens and has rotary embeddings of base `local_rope_theta`. A
    layer with experts has the mixture of experts of `DecoderConfig.moe` instead of an MLP.
    """

    is_local: bool = False
    has_experts: bool = False


@dataclass(frozen=True, kw_only=True)
class MoeConfig:
    """A mixture of `num_experts` experts, gated MLPs of size `inner`, of which each token uses `per_token`.

    The experts' outputs are summed, weighted by scores: the softmax or the sigmoids of the router's logits, divided by
    the sum over the chosen experts with `renormalise`, and multiplied by `scaling`. Of `groups` of experts, only those
    of the `groups_taken` best groups can be chosen. `has_bias`: a bias is added to the scores to choose experts only.
    `shared_inner` is the MLP size of the shared expert, 0 without one. `balance_coef` is the coefficient of the
    load-balancing loss in training (Balance in moe.py).
    """

    num_experts: int
    per_token: int
    inner: int
    shared_inner: int = 0
    scores: ExpertScores
    renormalise: bool
    groups: int = 1
    groups_taken: int = 1
    scaling: float = 1.0
    has_bias: bool = False
    balance_coef: float = 0.0

    @property
    def active_inner(self) -> int:
        """Returns the total MLP size of the experts that a token uses, with the shared expert."""
        return self.per_token * self.inner + self.shared_inner


@dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """Dimensions of multi-head latent attention (arXiv:2405.04434, section 2.1).

    Keys and values are up-projections of a latent of size `rank`; queries are made from a latent of size `query_rank`,
    or from the hidden state if it is None. A query or key head has `nope_dim` dims without positions, then `rope_dim`
    rotary dims, which all key heads share. Rotary pairs are adjacent dims if `is_interleaved`, else the two halves. A
    value head has `value` dims.
    """

    query_rank: int | None
    rank: int
    nope_dim: int
    rope_dim: int
    value: int
    is_interleaved: bool


# The norms of latents ignore rms_norm_eps and use the default of transformers' DeepseekV3RMSNorm.
LATENT_EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Dimensions and options of a decoder; `raw` is the config.json that they came from, for writing it back.

    Attention scores are multiplied by `query_scale`. `layers[i]` is the kind of layer i. `sliding_window` is None in
    models without local layers, `moe` in dense models, and `latent` without latent attention. With a scalar `head`,
    positions have one value each instead of logits. Of models that see images, `vision` is the encoder, and
    `rope_sections` are the numbers of rotary frequencies that turn by a token's time, row and column.
    """

    model_type: str
    family: Family
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
    activation: Activation
    query_scale: float
    layers: tuple[LayerKind, ...]
    local_rope_theta: float
    sliding_window: int | None
    moe: MoeConfig | None = None
    latent: LatentConfig | None = None
    vision: VisionConfig | None = None
    rope_sections: tuple[int, ...] | None = None
    head: Head = "vocabulary"
    raw: Mapping[str, Any]

    @property
    def has_table_in_head(self) -> bool:
        """Returns whether the head multiplies by the embedding table."""
        return self.tie_word_embeddings and self.head == "vocabulary"

    def with_scalar_head(self) -> DecoderConfig:
        """Returns a copy whose head is a row of its own, score.weight [1, H], in place of the vocabulary's."""
        return replace(self, head="scalar")

    def balanced(self, coef: float) -> DecoderConfig:
        """Returns a copy whose load-balancing loss has coefficient `coef`; a dense model returns itself."""
        return self if self.moe is None else replace(self, moe=replace(self.moe, balance_coef=coef))

    def moe_of(self, layer: int) -> MoeConfig | None:
        """Returns the layer's mixture of experts; None for a dense layer."""
        return self.moe if self.layers[layer].has_experts else None

    def active_inner(self, layer: int) -> int:
        """Returns the MLP size of a layer; with experts, the total of those that a token uses."""
        moe = self.moe_of(layer)
        return self.intermediate_size if moe is None else moe.active_inner

    @property
    def value_dim(self) -> int:
        """Returns the size of a value head."""
        return self.head_dim if self.latent is None else self.latent.value

    def attention_size(self, tp_size: int = 1) -> int:
        """Returns the number of elements of a layer's attention matrices on one of `tp_size` ranks."""
        hidden, heads = self.hidden_size, self.num_attention_heads // tp_size
        if (latent := self.latent) is None:
            kv_heads = max(1, self.num_key_value_heads // tp_size)
            return 2 * hidden * self.head_dim * (heads + kv_heads)
        queries, down = heads * self.head_dim, latent.rank + latent.rope_dim
        up = latent.rank * heads * (latent.nope_dim + latent.value)
        if latent.query_rank is None:
            down += queries
        else:
            down, up = down + latent.query_rank, up + latent.query_rank * queries
        return hidden * (down + heads * latent.value) + up

    @property
    def column_cost(self) -> float:
        """Returns the cost of a token's attention to one column, as a fraction of the cost of a layer's GEMMs."""
        queries = self.num_attention_heads * self.head_dim
        inner = sum(map(self.active_inner, range(len(self.layers)))) / len(self.layers)
        return 2 * queries / (self.attention_size() + 3 * self.hidden_size * inner)


def read_config(directory: str | Path) -> DecoderConfig:
    """Reads the config.json of a Hugging Face directory. Raises UserError if the model cannot be computed exactly."""
    path = Path(directory) / "config.json"
    if not Path(directory).is_dir():
        where = looked_at(directory)
        raise UserError(
            f"The model directory '{directory}' does not exist{where}; give a Hugging Face directory "
            "(config.json, *.safetensors, tokenizer.json) in actor_config.load."
        )
    adapter = path.with_name("adapter_config.json")
    if adapter.is_file():
        raise UserError(
            f"'{directory}' holds a LoRA adapter ({adapter.name}), which is not read; merge it into its model, as "
            "merge_and_unload and save_pretrained of the PEFT library do, and set actor_config.load to that."
        )
    if not path.exists():
        # The folder of a run, or of one of its checkpoints.
        if any(Path(directory, name).exists() for name in ("manifest.json", "checkpoints")):
            raise UserError(
                f"'{directory}' holds a run's checkpoint, not a model; export it with python -m mindgrpo export --from "
                f"{directory} --output DIR, and name DIR."
            )
        raise UserError(
            f"'{directory}' has no config.json, so it is not a Hugging Face model directory; "
            "set actor_config.load to one."
        )
    raw = read_object(path, "the model's", "restore it from its source.", MAX_CONFIG_BYTES)
    return decoder_config(raw, str(path))


def decoder_config(fields: Mapping[str, Any], where: str) -> DecoderConfig:
    """Reads the `fields` of config.json as a DecoderConfig; `where` is named in errors."""
    family = _family(fields, where)
    vision = read_vision(fields, where) if family.sees_images else None
    own = language_fields(fields) if family.sees_images else fields
    named = {**family.defaults, **own}
    # A null counts as a missing key, except for max_position_embeddings.
    raw = {**family.defaults, **{key: value for key, value in own.items() if value is not None}}
    for key, reason in {**NOT_COMPUTED, **family.not_computed}.items():
        if raw.get(key):
            raise UserError(f"{where}: {key} is {raw[key]!r}, but {reason}.")
    latent = _latents(raw, named, where) if family.has_latents else None
    heads, kv_heads, head_dim = _heads(raw, where, latent)
    scalar = family.query_scalar_key
    layers = _positive(raw, "num_hidden_layers", where, MAX_LAYERS)
    none = (False,) * layers
    local = _local_layers(raw, layers, where) if family.has_local_layers else none
    moe, with_experts = (
        _experts(raw, family.experts, layers, where) if family.experts else (None, none)
    )
    theta, scaling = _rope(raw, FULL, "rope_theta", where, family.has_latents)
    local_theta = theta
    if any(local):
        local_theta, _ = _rope(raw, LOCAL, "rope_local_base_freq", where)
    bias = _switch(raw, family.bias_key, where) if family.bias_key else family.qkv_bias
    hidden = _positive(raw, "hidden_size", where)
    if vision is not None and vision.out_hidden_size != hidden:
        raise UserError(
            f"{where}: vision_config.out_hidden_size is {vision.out_hidden_size}, but features take the place of "
            f"embeddings, whose size (hidden_size) is {hidden}; correct the file."
        )
    return DecoderConfig(
        model_type=raw["model_type"],
        family=family,
        vocab_size=_positive(raw, "vocab_size", where),
        hidden_size=hidden,
        intermediate_size=_positive(raw, "intermediate_size", where),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=_number(raw, "rms_norm_eps", where),
        rope_theta=theta,
        rope_scaling=scaling,
        max_position_embeddings=_positive(named, "max_position_embeddings", where, 1 << 40),
        tie_word_embeddings=_switch(raw, "tie_word_embeddings", where),
        qkv_bias=bias,
        output_bias=bias and family.bias_key is not None,
        activation=_activation(raw, family.activation_key, where),
        query_scale=(_number(raw, scalar, where) if scalar else head_dim) ** -0.5
        * _yarn_scale(scaling),
        layers=tuple(map(LayerKind, local, with_experts)),
        local_rope_theta=local_theta,
        sliding_window=_positive(raw, "sliding_window", where) if any(local) else None,
        moe=moe if any(with_experts) else None,
        latent=latent,
        vision=vision,
        rope_sections=_sections(raw, head_dim, where) if family.sees_images else None,
        head=_head(raw, where),
        raw=dict(fields),
    )


def _head(raw: Mapping[str, Any], where: str) -> Head:
    """Reads the kind of head from the architecture. Raises UserError for classifiers with several labels."""
    named = raw.get("architectures")
    architecture = str(named[0]) if isinstance(named, list) and named else ""
    if architecture.endswith(PROCESS_REWARD):
        raise UserError(
            f"{where}: {architecture} scores each step of a completion, with a head of several layers, which is not "
            f"computed here; use a model of an architecture *{CLASSIFIER} with one label."
        )
    if not architecture.endswith(CLASSIFIER):
        return "vocabulary"
    labels = raw.get("id2label")
    # As in transformers, where a configuration without labels has two.
    count = len(labels) if isinstance(labels, Mapping) else raw.get("num_labels", 2)
    if count != 1:
        raise UserError(
            f"{where}: {architecture} has {count} labels (id2label, num_labels), but only a head with one label is a "
            "score; use a classifier that was trained with num_labels=1."
        )
    return "scalar"


def _family(raw: Mapping[str, Any], where: str) -> Family:
    kind = str(raw.get("model_type"))
    if kind in FAMILIES:
        return FAMILIES[kind]
    if kind in OTHER_ENCODERS:
        raise UserError(
            f"{where}: the vision encoder of model_type '{kind}' {OTHER_ENCODERS[kind]}, which is not computed here; "
            "use a Qwen2.5-VL."
        )
    near = get_close_matches(kind[:100], FAMILIES, 1, 0.5)
    hint = f" (nearest: {near[0]})" if near else ""
    raise UserError(
        f"{where}: model_type '{kind}' is not one of {', '.join(FAMILIES)}{hint}; use a model of these families."
    )


def _heads(raw: Mapping[str, Any], where: str, latent: LatentConfig | None) -> tuple[int, int, int]:
    """Returns (query heads, key-value heads, head_dim)."""
    heads = _positive(raw, "num_attention_heads", where)
    hidden = _positive(raw, "hidden_size", where)
    if "head_dim" not in raw and hidden % heads:
        raise UserError(
            f"{where}: hidden_size {hidden} is not a multiple of num_attention_heads {heads} and no "
            "head_dim is given; correct the file."
        )
    head_dim = _positive(raw, "head_dim", where) if "head_dim" in raw else hidden // heads
    if latent is not None:
        # In the file, head_dim is the size of the rotary part only.
        head_dim = latent.nope_dim + latent.rope_dim
    kv = "num_key_value_heads"
    kv_heads = _positive(raw, kv, where) if kv in raw else heads
    if heads % kv_heads:
        raise UserError(
            f"{where}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}; "
            "correct the file."
        )
    if latent is not None and kv_heads != heads:
        raise UserError(
            f"{where}: num_key_value_heads is {kv_heads}, but with latents all {heads} heads have keys of their own; "
            "set it to num_attention_heads."
        )
    return heads, kv_heads, head_dim


def _latents(raw: Mapping[str, Any], named: Mapping[str, Any], where: str) -> LatentConfig:
    if "q_lora_rank" not in named:
        raise UserError(
            f"{where} has no q_lora_rank, the width of what queries are made of; set it, or set it to null where they "
            "are made of hidden states."
        )
    latent = LatentConfig(
        query_rank=_positive(raw, "q_lora_rank", where) if "q_lora_rank" in raw else None,
        rank=_positive(raw, "kv_lora_rank", where),
        nope_dim=_positive(raw, "qk_nope_head_dim", where),
        rope_dim=_positive(raw, "qk_rope_head_dim", where),
        value=_positive(raw, "v_head_dim", where),
        is_interleaved=_switch(raw, "rope_interleave", where),
    )
    for key, size in {
        "kv_lora_rank": latent.rank,
        "qk_nope_head_dim": latent.nope_dim,
        "qk_rope_head_dim": latent.rope_dim,
    }.items():
        if size % 2:
            raise UserError(f"{where}: {key} is {size}, but only even widths are computed here.")
    if latent.value > latent.nope_dim + latent.rope_dim:
        raise UserError(
            f"{where}: v_head_dim is {latent.value}, but values wider than keys (qk_nope_head_dim + qk_rope_head_dim "
            f"{latent.nope_dim + latent.rope_dim}) are not computed here."
        )
    return latent


def _local_layers(raw: Mapping[str, Any], count: int, where: str) -> tuple[bool, ...]:
    kinds = raw.get("layer_types")
    if kinds is None:
        pattern = _positive(raw, "sliding_window_pattern", where)
        return tuple((index + 1) % pattern > 0 for index in range(count))
    if not isinstance(kinds, list) or len(kinds) != count or set(kinds) - {FULL, LOCAL}:
        raise UserError(
            f"{where}: layer_types must list '{FULL}' or '{LOCAL}' for each of num_hidden_layers {count} layers; "
            "correct the file."
        )
    return tuple(kind == LOCAL for kind in kinds)


def _experts(
    raw: Mapping[str, Any], family: ExpertFamily, layers: int, where: str
) -> tuple[MoeConfig, tuple[bool, ...]]:
    """Returns the mixture of experts, and for each layer whether it has experts."""
    # transformers 5 writes num_local_experts instead of the family's own key.
    names = (family.number_key, "num_local_experts")
    number = [key for key in names if key in raw] or [family.number_key]
    counts = {_positive(raw, key, where, MAX_EXPERTS) for key in number}
    if len(counts) > 1:
        raise UserError(
            f"{where}: {' and '.join(f'{name} {raw[name]}' for name in names)} are two names of one number; correct "
            "the file."
        )
    (num_experts,) = counts
    per_token = _positive(raw, "num_experts_per_tok", where)
    if per_token > num_experts:
        raise UserError(
            f"{where}: num_experts_per_tok is {per_token}, but there are {num_experts} experts; correct the file."
        )
    key = family.renormalise_key
    if key is not None and key not in raw:
        raise UserError(
            f"{where} has no {key}, which says whether scores of experts are divided by their sum; set it to true or "
            "false, as this model was trained."
        )
    moe = MoeConfig(
        num_experts=num_experts,
        per_token=per_token,
        inner=_positive(raw, family.inner_key, where),
        scores=family.scores,
        renormalise=key is None or _switch(raw, key, where),
    )
    if family.has_groups:
        return _in_groups(raw, moe, where), _behind_dense(raw, layers, where)
    if not family.has_dense_layers:
        return moe, (True,) * layers
    step, dense = _positive(raw, "decoder_sparse_step", where), raw.get("mlp_only_layers")
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise UserError(
            f"{where}: mlp_only_layers is {dense!r}, but must list numbers of layers; correct the file."
        )
    return moe, tuple(i not in dense and (i + 1) % step == 0 for i in range(layers))


def _in_groups(raw: Mapping[str, Any], moe: MoeConfig, where: str) -> MoeConfig:
    """Returns `moe` with DeepSeek-V3's group-limited routing and shared expert."""
    for key, computed in GROUPED_ROUTING.items():
        if raw[key] != computed:
            raise UserError(
                f"{where}: {key} is {raw[key]!r}, but only {computed!r} is computed here."
            )
    groups, taken = (_positive(raw, key, where) for key in ("n_group", "topk_group"))
    size = moe.num_experts // groups
    if moe.num_experts % groups or size < 2 or taken > groups or taken * size < moe.per_token:
        raise UserError(
            f"{where}: {moe.per_token} experts cannot be chosen of {moe.num_experts} in topk_group {taken} of n_group "
            f"{groups} groups of equal size, 2 or more; correct the file."
        )
    return replace(
        moe,
        shared_inner=moe.inner * _positive(raw, "n_shared_experts", where),
        groups=groups,
        groups_taken=taken,
        scaling=_number(raw, "routed_scaling_factor", where),
        has_bias=True,
    )


def _behind_dense(raw: Mapping[str, Any], layers: int, where: str) -> tuple[bool, ...]:
    first = raw.get("first_k_dense_replace")
    if type(first) is not int or first < 0:
        raise UserError(
            f"{where}: first_k_dense_replace is {first!r}, but must be a whole number from 0 on."
        )
    return tuple(index >= first for index in range(layers))


def _activation(raw: Mapping[str, Any], key: str, where: str) -> Activation:
    name = str(raw.get(key))
    if name not in ACTIVATIONS:
        raise UserError(
            f"{where}: {key} '{name}' is not computed here; only {' and '.join(ACTIVATIONS)} are."
        )
    return ACTIVATIONS[name]


def _positive(raw: Mapping[str, Any], key: str, where: str, most: int = MAX_SIZE) -> int:
    value = raw.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= most:
        raise UserError(
            f"{where}: {key} is {value!r}, but must be a whole number above 0 and at most {most}."
        )
    return value


def _number(raw: Mapping[str, Any], key: str, where: str) -> float:
    value = raw.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise UserError(f"{where}: {key} is {value!r}, but must be a number above 0.")
    return float(value)


def _switch(raw: Mapping[str, Any], key: str, where: str) -> bool:
    value = raw.get(key)
    if not isinstance(value, bool | None):
        raise UserError(f"{where}: {key} is {value!r}, but must be true or false.")
    return bool(value)


def _rope(
    raw: Mapping[str, Any], layers: str, key: str, where: str, takes_yarn: bool = False
) -> tuple[float, Mapping[str, Any] | None]:
    """Returns the base and the scaling of rotary embeddings in layers of type `layers`.

    transformers 4 writes the base to `key`, and the scaling, for full-attention layers only, to rope_scaling. Later
    versions write both to rope_parameters, keyed by layer type if there are several.
    """
    rope = raw.get("rope_parameters", {})
    if isinstance(rope, Mapping):
        rope = rope.get(layers, rope)
    if not isinstance(rope, Mapping):
        raise UserError(f"{where}: rope_parameters is {rope!r}, but must be an object.")
    for name in ("partial_rotary_factor", "rotary_pct"):
        share = rope.get(name, raw.get(name))
        if share not in (None, 1):
            raise UserError(
                f"{where}: {name} is {share!r}, but only rotary positions of whole heads are computed here."
            )
    base = rope if "rope_theta" in rope else {"rope_theta": raw.get(key)}
    scaling = _rope_scaling(rope, where, takes_yarn)
    if layers == FULL and raw.get("rope_scaling"):
        earlier = _rope_scaling(raw["rope_scaling"], where, takes_yarn)
        has_type = not {"rope_type", "type"}.isdisjoint(rope)
        if has_type and _without_names(earlier) != _without_names(scaling):
            raise UserError(
                f"{where}: rope_scaling is {raw['rope_scaling']!r} and rope_parameters {dict(rope)!r}, two scalings of "
                "the same positions; remove the one that this model was not trained with."
            )
        scaling = earlier
    if scaling is not None and layers == LOCAL:
        raise UserError(f"{where}: rope_parameters scales {LOCAL}, which is not computed here.")
    return _number(base, "rope_theta", where), scaling


def _sections(raw: Mapping[str, Any], head_dim: int, where: str) -> tuple[int, ...]:
    rope = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    return rope_sections(rope, head_dim, where)


def _without_names(scaling: Mapping[str, Any] | None) -> dict[str, Any]:
    return {key: value for key, value in (scaling or {}).items() if key not in ROPE_NAMES}


def _yarn_scale(scaling: Mapping[str, Any] | None) -> float:
    """Returns YaRN's factor of attention scores in models with latent attention (arXiv:2309.00071, section 3.4)."""
    if scaling is None or "mscale_all_dim" not in scaling:
        return 1.0
    return yarn_magnitude(scaling, "mscale_all_dim") ** 2


def yarn_magnitude(scaling: Mapping[str, Any], key: str) -> float:
    """Returns 0.1 m ln(factor) + 1, where m is the value of `key`."""
    return 0.1 * float(scaling[key]) * math.log(max(1.0, float(scaling["factor"]))) + 1.0


def _rope_scaling(scaling: Any, where: str, takes_yarn: bool) -> Mapping[str, Any] | None:
    if not scaling:
        return None
    if not isinstance(scaling, Mapping):
        raise UserError(f"{where}: rope_scaling is {scaling!r}, but must be an object.")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return None
    computed = "yarn" if takes_yarn else "llama3"
    if kind != computed:
        original = scaling.get("original_max_position_embeddings")
        below = f" if your sequences stay below {original} tokens" if original else ""
        raise UserError(
            f"{where}: rope_scaling type '{kind}' is not computed here, only '{computed}' and none are; use a model "
            f"without it, or remove rope_scaling{below}, where it only lengthens what the weights were trained for."
        )
    changed = [key for key in ("attention_factor", "truncate") if scaling.get(key) is not None]
    if takes_yarn and changed:
        raise UserError(
            f"{where}: rope_scaling has {changed[0]}, which is not computed here; use a model without it."
        )
    for factor in YARN_FACTORS if takes_yarn else ROPE_FACTORS:
        _number({factor: scaling.get(factor)}, factor, f"{where}: rope_scaling")
    return dict(scaling)
