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
from mindgrpo.config import load_config, parse_command_line, require_run_keys
from mindgrpo.config.supervised import SFT_KEYS
from mindgrpo.run.start import run_name


def main(argv: Sequence[str]) -> None:
    files, overrides = parse_command_line(argv)
    loaded = load_config(files, overrides, is_supervised=True)
    require_run_keys(loaded, needed=SFT_KEYS)
    if os.environ.get("MS_ROLE") == "MS_SCHED":
        # msrun's scheduler runs this program too.
        connect(loaded.config.context.target, dict(os.environ))
        return
    from mindgrpo.trainer import SFTTrainer

    SFTTrainer(loaded, name=run_name(files)).train()
