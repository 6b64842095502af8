"""What has changed between the run that saved and the run that goes on, and whether that may be. Pure.

Refuses every change that this file does not know to be harmless, unless the user has named its key.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from mindgrpo.checkpoint.format import Identity
from mindgrpo.errors import UserError

# Where a run writes, what it shows and how it shares out work: none of it reaches a sample or a weight, except by the
# order in which numbers are added up. What paths lead to is compared by its content.
FREE = (
    "output_dir",
    "context.",
    "monitor_config.",
    "profiler_config.",
    "msprobe_config.",
    "reward_config.workers",
    "reward_config.memory",
    "reward_config.deadline",
    "reward_config.together_deadline",
    "rl_config.save_",
    "rl_config.resume_",
    "rl_config.max_seconds",
    "rl_config.tensorboard",
    "rl_config.performance_stats",
    "rl_config.model_name",
    "rl_config.enable_compile_cache",
    "rl_config.dataset_file",
    "rl_config.dataset_split",
    "rl_config.tokenizer_dir",
    "rl_config.chat_template",
    "rl_config.system_prompt",
    "rl_config.prompts_per_step",
    "rl_config.chunk_size",
    "rl_config.num_rollouts",
    "rl_config.updates_per_rollout",
    "actor_config.save",
    "actor_config.offset",
    "ref_config.offset",
)
FREE_LEAVES = ("load", "model_config")
FREE_SECTIONS = ("parallel_config",)
# These change what is reported, when the run ends, or the order of additions.
TOLD = (
    "rl_config.eval_",
    "rl_config.epochs",
    "rl_config.max_steps",
    "rl_config.logprob_gap_limit",
    "rl_config.deterministic",
    "rl_config.batch_size",
    "rl_config.packing",
    "rl_config.pack_num",
    "rl_config.seq_length",
    "rl_config.micro_batch_interleaved",
    "ref_config.ref_model_batch_size",
    "generate_config.max_num_seqs",
    "actor_config.recompute_config.",
    "actor_config.optimizer.opt_offload",
)
EVERYTHING = "all"


@dataclass(frozen=True)
class Difference:
    key: str
    was: object
    now: object
    is_dangerous: bool

    def __str__(self) -> str:
        return f"{self.key} was {self.was!r:.80} and is {self.now!r:.80}"


def differences(saved: Identity, now: Identity) -> list[Difference]:
    """In the order of the keys, what is free left out."""
    found = list(_settings(saved.config, now.config))
    for title, was, is_now in (
        ("model", saved.model, now.model),
        ("batch", saved.batch, now.batch),
        ("weights", saved.unsaved, now.unsaved),
    ):
        for key in sorted(was.keys() | is_now.keys()):
            if was.get(key) != is_now.get(key):
                found.append(Difference(f"{title}.{key}", was.get(key), is_now.get(key), True))
    if saved.data != now.data:
        found.append(Difference("data", saved.data[:12], now.data[:12], True))
    if saved.code != now.code:
        found.append(Difference("mindgrpo", saved.code, now.code, False))
    return found


def _settings(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[Difference]:
    found = []
    for key in sorted(was.keys() | now.keys()):
        # A key of one side only belongs to another version, whose default did what the other does without it.
        if key not in was or key not in now or was[key] == now[key] or _is_free(key):
            continue
        found.append(Difference(key, was[key], now[key], not key.startswith(TOLD)))
    return found


def _is_free(key: str) -> bool:
    parts = key.split(".")
    if parts[-1] in FREE_LEAVES or set(parts[:-1]) & set(FREE_SECTIONS):
        return True
    return key.startswith(FREE)


def check(found: list[Difference], allowed: Collection[str], where: str) -> list[str]:
    """Lines for the user about what has changed. Raises UserError for what is dangerous and not `allowed`."""
    refused = [
        one
        for one in found
        if one.is_dangerous and EVERYTHING not in allowed and one.key not in allowed
    ]
    if refused:
        keys = ",".join(one.key for one in refused)
        raise UserError(
            f"The run of {where} cannot go on as it was: {'; '.join(map(str, refused))}; give it its own "
            f"configuration, or allow this with --rl_config.resume_changed {keys}."
        )
    return [f"changed since {where}: {one}" for one in found]
