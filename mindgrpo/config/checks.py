"""Rules that span several keys: sentences about keys that are each right and cannot stand together.

A sentence names its keys in full: `load.explain` adds where these were set.
"""

from __future__ import annotations

from collections.abc import Iterator
from os.path import normpath

from mindgrpo.algorithm.surrogates import LOSS_TYPES
from mindgrpo.config.observation import TENSORBOARD, MonitorConfig, ProfilerConfig
from mindgrpo.config.rl import RewardConfig, RLConfig
from mindgrpo.config.roles import (
    ActorConfig,
    CriticConfig,
    GenerateConfig,
    ParallelConfig,
    RefConfig,
    SamplingConfig,
    ScoreParallelConfig,
)
from mindgrpo.errors import counted


class Contradiction(ValueError):
    """Keys that are each right and cannot stand together."""


def model_contradictions(
    actor: ActorConfig, ref: RefConfig, ref_parallel: ParallelConfig, generate: GenerateConfig
) -> Iterator[str]:
    if generate.load is not None and normpath(generate.load) != normpath(actor.load):
        yield (
            f"generate_config.load is '{generate.load}' and actor_config.load is '{actor.load}', but the "
            "generator always takes the policy's weights; leave generate_config.load empty"
        )
    for role, offset, parallel in (
        ("actor_config", actor.offset, actor.parallel_config),
        ("ref_config", ref.offset, ref_parallel),
    ):
        stages, chunks = parallel.pipeline_stage, parallel.num_chunks
        if chunks > 1 and stages == 1 and not (role == "ref_config" and not ref.parallel_config):
            yield (
                f"{role}.parallel_config.pp_interleave_num {chunks} deals chunks of layers to pipeline stages, but "
                f"{role}.parallel_config.pipeline_stage is 1; leave pp_interleave_num at 1"
            )
        elif isinstance(offset, list) and chunks == 1 and len(offset) != stages:
            yield (
                f"{role}.offset {offset} has {counted(len(offset), 'entry', 'entries')} for "
                f"{counted(stages, 'pipeline stage')} ({role}.parallel_config.pipeline_stage); give one entry a stage, "
                "or 0"
            )
    recompute, prefix = actor.recompute_config, "actor_config.recompute_config."
    if recompute.recompute and recompute.select_recompute is not False:
        yield (
            f"{prefix}recompute True recomputes all of every layer, which leaves nothing for "
            f"{prefix}select_recompute {recompute.select_recompute} to choose; set one of them to False"
        )
    schedule, prefix = actor.lr_schedule, "actor_config.lr_schedule."
    if schedule.min_lr > schedule.lr:
        yield f"{prefix}min_lr {schedule.min_lr} is above {prefix}lr {schedule.lr}; lower min_lr"
    if schedule.warmup_ratio is not None and schedule.warmup_step:
        yield (
            f"{prefix}warmup_ratio {schedule.warmup_ratio} and {prefix}warmup_step "
            f"{schedule.warmup_step} both set the warm-up; set warmup_ratio to null or "
            "warmup_step to 0"
        )


def batch_contradictions(rl: RLConfig) -> Iterator[str]:
    if rl.prompts_per_step is not None and rl.chunk_size is not None:
        yield (
            f"rl_config.prompts_per_step {rl.prompts_per_step} and rl_config.chunk_size "
            f"{rl.chunk_size} both say how many prompts a step takes; set one of them to null"
        )
    if rl.prompts_per_step is not None and (rl.num_rollouts or 1) > 1:
        yield (
            f"rl_config.prompts_per_step {rl.prompts_per_step} counts the prompts of a whole step, "
            f"so rl_config.num_rollouts cannot be {rl.num_rollouts}; set it to 1"
        )
    if not rl.packing and rl.pack_num not in (None, 1):
        yield (
            f"rl_config.packing False means one sample a row, but rl_config.pack_num is "
            f"{rl.pack_num}; set rl_config.pack_num to 1 or rl_config.packing to True"
        )
    if rl.batch_size % rl.micro_batch_interleaved:
        yield (
            f"rl_config.micro_batch_interleaved {rl.micro_batch_interleaved} must divide "
            f"rl_config.batch_size {rl.batch_size}, the rows of a micro-batch; set it to 1 or "
            "batch_size to a multiple of it"
        )


def length_contradictions(rl: RLConfig, generate: GenerateConfig) -> Iterator[str]:
    sampling, prefix = generate.sampling_config, "generate_config.sampling_config."
    longest = generate.max_prompt_length + sampling.max_tokens
    for key, limit in (
        ("rl_config.seq_length", rl.seq_length),
        ("generate_config.max_model_len", generate.max_model_len),
    ):
        if limit is not None and longest > limit:
            yield (
                f"generate_config.max_prompt_length {generate.max_prompt_length} and {prefix}max_tokens "
                f"{sampling.max_tokens} add to {longest} tokens, above {key} {limit}; raise {key} to "
                f"{longest} or lower one of the two"
            )
    if sampling.min_tokens > sampling.max_tokens:
        yield (
            f"{prefix}min_tokens {sampling.min_tokens} is above {prefix}max_tokens "
            f"{sampling.max_tokens}; lower min_tokens"
        )


def data_contradictions(rl: RLConfig, rewards: RewardConfig) -> Iterator[str]:
    functions, weights = rewards.verifier_function, rewards.verifier_weight
    # Functions may also be given in Python, and then the weights are theirs.
    if weights is not None and functions and len(weights) != len(functions):
        yield (
            f"reward_config.verifier_weight has {counted(len(weights), 'weight')} and "
            f"reward_config.verifier_function has {counted(len(functions), 'function')}; give one weight a "
            "function, or leave verifier_weight out for 1.0 each"
        )
    files = [path for path in (rl.dataset_file, rl.eval_dataset_file) if path]
    if files and all(path.endswith(".mindrecord") for path in files):
        for name in ("dataset_type", "dataset_map_keys", "dataset_columns"):
            if value := getattr(rl, name):
                yield (
                    f"rl_config.{name} is {value!r}, but rl_config.dataset_file '{files[0]}' is a MindRecord, whose "
                    f"rows were settled when it was converted; leave {name} out, and give it to rlhf_data.py"
                )


def reward_model_contradictions(rewards: RewardConfig) -> Iterator[str]:
    names: dict[str, str] = {}
    for key, model in rewards.models_by_key.items():
        name = model.score_name
        if model.load is None:
            yield f"{key} has no load, the folder of its model; set it, or leave the section out"
        elif name in names:
            yield (
                f"{names[name]} and {key} both have scores named '{name}'; set {key}.name to another name"
            )
        names[name] = key
        parallel = model.parallel_config
        if parallel is not None and parallel.num_chunks > 1 and parallel.pipeline_stage == 1:
            yield (
                f"{key}.parallel_config.pp_interleave_num {parallel.num_chunks} deals chunks of layers to pipeline "
                f"stages, but {key}.parallel_config.pipeline_stage is 1; leave pp_interleave_num at 1"
            )


def critic_contradictions(
    rl: RLConfig, critic: CriticConfig, parallel: ScoreParallelConfig
) -> Iterator[str]:
    if not rl.estimator.needs_critic:
        return
    stages, chunks = parallel.pipeline_stage, parallel.num_chunks
    if critic.parallel_config is not None and chunks > 1 and stages == 1:
        yield (
            f"critic_config.parallel_config.pp_interleave_num {chunks} deals chunks of layers to pipeline stages, but "
            "critic_config.parallel_config.pipeline_stage is 1; leave pp_interleave_num at 1"
        )
    if rl.partial_rollout:
        yield (
            "rl_config.partial_rollout continues completions over steps, which rl_config.advantage_estimator gae does "
            "not do yet; set partial_rollout to false or use grpo"
        )
    schedule, prefix = critic.lr_schedule, "critic_config.lr_schedule."
    if schedule.min_lr > schedule.lr:
        yield f"{prefix}min_lr {schedule.min_lr} is above {prefix}lr {schedule.lr}; lower min_lr"


def evaluation_contradictions(rl: RLConfig) -> Iterator[str]:
    if rl.eval_steps and rl.eval_dataset_file is None and not rl.uses_seeds:
        yield (
            f"rl_config.eval_steps is {rl.eval_steps}, but there is nothing to evaluate on; set "
            "rl_config.eval_dataset_file, or rl_config.eval_steps to 0"
        )
    if rl.eval_temperature == 0 and rl.eval_num_generations > 1:
        yield (
            f"rl_config.eval_temperature 0 draws the same completion each time, but "
            f"rl_config.eval_num_generations is {rl.eval_num_generations}; set it to 1, or eval_temperature "
            "above 0 and add greedy to rl_config.eval_modes"
        )
    if rl.save_ckpt_best and rl.eval_dataset_file is None and not rl.eval_steps:
        yield (
            f"rl_config.save_ckpt_best is '{rl.save_ckpt_best}', but which checkpoint is best is known from "
            "evaluations alone; set rl_config.eval_dataset_file, or save_ckpt_best to null"
        )


def per_token_contradictions(rl: RLConfig, monitor: MonitorConfig) -> Iterator[str]:
    every, of_rows = monitor.per_token, rl.save_prompt_completions_interval
    if every and not rl.save_prompt_completions_data:
        yield (
            f"monitor_config.per_token is {every}, but its rows are about those of completions.jsonl, which "
            "rl_config.save_prompt_completions_data false turns off; set that to true, or per_token to 0"
        )
    if every % of_rows:
        yield (
            f"monitor_config.per_token {every} must be a multiple of rl_config.save_prompt_completions_interval "
            f"{of_rows}, so that each of its rows is about one of completions.jsonl; set it to {of_rows}, or to 0"
        )


def profiler_contradictions(profiler: ProfilerConfig) -> Iterator[str]:
    start, stop, prefix = profiler.profile_step_start, profiler.profile_step_end, "profiler_config."
    if profiler.profile and stop in range(start + 1):
        yield (
            f"{prefix}profile_step_end {stop} is not above {prefix}profile_step_start {start}, so no step would be "
            "traced; raise it, or set it to -1 for the end of the run"
        )


def tracker_contradictions(rl: RLConfig, monitor: MonitorConfig) -> Iterator[str]:
    if TENSORBOARD in monitor.trackers and not rl.tensorboard:
        yield (
            f"monitor_config.trackers {monitor.trackers} has tensorboard, but rl_config.tensorboard is False; leave "
            "one of them out"
        )


def conversation_contradictions(rl: RLConfig, rewards: RewardConfig) -> Iterator[str]:
    if rl.environment is not None and rl.tools:
        yield (
            f"rl_config.environment is {', '.join(rl.environment)} and rl_config.tools is {rl.tools}, but either an "
            "environment answers a turn or tools do; leave one out, and call the tools in the environment's step"
        )
    if rl.environment is not None and any(map(_is_environment, rewards.verifier_function)):
        yield (
            "reward_config.verifier_function has a function named environment, which is the name of the rewards of "
            "rl_config.environment; rename the function"
        )
    for key, is_on in (
        ("rl_config.environment", rl.environment is not None),
        ("rl_config.partial_rollout", rl.partial_rollout),
    ):
        if rewards.score_as_ended and is_on:
            yield (
                f"reward_config.score_as_ended is true, but does not go together with {key}; turn one of them off"
            )
    if not rl.turn_advantages:
        return
    if rl.environment is None:
        yield (
            "rl_config.turn_advantages is true, but only an environment rewards single turns and rl_config.environment "
            "is null; set turn_advantages to false or name an environment"
        )
    of_samples = LOSS_TYPES[rl.loss_type].of_samples
    for key, value, needed in (
        ("advantage_estimator", rl.advantage_estimator, "grpo"),
        ("importance_sampling_level", rl.importance_sampling_level, "token"),
        ("loss_type", rl.loss_type, "grpo" if of_samples else rl.loss_type),
        ("kl_in_reward", rl.kl_in_reward, False),
    ):
        if value != needed:
            yield (
                f"rl_config.turn_advantages gives every turn an advantage of its own, which rl_config.{key} {value} "
                f"does not do; set {key} to {needed} or turn_advantages to false"
            )


def _is_environment(function: str) -> bool:
    return function.partition("(")[0].rpartition(":")[2].strip() == "environment"


PARTIAL_KEYS = (
    "over_sampling_batch_size",
    "max_staleness",
    "partial_rollout_chunk",
    "rollout_token_budget",
)


def partial_contradictions(rl: RLConfig, sampling: SamplingConfig) -> Iterator[str]:
    if not rl.partial_rollout:
        for key in PARTIAL_KEYS:
            if getattr(rl, key) is not None:
                yield (
                    f"rl_config.{key} is {getattr(rl, key)}, but rl_config.partial_rollout is false, so it has no "
                    f"effect; set partial_rollout to true or leave {key} out"
                )
        return
    if rl.importance_sampling_correction == "none" and rl.old_source == "trainer":
        yield (
            "rl_config.partial_rollout trains on tokens of older weights, but "
            "rl_config.importance_sampling_correction is none, so they would count as the policy's own; set the "
            "correction to token_truncate"
        )
    for key, other in (
        ("dynamic_sampling", rl.dynamic_sampling),
        ("environment", rl.environment is not None),
    ):
        if other:
            yield (
                f"rl_config.partial_rollout does not go together with rl_config.{key}; turn one of them off"
            )
    if sampling.min_tokens:
        yield (
            f"rl_config.partial_rollout draws completions in chunks, and generate_config.sampling_config.min_tokens "
            f"{sampling.min_tokens} would count in each; set min_tokens to 0"
        )
