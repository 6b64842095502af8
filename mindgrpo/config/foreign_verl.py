"""Decides on those settings of verl that depend on others, or count in other units; see foreign.py."""

from __future__ import annotations

from typing import Any

from mindgrpo.config.meanings import (
    AS_HERE,
    Ignored,
    Meaning,
    Others,
    Refused,
    Rules,
    Values,
    by_tables,
    without_effect,
)
from mindgrpo.config.names import aliases

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
CORRECTION = "algorithm.rollout_correction"
PROMPTS = "data.train_batch_size"
# verl's own defaults, of switches that are on without a number.
KL_COEF, MAX_ROUNDS = 0.001, 100
VERL_RULES = Rules()


@VERL_RULES.of(f"{ACTOR}.ppo_mini_batch_size", null=True)
def _updates(value: Any, others: Others) -> Meaning:
    prompts = others.get(PROMPTS)
    if isinstance(prompts, int) and isinstance(value, int) and value > 0 and prompts % value == 0:
        return {"rl_config.updates_per_rollout": prompts // value}
    return Refused(f"{PROMPTS} / this number is rl_config.updates_per_rollout here")


@VERL_RULES.of("data.gen_batch_size")
def _generated(value: Any, others: Others) -> Meaning:
    return AS_HERE if value == others.get(PROMPTS) else by_tables("data.gen_batch_size", value)


@VERL_RULES.of(
    *(
        f"{part}_micro_batch_size{unit}"
        for part in (f"{ACTOR}.ppo", f"{ROLLOUT}.log_prob", "actor_rollout_ref.ref.log_prob")
        for unit in ("", "_per_gpu")
    )
)
def _memory(_: Any, others: Others) -> Meaning:
    number = f" {others[PROMPTS]}" if PROMPTS in others else ""
    return Ignored(
        "the samples that are computed at once, which changes no result: a step trains on rl_config.prompts_per_step"
        f"{number}, and rl_config.batch_size counts packed rows"
    )


@VERL_RULES.of("reward_model.micro_batch_size", "reward_model.micro_batch_size_per_gpu")
def _scored_at_once(_: Any, __: Others) -> Meaning:
    return Ignored(
        "the samples that are scored at once, which changes no result: reward_config.model.batch_size counts packed "
        "rows"
    )


@VERL_RULES.of("reward_model.enable", "reward.reward_model.enable")
def _reward_model(value: Any, _: Others) -> Meaning:
    return AS_HERE if value else Ignored("no reward model, as without reward_config.model.load")


@VERL_RULES.of(f"{ACTOR}.use_dynamic_bsz", "actor_rollout_ref.model.use_remove_padding")
def _dynamic(_: Any, __: Others) -> Meaning:
    return Ignored("rows are packed up to rl_config.seq_length tokens")


@VERL_RULES.of(f"{ACTOR}.optim.min_lr_ratio")
def _lowest_rate(value: Any, others: Others) -> Meaning:
    rate = others.number(f"{ACTOR}.optim.lr", 0)
    if rate and isinstance(value, int | float):
        return {"actor_config.lr_schedule.min_lr": float(rate * value)}
    return Refused("this number times the learning rate is actor_config.lr_schedule.min_lr here")


@VERL_RULES.of(f"{ACTOR}.optim.betas")
def _both_betas(value: Any, _: Others) -> Meaning:
    keys = ("actor_config.optimizer.adam_beta1", "actor_config.optimizer.adam_beta2")
    if not isinstance(value, list | tuple) or len(value) != 2:
        return Refused(f"{keys[0]} and adam_beta2 here")
    return dict(zip(keys, value, strict=True))


@VERL_RULES.of(f"{ACTOR}.clip_ratio")
def _both_sides(value: Any, others: Others) -> Meaning:
    sides = {"rl_config.epsilon_low": "low", "rl_config.epsilon_high": "high"}
    own = {key: others.get(f"{ACTOR}.clip_ratio_{side}") for key, side in sides.items()}
    return {key: value if number is None else number for key, number in own.items()}


@VERL_RULES.of(f"{ACTOR}.clip_ratio_c")
def _clip_c(value: Any, others: Others) -> Meaning:
    is_dppo = others.get(f"{ACTOR}.policy_loss.loss_mode") in ("dppo_tv", "dppo_kl")
    return {f"rl_config.{'dppo_ratio_cap' if is_dppo else 'dual_clip'}": value}


@VERL_RULES.of(f"{ACTOR}.use_kl_loss", f"{ACTOR}.kl_loss_coef")
@VERL_RULES.of("algorithm.use_kl_in_reward", "algorithm.kl_ctrl.kl_coef")
def _kl(_: Any, others: Others) -> Meaning:
    """Decides on the weight and the place of the KL, by all four settings."""
    in_loss = others.get(f"{ACTOR}.use_kl_loss") is True
    if others.get("algorithm.use_kl_in_reward") is not True:
        weight = others.number(f"{ACTOR}.kl_loss_coef", KL_COEF) if in_loss else 0.0
        return {"rl_config.beta": weight}
    if in_loss:
        return Refused(
            "the KL is in the loss or in the rewards here (rl_config.kl_in_reward), not in both"
        )
    weight = others.number("algorithm.kl_ctrl.kl_coef", KL_COEF)
    estimator = by_tables("algorithm.kl_penalty", others.get("algorithm.kl_penalty", "kl"))
    if not isinstance(estimator, dict):
        return estimator
    return {"rl_config.beta": weight, "rl_config.kl_in_reward": True, **estimator}


@VERL_RULES.of(f"{ACTOR}.policy_loss.loss_mode")
def _loss_mode(value: Any, _: Others) -> Meaning:
    if value == "vanilla":
        return Refused(
            "a clipped loss, such as rl_config.loss_type dapo, the average of which is loss_aggregation"
        )
    if value == "gspo":
        return {"rl_config.importance_sampling_level": "sequence"}
    return by_tables(f"{ACTOR}.policy_loss.loss_mode", value)


@VERL_RULES.of("algorithm.filter_groups.max_num_gen_batches")
def _rounds(value: Any, _: Others) -> Meaning:
    """Converts a limit of batches, which counts the first one and is none at 0."""
    key, rounds = "rl_config.dynamic_sampling_rounds", value - 1 if isinstance(value, int) else 0
    if 1 <= rounds <= MAX_ROUNDS:
        return {key: rounds}
    if rounds == 0:
        return Refused(f"one batch leaves no round that replaces groups; {key} is at least 1")
    return Refused(f"no limit there, and {key} is from 1 to {MAX_ROUNDS} here; set it")


@VERL_RULES.of(f"{ACTOR}.tis_imp_ratio_cap")
def _truncated(value: Any, _: Others) -> Meaning:
    if not isinstance(value, int | float) or value <= 0:
        return AS_HERE
    keys = ("importance_sampling_cap", "importance_sampling_correction")
    return {f"rl_config.{keys[0]}": float(value), f"rl_config.{keys[1]}": "token_truncate"}


@VERL_RULES.of(f"{CORRECTION}.rollout_rs", f"{CORRECTION}.rollout_rs_threshold", null=True)
def _rejection(_: Any, others: Others) -> Meaning:
    """Converts which samples are left out, and beyond which threshold."""
    name = f"{CORRECTION}.rollout_rs"
    kind, limit = others.get(name), others.get(f"{name}_threshold")
    if kind is None:
        return AS_HERE if limit is None else without_effect("without rollout_rs")
    if kind == "seq_mean_k3" and isinstance(limit, int | float):
        return {"rl_config.rejection_k3": float(limit)}
    try:
        low, high = (float(number) for number in str(limit).split("_"))
    except ValueError:
        low, high = 0.0, 0.0
    if kind != "seq_mean_k1" or not low:
        return Refused(f"rejection_* of rl_config here: {aliases().differences[name]}")
    keys = ("rl_config.rejection_geometric_low", "rl_config.rejection_geometric_high")
    return dict(zip(keys, (low, high), strict=True))


@VERL_RULES.of("custom_reward_function.path", "custom_reward_function.name", null=True)
@VERL_RULES.of(
    "reward.custom_reward_function.path", "reward.custom_reward_function.name", null=True
)
def _reward_file(_: Any, others: Others) -> Meaning:
    """Converts a file and the function in it, in verl's section of newer or of older releases."""
    sections = ("reward.custom_reward_function", "custom_reward_function")
    path, name = (
        next((held for section in sections if (held := others.get(f"{section}.{leaf}"))), None)
        for leaf in ("path", "name")
    )
    if path is None:
        return AS_HERE if name is None else without_effect("without custom_reward_function.path")
    return {"reward_config.verifier_function": [f"{path}:{name or 'compute_score'}"]}


@VERL_RULES.of("data.prompt_key", "data.image_key")
def _columns(_: Any, others: Others) -> Meaning:
    """Converts both, as one key holds all columns with other names."""
    named = {"question": "prompt_key", "images": "image_key"}
    keys = {name: others.get(f"data.{key}") for name, key in named.items()}
    map_keys = [f"{name}={key}" for name, key in keys.items() if key not in (None, name)]
    return {"rl_config.dataset_map_keys": map_keys} if map_keys else AS_HERE


@VERL_RULES.of("trainer.resume_mode", "trainer.resume_from_path", null=True)
def _resume(_: Any, others: Others) -> Meaning:
    mode, path = (others.get(f"trainer.{name}") for name in ("resume_mode", "resume_from_path"))
    if mode == "resume_path" or (mode is None and path is not None):
        return {"rl_config.resume_training": path} if path else Refused("name resume_from_path")
    return by_tables("trainer.resume_mode", mode)


@VERL_RULES.of("trainer.validation_data_dir")
def _validation_folder(_: Any, __: Others) -> Meaning:
    return Ignored("eval_completions.jsonl is in the run's folder")


def ranks(others: Others) -> int | None:
    """Returns the devices of all hosts; None where verl's settings do not say."""
    sizes = others.get("trainer.n_gpus_per_node"), others.get("trainer.nnodes", 1)
    a_host, hosts = sizes
    known = all(isinstance(size, int) and size > 0 for size in sizes)
    return a_host * hosts if known and isinstance(a_host, int) else None


@VERL_RULES.of("trainer.n_gpus_per_node", "trainer.nnodes", null=True)
def _layouts(_: Any, others: Others) -> Meaning:
    """Has all ranks take part in each role: what no layout of verl's names is data parallel."""
    world = ranks(others)
    if world is None:
        return Refused(aliases().absent["nnodes"])
    sizes = {
        "actor_config": (
            f"{ACTOR}.megatron.tensor_model_parallel_size",
            f"{ACTOR}.megatron.pipeline_model_parallel_size",
            f"{ACTOR}.megatron.context_parallel_size",
            f"{ACTOR}.ulysses_sequence_parallel_size",
        ),
        "generate_config": (f"{ROLLOUT}.tensor_model_parallel_size",),
    }
    values: Values = {}
    for role, names in sizes.items():
        shared = 1
        for name in names:
            shared *= int(others.number(name, 1))
        if shared < 1 or world % shared:
            return Refused(
                f"{world} ranks cannot be shared out by {shared} in {role}.parallel_config"
            )
        values[f"{role}.parallel_config.data_parallel"] = world // shared
    return AS_HERE if world == 1 else values
