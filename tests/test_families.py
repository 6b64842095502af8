"""A family's config.json as a decoder: what may be left out, the ways to write one thing, and what is refused.

Does not prove that the decoder computes what it reads: test_golden_models.py does.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tables import each_row

from mindgrpo.config import load_config
from mindgrpo.errors import UserError
from mindgrpo.models.decoder_config import (
    DecoderConfig,
    LatentConfig,
    LayerKind,
    MoeConfig,
    decoder_config,
)
from mindgrpo.models.families import FAMILIES
from mindgrpo.models.parameters import num_active_parameters, num_parameters, parameter_specs
from mindgrpo.models.rotary import rotary_table
from mindgrpo.parallel.mesh import Mesh
from mindgrpo.parallel.sharding import Box, Layout
from mindgrpo.plan.fit import verdict
from mindgrpo.plan.role_layouts import check_experts, check_mode
from mindgrpo.plan.run_plan import RunPlan, plan_run
from mindgrpo.weights.local_weights import arrange

SIZES: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
# As published, the fields that matter here.
GEMMA3_1B = {
    "model_type": "gemma3_text",
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "vocab_size": 262144,
}
OLMO2_1B = {
    "model_type": "olmo2",
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 4096,
    "num_attention_heads": 16,
    "num_hidden_layers": 16,
    "num_key_value_heads": 16,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 500000,
    "tie_word_embeddings": False,
    "vocab_size": 100352,
}
QWEN3_30B_A3B = {
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
    "vocab_size": 151936,
}
MIXTRAL_8X7B = {
    "model_type": "mixtral",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "output_router_logits": True,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
# As published, with its weights in fp8.
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "attention_bias": False,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {"quant_method": "fp8"},
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
# What no family leaves out of its experts and latents.
EXPERTS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 12,
        "norm_topk_prob": False,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [3],
    },
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "deepseek_v3": {
        "kv_lora_rank": 10,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 12,
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 2,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "first_k_dense_replace": 2,
    },
}
EXAMPLE = Path(__file__).resolve().parents[1] / "examples/grpo/tiny_arithmetic/grpo_config.yaml"
ONE_RANK = {
    f"actor_config.parallel_config.{key}": 1
    for key in ("data_parallel", "model_parallel", "pipeline_stage")
}


def fields_of(family: str) -> dict[str, Any]:
    others: dict[str, Any] = (
        {"num_key_value_heads": 4, "q_lora_rank": None} if family == "deepseek_v3" else {}
    )
    if family in FAMILIES and FAMILIES[family].sees_images:
        others |= {"vision_config": {"out_hidden_size": SIZES["hidden_size"]}}
        others |= {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}
    return {**SIZES, **others, **EXPERTS.get(family, {})}


def read(family: str, **raw: Any) -> DecoderConfig:
    return decoder_config({"model_type": family, **fields_of(family), **raw}, "here")


@each_row(
    ("family", "keys", "told"),
    [
        ("qwen2", {}, None),
        ("qwen3_moe", {}, None),
        ("olmo2", {}, "models of type olmo2"),
        ("deepseek_v3", {}, "models of type deepseek_v3"),
        (
            "qwen2",
            {"actor_config.parallel_config.context_parallel": 2},
            r"2 ranks \(actor_config.parallel_config\)",
        ),
        (
            "qwen2",
            {"actor_config.parallel_config.data_parallel": 2},
            r"2 ranks \(actor_config.parallel_config\)",
        ),
    ],
)
def test_what_would_be_trained_wrongly_without_compiled_graphs_is_refused(
    family: str, keys: dict[str, Any], told: str | None
) -> None:
    model = read(family, max_position_embeddings=4096)
    for mode in (0, 1):
        values = {**ONE_RANK, **keys, "context.mode": mode}
        config = load_config(EXAMPLE, [f"--{key}={value}" for key, value in values.items()]).config
        if told is None or mode == 0:
            check_mode(config, model)
            continue
        with pytest.raises(UserError, match=f"gets gradients wrong with {told}; set context.mode"):
            check_mode(config, model)


@pytest.mark.parametrize(
    ("raw", "count"),
    [
        (GEMMA3_1B, 999_885_952),
        (OLMO2_1B, 1_484_916_736),
        (QWEN3_30B_A3B, 30_532_122_624),
        (MIXTRAL_8X7B, 46_702_792_704),
        (DEEPSEEK_V3, 671_026_419_200),
    ],
    ids=["gemma", "olmo", "qwen3_moe", "mixtral", "deepseek_v3"],
)
def test_published_models_have_their_published_number_of_parameters(
    raw: dict[str, Any], count: int
) -> None:
    assert num_parameters(decoder_config(raw, "here")) == count


def test_a_token_passes_as_many_parameters_as_are_published() -> None:
    # 30.5B in total, 3.3B activated; 12.9B of Mixtral's 47B (arXiv:2401.04088).
    models = [decoder_config(raw, "here") for raw in (QWEN3_30B_A3B, MIXTRAL_8X7B)]
    assert [*map(num_active_parameters, models)] == [3_353_032_704, 12_879_925_248]
    # 37B (arXiv:2412.19437) without the table of embeddings, of which a token takes a row.
    deepseek = decoder_config(DEEPSEEK_V3, "here")
    assert num_active_parameters(deepseek) - 129280 * 7168 == pytest.approx(36.6e9, rel=0.01)
    assert num_active_parameters(read("qwen3")) == num_parameters(read("qwen3"))


def test_what_config_json_leaves_out_is_the_familys_default() -> None:
    gemma, llama = read("gemma3_text"), read("llama")
    assert (gemma.tie_word_embeddings, llama.tie_word_embeddings) == (True, False)
    assert (gemma.head_dim, llama.head_dim) == (256, 8)
    assert (gemma.activation, llama.activation) == ("gelu_tanh", "silu")
    assert (gemma.query_scale, llama.query_scale) == (256**-0.5, 8**-0.5)
    assert (gemma.rope_theta, gemma.local_rope_theta, llama.rope_theta) == (1e6, 1e4, 1e4)
    assert read("olmo2").rms_norm_eps == 1e-5
    # Nulls are as good as nothing.
    assert read("gemma3_text", head_dim=None, rope_theta=None).head_dim == 256


@pytest.mark.parametrize("family", list(FAMILIES))
def test_what_config_json_leaves_out_is_what_transformers_takes_for_it(family: str) -> None:
    transformers = pytest.importorskip("transformers")
    whole = transformers.AutoConfig.for_model(family, **fields_of(family))
    theirs = whole.get_text_config()
    rope = getattr(theirs, "rope_parameters", None) or {"rope_theta": theirs.rope_theta}
    own = read(family)
    assert own.max_position_embeddings == theirs.max_position_embeddings
    assert own.rms_norm_eps == theirs.rms_norm_eps
    assert own.rope_theta == rope.get("full_attention", rope)["rope_theta"]
    assert own.tie_word_embeddings == whole.tie_word_embeddings
    heads = theirs.hidden_size // theirs.num_attention_heads
    their_dim = getattr(theirs, "qk_head_dim", None) or getattr(theirs, "head_dim", None)
    assert own.head_dim == (their_dim or heads)


def test_experts_in_groups_and_latents_are_read_as_deepseek_names_them() -> None:
    config = read("deepseek_v3")
    assert [index for index, layer in enumerate(config.layers) if layer.has_experts] == [
        *range(2, 7)
    ]
    assert config.moe == MoeConfig(
        num_experts=8,
        per_token=3,
        inner=12,
        shared_inner=24,
        scores="sigmoid",
        renormalise=True,
        groups=4,
        groups_taken=2,
        scaling=2.5,
        has_bias=True,
    )
    assert config.latent == LatentConfig(
        query_rank=None, rank=10, nope_dim=6, rope_dim=4, value=8, is_interleaved=True
    )
    assert (config.head_dim, config.query_scale) == (10, 10**-0.5)
    # ln 40 / 10 + 1, squared: what YaRN makes of scores.
    published = decoder_config(DEEPSEEK_V3, "here")
    assert published.query_scale == pytest.approx(192**-0.5 * 1.3688879**2)
    assert published.latent is not None and published.latent.query_rank == 1536


def test_whether_queries_are_made_of_latents_is_not_guessed() -> None:
    raw = {"model_type": "deepseek_v3", **fields_of("deepseek_v3")}
    del raw["q_lora_rank"]
    with pytest.raises(UserError, match="has no q_lora_rank"):
        decoder_config(raw, "here")


def test_layers_have_experts_as_their_family_names_them() -> None:
    qwen, mixtral = read("qwen3_moe"), read("mixtral", output_router_logits=True)
    # Every second layer, but the one that is said to be dense.
    assert [index for index, layer in enumerate(qwen.layers) if layer.has_experts] == [1, 5]
    assert all(layer.has_experts for layer in mixtral.layers)
    assert qwen.moe == MoeConfig(
        num_experts=8, per_token=3, inner=12, scores="softmax", renormalise=False
    )
    assert mixtral.moe == MoeConfig(
        num_experts=8, per_token=2, inner=48, scores="softmax", renormalise=True
    )
    assert read("qwen3_moe", decoder_sparse_step=8).moe is None
    # As transformers 5 writes it.
    renamed = {"num_experts": None, "num_local_experts": 8}
    assert read("qwen3_moe", **renamed).moe == qwen.moe


@each_row("key", [(family, key) for family, keys in EXPERTS.items() for key in keys])
def test_nothing_about_experts_is_guessed(key: tuple[str, str]) -> None:
    with pytest.raises(UserError, match=key[1].replace("num_local_experts", "num_experts")):
        read(key[0], **{key[1]: None})


def local(config: DecoderConfig) -> tuple[bool, ...]:
    return tuple(layer.is_local for layer in config.layers)


def test_local_layers_are_listed_or_all_but_every_nth() -> None:
    listed = ["sliding_attention", "full_attention"] * 3 + ["full_attention"]
    assert local(read("gemma3_text")) == (True,) * 5 + (False, True)
    by_pattern = read("gemma3_text", sliding_window_pattern=2, sliding_window=9)
    assert local(by_pattern) == (True, False) * 3 + (True,)
    assert by_pattern.sliding_window == 9
    assert local(read("gemma3_text", layer_types=listed)) == (True, False) * 3 + (False,)
    everywhere = read("gemma3_text", layer_types=["full_attention"] * 7)
    assert everywhere.sliding_window is None
    # Families without local layers say so for each layer, too.
    assert not any(local(read("qwen3", layer_types=["full_attention"] * 7)))


def test_rotary_bases_are_read_as_older_and_as_newer_files_have_them() -> None:
    older = read("gemma3_text", rope_theta=7e5, rope_local_base_freq=300.0)
    newer = read(
        "gemma3_text",
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 7e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        },
    )
    for config in (older, newer):
        assert (config.rope_theta, config.local_rope_theta) == (7e5, 300.0)
        assert config.rope_scaling is None
    assert read("olmo2", rope_parameters={"rope_theta": 9e4}).rope_theta == 9e4


def test_local_layers_turn_by_their_own_base_and_without_the_scaling_of_the_others() -> None:
    factors = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    config = read("gemma3_text", rope_scaling={"rope_type": "llama3", **factors})
    plain = read("gemma3_text", rope_theta=1e4)
    np.testing.assert_array_equal(rotary_table(config, 40, True), rotary_table(plain, 40))
    assert np.abs(rotary_table(config, 40) - rotary_table(read("gemma3_text"), 40)).max() > 0.1


@each_row(
    ("family", "raw", "message"),
    [
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0, but"),
        ("gemma3_text", {"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0, but"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "later tokens is not computed"),
        ("gemma3_text", {"hidden_activation": "relu"}, "only silu and gelu_pytorch_tanh are"),
        ("gemma3_text", {"layer_types": ["full_attention"]}, "for each of num_hidden_layers 7"),
        ("gemma3_text", {"layer_types": ["chunked"] * 7}, "must list 'full_attention' or"),
        ("gemma3_text", {"sliding_window": 0}, "sliding_window is 0, but must be"),
        ("gemma3_text", {"query_pre_attn_scalar": -1}, "query_pre_attn_scalar is -1, but must"),
        ("gemma3_text", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, "type 'linear'"),
        ("qwen2", {"use_sliding_window": True}, "set it to false if the sequences stay below"),
        ("llama", {"mlp_bias": True}, "a bias in the MLP"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not computed here"),
        ("qwen3_moe", {"num_experts_per_tok": 9}, "is 9, but there are 8 experts"),
        ("qwen3_moe", {"num_local_experts": 4}, "two names of one number"),
        ("qwen3_moe", {"mlp_only_layers": [True]}, "must list numbers of layers"),
        ("qwen3_moe", {"shared_expert_intermediate_size": 8}, "an expert that all tokens share"),
        ("mixtral", {"router_jitter_noise": 0.01}, "noise on what routers get"),
        ("mixtral", {"sliding_window": 4096}, "set it to null if the sequences stay below"),
        ("deepseek_v3", {"attention_bias": True}, "biases of attention with latents"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "all 4 heads have keys of their own"),
        ("deepseek_v3", {"qk_rope_head_dim": 5}, "qk_rope_head_dim is 5, but only even"),
        ("deepseek_v3", {"v_head_dim": 12}, "values wider than keys"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method is 'greedy', but only 'noaux_tc'"),
        ("deepseek_v3", {"topk_group": 1}, "3 experts cannot be chosen of 8 in topk_group 1"),
        ("deepseek_v3", {"n_group": 3}, "n_group 3 groups of equal size"),
        ("deepseek_v3", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "beta_fast is None"),
        ("deepseek_v3", {"rope_scaling": {"type": "llama3"}}, "only 'yarn' and none are"),
        ("olmo3", {}, "nearest: olmo2"),
    ],
)
def test_what_the_decoder_does_not_compute_is_refused(
    family: str, raw: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        read(family, **raw)


def test_a_layers_experts_are_one_parameter_each_split_over_their_own_axes() -> None:
    moe = MoeConfig(num_experts=8, per_token=2, inner=12, scores="softmax", renormalise=True)
    kinds = tuple(LayerKind(has_experts=index % 2 == 1) for index in range(7))
    config = replace(read("qwen3"), moe=moe, layers=kinds)
    layout = Layout.of(Mesh(2, 2, ep=2, etp=2), parameter_specs(config))
    prefix, box = "model.layers.1.mlp.", layout.held_by(3)
    assert layout.by_name[f"{prefix}gate.weight"].shape == (8, 32)
    assert box[f"{prefix}experts.up_proj.weight"] == Box((4, 6, 0), (8, 12, 32))
    assert box[f"{prefix}experts.down_proj.weight"] == Box((4, 0, 6), (8, 32, 12))
    assert layout.by_name[f"{prefix}experts.down_proj.weight"].summed_over == {"edp"}
    stored = {entry.key: entry.shape for entry in arrange(layout, 3)}
    assert stored[f"{prefix}experts.gate_up_proj.weight"] == (4, 32, 12)
    assert stored[f"{prefix}experts.down_proj.weight"] == (4, 6, 32)
    assert "model.layers.0.mlp.gate_up_proj.weight" in stored
    assert f"{prefix}gate_up_proj.weight" not in stored
    assert [config.active_inner(index) for index in (0, 1)] == [48, 24]


TRAINED, GENERATED = "actor_config.parallel_config", "generate_config.parallel_config"


@pytest.mark.parametrize(
    ("family", "mesh", "splits_tokens", "where", "words"),
    [
        ("mixtral", Mesh(4, 1, 2), False, TRAINED, None),
        ("mixtral", Mesh(2, 2, ep=4), True, TRAINED, None),
        ("mixtral", Mesh(2, 2, etp=2), True, TRAINED, None),
        ("mixtral", Mesh(2, 2, ep=2), False, GENERATED, None),
        ("llama", Mesh(2, 2), False, TRAINED, None),
        ("mixtral", Mesh(2, 2), False, TRAINED, "actor_config.parallel_config.model_parallel is 2"),
        ("mixtral", Mesh(3, 1, ep=3), False, TRAINED, "does not divide the 8 experts of a layer"),
        ("mixtral", Mesh(32, 1, etp=32), False, TRAINED, "does not divide the 48 columns of an"),
        ("mixtral", Mesh(4, 1, ep=2), False, GENERATED, "and model_parallel is 1; choose"),
        ("llama", Mesh(2, 1, ep=2), False, TRAINED, "models of type llama have no experts"),
    ],
)
def test_layouts_that_experts_do_not_divide_into_are_refused(
    family: str, mesh: Mesh, splits_tokens: bool, where: str, words: str | None
) -> None:
    with pytest.raises(UserError, match=words) if words else nullcontext():
        check_experts(mesh, read(family), splits_tokens, where)


def test_plans_refuse_what_experts_cannot_have_and_propose_nothing_of_it() -> None:
    keys = (
        "actor_config.parallel_config",
        "generate_config.parallel_config",
        "ref_config.parallel_config",
    )
    words = [word for key in keys for word in (f"--{key}.model_parallel", "1")]
    config, model = (
        load_config(EXAMPLE, words).config,
        read("mixtral", max_position_embeddings=4096),
    )
    plan = plan_run(config, model, None)
    assert plan.lora is None
    changed = load_config(EXAMPLE, [*words, "--generate_config.use_vllm", "1"]).config
    with pytest.raises(UserError, match="rl_config.router_replay is true, but"):
        plan_run(changed, model, None)
    small = load_config(EXAMPLE, [*words, "--context.max_device_memory", "1MB"])
    assert "does not fit" in verdict(small, plan_run(small.config, model, None)).lines()[0]


def test_plans_count_adapters_of_every_expert() -> None:
    words = ["--actor_config.lora.rank=5", "--actor_config.parallel_config.model_parallel=1"]
    for key, value in (("data_parallel", 2), ("expert_parallel", 2), ("pipeline_stage", 1)):
        words.append(f"--actor_config.parallel_config.{key}={value}")
    words += ["--generate_config.parallel_config.model_parallel=1", "--rl_config.beta=0"]
    model = read("mixtral", max_position_embeddings=4096)
    plan = plan_run(load_config(EXAMPLE, words).config, model, None)
    hidden, inner, heads = model.hidden_size, model.intermediate_size, model.head_dim
    queries, keys = (own * heads for own in (model.num_attention_heads, model.num_key_value_heads))
    # Four of the eight experts.
    a_layer = 2 * (hidden + queries) + 2 * (hidden + keys) + 4 * 3 * (hidden + inner)
    assert plan.trained_bytes(0) == 4 * 5 * a_layer * model.num_hidden_layers


def test_plans_of_vllm_cut_each_expert_over_its_workers_and_refuse_the_rest() -> None:
    generating = "--generate_config.parallel_config"
    words = ["--actor_config.parallel_config.model_parallel=1", "--rl_config.beta=0"]
    words += [f"{generating}.data_parallel=1", f"{generating}.model_parallel=2"]
    words += ["--generate_config.use_vllm=1", "--rl_config.router_replay=false"]

    def planned(family: str, *more: str) -> RunPlan:
        model = read(family, max_position_embeddings=4096)
        return plan_run(load_config(EXAMPLE, [*words, *more]).config, model, None)

    infer = planned("qwen3_moe").infer
    boxes = infer.held_by(1)
    of_experts = [spec for spec in infer.specs if len(spec.shape) == 3]
    assert of_experts
    assert all(2 * boxes[s.name].size == np.prod(s.shape) for s in of_experts)
    for family, word, sentence in (
        ("qwen3_moe", "--rl_config.router_replay=true", "rl_config.router_replay is true, but"),
        ("qwen3_moe", f"{generating}.expert_parallel=2", "expert_parallel is 2, but vLLM"),
        ("deepseek_v3", "--rl_config.router_replay=false", "deepseek_v3 are not handed to vLLM"),
    ):
        with pytest.raises(UserError, match=sentence):
            planned(family, word)
