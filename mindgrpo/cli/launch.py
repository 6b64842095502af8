"""Trains on several ranks of this host, `mindgrpo launch --ranks N --config FILE [--key value ...]`, or runs a program.

A program and its arguments follow `--`, as do the verbs train and eval: `-- my_main.py --config FILE`,
`-- eval --config FILE`. Where there is a --config, it is checked for all ranks before they start.

Its share of several hosts comes from --hosts, --host_index and --master, or, with --cluster, from the variables of
Slurm or of MindCluster's AscendJob.

Shows the output of the first rank as it comes, keeps that of every rank in a fresh log folder, ends with the status
of the rank that failed first (2: the user's input cannot work) and leaves no process of its own behind. Reads
MINDGRPO_PORT (default: a free one), MINDGRPO_LOG_DIR (output/logs), MINDGRPO_MAX_RESTARTS (0), MINDGRPO_STOP_SECONDS
(how long ranks may take to end after Ctrl-C: 60; a second Ctrl-C ends them at once) and MINDGRPO_FORK (0: every rank
imports for itself; else ranks are forked from one process that has, where that is safe).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from mindgrpo.launch.launcher import launch
from mindgrpo.launch.options import read_options, without_cluster


def main(argv: Sequence[str]) -> None:
    sys.exit(launch(read_options(argv, os.environ), without_cluster(os.environ)))


def train(argv: Sequence[str]) -> None:
    """Trains as a configuration says, on the ranks that msrun started, or alone."""
    # The launcher starts without what reads a configuration.
    from mindgrpo.config import load_config, parse_command_line, require_run_keys
    from mindgrpo.run.start import run_name

    files, overrides = parse_command_line(argv)
    loaded = load_config(files, overrides)
    require_run_keys(loaded)
    if os.environ.get("MS_ROLE") == "MS_SCHED":
        # msrun's scheduler runs this program too; it serves the cluster, if there is one, from here.
        from mindgrpo.backend.connect import connect

        connect(loaded.config.context.target, dict(os.environ))
        return
    from mindgrpo.trainer import GRPOTrainer

    GRPOTrainer(loaded, name=run_name(files)).train()
