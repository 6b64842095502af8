"""Trainers one after the other in the processes of one job: the same numbers as in a process of their own, and nothing
of an earlier one left behind.

MindSpore keeps what it needs of graphs: 2 to 4 MB a trainer here. Does not prove anything of other sizes of models.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_runs import ONE_GRAPH, make_inputs, model_bits, rows, trainer

from mindgrpo.errors import UserError
from mindgrpo.health.heartbeat import IDLE
from mindgrpo.health.rank_health import RankHealth

TESTS = Path(__file__).resolve().parent
NUM_TRAINERS = 2
# Of the memory after the first trainer.
MOST_GROWTH = 0.05
# What this process holds after each trainer: shared memory in bytes by descriptor and by mapping, other descriptors
# and threads; and bytes of memory that no other process has.
PROGRAM = """
import ctypes, gc, json, os, sys, threading
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
    ctypes.CDLL(None).malloc_trim(0)
    lines = open("/proc/self/smaps_rollup").read().splitlines()
    own = [int(line.split()[1]) << 10 for line in lines if line.startswith("Private_Dirty:")]
    return sum(own), {{
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


def test_a_second_trainer_computes_what_the_first_does_and_holds_no_more(tmp_path: Path) -> None:
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
        held: list[tuple[int, dict[str, Any]]] = json.loads((tmp_path / f"held_{rank}").read_text())
        assert len(held) == NUM_TRAINERS
        (before, first), (after, last) = held[0], held[-1]
        assert last == first
        assert after < before * (1 + MOST_GROWTH), (before, after)
    alone, *others = (tmp_path / f"run{number}" for number in range(NUM_TRAINERS))
    assert all(rows(other) == rows(alone) for other in others)
    assert all(model_bits(other) == model_bits(alone) for other in others)


def test_a_trainer_that_has_ended_keeps_no_weights_and_says_what_to_do_instead(
    tmp_path: Path,
) -> None:
    make_inputs(tmp_path)
    words = ("--rl_config.max_steps=1", "--rl_config.eval_on_start=false", *ONE_GRAPH)
    made = trainer(tmp_path, tmp_path / "run", *words)
    pools = [pool for pool in made.run.backend.live_pools if pool.num_bytes]
    values = [made.run.roles.policy.weights.pool.view(0, (8,))]
    assert pools and all(value.any() for value in values)
    # A notebook's user may take any time before this.
    heartbeat = made.run.backend.health.heartbeat_of(0)
    assert heartbeat is not None and heartbeat.kind == IDLE
    made.train()
    assert not any(value.any() for value in values)
    with pytest.raises(UserError, match="has run the 1 step of .*; make another trainer"):
        made.train()
    assert made.report().path == tmp_path / "run" / "report.html"


def test_a_trainer_that_could_not_be_made_is_watched_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_inputs(tmp_path)
    watched: set[RankHealth] = set()
    on_beat = RankHealth.on_beat

    def note(health: RankHealth, check: Callable[[], None]) -> None:
        watched.add(health)
        on_beat(health, check)

    monkeypatch.setattr(RankHealth, "on_beat", note)
    with pytest.raises(UserError, match="no number for this one"):
        trainer(tmp_path, tmp_path / "run", reward=wrong)
    (health,) = watched
    assert not health._checks


def wrong(*_: Any, **__: Any) -> list[float]:
    raise RuntimeError("no number for this one")
