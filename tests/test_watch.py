"""`mindgrpo watch` on folders of runs: those that have ended, that go on, and that were killed.

Does not prove what is seen of a run on another host.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from mindgrpo.cli.verbs import main
from mindgrpo.health.heartbeat import Heartbeat, HeartbeatFile
from mindgrpo.monitor.metrics import RowFollower, StepFollower
from mindgrpo.monitor.run_directory import PROCESS_FILE, read_process, write_process

ROOT = Path(__file__).resolve().parent.parent


def row(step: int, **figures: float) -> str:
    return json.dumps({"step": step, "reward/mean": step / 4, **figures}) + "\n"


def add(path: Path, text: str) -> None:
    with path.open("a") as lines:
        lines.write(text)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that goes on, in this process, with two steps."""
    write_process(tmp_path, None)
    evaluation = {"eval/accuracy_reward/mean": 0.25, "eval/accuracy_reward/mean@4": 0.25}
    add(tmp_path / "evaluations.jsonl", json.dumps({"step": 0, **evaluation}) + "\n")
    add(tmp_path / "metrics.jsonl", row(1) + row(2, **{"eval_greedy/accuracy_reward/mean": 0.5}))
    (tmp_path / "config_resolved.yaml").write_text("rl_config:\n  max_steps: 7\n")
    return tmp_path


class Watching:
    """The verb in a process of its own, and the lines that it prints."""

    def __init__(self, run: Path) -> None:
        self._printed = run / "printed.txt"
        with self._printed.open("w") as printed:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "mindgrpo", "watch", str(run)],
                env=os.environ | {"PYTHONPATH": str(ROOT)},
                stdout=printed,
                stderr=subprocess.STDOUT,
            )

    @property
    def lines(self) -> list[str]:
        return self._printed.read_text().splitlines()

    def wait_for(self, line: str) -> None:
        while line not in self.lines:
            time.sleep(0.02)


@pytest.fixture
def watching(run: Path) -> Iterator[Watching]:
    started = Watching(run)
    yield started
    started.process.kill()
    started.process.wait()


BEGINNING = [
    "  held out, 4 a prompt  accuracy 0.250",
    "step 1/7  reward 0.250",
    "  held out, greedy  accuracy 0.500",
    "step 2/7  reward 0.500",
]


def test_a_finished_run_is_shown_whole(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "summary.json").write_text(json.dumps({"steps": 2}))
    (run.parent / "latest").symlink_to(run)
    assert main(["watch", str(run.parent / "latest")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [*BEGINNING, "  the run has ended after 2 steps"]


def test_new_steps_come_as_they_are_written_and_half_a_line_waits(
    run: Path, watching: Watching
) -> None:
    watching.wait_for(BEGINNING[-1])
    whole = row(4)
    add(run / "evaluations.jsonl", json.dumps({"step": 2, "eval/accuracy_reward/mean": 1}) + "\n")
    add(run / "metrics.jsonl", row(3) + whole[:9])
    watching.wait_for("step 3/7  reward 0.750")
    assert watching.lines == [*BEGINNING, "step 3/7  reward 0.750"]
    add(run / "metrics.jsonl", whole[9:])
    (run / "summary.json").write_text(json.dumps({"steps": 4, "ended": "the signal SIGTERM"}))
    assert watching.process.wait() == 0
    last = ["step 3/7  reward 0.750", "step 4/7  reward 1.000"]
    ended = "  the run has ended after 4 steps: the signal SIGTERM"
    assert watching.lines == [*BEGINNING, *last, ended]


def test_ctrl_c_leaves_quietly(watching: Watching) -> None:
    watching.wait_for(BEGINNING[-1])
    watching.process.send_signal(signal.SIGINT)
    assert watching.process.wait() == 0
    assert watching.lines == [*BEGINNING, ""]


def test_a_run_whose_process_is_gone_is_told(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    process = subprocess.Popen(["sleep", "0"])
    process.wait()
    own = read_process(run)
    assert own is not None and own.is_alive
    (run / PROCESS_FILE).write_text(json.dumps(asdict(replace(own, pid=process.pid))))
    add(run / "metrics.jsonl", row(3)[:9])
    assert main(["watch", str(run)]) == 0
    *shown, last = capsys.readouterr().out.splitlines()
    assert shown == BEGINNING
    assert last == (
        f"  the run's process {process.pid} has ended without a summary.json: it failed or was killed"
    )


def test_another_process_of_the_same_number_is_not_the_run(run: Path) -> None:
    own = read_process(run)
    assert own is not None
    assert replace(own, started=own.started - 60).is_alive is False
    assert replace(own, host="another").is_alive is None


def test_the_summary_of_an_earlier_session_ends_nothing(run: Path, watching: Watching) -> None:
    summary = run / "summary.json"
    summary.write_text(json.dumps({"steps": 1}))
    os.utime(summary, (1, 1))
    watching.wait_for(BEGINNING[-1])
    add(run / "metrics.jsonl", row(3))
    watching.wait_for("step 3/7  reward 0.750")  # the summary was looked at before
    assert watching.process.poll() is None
    assert watching.lines == [*BEGINNING, "step 3/7  reward 0.750"]


def test_the_present_phase_is_shown_where_the_run_was_launched(run: Path) -> None:
    heartbeat = run / "heartbeat_0"
    write_process(run, heartbeat)
    now = time.monotonic()
    HeartbeatFile(heartbeat).write(
        Heartbeat(os.getpid(), now, "rollout", now - 10_000, 3, 9, graph_since=now - 50_000)
    )
    watching = Watching(run)
    try:
        watching.wait_for(BEGINNING[-1])
        while watching.lines[-1] == BEGINNING[-1]:
            time.sleep(0.02)
        assert re.fullmatch("  now in phase rollout of step 3, for 10... s", watching.lines[-1])
    finally:
        watching.process.kill()
        watching.process.wait()


def test_a_folder_without_a_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["watch", str(tmp_path)]) == 2
    assert f"{tmp_path} holds no run" in capsys.readouterr().err


def test_rows_come_once_also_when_a_resumed_run_has_cut_and_repeated_some(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    follower = StepFollower(tmp_path)
    assert [*follower.rows()] == []
    add(metrics, row(1) + row(2) + row(3))
    assert [one["step"] for one in follower.rows()] == [1, 2, 3]
    metrics.write_text(row(1) + row(2))
    assert [*follower.rows()] == []
    add(metrics, row(3) + row(4))
    assert [one["step"] for one in follower.rows()] == [4]


def test_a_line_that_is_no_row_is_passed(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    add(path, '{"step": 1}\nbroken\n[1]\n{"step": 2}\n{"st')
    follower = RowFollower(path)
    assert [one["step"] for one in follower.rows()] == [1, 2]
    add(path, 'ep": 3}\n')
    assert [one["step"] for one in follower.rows()] == [3]
