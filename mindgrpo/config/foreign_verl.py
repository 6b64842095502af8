"""Decides on those settings of verl that depend on others, or count in other units; see foreign.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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

ACTOR, ROLLOUT, MODEL = (f"actor_rollout_ref.{name}" for name in ("actor", "rollout", "model"))
CORRECTION = "algorithm.rollout_correction"
PROMPTS = "data.train_batch_size"
# verl's own defaults, of switches that are on without a number.
KL_COEF, MAX_ROUNDS = 0.001, 100


def _plainly(name: str, value: Any) -> Meaning:
    ours = aliases().key_of(name)
    assert ours is not None
    return AS_HERE if value is None else {ours: value}


def _by_words(name: str, value: Any) -> Meaning:
    """Takes a value by the words of aliases.yaml."""
    words, ours = aliases().words[name], aliases().key_of(name)
    if value is None:
        return AS_HERE
    if not isinstance(value, str) or value not in words:
        return Refused(f"{ours} here: {aliases().differences[name]}")
    return {str(ours): words[value]}


def _updates(value: Any, others: Others) -> Meaning:
    prompts = others.get(PROMPTS)
    if isinstance(prompts, int) and isinstance(value, int) and value > 0 and prompts % value == 0:
        return {"rl_config.updates_per_rollout": prompts // value}
    return Refused(f"{PROMPTS} / this number is rl_config.updates_per_rollout here")


def _generated(value: Any, others: Others) -> Meaning:
    if value in (None, others.get(PROMPTS)):
        return AS_HERE
    return Refused(
        f"rl_config.prompts_per_step here: {aliases().differences['data.gen_batch_size']}"
    )


def _memory(value: Any, others: Others) -> Meaning:
    if value is None:
        return AS_HERE
    number = f" {others[PROMPTS]}" if PROMPTS in others else ""
    return Ignored(
        "the samples that are computed at once, which changes no result: a step trains on rl_config.prompts_per_step"
        f"{number}, and rl_config.batch_size counts packed rows"
    )


def _row_length(value: Any, others: Others) -> Meaning:
    if others.get(f"{ACTOR}.use_dynamic_bsz") is not True:
        return without_effect("without use_dynamic_bsz=True")
    return _plainly(f"{ACTOR}.ppo_max_token_len_per_gpu", value)


def _dynamic(value: Any, _: Others) -> Meaning:
    return Ignored("rows are packed up to rl_config.seq_length tokens")


def _lowest_rate(value: Any, others: Others) -> Meaning:
    rate = others.number(f"{ACTOR}.optim.lr", 0)
    if value in (None, 0):
        return AS_HERE
    if rate and isinstance(value, int | float):
        return {"actor_config.lr_schedule.min_lr": float(rate * value)}
    return Refused("this number times the learning rate is actor_config.lr_schedule.min_lr here")


def _warmup_ratio(value: Any, others: Others) -> Meaning:
    if others.number(f"{ACTOR}.optim.lr_warmup_steps", -1) > 0:
        return without_effect("with lr_warmup_steps")
    return _plainly(f"{ACTOR}.optim.lr_warmup_steps_ratio", value)


def _both_betas(value: Any, _: Others) -> Meaning:
    keys = ("actor_config.optimizer.adam_beta1", "actor_config.optimizer.adam_beta2")
    if not isinstance(value, list | tuple) or len(value) != 2:
        return AS_HERE if value is None else Refused(f"{keys[0]} and adam_beta2 here")
    return dict(zip(keys, value, strict=True))


def _both_sides(value: Any, others: Others) -> Meaning:
    if value is None:
        return AS_HERE
    sides = {"rl_config.epsilon_low": "low", "rl_config.epsilon_high": "high"}
    own = {key: others.get(f"{ACTOR}.clip_ratio_{side}") for key, side in sides.items()}
    return {key: value if number is None else number for key, number in own.items()}


def _clip_c(value: Any, others: Others) -> Meaning:
    mode = others.get(f"{ACTOR}.policy_loss.loss_mode")
    key = "dppo_ratio_cap" if mode in ("dppo_tv", "dppo_kl") else "dual_clip"
    return AS_HERE if value is None else {f"rl_config.{key}": value}


def _in_loss(others: Others) -> bool:
    return others.get(f"{ACTOR}.use_kl_loss") is True


def _in_reward(others: Others) -> bool:
    return others.get("algorithm.use_kl_in_reward") is True


def _kl(others: Others) -> Meaning:
    """Decides on the weight and the place of the KL, by all four settings."""
    if _in_loss(others) and _in_reward(others):
        return Refused(
            "the KL is in the loss or in the rewards here (rl_config.kl_in_reward), not in both"
        )
    if _in_reward(others):
        weight = others.number("algorithm.kl_ctrl.kl_coef", KL_COEF)
        estimator = _by_words("algorithm.kl_penalty", others.get("algorithm.kl_penalty", "kl"))
        if not isinstance(estimator, dict):
            return estimator
        return {"rl_config.beta": weight, "rl_config.kl_in_reward": True, **estimator}
    if _in_loss(others):
        return {"rl_config.beta": others.number(f"{ACTOR}.kl_loss_coef", KL_COEF)}
    return {"rl_config.beta": 0.0}


def _of_kl(is_on: Any, switch: str) -> Rule:
    """Returns the rule of a setting that counts with a switch only: the weight of the KL."""

    def rule(value: Any, others: Others) -> Meaning:
        return _kl(others) if is_on(others) else without_effect(f"without {switch}=True")

    return rule


def _kl_kind(name: str, is_on: Any, switch: str) -> Rule:
    def rule(value: Any, others: Others) -> Meaning:
        return _by_words(name, value) if is_on(others) else without_effect(f"without {switch}=True")

    return rule


def _kl_switch(value: Any, others: Others) -> Meaning:
    return AS_HERE if value is None else _kl(others)


def _loss_mode(value: Any, _: Others) -> Meaning:
    if value == "vanilla":
        return Refused(
            "a clipped loss, such as rl_config.loss_type dapo, the average of which is loss_aggregation"
        )
    if value == "gspo":
        return {"rl_config.importance_sampling_level": "sequence"}
    loss = {"geo_mean": "gmpo"}.get(value, value) if isinstance(value, str) else value
    return AS_HERE if value is None else {"rl_config.loss_type": loss}


def _rounds(value: Any, others: Others) -> Meaning:
    """Converts a limit of batches, which counts the first one and is none at 0."""
    key, rounds = "rl_config.dynamic_sampling_rounds", value - 1 if isinstance(value, int) else 0
    if others.get("algorithm.filter_groups.enable") is not True:
        return without_effect("without filter_groups.enable=True")
    if 1 <= rounds <= MAX_ROUNDS:
        return {key: rounds}
    if rounds == 0:
        return Refused(f"one batch leaves no round that replaces groups; {key} is at least 1")
    return Refused(f"no limit there, and {key} is from 1 to {MAX_ROUNDS} here; set it")


def _truncated(value: Any, _: Others) -> Meaning:
    if not isinstance(value, int | float) or value <= 0:
        return AS_HERE
    keys = ("importance_sampling_cap", "importance_sampling_correction")
    return {f"rl_config.{keys[0]}": float(value), f"rl_config.{keys[1]}": "token_truncate"}


def _cap(value: Any, others: Others) -> Meaning:
    if others.get(f"{CORRECTION}.rollout_is") is None:
        return without_effect("without rollout_is")
    return _plainly(f"{CORRECTION}.rollout_is_threshold", value)


def _rejection(_: Any, others: Others) -> Meaning:
    """Converts which samples are left out, and beyond which threshold."""
    kind, limit = (
        others.get(f"{CORRECTION}.{name}") for name in ("rollout_rs", "rollout_rs_threshold")
    )
    if kind is None:
        return AS_HERE if limit is None else without_effect("without rollout_rs")
    if kind == "seq_mean_k3" and isinstance(limit, int | float):
        return {"rl_config.rejection_k3": float(limit)}
    try:
        low, high = (float(number) for number in str(limit).split("_"))
    except ValueError:
        low, high = 0.0, 0.0
    if kind != "seq_mean_k1" or not low:
        return Refused(
            f"rejection_* of rl_config here: {aliases().differences[f'{CORRECTION}.rollout_rs']}"
        )
    keys = ("rl_config.rejection_geometric_low", "rl_config.rejection_geometric_high")
    return dict(zip(keys, (low, high), strict=True))


def _of_conversations(name: str) -> Rule:
    def rule(value: Any, others: Others) -> Meaning:
        if others.get(f"{ROLLOUT}.multi_turn.enable") is not True:
            return without_effect("without multi_turn.enable=True")
        return _plainly(name, value)

    return rule


def _of_adapters(name: str) -> Rule:
    def rule(value: Any, others: Others) -> Meaning:
        if others.number(f"{MODEL}.lora_rank", 0) <= 0:
            return without_effect("without lora_rank")
        return AS_HERE if value == "all-linear" else _plainly(name, value)

    return rule


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


def _question(value: Any, _: Others) -> Meaning:
    is_same = value in (None, "prompt")
    return AS_HERE if is_same else {"rl_config.dataset_map_keys": [f"question={value}"]}


def _truncation(value: Any, others: Others) -> Meaning:
    if others.get("data.filter_overlong_prompts") is True:
        return without_effect("with filter_overlong_prompts=True")
    return _plainly("data.truncation", value)


def _resume(_: Any, others: Others) -> Meaning:
    mode, path = (others.get(f"trainer.{name}") for name in ("resume_mode", "resume_from_path"))
    if mode == "resume_path" or (mode is None and path is not None):
        return {"rl_config.resume_training": path} if path else Refused("name resume_from_path")
    if mode not in ("auto", "disable", None):
        return Refused(
            f"rl_config.resume_training here: {aliases().differences['trainer.resume_mode']}"
        )
    return AS_HERE if mode is None else {"rl_config.resume_training": mode == "auto"}


def _validation_folder(value: Any, _: Others) -> Meaning:
    where = "eval_completions.jsonl is in the run's folder"
    return AS_HERE if value is None else Ignored(where)


def ranks(others: Others) -> int | None:
    """Returns the devices of all hosts; None where verl's settings do not say."""
    sizes = others.get("trainer.n_gpus_per_node"), others.get("trainer.nnodes", 1)
    a_host, hosts = sizes
    known = all(isinstance(size, int) and size > 0 for size in sizes)
    return a_host * hosts if known and isinstance(a_host, int) else None


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


VERL_RULES: Mapping[str, Rule] = {
    f"{ACTOR}.ppo_mini_batch_size": _updates,
    "data.gen_batch_size": _generated,
    **dict.fromkeys(
        (
            f"{part}_micro_batch_size{unit}"
            for part in (f"{ACTOR}.ppo", f"{ROLLOUT}.log_prob", "actor_rollout_ref.ref.log_prob")
            for unit in ("", "_per_gpu")
        ),
        _memory,
    ),
    f"{ACTOR}.ppo_max_token_len_per_gpu": _row_length,
    f"{ACTOR}.use_dynamic_bsz": _dynamic,
    f"{MODEL}.use_remove_padding": _dynamic,
    f"{ACTOR}.optim.min_lr_ratio": _lowest_rate,
    f"{ACTOR}.optim.lr_warmup_steps_ratio": _warmup_ratio,
    f"{ACTOR}.optim.betas": _both_betas,
    f"{ACTOR}.clip_ratio": _both_sides,
    f"{ACTOR}.clip_ratio_c": _clip_c,
    f"{ACTOR}.use_kl_loss": _kl_switch,
    "algorithm.use_kl_in_reward": _kl_switch,
    f"{ACTOR}.kl_loss_coef": _of_kl(_in_loss, "use_kl_loss"),
    "algorithm.kl_ctrl.kl_coef": _of_kl(_in_reward, "use_kl_in_reward"),
    f"{ACTOR}.kl_loss_type": _kl_kind(f"{ACTOR}.kl_loss_type", _in_loss, "use_kl_loss"),
    "algorithm.kl_penalty": _kl_kind("algorithm.kl_penalty", _in_reward, "use_kl_in_reward"),
    f"{ACTOR}.policy_loss.loss_mode": _loss_mode,
    "algorithm.filter_groups.max_num_gen_batches": _rounds,
    f"{ACTOR}.tis_imp_ratio_cap": _truncated,
    f"{CORRECTION}.rollout_is_threshold": _cap,
    f"{CORRECTION}.rollout_rs": _rejection,
    f"{CORRECTION}.rollout_rs_threshold": _rejection,
    **{
        name: _of_conversations(name)
        for name in (
            f"{ROLLOUT}.multi_turn.max_assistant_turns",
            f"{ROLLOUT}.multi_turn.format",
        )
    },
    **{name: _of_adapters(name) for name in (f"{MODEL}.lora_alpha", f"{MODEL}.target_modules")},
    **{
        f"{section}custom_reward_function.{leaf}": _reward_file
        for section in ("", "reward.")
        for leaf in ("path", "name")
    },
    "data.prompt_key": _question,
    "data.truncation": _truncation,
    "trainer.resume_mode": _resume,
    "trainer.resume_from_path": _resume,
    "trainer.validation_data_dir": _validation_folder,
    "trainer.n_gpus_per_node": _layouts,
    "trainer.nnodes": _layouts,
}
