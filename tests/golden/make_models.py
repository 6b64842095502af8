"""Makes tests/golden/<family>/: tiny random models and what transformers computes with them.

Run by hand, in an environment with torch and transformers 4.57.1, when a family is added or a golden value is wanted:
`python tests/golden/make_models.py [FAMILY ...]`. Families with experts were made by transformers 5.19.0, which keeps a
layer's in two tensors. Refuses golden tokens, and choices of experts, that a rounding error could change.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma3TextConfig,
    LlamaConfig,
    MixtralConfig,
    Olmo2Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

HERE = Path(__file__).resolve().parent
SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "attn_implementation": "eager",
}
# Wavelengths of head_dim 12 lie on both sides of this scaling's borders and between them.
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "mscale": 0.7,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 64,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "qwen2": Qwen2Config(**SIZES, rope_theta=1e6, rms_norm_eps=1e-6, tie_word_embeddings=True),
    "llama": LlamaConfig(
        **SIZES, head_dim=12, rope_scaling=LLAMA3, rms_norm_eps=1e-5, attention_bias=False
    ),
    "qwen3": Qwen3Config(**SIZES, head_dim=16, rms_norm_eps=1e-6, tie_word_embeddings=False),
    # A dense layer between two with experts, whose scores are not divided by their sum.
    "qwen3_moe": Qwen3MoeConfig(
        **SIZES | {"num_hidden_layers": 3},
        head_dim=12,
        rms_norm_eps=1e-6,
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=8,
        norm_topk_prob=False,
        mlp_only_layers=[1],
    ),
    "mixtral": MixtralConfig(
        **SIZES | {"intermediate_size": 16},
        rms_norm_eps=1e-5,
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
    # A dense layer before one whose experts are chosen of two of four groups; no two widths are equal, and wavelengths
    # lie on both sides of the scaling's borders.
    "deepseek_v3": DeepseekV3Config(
        **SIZES | {"num_key_value_heads": 4},
        rms_norm_eps=1e-5,
        q_lora_rank=20,
        kv_lora_rank=14,
        qk_nope_head_dim=10,
        qk_rope_head_dim=8,
        v_head_dim=6,
        rope_theta=100.0,
        rope_scaling=YARN,
        n_routed_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=8,
        n_group=4,
        topk_group=2,
        n_shared_experts=2,
        routed_scaling_factor=1.5,
        norm_topk_prob=True,
        first_k_dense_replace=1,
        pad_token_id=None,
        num_nextn_predict_layers=0,
    ),
    # Without a padding id: transformers keeps the gradient of that token's embedding at zero.
    "olmo2": Olmo2Config(
        **SIZES, rope_theta=5e5, rms_norm_eps=1e-6, tie_word_embeddings=False, pad_token_id=None
    ),
    # A local base that turns heads otherwise at once; all sequences are shorter than the window.
    "gemma3_text": Gemma3TextConfig(
        **SIZES,
        head_dim=12,
        query_pre_attn_scalar=24,
        sliding_window=64,
        layer_types=["sliding_attention", "full_attention"],
        rope_theta=1e6,
        rope_local_base_freq=100.0,
        rms_norm_eps=1e-6,
        pad_token_id=None,
    ),
}
# Families whose norms multiply by 1 + weight.
NORMS_AROUND_ZERO = ("gemma3_text",)
IN_BFLOAT16 = ("qwen3", "qwen3_moe")
ROWS, LENGTH = 2, 24
PROMPT_LENGTHS = (3, 11, 7)
NEW_TOKENS = 16
# The arguments of `generate` for each set of golden tokens.
GENERATIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "penalised": {"repetition_penalty": 1.2},
    "held_back": {"min_new_tokens": 9},
}
# By how much the likeliest token must lead; other libraries' logits differ by some 1e-6.
SMALLEST_MARGIN = 1e-3
# MindSpore's softmax on CPU is not exact enough beyond.
LARGEST_LOGIT = 6.0
# By how much logits may differ from those of the same weights in float64.
LARGEST_ROUNDING = 6e-6
LAST_SEED = 30


def random_model(config: PretrainedConfig, seed: int) -> PreTrainedModel:
    """Every tensor away from its usual start, so that none can be left out unseen."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                centre = 0 if config.model_type in NORMS_AROUND_ZERO else 1
                parameter.copy_(centre + 0.3 * torch.randn_like(parameter))
            elif name.endswith(".bias"):
                parameter.copy_(0.5 * torch.randn_like(parameter))
            elif "embed_tokens" in name:
                # Small beside what the layers add: else a tied model repeats its last token.
                parameter.copy_(0.15 * torch.randn_like(parameter))
            else:
                parameter.copy_(0.25 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.2 * torch.randn_like(buffer))
    return model.eval()


def save(model: PreTrainedModel, family: str) -> PreTrainedModel:
    """llama in shards with an index, some in bfloat16; the model as it is read back, in float32."""
    directory = HERE / family
    shutil.rmtree(directory, ignore_errors=True)
    if family in IN_BFLOAT16:
        model = model.to(torch.bfloat16)
    model.save_pretrained(directory, max_shard_size="20KB" if family == "llama" else "1GB")
    (directory / "generation_config.json").unlink(missing_ok=True)
    for file in directory.iterdir():
        file.chmod(0o644)
    read = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    return read.eval()


def scores(model: PreTrainedModel, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Logits, log-probs of the next tokens, and the gradient of these log-probs' sum."""
    ids = rng.integers(0, SIZES["vocab_size"], (ROWS, LENGTH))
    has_groups = hasattr(model.config, "n_group")
    has_experts = hasattr(model.config, "num_experts_per_tok") and not has_groups
    routers = {"output_router_logits": True} if has_experts else {}
    grouped = [module for module in model.modules() if hasattr(module, "num_group")]
    hooks = [module.register_forward_hook(check_groups) for module in grouped]
    out = model(torch.from_numpy(ids), **routers)
    for hook in hooks:
        hook.remove()
    logits = out.logits
    if (largest := float(logits.detach().abs().max())) > LARGEST_LOGIT:
        raise Unfit(f"a logit is {largest:g}")
    if routers:
        check_choices(out.router_logits, model.config.num_experts_per_tok)
    double = deepcopy(model).double()
    double.config._experts_implementation = "eager"
    with torch.no_grad():
        exact = double(torch.from_numpy(ids)).logits
    if (rounding := float((exact - logits).abs().max())) > LARGEST_ROUNDING:
        raise Unfit(f"logits are good to {rounding:g} only")
    labels = torch.from_numpy(ids[:, 1:, None])
    logps = torch.log_softmax(logits[:, :-1], -1).gather(2, labels)[:, :, 0]
    logps.sum().backward()
    golden = {
        "input_ids": ids.astype(np.int32),
        "logits": logits.detach().numpy(),
        "logps": logps.detach().numpy(),
    }
    for name, parameter in model.named_parameters():
        for own, gradient in by_projection(name, parameter.grad.numpy()):
            golden[f"gradient/{own}"] = gradient
    return golden


def by_projection(name: str, values: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """The matrices of all experts [experts, out, in] by themselves, of the two tensors that transformers 5 keeps."""
    if name.endswith("experts.gate_up_proj"):
        for own, half in zip(("gate_proj", "up_proj"), np.split(values, 2, axis=1), strict=True):
            yield name.replace("gate_up_proj", f"{own}.weight"), half
    else:
        yield name + ".weight" * name.endswith("experts.down_proj"), values


def check_choices(router_logits: Sequence[torch.Tensor], per_token: int) -> None:
    """Raises Unfit where the last expert that is chosen is hardly better than the next, or one is never chosen."""
    for logits in router_logits:
        best, chosen = logits.detach().topk(per_token + 1, -1)
        margin = float((best[:, -2] - best[:, -1]).min())
        if margin < SMALLEST_MARGIN:
            raise Unfit(f"two experts are within {margin:g}")
        if len(chosen[:, :-1].unique()) < logits.shape[-1]:
            raise Unfit("an expert is never chosen")


def check_groups(router: Any, _: Any, made: Any) -> None:
    """Raises Unfit as check_choices, for groups and for experts of those that are taken."""
    scores = made[0].detach().sigmoid() + router.e_score_correction_bias
    by_group = scores.unflatten(1, (router.num_group, -1))
    best, taken = by_group.topk(2).values.sum(-1).topk(router.topk_group + 1)
    mask = torch.zeros(len(scores), router.num_group).scatter(1, taken[:, :-1], 1.0)[..., None]
    own = torch.where(mask > 0, by_group, -9.0).flatten(1)
    experts, chosen = own.topk(router.top_k + 1)
    if not torch.equal(chosen[:, :-1].sort().values, made[2].sort().values):
        raise Unfit("the choice is another")
    margin = min(float((own[:, -2] - own[:, -1]).min()) for own in (best, experts))
    if margin < SMALLEST_MARGIN:
        raise Unfit(f"two experts or groups are within {margin:g}")
    if len(chosen[:, :-1].unique()) < router.num_experts:
        raise Unfit("an expert is never chosen")


class Unfit(Exception):
    """A seed whose golden tokens would test too little, or hang on rounding."""


def generate(model: PreTrainedModel, prompt: np.ndarray, **how: Any) -> np.ndarray:
    """The tokens after the prompt, the stop id included."""
    ids = torch.from_numpy(prompt[None].astype(np.int64))
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=NEW_TOKENS,
        pad_token_id=0,
        output_scores=True,
        return_dict_in_generate=True,
        **how,
    )
    best = torch.stack(out.scores).topk(2, -1).values
    margin = float((best[..., 0] - best[..., 1]).min())
    if margin < SMALLEST_MARGIN:
        raise Unfit(f"two tokens are within {margin:g}")
    return out.sequences[0, len(prompt) :].numpy().astype(np.int32)


def generations(model: PreTrainedModel, rng: np.random.Generator) -> dict[str, np.ndarray]:
    prompts = [rng.integers(0, SIZES["vocab_size"], n).astype(np.int32) for n in PROMPT_LENGTHS]
    # The token that ends one prompt's completion after some steps, so that slots stop at different times.
    tokens = generate(model, prompts[1])
    late = [token for i, token in enumerate(tokens) if i > 2 and token not in tokens[:i]]
    if not late:
        raise Unfit("no token comes up late enough to be the stop id")
    stop = int(late[0])
    golden = {"stop_ids": np.array([stop], np.int32)}
    for index, prompt in enumerate(prompts):
        golden[f"prompt/{index}"] = prompt
        for name, how in GENERATIONS.items():
            golden[f"{name}/{index}"] = generate(model, prompt, eos_token_id=[stop], **how)
    return golden


def make(family: str) -> dict[str, np.ndarray]:
    """The first seed whose golden tokens are beyond doubt and whose completions stop after some steps."""
    for seed in range(LAST_SEED):
        rng = np.random.default_rng(seed)
        model = save(random_model(CONFIGS[family], seed), family)
        try:
            return scores(model, rng) | generations(model, rng)
        except Unfit as reason:
            print(f"{family}, seed {seed}: {reason}")
    raise SystemExit(f"make_models: no seed below {LAST_SEED} will do for {family}")


def main() -> None:
    for family in sys.argv[1:] or CONFIGS:
        golden = make(family)
        np.savez_compressed(HERE / family / "golden.npz", **golden)
        lengths = {n: [len(golden[f"{n}/{i}"]) for i in range(3)] for n in GENERATIONS}
        size = sum(file.stat().st_size for file in (HERE / family).iterdir())
        print(family, f"{size / 1024:.0f} KiB, tokens", lengths, "stop", golden["stop_ids"])


if __name__ == "__main__":
    main()
