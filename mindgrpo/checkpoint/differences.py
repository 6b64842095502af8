"""Compares the run that saved with the run that resumes, and decides whether the differences are allowed. Pure.

A difference that this module does not know to be harmless is an error, unless the user has named its key.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from mindgrpo.checkpoint.format import Identity
from mindgrpo.errors import UserError

# Where a run writes, what it shows and how it shares out work: none of it reaches a sample or a weight, except by the
# order in which numbers are added up. What paths lead to is compared by its content.
IGNORED = (
    *("output_dir", "context.", "monitor_config.", "profiler_config.", "msprobe_config."),
    *("reward_config.workers", "reward_config.memory"),
    *("reward_config.deadline", "reward_config.together_deadline"),
    *("rl_config.save_", "rl_config.resume_", "rl_config.max_seconds", "rl_config.model_name"),
    *("rl_config.tensorboard", "rl_config.performance_stats", "rl_config.enable_compile_cache"),
    *("rl_config.dataset_file", "rl_config.dataset_split", "rl_config.tokenizer_dir"),
    *("rl_config.chat_template", "rl_config.system_prompt", "rl_config.prompts_per_step"),
    *("rl_config.chunk_size", "rl_config.num_rollouts", "rl_config.updates_per_rollout"),
    *("actor_config.save", "actor_config.offset", "ref_config.offset"),
)
# Of any section.
IGNORED_NAMES = frozenset(("load", "model_config", "parallel_config"))
# These change what is reported, when the run ends, or the order of additions.
REPORTED = (
    *("rl_config.eval_", "rl_config.epochs", "rl_config.max_steps", "rl_config.logprob_gap_limit"),
    *("rl_config.deterministic", "rl_config.batch_size", "rl_config.packing", "rl_config.pack_num"),
    *("rl_config.seq_length", "rl_config.micro_batch_interleaved"),
    *("ref_config.ref_model_batch_size", "generate_config.max_num_seqs"),
    *("actor_config.recompute_config.", "actor_config.optimizer.opt_offload"),
    "actor_config.enable_parallel_optimizer",
)


@dataclass(frozen=True)
class Difference:
    key: str
    was: object
    now: object
    is_dangerous: bool = True

    def __str__(self) -> str:
        return f"{self.key} was {self.was!r:.80} and is {self.now!r:.80}"


def differences(saved: Identity, now: Identity) -> list[Difference]:
    """Lists the differences in the order of the keys, without those that are ignored."""
    changes = []
    # A key of one side only belongs to another version, whose default did what the other does without it.
    for key in sorted(saved.config.keys() & now.config.keys()):
        ignored = key.startswith(IGNORED) or IGNORED_NAMES.intersection(key.split("."))
        if saved.config[key] != now.config[key] and not ignored:
            is_dangerous = not key.startswith(REPORTED)
            changes.append(Difference(key, saved.config[key], now.config[key], is_dangerous))
    for title, field in (("model", "model"), ("batch", "batch"), ("weights", "unsaved")):
        was, is_now = getattr(saved, field), getattr(now, field)
        for key in sorted(was.keys() | is_now.keys()):
            if was.get(key) != is_now.get(key):
                changes.append(Difference(f"{title}.{key}", was.get(key), is_now.get(key)))
    if saved.data != now.data:
        changes.append(Difference("data", saved.data[:12], now.data[:12]))
    if saved.code != now.code:
        changes.append(Difference("mindgrpo", saved.code, now.code, is_dangerous=False))
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
