"""The process that forks ranks: who can reach it, and signals that come while ranks end.

Ranks are small programs under the stand-in for msrun of test_launch_script.py. Does not prove what a real run saves.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from test_launch_script import ROOT, STAND_IN, environment, launch, program
from test_launch_signals import SAVES
from test_restarts import SLEEPER, Started

from mindgrpo.launch.worker import NUM_DESCRIPTORS
from mindgrpo.processes.linux import is_alive

NOBODY = 65534


def wait_until(holds: Callable[[], object]) -> None:
    while not holds():
        time.sleep(0.02)


@contextmanager
def started(tmp_path: Path, source: str, **more: str) -> Iterator[Started]:
    job = Started(tmp_path, source, MINDGRPO_FORK="1", **more)
    try:
        yield job
    finally:
        job.launcher.kill()
        for pid in job.mine():
            os.kill(pid, signal.SIGKILL)


# -- who can reach it ------------------------------------------------------------------------------------------------


def names_of_sockets(pids: list[int]) -> list[str]:
    """Paths and abstract names by which the unix sockets of these processes can be reached."""
    mine = set()
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            mine.add(os.readlink(descriptor).removeprefix("socket:[").removesuffix("]"))
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    return [
        fields[7].replace("@", "\0", 1) for fields in lines if len(fields) > 7 and fields[6] in mine
    ]


def ask_as_nobody(names: list[str], request: dict[str, object]) -> None:
    """From a process of another user, and waits until what was asked for has ended."""
    pid = os.fork()
    if pid == 0:
        try:
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            for name in names:
                with socket.socket(socket.AF_UNIX) as client:
                    client.settimeout(60.0)
                    client.connect(name)
                    socket.send_fds(client, [b"\0"], [0, 1, 2])
                    client.sendall(json.dumps(request).encode() + b"\n")
                    while client.recv(16):
                        pass
        finally:
            os._exit(0)
    os.waitpid(pid, 0)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user for a moment")
def test_another_user_cannot_have_a_program_run_as_the_jobs_user(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs.py"
    theirs.write_text(f"import os; open({str(tmp_path / 'ran_as')!r}, 'w').write(str(os.getuid()))")
    variables = {"MINDGRPO_STATUS_DIR": str(tmp_path), "RANK_ID": "7", "PATH": os.environ["PATH"]}
    request = {"command": [str(theirs)], "environment": variables, "folder": "/"}
    with started(tmp_path, SLEEPER) as job:
        names = names_of_sockets(job.mine())
        ask_as_nobody(names, request)
        assert not (tmp_path / "ran_as").exists()
        assert names == []


# Before it starts the workers, it connects to whatever socket with a name the job has, and says nothing.
SILENT_CLIENT = """
import socket
clients = []
for line in open("/proc/net/unix"):
    if line.split()[-1].startswith("@mindgrpo-" + os.environ["MINDGRPO_JOB"]):
        clients.append(socket.socket(socket.AF_UNIX))
        clients[-1].connect(line.split()[-1].replace("@", chr(0), 1))
workers = []
"""


def own_msrun(tmp_path: Path, old: str, new: str) -> str:
    """A PATH with the stand-in for msrun changed in one place."""
    path = environment(tmp_path)["PATH"]
    folder = tmp_path / "own_programs"
    folder.mkdir()
    source = STAND_IN.format(python=sys.executable)
    assert source.count(old) == 1
    (folder / "msrun").write_text(source.replace(old, new))
    (folder / "msrun").chmod(0o755)
    return f"{folder}:{path}"


def test_a_process_that_connects_and_says_nothing_keeps_no_rank_from_starting(
    tmp_path: Path,
) -> None:
    path = own_msrun(tmp_path, "workers = []\n", SILENT_CLIENT)
    source = program(tmp_path, "print('rank', rank, 'ran', flush=True)")
    ended = launch(tmp_path, "--ranks", "2", "--", source, PATH=path, MINDGRPO_FORK="1")
    assert ended.returncode == 0 and ended.stdout == "rank 0 ran\n"


def test_a_signal_that_comes_while_a_rank_is_forked_is_passed_on_to_it(tmp_path: Path) -> None:
    """This test is the server: the rank, forked and heard of, may run before its worker knows of it."""
    server, standard_input = socket.socketpair()
    asking = subprocess.Popen(
        [sys.executable, str(ROOT / "mindgrpo" / "launch" / "worker.py"), "never_run.py"],
        stdin=standard_input,
        env=environment(tmp_path, MINDGRPO_STATUS_DIR=str(tmp_path)),
    )
    standard_input.close()
    _, descriptors, _, _ = socket.recv_fds(server, 1, NUM_DESCRIPTORS)
    *others, connection = descriptors
    asking.send_signal(signal.SIGINT)
    wait_until(lambda: asking.poll() is not None or is_pending(asking.pid, signal.SIGINT))
    with socket.socket(fileno=connection) as rank:
        rank.sendall(b"\0")
        assert rank.recv(16) == b"%d\n" % signal.SIGINT
        rank.sendall(b"5\n")
        assert asking.wait() == 5
    for descriptor in (server.detach(), *others):
        os.close(descriptor)


def test_a_forked_rank_reads_nothing_from_standard_input(tmp_path: Path) -> None:
    source = program(tmp_path, "print(sys.stdin.read(), rank, os.readlink('/proc/self/fd/0'))")
    for fork in ("0", "1"):
        ended = launch(tmp_path, "--ranks", "2", "--", source, MINDGRPO_FORK=fork)
        assert (ended.returncode, ended.stdout) == (0, " 0 /dev/null\n"), ended.stderr


# -- signals while ranks end -----------------------------------------------------------------------------------------

# Of Python in the process that forks: nothing is reported until the test has made `NUM_EVENTS` ready, and the end of a
# child comes first among them, because it was registered before any worker.
TOGETHER = """
import os, selectors, sys, time
class Together(selectors.PollSelector):
    def select(self, timeout=None):
        while os.path.exists({hold!r}):
            open({hold!r} + "ing", "w").close()
            if len(ready := super().select(0)) == {num_events}:
                os.remove({hold!r})
                return ready
            time.sleep(0.01)
        return super().select(timeout)
if any(word.endswith("fork_server.py") for word in sys.orig_argv):
    selectors.DefaultSelector = Together
"""


class Held:
    """Until `num_events` are ready the process that forks sees none, and then all in one `select`."""

    def __init__(self, tmp_path: Path, num_events: int) -> None:
        self._hold = tmp_path / "hold"
        self.folder = tmp_path / "customized"
        self.folder.mkdir()
        source = TOGETHER.format(hold=str(self._hold), num_events=num_events)
        (self.folder / "sitecustomize.py").write_text(source)

    def hold(self) -> None:
        self._hold.touch()
        wait_until(Path(f"{self._hold}ing").exists)


def child_called(name: str, pids: list[int]) -> int:
    (pid,) = [pid for pid in pids if Path(f"/proc/{pid}/comm").read_text() == f"{name}\n"]
    return pid


# Rank 1 ends well as soon as the test says so.
ONE_ENDS = (
    """
if rank == "1":
    print(os.getpid(), flush=True)
    while not os.path.exists(__file__ + ".ends"):
        time.sleep(0.01)
    os._exit(0)
"""
    + SAVES
)


def assert_rank_0_saved(job: Started, tmp_path: Path) -> None:
    job.release()
    shown, errors = job.launcher.communicate()
    (log,) = (tmp_path / "logs").glob("*/fork_server.log")
    assert shown == "saved by 0 after SIGTERM\n", log.read_text() + errors
    assert job.launcher.returncode == 143 and job.mine() == []


def test_a_rank_that_ends_just_as_a_signal_for_it_comes_keeps_no_other_from_saving(
    tmp_path: Path,
) -> None:
    held = Held(tmp_path, num_events=3)  # the end of rank 1, and a signal for each of two ranks
    with started(tmp_path, ONE_ENDS, PYTHONPATH=str(held.folder)) as job:
        held.hold()
        job.launcher.send_signal(signal.SIGTERM)
        (tmp_path / "program.py.ends").touch()
        assert_rank_0_saved(job, tmp_path)


def test_a_rank_whose_worker_has_ended_before_it_keeps_no_other_from_saving(tmp_path: Path) -> None:
    held = Held(
        tmp_path, num_events=3
    )  # the end of rank 1, that of its worker, a signal for rank 0
    path = own_msrun(tmp_path, "worker.poll()]", "False]")  # the others go on
    with started(tmp_path, SAVES, PYTHONPATH=str(held.folder), PATH=path) as job:
        held.hold()
        (status,) = (tmp_path / "logs").glob("*/status")
        worker = int((status / "rank_1").read_text().split()[1])
        os.kill(worker, signal.SIGKILL)
        wait_until(lambda: not is_alive(worker))
        job.launcher.send_signal(signal.SIGTERM)
        os.kill(child_called("rank_1", job.mine()), signal.SIGKILL)
        assert_rank_0_saved(job, tmp_path)


def test_a_signal_that_reaches_a_worker_after_its_rank_has_ended_well_keeps_no_other_from_saving(
    tmp_path: Path,
) -> None:
    with started(tmp_path, ONE_ENDS) as job:
        (status,) = (tmp_path / "logs").glob("*/status")
        worker = int((status / "rank_1").read_text().split()[1])
        os.kill(worker, signal.SIGSTOP)
        rank_1 = child_called("rank_1", job.mine())
        (tmp_path / "program.py.ends").touch()
        wait_until(lambda: not Path(f"/proc/{rank_1}").exists())  # its status was collected
        job.launcher.send_signal(signal.SIGTERM)
        wait_until(lambda: is_pending(worker, signal.SIGTERM))
        os.kill(worker, signal.SIGCONT)
        assert_rank_0_saved(job, tmp_path)


def is_pending(pid: int, number: signal.Signals) -> bool:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (mask,) = [int(line.split()[1], 16) for line in lines if line.startswith("ShdPnd:")]
    return bool(mask >> (number - 1) & 1)
