"""Turns the keys of a configuration into those of supervised training: one file serves both, before and with GRPO.

Keys of rollouts, rewards and the algorithm have no effect there. What they would decide follows from the others: a step
is one update by `rl_config.prompts_per_step` rows, its loss the mean negative log-likelihood of their completions.
"""

from __future__ import annotations

from collections.abc import Mapping

from mindgrpo.config.rl import RLConfig
from mindgrpo.config.schema import LIVE
from mindgrpo.config.yaml_file import Sourced

# What supervised training cannot start without.
SFT_KEYS: dict[str, str] = {
    "actor_config.load": "the Hugging Face directory of the model",
    "rl_config.dataset_file": "the training data",
    "rl_config.prompts_per_step": "the rows of an update",
}
ORIGIN = "supervised training"
# Of these sections every key is read, of rl_config those below.
_SECTIONS = ("actor_config", "context", "monitor_config", "profiler_config", "msprobe_config")
_READ = frozenset(
    f"rl_config.{name}"
    for name in (
        *("model_name", "deterministic", "seed", "max_seconds", "performance_stats"),
        *("dataset_file", "dataset_split", "dataset_map_keys", "tokenizer_dir", "chat_template"),
        *("eval_dataset_file", "eval_dataset_split", "eval_steps", "eval_on_start", "eval_samples"),
        *("chat_template_date", "system_prompt", "prompt_overflow", "epochs", "max_steps"),
        "prompts_per_step",
        *("batch_size", "seq_length", "packing", "pack_num", "micro_batch_interleaved"),
        *("save_ckpt_interval", "save_max_ckpt_num", "save_ckpt_best", "save_ckpt_async"),
        *("resume_training", "resume_changed"),
        *("max_skipped_updates", "dump_weights"),
        *("router_aux_loss_coef", "moe_router_bias_update_rate"),
        *("tensorboard", "tensorboard_dir", "tensorboard_queue_size"),
    )
)
# About updates per rollout, and about tokens that a generator drew.
_OF_ROLLOUTS = ("actor_config.parallel_config.micro_batch_num", "monitor_config.per_token")
# There is no generator whose bits a token's numbers could have: unless asked, none pays for them.
_INVARIANT = "context.batch_invariant"
_FIXED: dict[str, object] = {
    # Advantage 1 and no ratio: the negative log-likelihood.
    "rl_config.loss_type": "gpg",
    "rl_config.beta": 0.0,
    "rl_config.num_generations": 1,
    "rl_config.advantage_estimator": "reinforce_plus_plus",
    "rl_config.updates_per_rollout": 1,
    "rl_config.logprob_gap_limit": None,
    "rl_config.checksum_interval": None,
    "rl_config.save_prompt_completions_data": False,
    "generate_config.sampling_config.max_tokens": 1,
}


def is_of_supervised(resolved: str) -> bool:
    """Returns whether the text of a config_resolved.yaml is that of a run of supervised training."""
    return any(line.endswith(f"  # {ORIGIN}") for line in resolved.splitlines())


def is_read(key: str) -> bool:
    """Returns whether supervised training reads a key of the configuration."""
    in_section = key.split(".")[0] in _SECTIONS and key not in _OF_ROLLOUTS
    return in_section or key in _READ or "." not in key


def is_supervised(values: Mapping[str, object]) -> bool:
    """Returns whether these values by key, which may be an older version's, are those of supervised training."""
    fixed = [(key, value) for key, value in _FIXED.items() if key.startswith("rl_config.")]
    return all(key in values and values[key] == value for key, value in fixed)


def supervised(entries: dict[str, Sourced], notices: list[str]) -> dict[str, Sourced]:
    """Returns the entries of supervised training; adds a sentence about those that have no effect to `notices`."""
    # What is no key at all stays, to be refused.
    unread = [key for key in entries if key in LIVE and not is_read(key)]
    if own := [key for key in unread if entries[key].origin != ORIGIN]:
        notices.append(f"no effect in supervised training: {', '.join(own)}")
    longest = RLConfig.model_fields["seq_length"].default
    if "rl_config.seq_length" in entries:
        longest = entries["rl_config.seq_length"].value
    # What cannot be a length is refused for what it is.
    longest = longest if isinstance(longest, int) else 1
    derived: dict[str, object] = {
        **_FIXED,
        "generate_config.max_prompt_length": max(1, longest - 1),
    }
    kept = {key: entry for key, entry in entries.items() if key not in unread}
    if _INVARIANT not in entries or entries[_INVARIANT].value == "auto":
        derived[_INVARIANT] = False
    return kept | {key: Sourced(value, ORIGIN) for key, value in derived.items()}
