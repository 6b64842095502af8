"""Trains as a configuration says, on the ranks that msrun started, or alone."""

from __future__ import annotations

import os
from collections.abc import Sequence

from mindgrpo.config import load_config, parse_command_line, require_run_keys
from mindgrpo.run.output_paths import run_name


def main(argv: Sequence[str]) -> None:
    path, overrides = parse_command_line(argv)
    loaded = load_config(path, overrides)
    require_run_keys(loaded)
    if os.environ.get("MS_ROLE") == "MS_SCHED":
        # msrun's scheduler runs this program too; it serves the cluster, if there is one, from here.
        from mindgrpo.backend.connect import connect

        context = loaded.config.context
        connect(context.target, dict(os.environ))
        return
    from mindgrpo.trainer import GRPOTrainer

    GRPOTrainer(loaded, name=run_name(path)).train()
