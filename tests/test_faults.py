"""A real job on eight ranks is hurt from outside: it ends by itself, says who and where, and leaves nothing.

A few cells of scripts/faults/kill_matrix.py, which has every phase, bounds of time, and resumes. Does not prove
anything about several hosts, nor about ranks of another device.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from small_runs import input_keys, make_inputs

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts" / "faults"))

from job import Job  # noqa: E402
from kill_matrix import ARGUMENTS, Case, run_case, words  # noqa: E402

from mindgrpo.processes.linux import is_alive  # noqa: E402

RANKS = 8
# Without a reference ranks compile one graph less.
SMALL = {"rl_config.prompts_per_step": 4, "rl_config.eval_samples": 8, "rl_config.beta": 0}


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A layer for each of two stages."""
    folder = tmp_path_factory.mktemp("inputs")
    make_inputs(folder, layers=2)
    return words(ARGUMENTS | SMALL | input_keys(folder))


@pytest.mark.parametrize(
    "case",
    [
        Case("compile", 0, victim=5, occurrence=1, limit=math.inf),
        Case("rollout", 0, victim=3, occurrence=1, limit=math.inf),
        Case("update", 0, victim=0, occurrence=1, limit=math.inf),
    ],
    ids=lambda case: case.phase,
)
def test_a_killed_rank_ends_the_job_with_its_name_and_phase_and_nothing_is_left(
    tmp_path: Path, case: Case, arguments: list[str]
) -> None:
    told = run_case(case, RANKS, tmp_path / "job", None, arguments)
    assert told["good"], json.dumps(told)


@pytest.fixture
def job(tmp_path: Path, arguments: list[str]) -> Iterator[Job]:
    deadlines = {
        "monitor_config.phase_deadline_action": "stop",
        "monitor_config.phase_deadlines.rollout": 7,
    }
    with Job(tmp_path / "job", RANKS, [*arguments, *words(deadlines)]) as job:
        yield job


def test_a_rank_that_stands_still_is_named_and_the_job_ended_at_its_phases_deadline(
    job: Job,
) -> None:
    # Ranks that do not score pass that phase in no time; this one, none can leave without rank 6.
    stopped = job.stop_in(rank=6, kind="rollout", occurrence=1, seconds=math.inf)
    assert stopped is not None
    ended = job.end(0.0, math.inf)
    assert ended.status == 1 and ended.left == []
    assert "phase rollout of step 1 has taken" in ended.last_line
    assert "phase_deadline_seconds is 7" in ended.last_line
    assert "waiting for rank 6 (phase rollout of step 1 since" in ended.last_line
    assert "no heartbeat for" in ended.last_line and "phase_deadline_action" in ended.last_line
    # Where the rank that ended the job itself waited.
    (logs,) = (job.folder / "logs").iterdir()
    assert "most recent call first" in (logs / "worker_0.log").read_text()
    # Its parent has ended too, and who collects its status then is not the job's.
    assert not is_alive(stopped.pid)
