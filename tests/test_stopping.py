"""Signals and time limits, agreed by all ranks (threads here), and the rows of a run that goes on.

Does not prove what a run saves when it ends; test_resume.py does.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from ranks_as_threads import ThreadBackend, World, run

from mindgrpo.checkpoint.folders import to_delete
from mindgrpo.health.rank_health import RankHealth
from mindgrpo.monitor import run_directory
from mindgrpo.run import stop_signals
from mindgrpo.run.stop_signals import Stop, Stopping


def reason(stopping: Stopping) -> tuple[str, int] | None:
    try:
        stopping.check_time()
    except Stop as stop:
        return stop.reason, stop.status
    return None


def test_a_signal_to_one_rank_ends_all_of_them_alike() -> None:
    def on_rank(backend: Any) -> tuple[str, int] | None:
        stopping = Stopping(backend, 0.0, None)
        if backend.rank == 2:
            stopping._received = signal.SIGTERM
        return reason(stopping)

    assert run(4, on_rank) == [("SIGTERM was received", 143)] * 4


def test_the_first_ranks_clock_decides_and_the_status_is_0(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stop_signals, "time", SimpleNamespace(time=lambda: 1000.0))

    def on_rank(backend: Any, started: float) -> tuple[str, int] | None:
        return reason(Stopping(backend, started - 100 * backend.rank, 50.0))

    assert run(2, on_rank, 990.0) == [None, None]
    told = run(2, on_rank, 940.0)
    assert told[0] == ("rl_config.max_seconds 50 have passed (60 s since the launch)", 0)
    assert told[1] == told[0]


def test_a_signal_that_the_launcher_passes_on_has_the_launchers_name(tmp_path: Path) -> None:
    """MindSpore makes SIGTERM of the SIGINT that a rank receives."""
    backend = ThreadBackend(World(1), 0)
    backend.health = RankHealth(0, 1, tmp_path)
    stopping = Stopping(cast(Any, backend), 0.0, None)
    with stopping.listening():
        (tmp_path / "signal").write_text("2\n")
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Stop, match="SIGINT was received") as stop:
            stopping.check()
    assert stop.value.status == 130


ENDS = {"alone": -signal.SIGTERM, "launched": 0, "interactive": 0}


@pytest.mark.parametrize("where", ENDS)
def test_the_first_signal_is_a_wish_and_the_second_ends_the_process_unless_others_do(
    tmp_path: Path, where: str
) -> None:
    """A launcher ends it; in an interactive session the run ends, and the process stays."""
    folder = f"Path({str(tmp_path)!r})" if where == "launched" else None
    program = (
        "import os, signal, sys\nfrom pathlib import Path\n"
        "sys.path.insert(0, 'tests')\n"
        "from ranks_as_threads import World, ThreadBackend\n"
        "from mindgrpo.run.stop_signals import Stop, Stopping\n"
        + ("sys.ps1 = '> '\n" if where == "interactive" else "")
        + "backend = ThreadBackend(World(1), 0)\n"
        f"backend.health.folder = {folder}\n"
        "stopping = Stopping(backend, 0.0, None)\n"
        "try:\n"
        "    with stopping.listening():\n"
        "        stopping.check()\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "        try:\n"
        "            stopping.check()\n"
        "        except Stop as stop:\n"
        "            print(stop.status, stop.reason, flush=True)\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "        print('goes on')\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted')\n"
    )
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == ENDS[where], done.stderr
    heard, reason = "SIGTERM", "SIGTERM was received"
    if where == "interactive":
        heard = reason = "interrupted"
    last = {"alone": [], "launched": ["goes on"], "interactive": ["interrupted"]}
    assert done.stdout.splitlines() == [
        f"  {heard}: the run ends after this phase; a second one ends it at once",
        f"143 {reason}",
        *last[where],
    ]


def test_rows_after_a_step_are_put_aside_with_the_half_line_of_a_killed_run(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    kept = '{"step": 1, "a": 2}\n{"a": 3, "step": 2}\n'
    path.write_text(kept + '{"step": 3}\n{"step": 3}\n{"st')
    assert run_directory.cut_after(path, 2) == 3
    assert path.read_text() == kept
    aside = tmp_path / "metrics.jsonl.after_step_2"
    assert aside.read_text() == '{"step": 3}\n{"step": 3}\n{"st'
    assert run_directory.cut_after(path, 2) == 0
    path.write_text(kept + '{"step": 4}\n')
    run_directory.cut_after(path, 2)
    assert aside.read_text().endswith('{"st{"step": 4}\n')


def test_all_that_a_run_left_without_a_checkpoint_moves_into_a_folder_of_its_own(
    tmp_path: Path,
) -> None:
    for number in (1, 2):
        for name in run_directory.RUN_FILES:
            (tmp_path / name).write_text(f"{name} {number}")
        aside = run_directory.put_earlier_aside(tmp_path)
        assert aside == tmp_path / f"earlier_{number}"
        assert {path.name for path in aside.iterdir()} == set(run_directory.RUN_FILES)
        assert all(path.read_text() == f"{path.name} {number}" for path in aside.iterdir())
    assert run_directory.put_earlier_aside(tmp_path) is None


@pytest.mark.parametrize(
    ("keep", "best", "deleted"),
    [
        (1, None, [1, 5, 7]),
        (2, None, [1, 5]),
        (2, 1, [5]),
        (2, 12, [1, 5]),
        (9, None, []),
        (None, None, []),
        (0, None, [1, 5, 7]),
    ],
)
def test_the_newest_and_the_best_are_never_deleted(
    keep: int | None, best: int | None, deleted: list[int]
) -> None:
    assert to_delete([7, 1, 12, 5], keep, best) == deleted
