"""Ctrl-C, a closed terminal and a scheduler's goodbye, as they reach a launcher and its whole process group.

Ranks are small programs under the stand-in for msrun of test_launch_script.py. Does not prove what a real run saves.
"""

from __future__ import annotations

import array
import fcntl
import os
import signal
import subprocess
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_launch_script import ROOT, environment, program
from test_restarts import Started, listen_to_ctrl_c

from mindgrpo.health.rank_health import resume_command

SAVES = """
import signal
def end(number, _):
    wait_for_release()
    print("saved by", rank, "after", signal.Signals(number).name, flush=True)
    os._exit(0)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, end)
print(os.getpid(), flush=True)
time.sleep(3600)
"""


@pytest.fixture(autouse=True)
def hangups_count() -> Iterator[None]:
    """Also where the tests run under nohup, whose children would ignore them, as they should."""
    earlier = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, earlier)


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_what_rank_0_prints_while_it_ends_is_shown_though_the_whole_group_got_the_signal(
    tmp_path: Path, number: signal.Signals, status: int
) -> None:
    job = Started(tmp_path, SAVES, MINDGRPO_FORK="0")
    os.killpg(job.launcher.pid, number)
    job.wait_until_it_stops()
    job.release()
    shown, errors = job.launcher.communicate()
    assert job.launcher.returncode == status and job.mine() == []
    assert shown == f"saved by 0 after {number.name}\n"
    assert [line.partition(";")[0] for line in errors.splitlines()] == ["mindgrpo: stopped"]


def test_slurm_may_say_twice_that_a_job_is_to_end_and_the_ranks_save(tmp_path: Path) -> None:
    step = {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NODEID": "0"}
    step["SLURM_STEP_NODELIST"] = "node1"
    job = Started(tmp_path, SAVES, flags=("--cluster", "slurm"), MINDGRPO_FORK="0", **step)
    os.killpg(job.launcher.pid, signal.SIGTERM)
    job.wait_until_it_stops()
    os.killpg(job.launcher.pid, signal.SIGTERM)
    job.release()
    shown, errors = job.launcher.communicate()
    assert job.launcher.returncode == 143 and job.mine() == []
    assert shown == "saved by 0 after SIGTERM\n" and "nothing was saved" not in errors


STANDS_STILL = """
import signal
from pathlib import Path
from mindgrpo.health.rank_health import RankHealth
from mindgrpo.health.rank_health import resume_command
health = RankHealth.of_process(int(rank), 2, os.environ)
signal.signal(signal.SIGINT, signal.SIG_IGN)
run = Path("/there/run")
if SAVED:
    command = resume_command(sys.argv, sys.orig_argv, os.environ, run)
    health.report_checkpoint(run / "checkpoints" / "step_000003", command)
print(os.getpid(), flush=True)
time.sleep(3600)
"""


@pytest.mark.parametrize("has_saved", [True, False])
def test_a_second_ctrl_c_tells_what_had_been_saved_and_the_command_that_resumes(
    tmp_path: Path, has_saved: bool
) -> None:
    job = Started(tmp_path, STANDS_STILL.replace("SAVED", str(has_saved)), MINDGRPO_FORK="0")
    os.killpg(job.launcher.pid, signal.SIGINT)
    job.wait_until_it_stops()
    os.killpg(job.launcher.pid, signal.SIGINT)
    _, errors = job.launcher.communicate()
    assert job.launcher.returncode == 130 and job.mine() == []
    *lines, last = errors.splitlines()
    assert last.startswith("mindgrpo: stopped; full logs: ")
    command = f"bash {ROOT}/scripts/launch.sh --ranks 2 -- {tmp_path}/program.py"
    assert lines == (
        [
            "mindgrpo: stopped at once; saved: /there/run/checkpoints/step_000003",
            f"mindgrpo: resume with: {command} --resume_training true --output_dir /there/run",
        ]
        if has_saved
        else ["mindgrpo: stopped at once: nothing was saved"]
    )


def test_the_resuming_command_is_the_users_own_but_for_where_to_resume_from() -> None:
    argv = ["my run.py", "--config", "c.yaml", "--output_dir=a", "--resume_training", "--a.b", "c"]
    resume = "--resume_training true --output_dir /run"
    environment = {"MINDGRPO_LAUNCH_PREFIX": "mindgrpo launch --ranks 8 --"}
    expected = f"mindgrpo launch --ranks 8 -- 'my run.py' --config c.yaml --a.b c {resume}"
    assert resume_command(argv, [], environment, Path("/run")) == expected
    alone = ["/usr/bin/python3", "-m", "mindgrpo", "train", "--resume_training", "/x", "--c", "d"]
    expected = f"python -m mindgrpo train --c d {resume}"
    assert resume_command([], alone, {}, Path("/run")) == expected


def waiting_bytes(descriptor: int) -> int:
    count = array.array("i", [0])
    fcntl.ioctl(descriptor, termios.FIONREAD, count)
    return count[0]


def ignore_hangups() -> None:
    listen_to_ctrl_c()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def test_a_job_that_was_started_to_outlive_its_terminal_does(tmp_path: Path) -> None:
    source = "print(os.getpid(), flush=True)\nwait_for_release()\nprint('well')"
    job = Started(tmp_path, source, ignore_hangups, MINDGRPO_FORK="0")
    os.killpg(job.launcher.pid, signal.SIGHUP)
    job.release()
    assert job.launcher.wait() == 0
    assert job.launcher.communicate()[0] == "well\n"


def test_ctrl_c_during_the_check_leaves_nothing(tmp_path: Path) -> None:
    # A configuration that never comes to its end.
    os.mkfifo(tmp_path / "slow.yaml")
    words = ["--ranks", "2", "--", program(tmp_path, ""), "--config", str(tmp_path / "slow.yaml")]
    launcher = subprocess.Popen(
        ["bash", str(ROOT / "scripts" / "launch.sh"), *words],
        env=environment(tmp_path, MINDGRPO_FORK="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=listen_to_ctrl_c,
    )
    status = tmp_path / "logs"
    while not list(status.glob("*/fork_server.log")):
        time.sleep(0.05)
    os.killpg(launcher.pid, signal.SIGINT)
    shown, errors = launcher.communicate()
    assert (launcher.returncode, shown) == (130, "")
    assert errors.startswith("mindgrpo: stopped; full logs: ") and errors.count("\n") == 1
    mark = f"MINDGRPO_STATUS_DIR={status}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                assert mark not in (entry / "environ").read_bytes(), entry
            except OSError:
                continue


def test_a_screen_that_nobody_reads_any_more_does_not_end_the_job(tmp_path: Path) -> None:
    source = (
        "print(os.getpid(), flush=True)\nwait_for_release()\nprint('x' * 300_000, flush=True)\n"
    )
    source += f"open({str(tmp_path / 'done')!r}, 'w').close()"
    job = Started(tmp_path, source, MINDGRPO_FORK="0")
    assert job.launcher.stdout is not None
    job.launcher.stdout.close()
    job.release()
    assert job.launcher.wait() == 0
    assert (tmp_path / "done").exists()


def test_a_screen_that_is_held_keeps_neither_a_failure_nor_ctrl_c_from_being_seen(
    tmp_path: Path,
) -> None:
    source = (
        "print(os.getpid(), flush=True)\nif rank == '0': print('x' * 300_000, flush=True)\n"
        "wait_for_release()\nif rank == '1': raise ValueError\ntime.sleep(3600)"
    )
    job = Started(tmp_path, source, MINDGRPO_FORK="0")
    assert job.launcher.stdout is not None
    # The pipe is filling, and nobody reads it.
    while waiting_bytes(job.launcher.stdout.fileno()) < 1 << 15:
        time.sleep(0.02)
    job.release()
    job.wait_until_gone()  # the failure was seen
    for number in (signal.SIGINT, signal.SIGTERM):  # of one kind, two at once would be one
        job.launcher.send_signal(number)
    assert job.launcher.wait() == 1
    assert job.launcher.stderr is not None
    assert "rank 1 failed: ValueError" in job.launcher.stderr.read().splitlines()[-1]
