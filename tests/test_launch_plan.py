"""What the launcher decides before it starts anything, and how it follows logs; pure, or with files of its own.

Does not prove that a plan's processes do what their commands say: test_launch_script.py and test_wheel.py start them.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from test_launch_signals import waiting_bytes

from mindgrpo.backend import targets
from mindgrpo.errors import UserError
from mindgrpo.launch import launcher
from mindgrpo.launch import plan as plan_module
from mindgrpo.launch.log_follower import FollowedFile, LogFollower
from mindgrpo.launch.options import Hosts, Options, read_options
from mindgrpo.launch.plan import JobPlan, LocalHost, make_plan

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = str(Path(__file__))
LOCAL = LocalHost("/venv/bin/python", 77, "/venv/bin/msrun", 8)
LOGS = Path("/logs/20260101-000000-abcd")


def plan_of(options: Options, **environment: str) -> JobPlan:
    return make_plan(options, environment, LOCAL, LOGS, 12345, 9.5)


def test_one_rank_is_a_worker_and_needs_no_msrun() -> None:
    plan = plan_of(Options(1, (PROGRAM, "--a", "b")))
    python, worker, *command = plan.main.command
    assert (python, command) == (LOCAL.python, [PROGRAM, "--a", "b"])
    assert worker.endswith("mindgrpo/launch/worker.py") and plan.main.log == LOGS / "worker_0.log"
    assert plan.check is None and plan.headline == f"1 rank, full logs: {LOGS}"


def test_several_ranks_are_msruns_with_its_options_apart_from_the_programs() -> None:
    plan = plan_of(Options(4, (PROGRAM, "--join=no")))
    python, worker, *command = plan.main.command
    assert python == LOCAL.python and worker.endswith("mindgrpo/launch/worker.py")
    assert command[0] == LOCAL.msrun and command[-2:] == [PROGRAM, "--join=no"]
    options = command[1 : command.index("--")]
    assert "--worker_num=4" in options and "--local_worker_num=4" in options
    assert "--master_port=12345" in options and plan.headline.startswith("4 ranks on port 12345")
    assert plan.main.environment["OMP_NUM_THREADS"] == "2"
    assert "MINDGRPO_RANKS_PER_HOST" not in plan.main.environment


def test_a_host_of_several_starts_its_share_of_the_ranks() -> None:
    options = Options(8, (PROGRAM,), Hosts(2, 1, ("10.0.0.1", 17000)))
    assert (options.num_local_ranks, options.first_rank) == (4, 4)
    plan = plan_of(options)
    assert {"--worker_num=8", "--local_worker_num=4", "--node_rank=1"} < set(plan.main.command)
    assert "--master_addr=10.0.0.1" in plan.main.command
    assert plan.main.environment["MINDGRPO_RANKS_PER_HOST"] == "4"
    assert plan.fork_server is not None and plan.fork_server.command[2] == "5"
    assert plan.headline.startswith("host 1 of 2: 4 of 8 ranks, meeting at 10.0.0.1:17000")


def test_a_configuration_is_checked_for_all_ranks_before_they_start() -> None:
    check = plan_of(Options(8, (PROGRAM, "--config=my.yaml", "--x", "1"))).check
    assert check is not None and check.log is None
    assert check.command[3:] == ("check", "--quiet", "--ranks", "8", "--config=my.yaml", "--x", "1")


def test_variables_of_the_user_win_and_an_empty_one_counts_as_unset() -> None:
    ours = plan_of(Options(1, (PROGRAM,)), GLOG_v="0", HF_HUB_OFFLINE="", MINE="").main.environment
    assert (ours["GLOG_v"], ours["HF_HUB_OFFLINE"], ours["MINE"]) == ("0", "1", "")
    assert ours["MINDGRPO_STATUS_DIR"] == f"{LOGS}/status" and ours["MINDGRPO_JOB"] == "77-abcd"
    assert ours["MINDGRPO_LAUNCHED_AT"] == "9.500000"


def test_what_the_user_did_not_set_is_listed_for_processes_that_are_no_ranks() -> None:
    users = {"GLOG_v": "0", "HF_HUB_OFFLINE": "", "MINDGRPO_DEFAULTS": "HOME", "HOME": "/me"}
    listed = plan_of(Options(1, (PROGRAM,)), **users).main.environment["MINDGRPO_DEFAULTS"].split()
    assert {"OMP_NUM_THREADS", "HF_HUB_OFFLINE", "MS_NODE_TIMEOUT"} <= set(listed)
    assert not {"GLOG_v", "HOME"} & set(listed)
    users["OMP_NUM_THREADS"] = "3"
    ours = plan_of(Options(1, (PROGRAM,)), **users).main.environment
    assert ours["OMP_NUM_THREADS"] == "3"
    assert "OMP_NUM_THREADS" not in ours["MINDGRPO_DEFAULTS"].split()


@pytest.fixture
def started_with(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., Mapping[str, str]]:
    """The environment of ranks that `launch` would start with these variables, where files of devices have `names`."""

    class NoJob:
        is_stopped = False

        def __init__(self, plan: JobPlan, *_: object) -> None:
            self.environment = plan.main.environment

        def run(self) -> int:
            seen.append(self.environment)
            return 0

    seen: list[Mapping[str, str]] = []
    monkeypatch.setattr(launcher, "Job", NoJob)
    monkeypatch.setattr(launcher, "Signals", lambda **_: None)

    def start(names: Sequence[str], **variables: str) -> Mapping[str, str]:
        devices = tmp_path / f"dev{len(seen)}"
        devices.mkdir()
        for name in names:
            (devices / name).touch()
        monkeypatch.setattr(targets, "DEVICE_FILES", devices)
        environment = {"PATH": os.environ["PATH"], **variables}
        options = Options(1, (PROGRAM,), log_folder=str(tmp_path / "logs"))
        assert launcher.launch(options, environment) == 0
        return seen[-1]

    return start


def test_ranks_of_npus_wait_for_the_slowest_to_load_the_model_and_to_write_it(
    started_with: Callable[..., Mapping[str, str]],
) -> None:
    npus = ("davinci0", "davinci1", "davinci_manager")
    ours = started_with(npus)
    # The largest that all of CANN's pages allow; its own are 120 s and half an hour.
    assert (ours["HCCL_CONNECT_TIMEOUT"], ours["HCCL_EXEC_TIMEOUT"]) == ("7200", "17340")
    listed = set(ours["MINDGRPO_DEFAULTS"].split())
    assert {"HCCL_CONNECT_TIMEOUT", "HCCL_EXEC_TIMEOUT"} < listed
    ours = started_with(npus, HCCL_CONNECT_TIMEOUT="600", HCCL_EXEC_TIMEOUT="")
    assert (ours["HCCL_CONNECT_TIMEOUT"], ours["HCCL_EXEC_TIMEOUT"]) == ("600", "17340")
    assert "HCCL_CONNECT_TIMEOUT" not in ours["MINDGRPO_DEFAULTS"].split()
    assert not any(name.startswith("HCCL_") for name in started_with(("null",)))


def test_ranks_find_the_package_of_a_clone_by_a_path_and_an_installed_one_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = plan_of(Options(1, (PROGRAM,)), PYTHONPATH="/mine")
    assert plan.main.environment["PYTHONPATH"] == f"{ROOT}:/mine"
    installed = Path("/venv/lib/python3.11/site-packages/mindgrpo")
    monkeypatch.setattr(plan_module, "PACKAGE_FOLDER", installed)
    assert "PYTHONPATH" not in plan_of(Options(1, (PROGRAM,))).main.environment


@pytest.mark.parametrize(("fork", "has_server"), [("0", False), ("1", True), ("", True)])
def test_no_process_imports_for_ranks_that_are_not_to_be_forked(
    fork: str, has_server: bool
) -> None:
    plan = plan_of(Options(1, (PROGRAM,)), MINDGRPO_FORK=fork)
    assert (plan.fork_server is not None) == has_server


def test_options_come_from_the_command_line_first_and_then_from_the_environment() -> None:
    words = ["--ranks=2", "--max_restarts", "3", "--", PROGRAM, "--", "--ranks", "9"]
    options = read_options(words, {"MINDGRPO_MAX_RESTARTS": "7", "MINDGRPO_STOP_SECONDS": "5"})
    assert (options.num_ranks, options.max_restarts, options.stop_seconds) == (2, 3, 5.0)
    assert options.command == (PROGRAM, "--", "--ranks", "9")
    with pytest.raises(UserError, match="MINDGRPO_STOP_SECONDS is 'soon'"):
        read_options(words, {"MINDGRPO_STOP_SECONDS": "soon"})


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["--ranks", "8", "--config", "my.yaml", "--output_dir=x"], "train --config my.yaml"),
        (["--config", "my.yaml", "--ranks=8", "--output_dir=x"], "train --config my.yaml"),
        (["--ranks", "8", "--", "train", "--config=my.yaml", "--output_dir=x"], None),
        (["--ranks", "8", "--", "eval", "--config=my.yaml", "--output_dir=x"], None),
    ],
)
def test_ranks_need_no_program_of_the_users(words: list[str], command: str | None) -> None:
    options = read_options(words, {})
    asked = words[3:] if command is None else [*command.split(), "--output_dir=x"]
    assert (options.num_ranks, list(options.command)) == (8, asked)
    plan = plan_of(options)
    assert list(plan.main.command[-len(asked) :]) == asked
    # What `check` is given; an evaluation is checked as one.
    arguments = asked if asked[0] == "eval" else asked[1:]
    assert plan.check is not None and plan.fork_server is not None
    assert list(plan.check.command[3:]) == ["check", "--quiet", "--ranks", "8", *arguments]
    assert list(plan.fork_server.command[3:]) == arguments


def test_what_is_neither_a_program_nor_a_configuration_is_refused() -> None:
    for words in (["--output_dir", "x"], ["my.csv"], ["--config", "my.yaml", "--", PROGRAM]):
        with pytest.raises(UserError, match="usage: "):
            read_options(["--ranks", "8", *words], {})
    with pytest.raises(UserError, match="there is no program trian: give the path .* train, eval"):
        read_options(["--ranks", "8", "--", "trian", "--config", "my.yaml"], {})


MASTER = ("--master", "10.0.0.1:17000")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--hosts", "0"), "--hosts 0 is not a positive whole number"),
        (("--hosts", "3", "--host_index", "0", *MASTER), "8 ranks cannot be shared by 3 hosts"),
        (("--hosts", "2", "--host_index", "2", *MASTER), "--host_index 2 is none of 2 hosts"),
        (("--hosts", "2", "--host_index", "x", *MASTER), "--host_index x is none of 2 hosts"),
        (("--hosts", "2"), "--master '' is not ADDRESS:PORT"),
        (("--hosts", "2", "--master", "10.0.0.1:99999"), "'10.0.0.1:99999' is not ADDRESS:PORT"),
        (("--hosts", "2", "--master", ":17000"), "--master ':17000' is not ADDRESS:PORT"),
        (("--hosts", "2", *MASTER, "--max_restarts", "2"), "--max_restarts 2 is for one host"),
        (("--hosts", "2", "--where", "here"), "usage: "),
    ],
)
def test_hosts_that_cannot_work_are_refused_in_a_sentence(
    words: tuple[str, ...], sentence: str
) -> None:
    with pytest.raises(UserError) as refused:
        read_options(["--ranks", "8", *words, "--", PROGRAM], {})
    assert sentence in str(refused.value)


def test_hosts_need_no_secret_and_the_highest_port_will_do() -> None:
    words = ["--ranks", "8", "--hosts", "2", "--host_index", "1", "--master", "node1:65535"]
    options = read_options([*words, "--", PROGRAM], {})
    assert options.hosts == Hosts(2, 1, ("node1", 65535))


def test_the_launcher_itself_imports_no_heavy_library() -> None:
    ask = "import sys, mindgrpo.cli.launch, mindgrpo.cli.verbs; print(*sys.modules)"
    ended = subprocess.run([sys.executable, "-c", ask], cwd=ROOT, capture_output=True, text=True)
    heavy = {"mindspore", "numpy", "pydantic", "yaml", "mindgrpo.config", "mindgrpo.backend"}
    assert "mindgrpo.launch.launcher" in ended.stdout.split()
    assert heavy.isdisjoint(ended.stdout.split())


# -- logs ------------------------------------------------------------------------------------------------------------


def test_a_file_that_moves_aside_is_read_to_its_end_and_then_the_next(tmp_path: Path) -> None:
    path = tmp_path / "log"
    file = FollowedFile(path)
    assert file.read() == b""
    with path.open("wb", buffering=0) as old:
        old.write(b"one ")
        assert file.read() == b"one "
        path.rename(tmp_path / "log.1")
        assert file.read() == b""
        path.write_bytes(b"three")
        old.write(b"two ")
    assert file.read() + file.read() == b"two three"
    path.unlink()
    assert file.read() == b""


def follow(path: Path, output: int) -> LogFollower:
    follower = LogFollower([path], output)
    follower.start()
    return follower


def test_what_is_written_last_is_shown_before_the_follower_ends(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.touch()
    reader, writer = os.pipe()
    follower = follow(path, writer)
    path.write_bytes(b"the end")
    follower.finish()
    follower.join()
    assert os.read(reader, 100) == b"the end"
    os.close(reader)
    os.close(writer)


def test_a_screen_that_is_held_or_gone_does_not_keep_the_follower_from_its_work(
    tmp_path: Path,
) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"x" * 200_000)  # more than a pipe holds
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    follower = follow(path, writer)
    follower.finish()
    while waiting_bytes(reader) < fcntl.fcntl(reader, fcntl.F_GETPIPE_SZ):
        time.sleep(0.02)
    assert follower.is_alive()
    shown = os.read(reader, 100_000)
    os.close(reader)
    follower.join()
    assert not follower.is_alive() and set(shown) == {ord("x")}
    os.close(writer)
