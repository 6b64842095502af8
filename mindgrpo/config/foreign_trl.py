"""Decides on those settings of TRL that depend on others, or count in other units; see foreign.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindgrpo.algorithm.surrogates import LOSS_TYPES
from mindgrpo.config.meanings import (
    AS_HERE,
    Ignored,
    Meaning,
    Others,
    Refused,
    Rule,
    Values,
    without_effect,
)
from mindgrpo.config.names import aliases

# What TRL trains on by default, where only a part of the batch is named.
PER_DEVICE, GENERATIONS = 8, 8
SAMPLED_MODE = "sequence_mask"
CORRECTION = "rl_config.importance_sampling_correction"
_LOW, _HIGH = "rl_config.epsilon_low", "rl_config.epsilon_high"
# Of model_init_kwargs: what does not change the model's numbers.
_OF_LOADING = ("attn_implementation", "device_map", "low_cpu_mem_usage", "use_cache")


def _samples_of_update(others: Others) -> int | None:
    values = (
        others.number("per_device_train_batch_size", PER_DEVICE),
        others.number("gradient_accumulation_steps", 1),
        others.processes or 1,
    )
    per_device, accumulated, processes = values
    whole = all(isinstance(value, int) and value > 0 for value in values)
    return int(per_device * accumulated * processes) if whole else None


def _batch(_: Any, others: Others) -> Meaning:
    """Converts TRL's batch: samples of a device, accumulated, of all processes and of several updates."""
    update, group = _samples_of_update(others), others.number("num_generations", GENERATIONS)
    steps, total = (others.get(name) for name in ("steps_per_generation", "generation_batch_size"))
    if steps is not None and total is not None:
        return Refused("steps_per_generation and generation_batch_size say the same; keep one")
    accumulated = others.number("gradient_accumulation_steps", 1)
    if update is not None and isinstance(steps, int) and steps > 0:
        total = update * steps // accumulated
    total = update if total is None else total
    if update is None or not isinstance(total, int) or total < 1 or not isinstance(group, int):
        return Refused("set rl_config.prompts_per_step, which has to be a whole number of prompts")
    if group < 1 or total % group:
        return Refused(
            f"{total} samples a rollout are no whole number of groups of num_generations {group}; "
            f"set rl_config.prompts_per_step, such as {max(1, round(total / max(group, 1)))}"
        )
    if total % update:
        return Refused(
            f"{total} samples a rollout are no whole number of updates of {update} samples; set "
            f"rl_config.prompts_per_step to {total // group}, and rl_config.updates_per_rollout"
        )
    values: Values = {"rl_config.prompts_per_step": total // group}
    if total > update:
        values["rl_config.updates_per_rollout"] = total // update
    return values


def _updates(others: Others) -> int:
    batch = _batch(None, others)
    updates = batch.get("rl_config.updates_per_rollout", 1) if isinstance(batch, dict) else 1
    passes = others.number("num_iterations", 1)
    return (updates if isinstance(updates, int) else 1) * (passes if passes > 0 else 1)


def _in_updates(key: str, strategies: tuple[str, ...] = (), unset: object = None) -> Rule:
    """Returns the rule of a number of updates, which counts there with strategy `steps` only."""

    def rule(value: Any, others: Others) -> Meaning:
        strategy = next((plain for name in strategies if (plain := others.word(name))), "steps")
        updates = _updates(others)
        if value in (None, unset):
            return AS_HERE
        if strategy != "steps":
            return without_effect(f"with {strategies[0]} {strategy}")
        if isinstance(value, int) and value % updates == 0:
            return {key: value // updates}
        if updates == 1:
            return {key: value}
        return Refused(
            f"TRL counts updates, of which a rollout has {updates}, and {value} are no whole number of rollouts; set "
            f"{key}, which counts rollouts"
        )

    return rule


def _strategy(name: str, steps: str, key: str) -> Rule:
    def rule(value: Any, others: Others) -> Meaning:
        if value == "no":
            return {key: 0}
        is_said = value is None or (value == "steps" and others.get(steps) is not None)
        return AS_HERE if is_said else Refused(f"{key} here: {aliases().differences[name]}")

    return rule


def _epochs(value: Any, others: Others) -> Meaning:
    if value is None:
        return AS_HERE
    if others.number("max_steps", -1) > 0:
        return without_effect("with max_steps")
    is_whole = isinstance(value, float) and value.is_integer()
    return {"rl_config.epochs": int(value) if is_whole else value}


def _clips(others: Others) -> bool:
    loss = LOSS_TYPES.get(others.word("loss_type") or "")
    return loss is None or loss.epsilon is not None


def _epsilon(value: Any, others: Others) -> Meaning:
    high = others.get("epsilon_high")
    if value is None:
        return AS_HERE
    if not _clips(others):
        return without_effect(f"with loss_type {others.word('loss_type')}")
    if others.word("loss_type") == "cispo":
        if high is not None:
            return without_effect("with loss_type cispo, which has no lower side")
        return Refused("cispo bounds ratios by epsilon_high alone there; set that, such as 5.0")
    return {_LOW: value, _HIGH: value if high is None else high}


def _epsilon_high(value: Any, others: Others) -> Meaning:
    if value is None:
        return AS_HERE
    if not _clips(others):
        return without_effect(f"with loss_type {others.word('loss_type')}")
    if others.word("loss_type") != "cispo":
        return {_HIGH: value}
    if isinstance(value, int | float) and value > 1:
        return {_LOW: 1.0, _HIGH: round(value - 1, 12)}
    return Refused("the largest ratio of cispo, which has to be above 1, such as 5.0")


def _scale(value: Any, others: Others) -> Meaning:
    if others.word("multi_objective_aggregation") == "normalize_then_sum":
        return without_effect("with multi_objective_aggregation normalize_then_sum")
    if value == "mean":
        return {"rl_config.advantage_estimator": "maxrl"}
    return AS_HERE if value is None else {"rl_config.scale_rewards": value}


def _correction(value: Any, others: Others) -> Meaning:
    if value is None:
        return AS_HERE
    if others.get("vllm_importance_sampling_correction") is False:
        return {CORRECTION: "none"}
    return {CORRECTION: others.word("vllm_importance_sampling_mode") or SAMPLED_MODE}


def _of_correction(key: str) -> Rule:
    def rule(value: Any, others: Others) -> Meaning:
        if value is None:
            return AS_HERE
        if others.get("vllm_importance_sampling_correction") is False:
            return without_effect("with vllm_importance_sampling_correction False")
        return {
            key: value,
            CORRECTION: others.word("vllm_importance_sampling_mode") or SAMPLED_MODE,
        }

    return rule


def _dtype(value: Any, others: Others) -> Meaning:
    switches = {name: others.get(name) for name in ("bf16", "fp16")}
    key, on = "context.compute_dtype", [name for name in switches if switches[name] is True]
    if value is not None and not isinstance(value, bool):
        return Refused("context.compute_dtype here, and this has to be true or false")
    if len(on) == 2:
        return Refused("bf16 and fp16 are both true; keep one of them")
    if on:
        return {key: {"bf16": "bfloat16", "fp16": "float16"}[on[0]]}
    # Without bf16, fp16 false is what TRL does anyway.
    return {key: "float32"} if switches["bf16"] is False else AS_HERE


def _of_model(value: Any, others: Others) -> Meaning:
    if value is None or value == {}:
        return AS_HERE
    kinds = value if isinstance(value, dict) else {}
    left = [name for name in kinds if name not in (*_OF_LOADING, "dtype", "torch_dtype")]
    if not kinds or [name for name in left if kinds[name]]:
        return Refused(
            f"only its dtype has a key here, context.compute_dtype; leave {', '.join(left) or 'it'} out"
        )
    dtype = str(kinds.get("dtype", kinds.get("torch_dtype", "auto"))).rpartition(".")[2]
    if dtype == "auto" or others.get("bf16") or others.get("fp16"):
        return Ignored("the run computes in context.compute_dtype")
    return {"context.compute_dtype": dtype}


def _of_weights(value: Any, others: Others) -> Meaning:
    """Decides on dtype of ModelConfig, where bf16 and fp16 leave it open."""
    if value in (None, "auto") or others.get("bf16") or others.get("fp16"):
        return Ignored("the run computes in context.compute_dtype")
    return {"context.compute_dtype": str(value).rpartition(".")[2]}


def _adapters(value: Any, others: Others) -> Meaning:
    """Decides on ModelConfig's adapters, which has them with use_peft only."""
    if others.get("use_peft") is not True:
        return AS_HERE if value in (None, False) else without_effect("without use_peft")
    keys = {"rank": others.number("lora_r", 16), "alpha": float(others.number("lora_alpha", 32))}
    return {f"actor_config.lora.{name}": number for name, number in keys.items()}


def _adapted(value: Any, others: Others) -> Meaning:
    if others.get("use_peft") is not True:
        return AS_HERE if value is None else without_effect("without use_peft")
    listed = value if isinstance(value, list) else [value]
    is_all = listed in ([None], ["all-linear"])
    return AS_HERE if is_all else {"actor_config.lora.target_modules": listed}


def _dropout(value: Any, others: Others) -> Meaning:
    if others.get("use_peft") is not True:
        return AS_HERE if value is None else without_effect("without use_peft")
    return Refused(aliases().absent["lora_dropout"]) if value else AS_HERE


def _schedule(value: Any, _: Others) -> Meaning:
    style = "constant" if value == "constant_with_warmup" else value
    return AS_HERE if value is None else {"actor_config.lr_schedule.lr_decay_style": style}


def _warmup(value: Any, others: Others) -> Meaning:
    """Decides on warmup_steps, of which a part below 1 is a ratio in newer releases."""
    if value in (None, 0):
        return AS_HERE
    if others.word("lr_scheduler_type") == "constant":
        return without_effect("with lr_scheduler_type constant")
    is_ratio = isinstance(value, float) and value < 1
    name = "warmup_ratio" if is_ratio else "warmup_step"
    return {f"actor_config.lr_schedule.{name}": value}


def _warmup_ratio(value: Any, others: Others) -> Meaning:
    if value in (None, 0):
        return AS_HERE
    if others.word("lr_scheduler_type") == "constant":
        return without_effect("with lr_scheduler_type constant")
    if others.get("warmup_steps"):
        return without_effect("with warmup_steps")
    return {"actor_config.lr_schedule.warmup_ratio": value}


def _trackers(value: Any, _: Others) -> Meaning:
    if value is None:
        return AS_HERE
    listed = value if isinstance(value, list | tuple) else [value]
    if "all" in listed:
        return Refused("monitor_config.trackers here; name those that are meant, such as wandb")
    written = [name for name in listed if name not in ("none", "console", "file")]
    return {"monitor_config.trackers": written}


def _prompt_length(value: Any, _: Others) -> Meaning:
    cut = {"rl_config.prompt_overflow": "left"}
    return AS_HERE if value is None else {"generate_config.max_prompt_length": value, **cut}


def _completion_length(value: Any, _: Others) -> Meaning:
    if value is None:
        return Refused("completions without a limit are not possible here; give a number")
    return {"generate_config.sampling_config.max_tokens": value}


def _turns(value: Any, _: Others) -> Meaning:
    # The last turn answers what the last calls returned.
    turns = value + 1 if isinstance(value, int) else value
    return AS_HERE if value is None else {"rl_config.max_turns": turns}


def _data_seed(value: Any, others: Others) -> Meaning:
    if value in (None, others.get("seed")):
        return AS_HERE
    return Refused("rl_config.seed is the seed of the order of the data and of sampling; set that")


def _logged(value: Any, _: Others) -> Meaning:
    if value is True:
        return {"rl_config.save_prompt_completions_data": True}
    return Ignored("samples are not printed, and completions.jsonl has all of them")


def _data_set(_: Any, others: Others) -> Meaning:
    name, part = others.get("dataset_name"), others.get("dataset_config")
    if not isinstance(name, str):
        return AS_HERE if name is None is part else Refused("rl_config.dataset_file here")
    return {"rl_config.dataset_file": f"{name}:{part}" if part else name}


def _columns(_: Any, others: Others) -> Meaning:
    pairs = [
        f"{ours}={others[theirs]}"
        for ours, theirs in (
            ("question", "input_key"),
            ("answer", "label_key"),
        )
        if theirs in others
    ]
    return {"rl_config.dataset_map_keys": pairs}


_EVALUATE = ("eval_strategy", "evaluation_strategy")
TRL_RULES: Mapping[str, Rule] = {
    **dict.fromkeys(
        (
            "per_device_train_batch_size",
            "gradient_accumulation_steps",
            "steps_per_generation",
            "generation_batch_size",
        ),
        _batch,
    ),
    "max_steps": _in_updates("rl_config.max_steps", unset=-1),
    "eval_steps": _in_updates("rl_config.eval_steps", _EVALUATE),
    "save_steps": _in_updates("rl_config.save_ckpt_interval", ("save_strategy",)),
    "ref_model_sync_steps": _in_updates("ref_config.ref_model_sync_steps"),
    **{name: _strategy(name, "eval_steps", "rl_config.eval_steps") for name in _EVALUATE},
    "save_strategy": _strategy("save_strategy", "save_steps", "rl_config.save_ckpt_interval"),
    "num_train_epochs": _epochs,
    "epsilon": _epsilon,
    "epsilon_high": _epsilon_high,
    "scale_rewards": _scale,
    "vllm_importance_sampling_correction": _correction,
    "vllm_importance_sampling_mode": _correction,
    "vllm_importance_sampling_cap": _of_correction("rl_config.importance_sampling_cap"),
    "vllm_importance_sampling_clip_max": _of_correction("rl_config.importance_sampling_cap"),
    "vllm_importance_sampling_clip_min": _of_correction("rl_config.importance_sampling_floor"),
    "bf16": _dtype,
    "fp16": _dtype,
    "model_init_kwargs": _of_model,
    "dtype": _of_weights,
    "torch_dtype": _of_weights,
    "use_peft": _adapters,
    "lora_r": _adapters,
    "lora_alpha": _adapters,
    "lora_target_modules": _adapted,
    "lora_dropout": _dropout,
    "lr_scheduler_type": _schedule,
    "warmup_steps": _warmup,
    "warmup_ratio": _warmup_ratio,
    "report_to": _trackers,
    "trainer.logger": _trackers,
    "max_prompt_length": _prompt_length,
    "max_completion_length": _completion_length,
    "max_tool_calling_iterations": _turns,
    "data_seed": _data_seed,
    "log_completions": _logged,
    "dataset_name": _data_set,
    "dataset_config": _data_set,
    "input_key": _columns,
    "label_key": _columns,
}
