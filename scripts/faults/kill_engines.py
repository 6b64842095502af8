"""Kills an engine of vLLM, a worker of it, or the rank that owns it.

    python scripts/faults/kill_engines.py [--cases engine-rollout ...]

On two ranks with one engine of two workers. A JSON line a case: good when the job ends by itself within 10 seconds
with a status that is not 0, its last line names rank and phase, and nothing is left: no process, nothing in /dev/shm
or the temporary folder. Status 1 if a case is not good.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from job import Job
from kill_matrix import words

LIMIT, TO_GET_THERE = 10.0, 240.0
VICTIMS = ("engine", "worker", "owner")
# Phase: in it the engine is handed weights, generates, or has nothing to do.
PHASES = ("reshard", "rollout", "update")
SETTINGS = {
    "generate_config.use_vllm": 1,
    "rl_config.max_steps": 4,
    "rl_config.eval_on_start": "false",
    "rl_config.eval_samples": 8,
    "rl_config.prompts_per_step": 8,
}
for section in ("actor_config", "generate_config", "ref_config"):
    for axis, degree in (("data_parallel", 1), ("model_parallel", 2), ("pipeline_stage", 1)):
        SETTINGS[f"{section}.parallel_config.{axis}"] = degree


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def victim_of(job: Job, kind: str) -> int:
    """Of the first engine; its workers are its last children."""
    engine = next(pid for pid, name in job.processes() if "-m mindgrpo_engine" in name)
    return engine if kind == "engine" else children_of(engine)[-1]


def run_case(kind: str, phase: str, folder: Path) -> dict[str, Any]:
    told: dict[str, Any] = {"case": f"{kind}-{phase}"}
    with Job(folder, 2, words(SETTINGS)) as job:
        # The second step's: in the first one the engine starts.
        stopped = job.stop_in(0, phase, 2, TO_GET_THERE)
        if stopped is None:
            return told | {"good": False, "wrong": ["never got there"], "screen": job.screen[-500:]}
        victim = stopped.pid if kind == "owner" else victim_of(job, kind)
        struck_at = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        if kind != "owner":
            os.kill(stopped.pid, signal.SIGCONT)
        ended = job.end(struck_at, LIMIT + 30)
    wrong = [f"left: {what}" for what in ended.left]
    if ended.status == 0:
        wrong.append("status 0")
    if ended.seconds > LIMIT:
        wrong.append(f"took {ended.seconds:.1f} s")
    # A rank whose engine had nothing to do hears of its end half a second later, perhaps in the next phase.
    phases = (*PHASES, "loop") if kind != "owner" and phase == "update" else (phase,)
    if "rank 0" not in ended.last_line or not any(f"phase {p}" in ended.last_line for p in phases):
        wrong.append("rank and phase are not named")
    told |= {"seconds": round(ended.seconds, 2), "status": ended.status}
    return told | {"good": not wrong, "wrong": wrong, "last_line": ended.last_line}


def main() -> int:
    names = [f"{kind}-{phase}" for kind in VICTIMS for phase in PHASES]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="*", default=names, choices=names)
    good = True
    for name in parser.parse_args().cases:
        folder = Path(tempfile.mkdtemp(prefix="mindgrpo-engines-"))
        kind, phase = name.split("-")
        row = run_case(kind, phase, folder)
        good = good and row["good"]
        print(json.dumps(row), flush=True)
        shutil.rmtree(folder)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
