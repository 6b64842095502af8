"""Which names exist, and what an unknown one was probably meant to be.

Only suggests: a near name is never taken for the given one.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from mindgrpo.config.retired import PENDING, RETIRED
from mindgrpo.config.schema import LIVE

KNOWN: tuple[str, ...] = (*LIVE, *PENDING, *RETIRED)
SECTIONS: frozenset[str] = frozenset(
    ".".join(key.split(".")[:end]) for key in KNOWN for end in range(1, key.count(".") + 1)
)

_MAX_TOKENS = "generate_config.sampling_config.max_tokens"
_LR = "actor_config.lr_schedule."
_PARALLEL = "actor_config.parallel_config."

# What other trainers call the same thing: their name -> ours.
NEIGHBOURS: dict[str, str] = {
    "n_samples_per_prompt": "rl_config.num_generations",
    "num_return_sequences": "rl_config.num_generations",
    "rollout_n": "rl_config.num_generations",
    "group_size": "rl_config.num_generations",
    "clip_ratio": "rl_config.epsilon_low",
    "clip_ratio_low": "rl_config.epsilon_low",
    "clip_ratio_high": "rl_config.epsilon_high",
    "clip_range": "rl_config.epsilon_low",
    "cliprange": "rl_config.epsilon_low",
    "eps_clip": "rl_config.epsilon_low",
    "eps_clip_high": "rl_config.epsilon_high",
    "epsilon": "rl_config.epsilon_low",
    "mini_batch_size": "rl_config.updates_per_rollout",
    "ppo_mini_batch_size": "rl_config.updates_per_rollout",
    "steps_per_generation": "rl_config.updates_per_rollout",
    "ppo_epochs": "rl_config.num_iterations",
    "micro_batch_size": "rl_config.batch_size",
    "ppo_micro_batch_size": "rl_config.batch_size",
    "ppo_micro_batch_size_per_gpu": "rl_config.batch_size",
    "per_device_train_batch_size": "rl_config.batch_size",
    "gradient_accumulation_steps": _PARALLEL + "micro_batch_num",
    "train_batch_size": "rl_config.prompts_per_step",
    "global_batch_size": "rl_config.prompts_per_step",
    "gen_batch_size": "rl_config.prompts_per_step",
    "rollout_batch_size": "rl_config.prompts_per_step",
    "kl_loss_coef": "rl_config.beta",
    "kl_coef": "rl_config.beta",
    "kl_ctrl": "rl_config.beta",
    "init_kl_coef": "rl_config.beta",
    "kl_loss_type": "rl_config.kl_estimator",
    "kl_penalty": "rl_config.kl_estimator",
    "use_kl_in_reward": "rl_config.kl_in_reward",
    "norm_adv_by_std_in_grpo": "rl_config.scale_rewards",
    "adv_estimator": "rl_config.advantage_estimator",
    "loss_agg_mode": "rl_config.loss_type",
    "loss_mode": "rl_config.loss_type",
    "clip_ratio_c": "rl_config.dual_clip",
    "eps_clip_c": "rl_config.dual_clip",
    "entropy_coeff": "rl_config.entropy_coef",
    "filter_groups": "rl_config.dynamic_sampling",
    "max_num_gen_batches": "rl_config.dynamic_sampling_rounds",
    "use_tis": "rl_config.importance_sampling_correction",
    "tis_clip": "rl_config.importance_sampling_cap",
    "rollout_is": "rl_config.importance_sampling_correction",
    "rollout_is_threshold": "rl_config.importance_sampling_cap",
    "vllm_importance_sampling_correction": "rl_config.importance_sampling_correction",
    "vllm_importance_sampling_mode": "rl_config.importance_sampling_correction",
    "vllm_importance_sampling_clip_max": "rl_config.importance_sampling_cap",
    "vllm_importance_sampling_cap": "rl_config.importance_sampling_cap",
    "max_completion_length": _MAX_TOKENS,
    "max_new_tokens": _MAX_TOKENS,
    "max_response_length": _MAX_TOKENS,
    "response_length": _MAX_TOKENS,
    "max_prompt_len": "generate_config.max_prompt_length",
    "stop_token_ids": "generate_config.sampling_config.eos_token_id",
    "truncation": "rl_config.prompt_overflow",
    "filter_overlong_prompts": "rl_config.prompt_overflow",
    "learning_rate": _LR + "lr",
    "start_lr": _LR + "lr",
    "end_lr": _LR + "min_lr",
    "warmup_steps": _LR + "warmup_step",
    "lr_warmup_steps": _LR + "warmup_step",
    "lr_warmup_iters": _LR + "warmup_step",
    "lr_warmup_fraction": _LR + "warmup_ratio",
    "lr_warmup_steps_ratio": _LR + "warmup_ratio",
    "lr_decay_iters": _LR + "decay_steps",
    "lr_scheduler_type": _LR + "lr_decay_style",
    "clip_grad": "actor_config.optimizer.max_grad_norm",
    "grad_clip": "actor_config.optimizer.max_grad_norm",
    "adam_epsilon": "actor_config.optimizer.eps",
    "offload_train_optimizer": "actor_config.optimizer.opt_offload",
    "optimizer_offload": "actor_config.optimizer.opt_offload",
    "gradient_checkpointing": "actor_config.recompute_config.recompute",
    "enable_gradient_checkpointing": "actor_config.recompute_config.recompute",
    "data_parallel_size": _PARALLEL + "data_parallel",
    "tensor_model_parallel_size": _PARALLEL + "model_parallel",
    "tensor_parallel_size": "generate_config.parallel_config.model_parallel",
    "pipeline_model_parallel_size": _PARALLEL + "pipeline_stage",
    "context_parallel_size": _PARALLEL + "context_parallel",
    "model_name_or_path": "actor_config.load",
    "hf_checkpoint": "actor_config.load",
    "data_path": "rl_config.dataset_file",
    "train_files": "rl_config.dataset_file",
    "prompt_data": "rl_config.dataset_file",
    "dataset_name": "rl_config.dataset_file",
    "val_files": "rl_config.eval_dataset_file",
    "test_freq": "rl_config.eval_steps",
    "eval_interval": "rl_config.eval_steps",
    "total_epochs": "rl_config.epochs",
    "num_train_epochs": "rl_config.epochs",
    "train_iters": "rl_config.max_steps",
    "total_training_steps": "rl_config.max_steps",
    "reward_funcs": "reward_config.verifier_function",
    "rule_reward": "reward_config.verifier_function",
    "custom_rm_path": "reward_config.verifier_function",
    "reward_weights": "reward_config.verifier_weight",
    "verifier_timeout": "reward_config.deadline",
    "verifier_parallel": "reward_config.workers",
    "save_freq": "rl_config.save_ckpt_interval",
    "save_interval": "rl_config.save_ckpt_interval",
    "save_steps": "rl_config.save_ckpt_interval",
    "report_to": "rl_config.tensorboard",
    "vocab_path": "rl_config.tokenizer_dir",
    "merges_file_path": "rl_config.tokenizer_dir",
    "tokenizer_name_or_path": "rl_config.tokenizer_dir",
    "prompt_type": "rl_config.chat_template",
    "prompt_type_path": "rl_config.chat_template",
    "apply_chat_template": "rl_config.chat_template",
    "dataset_additional_keys": "rl_config.dataset_columns",
    "map_keys": "rl_config.dataset_map_keys",
    "prompt_key": "rl_config.dataset_map_keys",
    "input_key": "rl_config.dataset_map_keys",
    "label_key": "rl_config.dataset_map_keys",
    "dataset_train_split": "rl_config.dataset_split",
    "dataset_test_split": "rl_config.eval_dataset_split",
    "eval_prompt_data": "rl_config.eval_dataset_file",
    "rollout_max_prompt_len": "generate_config.max_prompt_length",
}


def suggestion(key: str, dashes: str = "") -> str:
    """The remedy for an unknown dotted key or bare name, as the end of a sentence."""
    section, _, leaf = key.rpartition(".")
    if leaf in NEIGHBOURS:
        return f"it is called {dashes}{NEIGHBOURS[leaf]} here"
    elsewhere = [known for known in KNOWN if known.rpartition(".")[2] == leaf]
    if elsewhere:
        return _mention(_nearest(key, elsewhere, cutoff=0.0) or elsewhere[0], dashes)
    beside = {known.rpartition(".")[2]: known for known in KNOWN if _section(known) == section}
    near = _nearest(leaf, beside)
    if near:
        return _mention(beside[near], dashes)
    everywhere = {known.rpartition(".")[2]: known for known in reversed(KNOWN)}
    near = _nearest(leaf, everywhere)
    if near:
        return _mention(everywhere[near], dashes)
    return "no key comes near it, leave it out"


def section_suggestion(section: str) -> str:
    near = _nearest(section, SECTIONS) or _nearest(section, KNOWN, cutoff=0.75)
    top = sorted(name for name in SECTIONS if "." not in name)
    return f"did you mean {near}" if near else f"the sections are {', '.join(top)}"


def unknown(key: str, is_section: bool) -> str:
    """What is wrong with a key that is neither live, pending nor retired, and the remedy."""
    parts = key.split(".")
    prefixes = [".".join(parts[:end]) for end in range(1, len(parts))]
    for prefix in prefixes:
        if prefix in LIVE or prefix in PENDING:
            return f"{prefix} takes one value, but is given the section '{key[len(prefix) + 1 :]}'"
        if prefix not in SECTIONS:
            return f"'{prefix}' is no section; {section_suggestion(prefix)}"
    if is_section:
        return f"'{key}' is no section; {section_suggestion(key)}"
    return f"'{key}' is no key of the configuration; {suggestion(key)}"


def _mention(key: str, dashes: str) -> str:
    retired = f" (which is retired: {RETIRED[key]})" if key in RETIRED else ""
    return f"did you mean {dashes}{key}{retired}"


def _section(key: str) -> str:
    return key.rpartition(".")[0]


def _nearest(name: str, names: Iterable[str], cutoff: float = 0.6) -> str | None:
    near = difflib.get_close_matches(name, sorted(names), n=1, cutoff=cutoff)
    return near[0] if near else None
