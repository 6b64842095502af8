"""Trains on given answers, on the ranks that msrun started, or alone: supervised, the warm start of a run of GRPO.

Reads the keys of a run of GRPO; those of rollouts, rewards and the algorithm have no effect. A step is one update by
rl_config.prompts_per_step rows of rl_config.dataset_file, at most rl_config.seq_length tokens each: `messages` that end
with an answer, `prompt` and `completion`, or `question` and `answer`. On several ranks:
mindgrpo launch --ranks N -- sft --config FILE.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from mindgrpo.backend.connect import connect
from mindgrpo.backend.targets import check_hosts
from mindgrpo.config import Loaded, load_config, parse_command_line, require_run_keys
from mindgrpo.config.supervised import SFT_KEYS
from mindgrpo.run.named_sources import with_local_paths
from mindgrpo.run.preflight import prepare_supervised
from mindgrpo.run.start import find_start, run_name, saved_values


def load(argv: Sequence[str]) -> tuple[str, Loaded]:
    """Reads command line and configuration; returns the run's name, too. Raises UserError."""
    path, overrides = parse_command_line(argv)
    loaded = load_config(path, overrides, is_supervised=True)
    require_run_keys(loaded, needed=SFT_KEYS)
    return run_name(path), loaded


def check(argv: Sequence[str], world_size: int) -> None:
    """Checks all that can be known of a run without a device. Raises UserError."""
    name, loaded = load(argv)
    check_hosts(loaded.config.context.target, os.environ, world_size)
    start, loaded = find_start(loaded, name)
    loaded = with_local_paths(loaded, earlier=saved_values(start))
    prepare_supervised(loaded.config, world_size)


def main(argv: Sequence[str]) -> None:
    name, loaded = load(argv)
    if os.environ.get("MS_ROLE") == "MS_SCHED":
        # msrun's scheduler runs this program too.
        connect(loaded.config.context.target, dict(os.environ))
        return
    from mindgrpo.trainer import SFTTrainer

    SFTTrainer(loaded, name=name).train()
