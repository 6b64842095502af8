"""The files of model_configs/: each gives its model's published number of parameters, and agrees with itself.

Does not prove that a published model's config.json says the same in every field: none is downloaded.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from test_families import read

from mindgrpo.config import Config
from mindgrpo.errors import UserError
from mindgrpo.models.decoder_config import decoder_config
from mindgrpo.models.mindformers_yaml import (
    REQUIRED,
    check_agreement,
    read_model_yaml,
)
from mindgrpo.models.parameters import num_parameters
from mindgrpo.models.precision import compute_dtype, dtype_notices, flash_attention

FOLDER = Path(__file__).resolve().parent.parent / "model_configs"
# From the models' cards; tied embeddings are counted once.
PARAMETERS = {
    "qwen_grpo/qwen2_5_0_5b": 494_032_768,
    "qwen_grpo/qwen2_5_7b": 7_615_616_512,
    "qwen_grpo/qwen2_5_32b": 32_763_876_352,
    "qwen_grpo/qwen2_5_72b": 72_706_203_648,
    "qwen_grpo/qwen3_0_6b": 596_049_920,
    "qwen_grpo/qwen3_8b": 8_190_735_360,
    "llama_grpo/llama3_2_1b": 1_235_814_400,
    "llama_grpo/smollm2_135m": 134_515_008,
}
LLAMA = FOLDER / "llama_grpo/llama3_2_1b/finetune_llama3_2_1b.yaml"
# Llama-3.2-1B's own config.json, as far as it matters here.
LLAMA_RAW = {
    "model_type": "llama",
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128256,
    "intermediate_size": 8192,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}


def test_every_model_has_its_two_files_and_no_other() -> None:
    found = sorted(path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*.yaml"))
    expected = []
    for name in PARAMETERS:
        model = name.rpartition("/")[2]
        expected += [f"{name}/finetune_{model}.yaml", f"{name}/predict_{model}_instruct.yaml"]
    # MindFormers has no such models; these files are for plans.
    for model in ("qwen2_5_vl_3b", "qwen2_5_vl_7b"):
        expected.append(f"qwen_grpo/{model}/finetune_{model}.yaml")
    assert found == sorted(expected)


@pytest.mark.parametrize("name", PARAMETERS)
def test_both_files_have_the_published_number_of_parameters(name: str) -> None:
    files = sorted((FOLDER / name).glob("*.yaml"))
    configs = [read_model_yaml(path) for path in files]
    assert [num_parameters(config) for config in configs] == [PARAMETERS[name]] * 2
    for path in files:
        check_agreement(configs[0], str(path), "here")


def test_a_config_json_with_the_same_rope_scaling_agrees() -> None:
    check_agreement(decoder_config(LLAMA_RAW, "here"), str(LLAMA), "here")


def test_another_rope_scaling_is_told() -> None:
    other = json.loads(json.dumps(LLAMA_RAW))
    other["rope_scaling"]["factor"] = 8.0
    with pytest.raises(UserError, match="rope_scaling is .*32.0.* but .*8.0"):
        check_agreement(decoder_config(other, "here"), str(LLAMA), "here")


def test_a_way_to_extend_positions_that_is_not_computed_is_refused(tmp_path: Path) -> None:
    for method, told in (('"YARN"', "'YARN'"), ('["LLAMA3"]', r"'\['LLAMA3'\]'")):
        (tmp_path / "other.yaml").write_text(LLAMA.read_text().replace('"LLAMA3"', method))
        with pytest.raises(UserError, match=f"extend_method {told}, but only LLAMA3"):
            read_model_yaml(tmp_path / "other.yaml")


QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "intermediate_size": 96,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [0],
}


def test_what_a_file_says_of_experts_is_compared_and_never_taken_over(tmp_path: Path) -> None:
    model, keys = decoder_config(QWEN3_MOE, "here"), {v: k for k, v in REQUIRED.items()}
    dims = {keys[name]: value for name, value in QWEN3_MOE.items() if name in keys}
    dims |= {"model_type": "qwen3_moe", "n_kv_heads": 4}

    def written(**experts: object) -> str:
        path = tmp_path / "model.yaml"
        path.write_text(yaml.safe_dump({"model": {"model_config": dims | experts}}))
        return str(path)

    check_agreement(model, written(), "here")
    stated = {"num_experts": 8, "num_experts_chosen": 2, "moe_intermediate_size": 24}
    check_agreement(model, written(**stated), "here")
    for key, value in (("num_experts", 4), ("num_experts_chosen", 1), ("moe_intermediate_size", 8)):
        with pytest.raises(UserError, match=f"{key} is {value} in model_config .* but"):
            check_agreement(model, written(**stated | {key: value}), "here")
    # Without a config.json, a plan reads the model of a file that says everything.
    rest = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [0]}
    assert read_model_yaml(written(**stated, **rest)).moe == model.moe
    with pytest.raises(UserError, match="no norm_topk_prob"):
        read_model_yaml(written(**stated))


# Cut down from MindFormers' research/deepseek3, research/mixtral and configs/qwen3_moe: sizes are those of tests.
OF_EXPERTS = {
    "deepseek_v3": """
moe_config:
  expert_num: &expert_num 8
  expert_group_size: 8
  capacity_factor: 1.5
  num_experts_chosen: 3
  routing_policy: "TopkRouterV2"
  shared_expert_num: 2
  routed_scaling_factor: 2.5
  norm_topk_prob: True
  first_k_dense_replace: 2
  moe_intermediate_size: 12
  use_gating_sigmoid: True
  use_gmm: False
model:
  model_config:
    type: DeepseekV3Config
    seq_length: 4096
    hidden_size: 32
    num_layers: &num_layers 7
    num_heads: 4
    max_position_embeddings: 4096
    intermediate_size: 48
    kv_lora_rank: 10
    n_kv_heads: 4
    q_lora_rank:
    qk_rope_head_dim: 4
    v_head_dim: 8
    qk_nope_head_dim: 6
    vocab_size: 67
    rms_norm_eps: 1.0e-6
    compute_dtype: "bfloat16"
    router_dense_type: "float32"
    extend_method: "None"
    theta: 10000.0
callbacks:
  - type: TopkBiasBalanceCallback
    expert_num: *expert_num
""",
    "mixtral": """
moe_config:
  expert_num: 8
  capacity_factor: 1.1
  num_experts_chosen: 2
  routing_policy: "TopkRouterV2"
  enable_sdrop: True
model:
  model_config:
    type: LlamaConfig
    seq_length: 4096
    hidden_size: 32
    intermediate_size: 48
    theta: 1000000
    num_layers: 7
    num_heads: 4
    vocab_size: 67
    n_kv_heads: 2
    rms_norm_eps: 1.0e-5
""",
    "qwen3_moe": """
use_legacy: False
model:
  model_config:
    model_type: "qwen3_moe"
    architectures: "Qwen3MoeForCausalLM"
    vocab_size: 67
    hidden_size: 32
    intermediate_size: 48
    num_hidden_layers: 7
    max_position_embeddings: 32768
    hidden_act: 'silu'
    num_attention_heads: 4
    num_key_value_heads: 2
    rms_norm_eps: 1.e-6
    position_embedding_type: "rope"
    rope_theta: 10000
    params_dtype: "float32"
    compute_dtype: "bfloat16"
    layernorm_compute_dtype: "float32"
    moe_grouped_gemm: True
    num_experts: 8
    num_experts_per_tok: 3
    moe_intermediate_size: 12
    norm_topk_prob: False
    decoder_sparse_step: 2
    mlp_only_layers: [3]
""",
}
# In each, of a statement another one.
OTHERS = {
    "deepseek_v3": (
        ("expert_num: &expert_num 8", "expert_num: &expert_num 16"),
        ("num_experts_chosen: 3", "num_experts_chosen: 2"),
        ("shared_expert_num: 2", "shared_expert_num: 1"),
        ("routed_scaling_factor: 2.5", "routed_scaling_factor: 1.0"),
        ("first_k_dense_replace: 2", "first_k_dense_replace: 3"),
        ("use_gating_sigmoid: True", "use_gating_sigmoid: False"),
        ("latent", "kv_lora_rank: 10", "kv_lora_rank: 12"),
        ("num_hidden_layers", "num_layers: &num_layers 7", "num_layers: &num_layers 8"),
    ),
    "mixtral": (
        ("expert_num: 8", "expert_num: 4"),
        ("num_experts_chosen: 2", "num_experts_chosen: 1"),
        ("num_key_value_heads", "n_kv_heads: 2", "n_kv_heads: 4"),
    ),
    "qwen3_moe": (
        ("num_experts: 8", "num_experts: 4"),
        ("num_experts_per_tok: 3", "num_experts_per_tok: 2"),
        ("norm_topk_prob: False", "norm_topk_prob: True"),
        ("mlp_only_layers: [3]", "mlp_only_layers: [1]"),
        ("num_attention_heads", "num_attention_heads: 4", "num_attention_heads: 8"),
    ),
}


@pytest.mark.parametrize("family", OF_EXPERTS)
def test_files_of_mixtures_as_mindformers_writes_them_are_compared_with_config_json(
    family: str, tmp_path: Path
) -> None:
    model, path, text = read(family), tmp_path / "finetune.yaml", OF_EXPERTS[family]
    path.write_text(text)
    check_agreement(model, str(path), "here")
    if family != "deepseek_v3":
        # Without a config.json a plan reads it alone; DeepSeek's groups are nowhere in it.
        assert num_parameters(read_model_yaml(path)) == num_parameters(model)
    for *named, stated, other in OTHERS[family]:
        assert text.count(stated) == 1
        path.write_text(text.replace(stated, other))
        key = named[0] if named else stated.split(":")[0]
        with pytest.raises(UserError, match=f"^{key} is .* in model_config .* but .*config.json"):
            check_agreement(model, str(path), "here")


def test_two_names_of_one_dimension_that_differ_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "finetune.yaml"
    text = OF_EXPERTS["mixtral"].replace(
        "    num_layers: 7\n", "    num_layers: 7\n    num_hidden_layers: 6\n"
    )
    path.write_text(text)
    with pytest.raises(UserError, match="num_layers 7 and num_hidden_layers 6, two names"):
        check_agreement(read("mixtral"), str(path), "here")


def test_a_dense_model_agrees_with_a_file_of_one_expert_and_not_of_several(tmp_path: Path) -> None:
    path, model = tmp_path / "finetune.yaml", read("llama", num_key_value_heads=2, rope_theta=1e6)
    text = OF_EXPERTS["mixtral"]
    path.write_text(text.replace("expert_num: 8", "expert_num: 1"))
    check_agreement(model, str(path), "here")
    path.write_text(text)
    with pytest.raises(UserError, match="^expert_num is 8 in model_config .* but None"):
        check_agreement(model, str(path), "here")


# -- dtypes ---------------------------------------------------------------------------------------------------------


def with_dtypes(folder: Path, name: str, **words: object) -> str:
    """A copy of a model's file with these words of its model_config."""
    document = yaml.safe_load(LLAMA.read_text())
    document["model"]["model_config"] |= words
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(document))
    return str(path)


def config_of(actor: str, reference: str | None = None, **context: object) -> Config:
    return Config.model_validate(
        {
            "context": {"device_target": "CPU", **context},
            "actor_config": {"model_config": actor},
            "ref_config": {"model_config": reference},
        }
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_files_compute_dtype_is_the_runs(tmp_path: Path, dtype: str) -> None:
    words = {"compute_dtype": dtype, "param_init_type": dtype, "softmax_compute_type": "float32"}
    config = config_of(with_dtypes(tmp_path, "model", **words))
    assert compute_dtype(config) == dtype
    assert dtype_notices(config) == []


def test_the_configuration_has_the_last_word_and_says_so(tmp_path: Path) -> None:
    path = with_dtypes(tmp_path, "model", compute_dtype="bfloat16", use_flash_attention=True)
    config = config_of(path, compute_dtype="float32")
    assert compute_dtype(config) == "float32"
    first, second = dtype_notices(config)
    assert "context.compute_dtype float32 is used, not compute_dtype bfloat16" in first
    assert "use_flash_attention of model_config has no effect" in second


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ({"compute_dtype": "fp8"}, "compute_dtype 'fp8', which is none of float32"),
        ({"softmax_compute_type": "float16"}, "softmax are computed in float32"),
        ({"layernorm_compute_type": "bfloat16"}, "norms are computed in float32"),
        ({"layernorm_compute_dtype": "bfloat16"}, "norms are computed in float32"),
        ({"softmax_compute_dtype": "float16"}, "softmax are computed in float32"),
        (
            {"compute_dtype": "bfloat16", "params_dtype": "float16"},
            "has params_dtype 'float16' and",
        ),
        ({"rotary_dtype": "float16"}, "rotary positions are computed in float32"),
        (
            {"compute_dtype": "bfloat16", "param_init_type": "float16"},
            "set it to one of the two or leave it out",
        ),
        ({"use_flash_attention": "yes"}, "set it to true or false"),
        ({"compute_dtype": "float16"}, "compute_dtype of model_config '.*' is 'float16', but"),
    ],
)
def test_what_is_not_computed_is_refused(
    tmp_path: Path, words: dict[str, object], sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence):
        compute_dtype(config_of(with_dtypes(tmp_path, "model", **words)))


def test_files_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    files = [with_dtypes(tmp_path, name, compute_dtype=name) for name in ("float32", "bfloat16")]
    with pytest.raises(UserError, match="compute in one dtype; make them equal"):
        compute_dtype(config_of(*files))


@pytest.mark.parametrize(
    ("words", "fused"),
    [({}, True), ({"use_flash_attention": True}, True), ({"use_flash_attention": False}, False)],
)
def test_fused_attention_can_be_left_out_on_ascend(
    tmp_path: Path, words: dict[str, object], fused: bool
) -> None:
    path = with_dtypes(tmp_path, "model", **words)
    assert flash_attention(config_of(path, device_target="Ascend")) is fused
    config = config_of(path, device_target="Ascend", compute_dtype="float32")
    if words.get("use_flash_attention"):
        with pytest.raises(UserError, match="takes float16 and bfloat16"):
            flash_attention(config)
    else:
        assert not flash_attention(config)
