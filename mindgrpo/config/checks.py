"""Rules that span several keys, one function each. Refuses to repair what it finds."""

from __future__ import annotations

import os.path
from collections.abc import Callable
from typing import TYPE_CHECKING

from mindgrpo.config.algorithm_checks import ALGORITHM_CHECKS
from mindgrpo.config.section import Contradiction

if TYPE_CHECKING:
    from mindgrpo.config.schema import Config


def _same_weights_for_generator(config: Config) -> None:
    actor, generator = config.actor_config.load, config.generate_config.load
    if generator is None or os.path.normpath(generator) == os.path.normpath(actor):
        return
    raise Contradiction(
        f"generate_config.load is '{generator}' and actor_config.load is '{actor}', but the "
        "generator always takes the policy's weights; leave generate_config.load empty",
        "generate_config.load",
        "actor_config.load",
    )


def _prompts_counted_once(config: Config) -> None:
    rl = config.rl_config
    if rl.prompts_per_step is None:
        return
    if rl.chunk_size is not None:
        raise Contradiction(
            f"rl_config.prompts_per_step {rl.prompts_per_step} and rl_config.chunk_size "
            f"{rl.chunk_size} both say how many prompts a step takes; set one of them to null",
            "rl_config.prompts_per_step",
            "rl_config.chunk_size",
        )
    if rl.num_rollouts > 1:
        raise Contradiction(
            f"rl_config.prompts_per_step {rl.prompts_per_step} counts the prompts of a whole step, "
            f"so rl_config.num_rollouts cannot be {rl.num_rollouts}; set it to 1",
            "rl_config.prompts_per_step",
            "rl_config.num_rollouts",
        )


def _packing_and_pack_num(config: Config) -> None:
    rl = config.rl_config
    if not rl.packing and rl.pack_num not in (None, 1):
        raise Contradiction(
            f"rl_config.packing False means one sample a row, but rl_config.pack_num is "
            f"{rl.pack_num}; set rl_config.pack_num to 1 or rl_config.packing to True",
            "rl_config.packing",
            "rl_config.pack_num",
        )


def _parts_of_a_micro_batch(config: Config) -> None:
    rl = config.rl_config
    if rl.batch_size % rl.micro_batch_interleaved:
        raise Contradiction(
            f"rl_config.micro_batch_interleaved {rl.micro_batch_interleaved} must divide "
            f"rl_config.batch_size {rl.batch_size}, the rows of a micro-batch; set it to 1 or "
            "batch_size to a multiple of it",
            "rl_config.micro_batch_interleaved",
            "rl_config.batch_size",
        )


def _lengths_fit(config: Config) -> None:
    generate, rl = config.generate_config, config.rl_config
    longest = generate.max_prompt_length + generate.sampling_config.max_tokens
    limits = {
        "rl_config.seq_length": rl.seq_length,
        "generate_config.max_model_len": generate.max_model_len,
    }
    for key, limit in limits.items():
        if limit is not None and longest > limit:
            raise Contradiction(
                f"generate_config.max_prompt_length {generate.max_prompt_length} and "
                f"generate_config.sampling_config.max_tokens "
                f"{generate.sampling_config.max_tokens} add to {longest} tokens, above {key} "
                f"{limit}; raise {key} to {longest} or lower one of the two",
                key,
                "generate_config.max_prompt_length",
                "generate_config.sampling_config.max_tokens",
            )


def _min_tokens(config: Config) -> None:
    sampling = config.generate_config.sampling_config
    if sampling.min_tokens > sampling.max_tokens:
        prefix = "generate_config.sampling_config."
        raise Contradiction(
            f"{prefix}min_tokens {sampling.min_tokens} is above {prefix}max_tokens "
            f"{sampling.max_tokens}; lower min_tokens",
            prefix + "min_tokens",
            prefix + "max_tokens",
        )


def _learning_rates(config: Config) -> None:
    schedule, prefix = config.actor_config.lr_schedule, "actor_config.lr_schedule."
    if schedule.min_lr > schedule.lr:
        raise Contradiction(
            f"{prefix}min_lr {schedule.min_lr} is above {prefix}lr {schedule.lr}; lower min_lr",
            prefix + "min_lr",
            prefix + "lr",
        )
    if schedule.warmup_ratio is not None and schedule.warmup_step:
        raise Contradiction(
            f"{prefix}warmup_ratio {schedule.warmup_ratio} and {prefix}warmup_step "
            f"{schedule.warmup_step} both set the warm-up; set warmup_ratio to null or "
            "warmup_step to 0",
            prefix + "warmup_ratio",
            prefix + "warmup_step",
        )


def _weights_of_functions(config: Config) -> None:
    rewards = config.reward_config
    functions, weights = rewards.verifier_function, rewards.verifier_weight
    # Functions may also be given in Python, and then the weights are theirs.
    if weights is not None and functions and len(weights) != len(functions):
        raise Contradiction(
            f"reward_config.verifier_weight has {len(weights)} weights and "
            f"reward_config.verifier_function has {len(functions)} functions; give one weight a "
            "function, or leave verifier_weight out for 1.0 each",
            "reward_config.verifier_weight",
            "reward_config.verifier_function",
        )


def _offsets(config: Config) -> None:
    roles = (
        ("actor_config", config.actor_config.offset, config.actor_config.parallel_config),
        ("ref_config", config.ref_config.offset, config.reference_parallel),
    )
    for role, offset, parallel in roles:
        if isinstance(offset, list) and len(offset) != parallel.pipeline_stage:
            raise Contradiction(
                f"{role}.offset {offset} has {len(offset)} entries for "
                f"{parallel.pipeline_stage} pipeline stages; give one entry a stage, or 0",
                f"{role}.offset",
                f"{role}.parallel_config.pipeline_stage",
            )


def _evaluation(config: Config) -> None:
    rl = config.rl_config
    if rl.eval_steps and rl.eval_dataset_file is None:
        raise Contradiction(
            f"rl_config.eval_steps is {rl.eval_steps}, but there is nothing to evaluate on; set "
            "rl_config.eval_dataset_file, or rl_config.eval_steps to 0",
            "rl_config.eval_steps",
        )
    if rl.eval_temperature == 0 and rl.eval_num_generations > 1:
        raise Contradiction(
            f"rl_config.eval_temperature 0 draws the same completion each time, but "
            f"rl_config.eval_num_generations is {rl.eval_num_generations}; set it to 1, or eval_temperature "
            "above 0 and add greedy to rl_config.eval_modes",
            "rl_config.eval_num_generations",
            "rl_config.eval_temperature",
        )
    if rl.save_ckpt_best and rl.eval_dataset_file is None:
        raise Contradiction(
            f"rl_config.save_ckpt_best is '{rl.save_ckpt_best}', but which checkpoint is best is known from "
            "evaluations alone; set rl_config.eval_dataset_file, or save_ckpt_best to null",
            "rl_config.save_ckpt_best",
        )


def _rows_of_a_mindrecord(config: Config) -> None:
    rl = config.rl_config
    files = [path for path in (rl.dataset_file, rl.eval_dataset_file) if path]
    if not files or not all(path.endswith(".mindrecord") for path in files):
        return
    given = {
        "rl_config.dataset_type": rl.dataset_type,
        "rl_config.dataset_map_keys": rl.dataset_map_keys,
        "rl_config.dataset_columns": rl.dataset_columns,
    }
    for key, value in given.items():
        if value:
            raise Contradiction(
                f"{key} is {value!r}, but '{files[0]}' is a MindRecord, whose rows were settled when it "
                f"was converted; leave {key} out, and give it to rlhf_data.py",
                key,
                "rl_config.dataset_file",
            )


CHECKS: tuple[Callable[[Config], None], ...] = (
    _same_weights_for_generator,
    _prompts_counted_once,
    _packing_and_pack_num,
    _parts_of_a_micro_batch,
    _lengths_fit,
    _min_tokens,
    _learning_rates,
    _weights_of_functions,
    _offsets,
    _evaluation,
    _rows_of_a_mindrecord,
    *ALGORITHM_CHECKS,
)
