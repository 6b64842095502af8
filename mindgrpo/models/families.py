"""Model families, declared as data: how the decoder blocks of one architecture differ from those of another.

A family holds what all models of one `model_type` in config.json have in common; decoder_config.py adds the dimensions
of a particular model. To add a family, add an entry to FAMILIES; docs/extending.md says what else to change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from mindgrpo.backend.kernels.shapes import Activation

# The function from router logits to expert scores.
ExpertScores = Literal["softmax", "sigmoid"]


@dataclass(frozen=True)
class BlockNorms:
    """Names of a layer's norms in checkpoint files, for the input and the output of attention and of the MLP.

    None if the family has no such norm.
    """

    attention_in: str | None = None
    attention_out: str | None = None
    mlp_in: str | None = None
    mlp_out: str | None = None


@dataclass(frozen=True, kw_only=True)
class ExpertFamily:
    """How a family's config.json describes its mixture of experts (decoder_config.MoeConfig).

    `inner_key` is the key of an expert's MLP size. `renormalise_key` is the switch that divides scores by their sum; in
    families without one, they always are. `has_dense_layers`: decoder_sparse_step and mlp_only_layers determine which
    layers have experts; in other families all have. `has_groups`: as in DeepSeek-V3 (arXiv:2412.19437, section 2.1.2),
    experts are chosen from the best of n_group groups, with a bias, and scores are multiplied by
    routed_scaling_factor; n_shared_experts process all tokens, and the first first_k_dense_replace layers are dense.
    All of these keys are required.
    """

    inner_key: str
    number_key: str = "num_experts"
    scores: ExpertScores = "softmax"
    renormalise_key: str | None = None
    has_dense_layers: bool = False
    has_groups: bool = False


OF_MOST = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e4}
PRE_NORMS = BlockNorms(attention_in="input_layernorm", mlp_in="post_attention_layernorm")


@dataclass(frozen=True, kw_only=True)
class Family:
    """The properties of an architecture in which it differs from the others that the decoder supports.

    `qkv_bias`: q, k and v have biases; `bias_key` is config.json's switch in families where q, k, v and o may have
    them. `qk_norm`: queries and keys are normalized per head, or over a token's whole projection. Norms multiply by
    `norm_offset` plus their weight. `activation_key` is config.json's key of the MLP's activation. `scaled_embeddings`
    are multiplied by sqrt(hidden_size). Attention scores are divided by the square root of config.json's
    `query_scalar_key`, or of head_dim without one. `sees_images`: a vision encoder is beside the decoder, and positions
    have three axes (vision_config.py). `has_local_layers`: some layers use sliding-window attention, with a
    rotary base of their own. `has_latents`: multi-head latent attention (decoder_config.LatentConfig). `experts` is
    None in dense families. `not_computed`: like NOT_COMPUTED, for keys that are supported or mean something else in
    other families. `defaults` are the values of keys that config.json may leave out, those of transformers'
    configuration class of the family.
    """

    qkv_bias: bool = False
    bias_key: str | None = "attention_bias"
    qk_norm: Literal["head", "projection"] | None = None
    norms: BlockNorms = PRE_NORMS
    norm_offset: float = 0.0
    activation_key: str = "hidden_act"
    scaled_embeddings: bool = False
    query_scalar_key: str | None = None
    sees_images: bool = False
    has_local_layers: bool = False
    has_latents: bool = False
    experts: ExpertFamily | None = None
    not_computed: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=lambda: OF_MOST)


FAMILIES: dict[str, Family] = {
    "qwen2": Family(
        qkv_bias=True, bias_key=None, defaults=OF_MOST | {"max_position_embeddings": 32768}
    ),
    # arXiv:2502.13923
    "qwen2_5_vl": Family(
        qkv_bias=True,
        bias_key=None,
        sees_images=True,
        defaults={
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "max_position_embeddings": 32768,
        },
    ),
    "llama": Family(defaults=OF_MOST | {"max_position_embeddings": 2048}),
    "qwen3": Family(
        qk_norm="head", defaults=OF_MOST | {"max_position_embeddings": 32768, "head_dim": 128}
    ),
    # arXiv:2505.09388
    "qwen3_moe": Family(
        qk_norm="head",
        experts=ExpertFamily(
            inner_key="moe_intermediate_size",
            renormalise_key="norm_topk_prob",
            has_dense_layers=True,
        ),
        defaults=OF_MOST | {"max_position_embeddings": 32768, "num_key_value_heads": 4},
    ),
    # arXiv:2401.04088
    "mixtral": Family(
        bias_key=None,
        experts=ExpertFamily(inner_key="intermediate_size"),
        not_computed={
            "sliding_window": "only full attention is computed; set it to null if the sequences stay below the window"
        },
        defaults={
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
        },
    ),
    # arXiv:2412.19437; multi-token prediction layers (num_nextn_predict_layers) are neither read nor written.
    "deepseek_v3": Family(
        bias_key=None,
        has_latents=True,
        experts=ExpertFamily(
            inner_key="moe_intermediate_size",
            number_key="n_routed_experts",
            scores="sigmoid",
            renormalise_key="norm_topk_prob",
            has_groups=True,
        ),
        not_computed={"attention_bias": "biases of attention with latents are not computed here"},
        defaults=OF_MOST
        | {
            "max_position_embeddings": 4096,
            "rope_interleave": True,
            # The values of all published files, and the only ones supported.
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "moe_layer_freq": 1,
        },
    ),
    # arXiv:2501.00656
    "olmo2": Family(
        qk_norm="projection",
        norms=BlockNorms(
            attention_out="post_attention_layernorm", mlp_out="post_feedforward_layernorm"
        ),
        defaults=OF_MOST | {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
    ),
    # arXiv:2503.19786
    "gemma3_text": Family(
        qk_norm="head",
        norms=BlockNorms(
            attention_in="input_layernorm",
            attention_out="post_attention_layernorm",
            mlp_in="pre_feedforward_layernorm",
            mlp_out="post_feedforward_layernorm",
        ),
        norm_offset=1.0,
        activation_key="hidden_activation",
        scaled_embeddings=True,
        query_scalar_key="query_pre_attn_scalar",
        has_local_layers=True,
        defaults={
            "hidden_activation": "gelu_pytorch_tanh",
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-6,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
            "tie_word_embeddings": True,
        },
    ),
}

# Vision-language models that are not read, and how their encoders differ from Qwen2.5-VL's.
OTHER_ENCODERS: Mapping[str, str] = {
    "qwen2_vl": "has layer norms and an MLP without a gate",
    **dict.fromkeys(
        ("qwen3_vl", "qwen3_vl_moe"), "adds features to the language model's layers (deepstack)"
    ),
    "qwen2_5_omni": "is beside one of sounds",
}

# The supported activations of the MLP, by their names in config.json.
ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
# Options that no family supports: their keys must be null or false.
NOT_COMPUTED = {
    "use_sliding_window": (
        "only full attention is computed; set it to false if the sequences stay below the window"
    ),
    "mlp_bias": "a bias in the MLP is not computed here",
    "attn_logit_softcapping": "a soft cap on attention's scores is not computed here",
    "final_logit_softcapping": "a soft cap on logits is not computed here",
    "use_bidirectional_attention": "attention to later tokens is not computed here",
    "router_jitter_noise": "noise on what routers get is not computed here; set it to 0",
    "shared_expert_intermediate_size": "an expert that all tokens share is not computed here",
}
