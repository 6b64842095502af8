"""Trains on several ranks of this host, `mindgrpo launch --ranks N --config FILE [--key value ...]`, or runs a program.

A program stands with its arguments after `--`, as do the verbs train and eval: `-- my_main.py --config FILE`,
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

from mindgrpo.launch.cluster import without_cluster
from mindgrpo.launch.launcher import launch
from mindgrpo.launch.options import read_options


def main(argv: Sequence[str]) -> None:
    sys.exit(launch(read_options(argv, os.environ), without_cluster(os.environ)))
