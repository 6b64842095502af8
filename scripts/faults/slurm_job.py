"""The sbatch file of the examples on a Slurm cluster of this machine: a job that is preempted goes on exactly.

    python scripts/faults/slurm_job.py [--cases preempt requeue time] [--steps 3] [--ranks 2] [--keep FOLDER] [MORE]

A JSON line a case; status 1 if one is not good. Two jobs of examples/cluster/slurm.sbatch run at once on two nodes of
`--ranks` ranks each. One is left alone. The other is stopped after its first step: `preempt`: a job of another
partition needs its CPUs; `requeue`: `scontrol requeue`; `time`: the signal that Slurm sends before the time limit. Good
is: Slurm started it again, it went on from its checkpoint, and its metrics, completions and weights are those of the
one that was left alone, bit for bit; times, and memory and traffic of a start, excepted. Needs root, slurm-wlm and
munge.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from job import EXAMPLE, PROGRAM
from kill_matrix import differences
from run_cases import run_cases
from slurm_cluster import CPUS, Slurm, cannot, two_nodes
from two_hosts import ARGUMENTS

SBATCH = "examples/cluster/slurm.sbatch"
CASES = ("preempt", "requeue", "time")
LONGEST_RUN = 1500.0
# A start moves weights once more, and has what it needs for that on the device.
NOT_COMPARED = (": host_device_bytes", ": memory/device_peak", ": reshard/")


def blow(slurm: Slurm, case: str, job: str, ranks: int) -> None:
    if case == "preempt":
        # The CPUs that both jobs leave, and one more.
        num_cpus = CPUS - 2 * ranks + 1
        options = ["--partition=urgent", "--nodes=2", f"--ntasks-per-node={num_cpus}"]
        slurm.submit(*options, "--output=/dev/null", "--wrap", "sleep 1")
    elif case == "requeue":
        slurm.run("scontrol", "requeue", job)
    else:
        slurm.run("scancel", "--batch", "--signal=USR1", job)


def wait_until(is_so: Callable[[], bool], what: str) -> None:
    """Raises RuntimeError."""
    until = time.monotonic() + LONGEST_RUN
    while not is_so():
        if time.monotonic() > until:
            raise RuntimeError(f"after {LONGEST_RUN:.0f} s, {what}")
        time.sleep(0.2)


def num_rows(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def unequal(run: Path, reference: Path) -> list[str]:
    different = [
        text
        for text in differences(run, reference)
        if not any(name in text for name in NOT_COMPARED)
    ]
    ours, others = ((folder / "completions.jsonl").read_text() for folder in (run, reference))
    return different + (["completions"] if ours != others else [])


def run_case(case: str, folder: Path, ranks: int, arguments: Sequence[str]) -> dict[str, Any]:
    environment = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "MINDGRPO_LOG_DIR": str(folder / "logs"),
    }
    program = [PROGRAM, "--config", EXAMPLE, *arguments]
    runs = {name: folder / name for name in ("alone", "stopped")}

    def submit(slurm: Slurm, name: str, partition: str) -> str:
        options = [f"--ntasks-per-node={ranks}", f"--partition={partition}"]
        options += [f"--output={folder}/{name}.out", f"--export=ALL,RUN={runs[name]}"]
        return slurm.submit(*options, SBATCH, *program)

    with two_nodes(folder / "slurm", environment) as slurm:
        started = time.monotonic()
        stopped, alone = submit(slurm, "stopped", "mine"), submit(slurm, "alone", "safe")
        jobs = {"stopped": stopped, "alone": alone}
        wait_until(
            lambda: (
                num_rows(runs["stopped"]) > 0 or slurm.state(stopped).get("JobState") == "FAILED"
            ),
            "there was no step",
        )
        rows = num_rows(runs["stopped"])
        blow(slurm, case, stopped, ranks)
        wait_until(lambda: not slurm.run("squeue", "-h"), "the jobs had not ended")
        seconds = time.monotonic() - started
        states = {name: slurm.state(job) for name, job in jobs.items()}
    return {"rows": rows, "seconds": round(seconds, 1)} | judge(folder, runs, states)


def judge(folder: Path, runs: dict[str, Path], states: dict[str, dict[str, str]]) -> dict[str, Any]:
    screens = {name: (folder / f"{name}.out").read_text() for name in runs}
    ends = {name: state["JobState"] for name, state in states.items()}
    if set(ends.values()) != {"COMPLETED"}:
        last = {name: screen.splitlines()[-12:] for name, screen in screens.items()}
        return {"good": False, "jobs": ends, "last_lines": last}
    meeting = {name: set(re.findall(r"meeting at (\S+),", text)) for name, text in screens.items()}
    resumed = re.findall(r"resumed from .*?(step_\d+): (\d+) of", screens["stopped"])
    wrong = unequal(runs["stopped"], runs["alone"])
    starts = int(states["stopped"]["Restarts"])
    apart = len(set.union(*meeting.values())) == len(meeting)
    return {
        "good": not wrong and starts == 1 and len(resumed) == 1 and apart,
        "steps": num_rows(runs["alone"]),
        "started_again": starts,
        "resumed_from": [checkpoint for checkpoint, _ in resumed],
        "meeting_at": sorted(set.union(*meeting.values())),
        "different": wrong,
    }


def main() -> int:
    """`--ranks` are those of each node, at most 2."""
    cases = {case: partial(run_case, case) for case in CASES}
    return run_cases(__doc__, cases, cannot(), ARGUMENTS, ranks=2, steps=3)


if __name__ == "__main__":
    sys.exit(main())
