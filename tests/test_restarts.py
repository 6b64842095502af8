"""launch.sh starts a failed job again, and nothing outlives a launcher, however that ends.

Ranks are small programs, forked or not, under the stand-in for msrun of test_launch_script.py. Does not prove that a
real run goes on where it left off.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from test_launch_script import BOTH_WAYS, ROOT, environment, launch, program

from mindgrpo.launch.launcher import Restarts
from mindgrpo.launch.options import read_options
from mindgrpo.processes.linux import is_alive

# A run that tells where it writes, and comes one step further with each start unless told otherwise.
RUN = """
from pathlib import Path
from mindgrpo.health.rank_health import RankHealth
health = RankHealth.of_process(int(rank), 2, os.environ)
here = Path(__file__).parent
health.report_output_directory(here / "run")
starts = len(list(here.glob("started_" + rank + "_*")))
(here / f"started_{rank}_{starts}").write_text(" ".join(sys.argv[1:]))
health.at_step(STEP)
if rank == "1" and starts < FAILURES:
    while len(list(here.glob("started_0_*"))) <= starts:
        time.sleep(0.1)
    HOW
while rank == "0" and len(list(here.glob("started_1_*"))) <= FAILURES:
    time.sleep(0.1)
"""


def run(tmp_path: Path, how: str, failures: int, step: str = "starts + 1") -> str:
    words = {"HOW": how, "FAILURES": str(failures), "STEP": step}
    source = RUN
    for word, meaning in words.items():
        source = source.replace(word, meaning)
    return program(tmp_path, source)


def started(tmp_path: Path) -> list[str]:
    paths = sorted(tmp_path.glob("started_1_*"), key=lambda path: int(path.name.rpartition("_")[2]))
    return [path.read_text() for path in paths]


def test_a_job_that_failed_goes_on_with_its_run_as_often_as_allowed(tmp_path: Path) -> None:
    path = run(tmp_path, "os.kill(os.getpid(), 9)", 2)
    ended = launch(tmp_path, "--ranks", "2", "--max_restarts", "2", "--", path, "--a.b", "c")
    assert ended.returncode == 0, ended.stderr
    goes_on = f"--a.b c --resume_training true --output_dir {tmp_path / 'run'}"
    assert started(tmp_path) == ["--a.b c", goes_on, goes_on]
    assert "rank 1 was killed by signal 9 in phase start of step 1" in ended.stderr
    assert f"start 2, 1 more after it, resumes the run in {tmp_path / 'run'}" in ended.stderr
    assert len(list((tmp_path / "logs").iterdir())) == 3


PROGRAM = ROOT / "examples/grpo/qwen_grpo_tutorial/main.py"


def test_a_start_behind_the_first_begins_with_the_run_that_this_one_reported(
    tmp_path: Path,
) -> None:
    restarts = Restarts(num_left=2)
    first = read_options(["--ranks", "2", "--", str(PROGRAM), "--a.b", "c"], {})
    (tmp_path / "directory").write_text("output/run/7\n")
    again = restarts.next_options(first, tmp_path)
    assert again is not None
    where = ("--resume_training", "true", "--output_dir", "output/run/7")
    assert again.command == (*first.command, *where) and restarts.num_left == 1


def test_a_job_that_comes_no_further_is_given_up(tmp_path: Path) -> None:
    path = run(tmp_path, "sys.exit(7)", 99, step="5")
    ended = launch(tmp_path, "--ranks", "2", "--", path, MINDGRPO_MAX_RESTARTS="50")
    assert ended.returncode == 7 and len(started(tmp_path)) == 3
    *_, failure, last = ended.stderr.splitlines()
    assert failure.startswith("mindgrpo: rank 1 ended with status 7 in phase start of step 5")
    assert "not started again: the last two starts came no further than step 5" in last


def test_the_users_mistake_is_not_tried_twice(tmp_path: Path) -> None:
    path = program(tmp_path, "print('mindgrpo: no.'); sys.exit(2)")
    ended = launch(tmp_path, "--ranks", "2", "--max_restarts", "5", "--", path)
    assert ended.returncode == 2 and len(list((tmp_path / "logs").iterdir())) == 1


# -- the ends of those who hold it all -------------------------------------------------------------------------------

SLEEPER = "print(os.getpid(), flush=True); time.sleep(3600)"


def listen_to_ctrl_c() -> None:
    """What a terminal's job does, and what pytest runs may have been told not to."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


class Started:
    """A job of two ranks that have both printed; `mine` are the processes with its log folder in their environment."""

    def __init__(
        self,
        tmp_path: Path,
        source: str,
        prepare: Callable[[], object] = listen_to_ctrl_c,
        flags: Sequence[str] = (),
        **more: str,
    ) -> None:
        self._mark = f"MINDGRPO_STATUS_DIR={tmp_path / 'logs'}".encode()
        self._release = tmp_path / "release"
        command = ["bash", str(ROOT / "scripts" / "launch.sh"), "--ranks", "2", *flags, "--"]
        self.launcher = subprocess.Popen(
            [*command, program(tmp_path, source)],
            env=environment(tmp_path, **more),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=prepare,
        )
        assert self.launcher.stdout is not None
        self.rank_0 = int(self.launcher.stdout.readline())
        while not self.said_by_rank_1(tmp_path):
            time.sleep(0.05)

    def release(self) -> None:
        self._release.touch()

    def wait_until_it_stops(self) -> None:
        """Until the launcher says that it has heard of a signal; what it says later is still to be read."""
        assert self.launcher.stderr is not None
        lines = iter(self.launcher.stderr.readline, "")
        assert any(line.startswith("mindgrpo: stopping 2 ranks") for line in lines)

    @staticmethod
    def said_by_rank_1(tmp_path: Path) -> str:
        return "".join(log.read_text() for log in (tmp_path / "logs").glob("*/worker_1.log"))

    def mine(self, name: str = "") -> list[int]:
        found = []
        for entry in Path("/proc").iterdir():
            try:
                ours = entry.name.isdecimal() and self._mark in (entry / "environ").read_bytes()
                if ours and name in (entry / "cmdline").read_bytes().decode():
                    found.append(int(entry.name))
            except OSError:
                continue
        return found

    def wait_until_gone(self) -> None:
        # A process that ends gives up its environment a moment before it counts as ended.
        while self.mine() or is_alive(self.rank_0):
            time.sleep(0.05)


@pytest.fixture
def sleeping(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Started]:
    job = Started(tmp_path, SLEEPER, MINDGRPO_FORK=request.param)
    yield job
    job.launcher.kill()
    for pid in job.mine():
        os.kill(pid, signal.SIGKILL)


both = pytest.mark.parametrize("sleeping", ["0", "1"], indirect=True)


@both
def test_nothing_outlives_a_launcher_that_was_killed(sleeping: Started) -> None:
    assert len(sleeping.mine()) >= 3
    sleeping.launcher.kill()
    sleeping.wait_until_gone()


@both
def test_a_job_ends_with_msrun(sleeping: Started) -> None:
    (msrun,) = sleeping.mine("programs/msrun")
    os.kill(msrun, signal.SIGKILL)
    assert sleeping.launcher.wait() == 1
    assert sleeping.mine() == []
    last = sleeping.launcher.communicate()[1].splitlines()[-1]
    assert last.startswith("mindgrpo: msrun was killed by signal 9 before a rank did")


@pytest.mark.parametrize("sleeping", ["1"], indirect=True)
def test_a_job_ends_with_the_process_that_forks_its_ranks(sleeping: Started) -> None:
    (server,) = children_of(sleeping.launcher.pid) & {*sleeping.mine("fork_server.py")}
    os.kill(server, signal.SIGKILL)
    assert sleeping.launcher.wait() == 1
    assert sleeping.mine() == []
    sleeping.wait_until_gone()
    last = sleeping.launcher.communicate()[1].splitlines()[-1]
    assert last.startswith("mindgrpo: the process that forks the ranks has ended")


@BOTH_WAYS
def test_a_signal_to_every_process_of_the_job_leaves_the_ranks_time_to_end(
    tmp_path: Path, fork: str
) -> None:
    """What schedulers of clusters do: the ranks end well after the launcher has heard of it."""
    source = (
        "import signal\ndef end(*_):\n    wait_for_release(); print('saved', flush=True); os._exit(0)\n"
        "signal.signal(signal.SIGTERM, end)\nprint(os.getpid(), flush=True)\ntime.sleep(3600)"
    )
    job = Started(tmp_path, source, MINDGRPO_FORK=fork)
    for pid in {job.launcher.pid, *job.mine()}:
        os.kill(pid, signal.SIGTERM)
    job.wait_until_it_stops()
    job.release()
    assert job.launcher.wait() == 143
    assert job.launcher.communicate()[0] == "saved\n" and job.mine() == []
    assert job.said_by_rank_1(tmp_path).endswith("saved\n")


def children_of(pid: int) -> set[int]:
    return {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}


@BOTH_WAYS
def test_ranks_have_time_to_end_and_a_second_ctrl_c_ends_them_at_once(
    tmp_path: Path, fork: str
) -> None:
    source = (
        "import signal\nsignal.signal(signal.SIGINT, lambda *_: print('told', flush=True))\n"
        "print(os.getpid(), flush=True)\nwait_for_release()\nprint('works', flush=True)\ntime.sleep(3600)"
    )
    job = Started(tmp_path, source, MINDGRPO_FORK=fork)
    assert job.launcher.stdout is not None
    job.launcher.send_signal(signal.SIGINT)
    assert job.launcher.stdout.readline() == "told\n"
    job.release()
    assert job.launcher.stdout.readline() == "works\n"
    assert job.launcher.poll() is None and is_alive(job.rank_0)
    job.launcher.send_signal(signal.SIGINT)
    assert job.launcher.wait() == 130
    assert job.mine() == []
    assert re.search("once more: at once", job.launcher.communicate()[1])
