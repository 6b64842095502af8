"""Processes that another launcher started are refused before each of them trains by itself.

Does not start such launchers: their variables are played.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tables import each_row

from mindgrpo.backend.connect import refuse_other_launchers
from mindgrpo.errors import UserError
from mindgrpo.processes.job import STATUS_VARIABLE

ROOT = Path(__file__).resolve().parent.parent
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@each_row(
    "environment, argv, said",
    [
        (TORCHRUN, ["my_run.py"], "mindgrpo launch --ranks 2 -- my_run.py (or unset WORLD_SIZE"),
        (TORCHRUN, ["a b.py", "--x", "1"], "--ranks 2 -- 'a b.py' --x 1 "),
        (
            TORCHRUN,
            ["/usr/lib/mindgrpo/__main__.py", "train", "--config", "my.yaml"],
            "--ranks 2 -- train --config my.yaml ",
        ),
        (TORCHRUN, ["/usr/bin/mindgrpo", "sft", "--config", "c"], "-- sft --config c "),
        (TORCHRUN, ["-c"], "-- my_run.py "),
        (
            {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "8"},
            ["my_run.py"],
            "OMPI_COMM_WORLD_RANK is 3 and OMPI_COMM_WORLD_SIZE is 8: mpirun has started 8 processes",
        ),
        ({"PMI_RANK": "0", "PMI_SIZE": "4"}, ["my_run.py"], "--ranks 4 "),
        ({"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}, ["my_run.py"], "srun has started 2"),
        ({"RANK_ID": "0", "RANK_SIZE": "8"}, ["my_run.py"], "RANK_SIZE is 8"),
    ],
)
def test_several_processes_of_another_launcher_are_refused_with_the_command_to_start(
    environment: dict[str, str], argv: list[str], said: str
) -> None:
    with pytest.raises(UserError) as caught:
        refuse_other_launchers(environment, argv)
    assert said in str(caught.value)


@each_row(
    "environment",
    [
        {},
        {**TORCHRUN, "WORLD_SIZE": "1"},
        {"WORLD_SIZE": "2"},
        {"RANK": "0", "WORLD_SIZE": "many"},
        # Ranks of ours, on a host that another launcher has set up.
        {**TORCHRUN, "MS_ROLE": "MS_WORKER", "MS_WORKER_NUM": "2"},
        {**TORCHRUN, STATUS_VARIABLE: "logs/status"},
        # The script of a Slurm job, which is one process.
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "8"},
    ],
)
def test_one_process_and_ranks_of_our_own_go_on(environment: dict[str, str]) -> None:
    refuse_other_launchers(environment, ["my_run.py"])


def test_a_program_that_torchrun_starts_twice_ends_before_it_reads_a_model(tmp_path: Path) -> None:
    program = tmp_path / "my_run.py"
    program.write_text(
        "from mindgrpo import GRPOTrainer\n"
        "GRPOTrainer(model='nowhere', reward_funcs='format_reward', train_dataset=[{'prompt': 'a'}])\n"
    )
    environment = {
        **os.environ,
        **TORCHRUN,
        "PYTHONPATH": str(ROOT),
        "XDG_CACHE_HOME": str(tmp_path),
    }
    words = [sys.executable, "my_run.py"]
    ended = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1 and "--ranks 2 -- my_run.py" in ended.stderr
