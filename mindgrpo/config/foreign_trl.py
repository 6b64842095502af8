"""Decides on those settings of TRL that depend on others, or count in other units; see foreign.py."""

from __future__ import annotations

from typing import Any

from mindgrpo.algorithm.surrogates import LOSS_TYPES
from mindgrpo.config.meanings import (
    AS_HERE,
    Ignored,
    Meaning,
    Others,
    Refused,
    Rule,
    Rules,
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
TRL_RULES = Rules()


def _samples_of_update(others: Others) -> int | None:
    values = (
        others.number("per_device_train_batch_size", PER_DEVICE),
        others.number("gradient_accumulation_steps", 1),
        others.processes or 1,
    )
    per_device, accumulated, processes = values
    whole = all(isinstance(value, int) and value > 0 for value in values)
    return int(per_device * accumulated * processes) if whole else None


@TRL_RULES.of("per_device_train_batch_size", "gradient_accumulation_steps", null=True)
@TRL_RULES.of("steps_per_generation", "generation_batch_size", null=True)
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


def _in_updates(key: str, strategies: tuple[str, ...] = ()) -> Rule:
    """Returns the rule of a number of updates, which counts there with strategy `steps` only."""

    def rule(value: Any, others: Others) -> Meaning:
        strategy = next((plain for name in strategies if (plain := others.word(name))), "steps")
        if strategy != "steps":
            return without_effect(f"with {strategies[0]} {strategy}")
        batch, passes = _batch(None, others), others.number("num_iterations", 1)
        updates = batch.get("rl_config.updates_per_rollout", 1) if isinstance(batch, dict) else 1
        updates = (updates if isinstance(updates, int) else 1) * (passes if passes > 0 else 1)
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
        is_said = value == "steps" and others.get(steps) is not None
        return AS_HERE if is_said else Refused(f"{key} here: {aliases().differences[name]}")

    return rule


_EVALUATE, _SAVE = ("eval_strategy", "evaluation_strategy"), ("save_strategy",)
TRL_RULES.of("max_steps")(_in_updates("rl_config.max_steps"))
TRL_RULES.of("eval_steps")(_in_updates("rl_config.eval_steps", _EVALUATE))
TRL_RULES.of("save_steps")(_in_updates("rl_config.save_ckpt_interval", _SAVE))
TRL_RULES.of("ref_model_sync_steps")(_in_updates("ref_config.ref_model_sync_steps"))
TRL_RULES.of(*_EVALUATE)(_strategy("eval_strategy", "eval_steps", "rl_config.eval_steps"))
TRL_RULES.of(*_SAVE)(_strategy("save_strategy", "save_steps", "rl_config.save_ckpt_interval"))


@TRL_RULES.of("num_train_epochs")
def _epochs(value: Any, _: Others) -> Meaning:
    is_whole = isinstance(value, float) and value.is_integer()
    return {"rl_config.epochs": int(value) if is_whole else value}


def _unclipped(others: Others) -> Ignored | None:
    kind = others.word("loss_type")
    loss = LOSS_TYPES.get(kind or "")
    is_clipped = loss is None or loss.epsilon is not None
    return None if is_clipped else without_effect(f"with loss_type {kind}")


@TRL_RULES.of("epsilon")
def _epsilon(value: Any, others: Others) -> Meaning:
    high = others.get("epsilon_high")
    if unclipped := _unclipped(others):
        return unclipped
    if others.word("loss_type") == "cispo":
        if high is not None:
            return without_effect("with loss_type cispo, which has no lower side")
        return Refused("cispo bounds ratios by epsilon_high alone there; set that, such as 5.0")
    return {_LOW: value, _HIGH: value if high is None else high}


@TRL_RULES.of("epsilon_high")
def _epsilon_high(value: Any, others: Others) -> Meaning:
    if unclipped := _unclipped(others):
        return unclipped
    if others.word("loss_type") != "cispo":
        return {_HIGH: value}
    if isinstance(value, int | float) and value > 1:
        return {_LOW: 1.0, _HIGH: round(value - 1, 12)}
    return Refused("the largest ratio of cispo, which has to be above 1, such as 5.0")


@TRL_RULES.of("scale_rewards")
def _scale(value: Any, _: Others) -> Meaning:
    is_mean = value == "mean"
    return (
        {"rl_config.advantage_estimator": "maxrl"}
        if is_mean
        else {"rl_config.scale_rewards": value}
    )


def _mode(others: Others) -> Values:
    if others.get("vllm_importance_sampling_correction") is False:
        return {CORRECTION: "none"}
    return {CORRECTION: others.word("vllm_importance_sampling_mode") or SAMPLED_MODE}


@TRL_RULES.of("vllm_importance_sampling_correction", "vllm_importance_sampling_mode")
def _correction(_: Any, others: Others) -> Meaning:
    return _mode(others)


@TRL_RULES.of("vllm_importance_sampling_cap", "vllm_importance_sampling_clip_max")
def _cap(value: Any, others: Others) -> Meaning:
    return {"rl_config.importance_sampling_cap": value, **_mode(others)}


@TRL_RULES.of("vllm_importance_sampling_clip_min")
def _floor(value: Any, others: Others) -> Meaning:
    return {"rl_config.importance_sampling_floor": value, **_mode(others)}


@TRL_RULES.of("bf16", "fp16", null=True)
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


@TRL_RULES.of("model_init_kwargs")
def _of_model(value: Any, others: Others) -> Meaning:
    if value == {}:
        return AS_HERE
    kinds = value if isinstance(value, dict) else {}
    left = [name for name in kinds if name not in (*_OF_LOADING, "dtype", "torch_dtype")]
    if not kinds or [name for name in left if kinds[name]]:
        return Refused(
            f"only its dtype has a key here, context.compute_dtype; leave {', '.join(left) or 'it'} out"
        )
    return _of_weights(kinds.get("dtype", kinds.get("torch_dtype", "auto")), others)


@TRL_RULES.of("dtype", "torch_dtype", null=True)
def _of_weights(value: Any, others: Others) -> Meaning:
    """Decides on dtype of ModelConfig, where bf16 and fp16 leave it open."""
    if value in (None, "auto") or others.get("bf16") or others.get("fp16"):
        return Ignored("the run computes in context.compute_dtype")
    return {"context.compute_dtype": str(value).rpartition(".")[2]}


@TRL_RULES.of("use_peft", "lora_r", "lora_alpha")
def _adapters(_: Any, others: Others) -> Meaning:
    """Decides on ModelConfig's adapters, which has them with use_peft only."""
    keys = {"rank": others.number("lora_r", 16), "alpha": float(others.number("lora_alpha", 32))}
    return {f"actor_config.lora.{name}": number for name, number in keys.items()}


@TRL_RULES.of("warmup_steps")
def _warmup(value: Any, _: Others) -> Meaning:
    """Decides on warmup_steps, of which a part below 1 is a ratio in newer releases."""
    is_ratio = isinstance(value, float) and value < 1
    return {f"actor_config.lr_schedule.{'warmup_ratio' if is_ratio else 'warmup_step'}": value}


@TRL_RULES.of("report_to", "trainer.logger")
def _trackers(value: Any, _: Others) -> Meaning:
    listed = value if isinstance(value, list | tuple) else [value]
    if "all" in listed:
        return Refused("monitor_config.trackers here; name those that are meant, such as wandb")
    written = [name for name in listed if name not in ("none", "console", "file")]
    return {"monitor_config.trackers": written}


@TRL_RULES.of("max_prompt_length")
def _prompt_length(value: Any, _: Others) -> Meaning:
    return {"generate_config.max_prompt_length": value, "rl_config.prompt_overflow": "left"}


@TRL_RULES.of("max_completion_length", null=True)
def _completion_length(value: Any, _: Others) -> Meaning:
    if value is None:
        return Refused("completions without a limit are not possible here; give a number")
    return {"generate_config.sampling_config.max_tokens": value}


@TRL_RULES.of("max_tool_calling_iterations")
def _turns(value: Any, _: Others) -> Meaning:
    # The last turn answers what the last calls returned.
    return {"rl_config.max_turns": value + 1 if isinstance(value, int) else value}


@TRL_RULES.of("data_seed")
def _data_seed(value: Any, others: Others) -> Meaning:
    if value == others.get("seed"):
        return AS_HERE
    return Refused("rl_config.seed is the seed of the order of the data and of sampling; set that")


@TRL_RULES.of("log_completions", null=True)
def _logged(value: Any, _: Others) -> Meaning:
    if value is True:
        return {"rl_config.save_prompt_completions_data": True}
    return Ignored("samples are not printed, and completions.jsonl has all of them")


@TRL_RULES.of("dataset_name", "dataset_config", null=True)
def _data_set(_: Any, others: Others) -> Meaning:
    name, part = others.get("dataset_name"), others.get("dataset_config")
    if not isinstance(name, str):
        return AS_HERE if name is None is part else Refused("rl_config.dataset_file here")
    return {"rl_config.dataset_file": f"{name}:{part}" if part else name}


@TRL_RULES.of("input_key", "label_key", null=True)
def _columns(_: Any, others: Others) -> Meaning:
    theirs = {"question": "input_key", "answer": "label_key"}
    pairs = [f"{ours}={others[name]}" for ours, name in theirs.items() if name in others]
    return {"rl_config.dataset_map_keys": pairs}
