"""Trainers one after the other in the processes of one job leave nothing of their own behind.

Does not prove anything of memory that MindSpore keeps for itself, such as compiled graphs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from small_runs import make_inputs

TESTS = Path(__file__).resolve().parent
NUM_TRAINERS = 2
# What this process holds after each trainer: shared memory in bytes by descriptor and by mapping, other descriptors
# and threads.
PROGRAM = """
import gc, json, os, sys, threading
from pathlib import Path
sys.path.insert(0, {tests!r})
from small_runs import run
from mindgrpo.health.rank_health import BEAT_SECONDS

def holds():
    gc.collect()
    for thread in threading.enumerate():
        if thread is not threading.main_thread():
            thread.join(4 * BEAT_SECONDS)
    entries = [os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    links = {{path: os.readlink(path) for path in entries if os.path.islink(path)}}
    shared = [path for path in links if "/memfd:" in links[path]]
    files = {{os.stat(path).st_ino: os.stat(path).st_blocks * 512 for path in shared}}
    maps = [line for line in open("/proc/self/maps") if "/memfd:" in line]
    return {{
        "shared bytes": sum(files.values()),
        "shared mappings": len(maps),
        "descriptors": len(links),
        "threads": threading.active_count(),
        "processes": len(open(f"/proc/self/task/{{os.getpid()}}/children").read().split()),
    }}

held = []
for number in range({num_trainers}):
    run(Path({folder!r}), Path({folder!r}, f"run{{number}}"), *{words!r})
    held.append(holds())
Path({folder!r}, "held_" + os.environ["RANK_ID"]).write_text(json.dumps(held))
"""
WORDS = (
    *("--rl_config.max_steps", "1", "--rl_config.beta", "0"),
    *("--actor_config.parallel_config.model_parallel", "2"),
    *("--ref_config.parallel_config.model_parallel", "2"),
    *("--generate_config.parallel_config.data_parallel", "2"),
)


def test_a_second_trainer_in_a_process_holds_no_more_than_the_first(tmp_path: Path) -> None:
    make_inputs(tmp_path, layers=2)
    program = tmp_path / "program.py"
    words = {"tests": str(TESTS), "folder": str(tmp_path), "words": WORDS}
    program.write_text(PROGRAM.format(num_trainers=NUM_TRAINERS, **words))
    command = [sys.executable, "-m", "mindgrpo", "launch", "--ranks", "2", "--", str(program)]
    environment = os.environ | {"MINDGRPO_LOG_DIR": str(tmp_path / "logs")}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, env=environment, cwd=tmp_path, stdout=pipe, stderr=pipe, text=True
    ) as job:
        errors = job.communicate()[1]
    assert job.returncode == 0, errors
    assert list(Path("/dev/shm").glob(f"mindgrpo-{job.pid}-*")) == []
    for rank in range(2):
        held: list[dict[str, Any]] = json.loads((tmp_path / f"held_{rank}").read_text())
        assert len(held) == NUM_TRAINERS
        assert held[-1] == held[0], held
