"""The process that forks ranks: who can reach it.

Ranks are small programs under the stand-in for msrun of test_launch_script.py. Does not prove what a real run saves.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from test_launch_script import STAND_IN, environment, launch, program
from test_restarts import SLEEPER, Started

NOBODY = 65534


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
    ended = launch(
        tmp_path, "--ranks", "2", "--", source, PATH=path, MINDGRPO_FORK="1", seconds=60.0
    )
    assert ended.returncode == 0 and ended.stdout == "rank 0 ran\n"


def test_a_forked_rank_reads_nothing_from_standard_input(tmp_path: Path) -> None:
    source = program(tmp_path, "print(sys.stdin.read(), rank, os.readlink('/proc/self/fd/0'))")
    for fork in ("0", "1"):
        ended = launch(tmp_path, "--ranks", "2", "--", source, MINDGRPO_FORK=fork)
        assert (ended.returncode, ended.stdout) == (0, " 0 /dev/null\n"), ended.stderr
