"""Compares the run that saved with the run that resumes, and decides whether the differences are allowed. Pure.

A difference that this module does not know to be harmless is an error, unless the user has named its key.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from mindgrpo.algorithm.estimators import AlgorithmConfig
from mindgrpo.algorithm.surrogates import LOSS_TYPES
from mindgrpo.checkpoint.format import Identity
from mindgrpo.errors import UserError

# Where a run writes, what it shows and how it shares out work: none of it reaches a sample or a weight, except by the
# order in which numbers are added up. What paths lead to is compared by its content.
IGNORED = (
    *("output_dir", "verbose", "monitor_config.", "profiler_config.", "msprobe_config."),
    *("context.max_device_memory", "context.backend", "context.max_call_depth"),
    *("context.save_graphs", "context.memory_optimize_level", "context.roofline."),
    *("reward_config.workers", "reward_config.memory"),
    *("reward_config.deadline", "reward_config.together_deadline"),
    *("rl_config.save_ckpt_interval", "rl_config.save_max_ckpt_num", "rl_config.save_ckpt_async"),
    *("rl_config.save_prompt_completions", "rl_config.save_eval_completions"),
    "rl_config.dump_weights",
    *("rl_config.resume_", "rl_config.max_seconds", "rl_config.model_name"),
    *("rl_config.tensorboard", "rl_config.performance_stats", "rl_config.enable_compile_cache"),
    *("rl_config.dataset_file", "rl_config.dataset_split", "rl_config.tokenizer_dir"),
    *("rl_config.chat_template", "rl_config.system_prompt", "rl_config.prompts_per_step"),
    *("rl_config.chunk_size", "rl_config.num_rollouts", "rl_config.updates_per_rollout"),
    *("actor_config.save", "actor_config.offset", "ref_config.offset"),
)
# Of any section.
IGNORED_NAMES = frozenset(("load", "model_config", "parallel_config"))
# These change what is reported, when the run ends, or how numbers are rounded and in which order they are added up.
REPORTED = (
    *("context.", "rl_config.save_ckpt_best", "rl_config.checksum_interval"),
    *("rl_config.eval_", "rl_config.epochs", "rl_config.max_steps", "rl_config.logprob_gap_limit"),
    *("rl_config.deterministic", "rl_config.batch_size", "rl_config.packing", "rl_config.pack_num"),
    *("rl_config.seq_length", "rl_config.micro_batch_interleaved"),
    *("ref_config.ref_model_batch_size", "generate_config.max_num_seqs"),
    "generate_config.draft_",
    *("actor_config.recompute_config.", "actor_config.optimizer.opt_offload"),
    *("critic_config.recompute_config.", "critic_config.optimizer.opt_offload"),
    *("actor_config.enable_parallel_optimizer", "critic_config.enable_parallel_optimizer"),
    *("reward_config.model.batch_size", "reward_config.model.name"),
)
# What a held-out score depends on, beside the weights.
SCORED = (
    *("held_out", "tokenizer.", "rewards", "reward_config.verifier_function"),
    "rl_config.save_ckpt_best",
    *("rl_config.eval_samples", "rl_config.eval_modes", "rl_config.eval_num_generations"),
    *("rl_config.eval_temperature", "rl_config.eval_top_p", "rl_config.environment"),
    *(
        "rl_config.tools",
        "rl_config.tool_parser",
        "rl_config.max_turns",
        "rl_config.max_tool_calls",
    ),
    *("generate_config.sampling_config.", "generate_config.max_prompt_length"),
)


@dataclass(frozen=True)
class Difference:
    key: str
    was: object
    now: object
    is_dangerous: bool = True

    def __str__(self) -> str:
        return f"{self.key} was {self.was!r:.80} and is {self.now!r:.80}"


def _in_effect(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings with numbers where null stands for them, and none of an engine that is not used.

    Earlier versions had null where there is a number today, or a number where it is null.
    """
    uses_vllm = config.get("generate_config.use_vllm") != 0
    kept = {
        key: value
        for key, value in config.items()
        if uses_vllm or not key.startswith("generate_config.vllm.")
    }
    for name, field in AlgorithmConfig.model_fields.items():
        # What is null today as well has null as its default.
        if kept.get(f"rl_config.{name}", 0) is None:
            kept[f"rl_config.{name}"] = field.default
    loss_type = LOSS_TYPES.get(str(config.get("rl_config.loss_type")))
    for number, key in enumerate(("rl_config.epsilon_low", "rl_config.epsilon_high")):
        if key in kept and kept[key] is None and loss_type is not None and loss_type.epsilon:
            kept[key] = loss_type.epsilon[number]
    return kept


def _agree(was: object, now: object) -> bool:
    """Compares what both versions say of a thing."""
    if isinstance(was, dict) and isinstance(now, dict):
        return all(_agree(was[key], now[key]) for key in was.keys() & now.keys())
    if isinstance(was, list) and isinstance(now, list):
        return len(was) == len(now) and all(map(_agree, was, now))
    return was == now


def differences(saved: Identity, now: Identity) -> list[Difference]:
    """Lists the differences in the order of the keys, without those that are ignored."""
    changes, before, after = [], _in_effect(saved.config), _in_effect(now.config)
    # A key of one side only belongs to another version, whose default did what the other does without it.
    for key in sorted(before.keys() & after.keys()):
        ignored = key.startswith(IGNORED) or IGNORED_NAMES.intersection(key.split("."))
        is_same = saved.config[key] == now.config[key] or before[key] == after[key]
        if not is_same and not ignored:
            is_dangerous = not key.startswith(REPORTED)
            changes.append(Difference(key, before[key], after[key], is_dangerous))
    for title, field in (("model", "model"), ("batch", "batch"), ("weights", "unsaved")):
        was, is_now = getattr(saved, field), getattr(now, field)
        # A run without a reference has no digest of one; of a model, other versions say other things.
        keys = was.keys() & is_now.keys() if field == "model" else was.keys() | is_now.keys()
        for key in sorted(keys):
            if not _agree(was.get(key), is_now.get(key)):
                changes.append(Difference(f"{title}.{key}", was.get(key), is_now.get(key)))
    changes += _content_changes(saved, now)
    if saved.code != now.code:
        changes.append(Difference("mindgrpo", saved.code, now.code, is_dangerous=False))
    return changes


def _content_changes(saved: Identity, now: Identity) -> list[Difference]:
    """Lists the differences of what paths and code led to, as far as the checkpoint's version says."""
    changes = []
    if saved.data != now.data:
        changes.append(Difference("data", saved.data[:12], now.data[:12]))
    if saved.held_out is not None and saved.held_out != now.held_out:
        was, is_now = ((one or "none")[:12] for one in (saved.held_out, now.held_out))
        changes.append(Difference("held_out", was, is_now, is_dangerous=False))
    # Of functions that are not given in code the configuration has the names.
    if None not in (saved.rewards, now.rewards) and saved.rewards != now.rewards:
        changes.append(Difference("rewards", saved.rewards, now.rewards))
    if saved.tokenizer is not None and now.tokenizer is not None:
        # Prompts have been compared; later turns are rendered as the run goes on.
        has_turns = any(now.config.get(f"rl_config.{key}") for key in ("tools", "environment"))
        for field, is_dangerous in (("template", has_turns), ("stop_ids", True)):
            was, is_now = (getattr(one.tokenizer, field) for one in (saved, now))
            if was != is_now:
                changes.append(Difference(f"tokenizer.{field}", was, is_now, is_dangerous))
    return changes


def scoring_changes(saved: Identity, now: Identity) -> list[Difference]:
    """Lists the differences because of which held-out scores of the two cannot be compared."""
    changes = [one for one in differences(saved, now) if one.key.startswith(SCORED)]
    # Version 1 does not say what the path led to.
    path = "rl_config.eval_dataset_file"
    was, is_now = saved.config.get(path), now.config.get(path)
    if saved.held_out is None and was != is_now:
        changes.append(Difference(path, was, is_now, is_dangerous=False))
    return changes


def check(changes: list[Difference], allowed: Collection[str], source: str) -> list[str]:
    """Returns lines for the user about what has changed since the checkpoint `source`.

    Raises UserError for what is dangerous and not `allowed`.
    """
    refused = [one for one in changes if one.is_dangerous and one.key not in allowed]
    if refused and "all" not in allowed:
        keys = ",".join(one.key for one in refused)
        raise UserError(
            f"The run of {source} cannot be resumed with these changes: {'; '.join(map(str, refused))}; give it its "
            f"own configuration, or allow this with --rl_config.resume_changed {keys}."
        )
    return [f"changed since {source}: {one}" for one in changes]
