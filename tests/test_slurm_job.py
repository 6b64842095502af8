"""The sbatch file of the examples under a real Slurm on this machine: preempted, queued again, and exact.

The shortest form of scripts/faults/slurm_job.py, with one rank a node and a very small model. Skipped where Slurm is
not installed, as in continuous integration. Does not prove anything of nodes with devices, nor of other versions of
Slurm than 22.05, which it was run with.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from small_runs import input_keys, make_inputs, reward_words
from test_two_hosts import ARGUMENTS

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts" / "faults"))

import slurm_cluster  # noqa: E402
import slurm_job  # noqa: E402
from kill_matrix import words  # noqa: E402

# Stands for the launcher, whose part the test after it shows: stops as ranks do that have saved; well the second time.
LAUNCHER = """
trap 'exit 143' TERM
echo "launched $SLURM_NODEID of $SLURM_STEP_NUM_NODES, start $SLURM_RESTART_COUNT: $*"
[ "${SLURM_RESTART_COUNT:-0}" -gt 0 ] && exit 0
sleep 3600 & wait
"""


@pytest.mark.parametrize(
    ("flags", "state", "starts"),
    [
        # What --signal sends before the time limit.
        (("--batch", "--signal=USR1"), "COMPLETED", 2),
        ((), "CANCELLED", 1),
    ],
)
def test_a_job_is_queued_again_when_its_time_is_up_and_not_when_it_is_cancelled(
    tmp_path: Path, flags: tuple[str, ...], state: str, starts: int
) -> None:
    if why := slurm_cluster.cannot():
        pytest.skip(f"no Slurm cluster can be made here: {why}")
    launcher, screen = tmp_path / "launcher.sh", tmp_path / "out"
    launcher.write_text(LAUNCHER)
    variables = {"PATH": os.environ["PATH"], "LAUNCH": f"bash {launcher}", "RUN": str(tmp_path)}
    with slurm_cluster.two_nodes(tmp_path / "slurm", variables) as slurm:
        options = ["--ntasks-per-node=2", f"--output={screen}", slurm_job.SBATCH]
        job = slurm.submit(*options, "my.py", "--config", "my.yaml")
        slurm_job.wait_until(
            lambda: (
                screen.exists() and all(f"launched {n}" in screen.read_text() for n in range(2))
            ),
            "none",
        )
        slurm.run("scancel", *flags, job)
        slurm_job.wait_until(lambda: not slurm.run("squeue", "-h"), "the job had not ended")
        assert slurm.state(job)["JobState"] == state
    command = f"--cluster slurm --ranks 4 -- my.py --config my.yaml --output_dir {tmp_path}"
    launched = [line for line in screen.read_text().splitlines() if line.startswith("launched")]
    assert len(launched) == 2 * starts
    assert all(line.endswith(f"{command} --resume_training true") for line in launched), launched


def test_a_preempted_job_is_queued_again_and_ends_as_one_that_was_left_alone(
    tmp_path: Path,
) -> None:
    if why := slurm_cluster.cannot():
        pytest.skip(f"no Slurm cluster can be made here: {why}")
    make_inputs(tmp_path, layers=2)
    keys = ARGUMENTS | input_keys(tmp_path) | {"rl_config.max_steps": 3}
    folder = tmp_path / "preempt"
    folder.mkdir()
    result = slurm_job.run_case("preempt", folder, 1, [*words(keys), *reward_words(tmp_path)])
    assert result["good"], json.dumps(result)
    assert (result["steps"], result["started_again"]) == (3, 1)
