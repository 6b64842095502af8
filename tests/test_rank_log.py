"""Full logs of ranks move aside and nothing of them is lost, on the screen or in the files.

One rank under the real launcher. Does not prove that several ranks write at a time, nor anything about a full disk.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mindgrpo.monitor.rank_log import own_log

ROOT = Path(__file__).resolve().parent.parent
LINES = 600
PROGRAM = f"""
import os, sys, time
from pathlib import Path
from mindgrpo.monitor.rank_log import own_log, rotate
log = own_log(os.environ)
for number in range({LINES}):
    print(f"line {{number:05}}", file=sys.stderr if number % 3 else sys.stdout, flush=True)
    # A step takes longer than a look of the screen's.
    while number % 100 == 99 and f"line {{number:05}}\\n" not in Path(sys.argv[2]).read_text():
        time.sleep(0.02)
    rotate(log, 2000, int(sys.argv[1]))
"""


def launched(folder: Path, backups: int) -> tuple[list[str], list[Path]]:
    """The program's lines on the screen, and its log files, the newest first."""
    program, screen = folder / "program.py", folder / "screen"
    program.write_text(PROGRAM)
    command = ["bash", str(ROOT / "scripts/launch.sh"), "--ranks", "1", "--"]
    with screen.open("w") as shown:
        ended = subprocess.run(
            [*command, str(program), str(backups), str(screen)],
            env=os.environ | {"MINDGRPO_LOG_DIR": str(folder / "logs"), "MINDGRPO_FORK": "0"},
            stdout=shown,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert ended.returncode == 0, ended.stderr
    (logs,) = (folder / "logs").iterdir()
    names = sorted(path.name for path in logs.glob("worker_0.log*"))
    lines = [line for line in screen.read_text().splitlines() if line.startswith("line ")]
    return lines, [logs / name for name in names]


def test_every_line_is_on_the_screen_once_and_in_the_files_in_order(tmp_path: Path) -> None:
    shown, files = launched(tmp_path, backups=9)
    expected = [f"line {number:05}" for number in range(LINES)]
    assert shown == expected
    written = "".join(path.read_text() for path in reversed(files)).splitlines()
    assert [line for line in written if line.startswith("line ")] == expected
    assert len(files) == 1 + LINES * len("line 00000\n") // 2002  # 182 lines fill a file


@pytest.mark.parametrize("backups", [0, 1])
def test_no_more_old_logs_stay_than_asked_for(tmp_path: Path, backups: int) -> None:
    shown, files = launched(tmp_path, backups)
    assert len(shown) == LINES and shown[-1] == f"line {LINES - 1:05}"
    assert [path.name for path in files] == ["worker_0.log", "worker_0.log.1"][: 1 + backups]
    assert sum(path.stat().st_size for path in files) < 2100 * (1 + backups)


def test_output_that_goes_elsewhere_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "status").mkdir()
    ask = "import os; from mindgrpo.monitor.rank_log import own_log; print(own_log(os.environ))"
    for name, ours in (
        ("worker_3.log", True),
        ("mine.txt", False),
        ("elsewhere/worker_3.log", False),
    ):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        with path.open("w") as output:
            subprocess.run(
                [sys.executable, "-c", ask],
                stdout=output,
                stderr=output,
                env=os.environ | {"MINDGRPO_STATUS_DIR": str(tmp_path / "status"), "PYTHONPATH": str(ROOT)},
                check=True,
            )  # fmt: skip
        assert path.read_text() == f"{path if ours else None}\n"


def test_without_a_launcher_there_is_no_log_to_move() -> None:
    assert own_log({}) is None
