"""scripts/launch.sh and scripts/quickstart.sh: what they refuse, and how they hand on a status.

Several ranks are played by a stand-in for msrun that starts its workers as msrun does and prints
its error line. Does not prove that the real msrun behaves so, nor that ranks find each other.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from fake_pythons import fake_python

from mindgrpo.launch.fork_server import FIRST_COMPILE, FIRST_RENDERING
from mindgrpo.processes.linux import is_alive

ROOT = Path(__file__).resolve().parent.parent

STAND_IN = """#!{python}
import argparse, os, signal, subprocess, sys, time
parser = argparse.ArgumentParser()  # as msrun's: it takes shortened options for its own
for name in ("worker_num", "worker_log_name", "local_worker_num", "master_port", "join", "log_dir",
             "tail_worker_log"):
    parser.add_argument("--" + name)
parser.add_argument("task_script")
parser.add_argument("task_script_args", nargs=argparse.REMAINDER)
given = parser.parse_args()
options = vars(given)
command = [given.task_script, *given.task_script_args]
workers = []
for rank in range(int(options["worker_num"])):
    log = open(f"{{options['log_dir']}}/worker_{{rank}}.log", "w")
    environment = os.environ | {{"RANK_ID": str(rank), "MS_ROLE": "MS_WORKER"}}
    workers.append(subprocess.Popen([sys.executable, *command], stdout=log, stderr=log,
                                    env=environment, start_new_session=True))
running = True
while running:
    running = any(worker.poll() is None for worker in workers)
    failed = [worker for worker in workers if worker.poll()]
    if failed:
        print(f"Worker process {{failed[0].pid}} exit with exception. "
              f"Error code: {{failed[0].poll()}}.", flush=True)
        for worker in workers:
            worker.kill()
        time.sleep(3600)
    time.sleep(0.05)
"""

# Most programs of these tests use nothing of what is imported for ranks, which takes seconds of a core.
NOTHING_FOR_RANKS = f"""
import sys, types
if any(word.endswith("fork_server.py") for word in sys.orig_argv):
    for name in ("scipy.linalg", "mindgrpo.backend.connect", "mindgrpo.trainer",
                 {FIRST_RENDERING!r}, *{FIRST_COMPILE!r}):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["mindgrpo.backend.connect"].load = lambda target: None
"""


def environment(tmp_path: Path, **more: str) -> dict[str, str]:
    programs = tmp_path / "programs"
    programs.mkdir(exist_ok=True)
    (programs / "sitecustomize.py").write_text(NOTHING_FOR_RANKS)
    stand_in = programs / "msrun"
    stand_in.write_text(STAND_IN.format(python=sys.executable))
    stand_in.chmod(0o755)
    path = f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    kept = {key: value for key, value in os.environ.items() if not key.startswith("MINDGRPO_")}
    ours = {"PATH": path, "MINDGRPO_LOG_DIR": str(tmp_path / "logs"), "MINDGRPO_FORK": "0"}
    ours["PYTHONPATH"] = ":".join(filter(None, (str(programs), kept.get("PYTHONPATH"))))
    return kept | ours | more


# Ranks that run in their worker, and ranks forked from a process that has imported what they need.
BOTH_WAYS = pytest.mark.parametrize("fork", ["0", "1"])


def launch(tmp_path: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(ROOT / "scripts" / "launch.sh"), *words]
    variables = environment(tmp_path, **more)
    return subprocess.run(command, env=variables, capture_output=True, text=True)


def program(tmp_path: Path, source: str) -> str:
    """A program of `source`, which may call `wait_for_release()`: the test makes the file `release`."""
    path = tmp_path / "program.py"
    path.write_text(
        "import os, sys, time\nrank = os.environ.get('RANK_ID', '0')\ndef wait_for_release():\n"
        f"    while not os.path.exists({str(tmp_path / 'release')!r}): time.sleep(0.02)\n{source}"
    )
    return str(path)


def is_one_sentence(words: str) -> bool:
    return words.startswith("mindgrpo: ") and words.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--ranks"],
        ["--ranks", "2"],
        ["--ranks", "2", "program.py"],
        ["--ranks", "2", "--"],
        ["--ranks", "0", "--", "program.py"],
        ["--ranks", "two", "--", "program.py"],
        ["--ranks", "2", "--", "nowhere.py"],
        ["--ranks", "2", "--max_restarts"],
        ["--ranks", "2", "--max_restarts", "--", "nowhere.py"],
        ["--ranks", "2", "--max_restarts", "-1", "--", "nowhere.py"],
    ],
)
def test_bad_usage_is_one_sentence_and_status_2(tmp_path: Path, words: list[str]) -> None:
    ended = launch(tmp_path, *words)
    assert ended.returncode == 2
    assert is_one_sentence(ended.stderr) and "usage" in ended.stderr
    assert not (tmp_path / "logs").exists()


def test_options_that_msrun_would_take_for_its_own_reach_the_program(tmp_path: Path) -> None:
    given = ["--work", "w.json", "--join=no", "--log", "x", "--"]
    source = "print(sys.argv[1:]) if rank == '0' else None"
    ended = launch(tmp_path, "--ranks", "2", "--", program(tmp_path, source), *given)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1] == str(given)


@BOTH_WAYS
def test_an_msrun_that_is_a_script_of_the_shell_is_run_by_it(tmp_path: Path, fork: str) -> None:
    variables = environment(tmp_path)
    own = tmp_path / "own_programs"
    own.mkdir()
    stand_in = tmp_path / "programs" / "msrun"
    (own / "msrun").write_text(f'#!/bin/sh\nexec {sys.executable} {stand_in} "$@"\n')
    (own / "msrun").chmod(0o755)
    given = program(tmp_path, "print('rank', rank)")
    path = f"{own}:{variables['PATH']}"
    ended = launch(tmp_path, "--ranks", "2", "--", given, PATH=path, MINDGRPO_FORK=fork)
    assert (ended.returncode, ended.stdout) == (0, "rank 0\n"), ended.stderr


def test_a_busy_port_is_refused_before_any_rank_starts(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        ended = launch(tmp_path, "--ranks", "2", "--", program(tmp_path, ""), MINDGRPO_PORT=port)
    assert ended.returncode == 2
    assert is_one_sentence(ended.stderr) and f"{port} is in use" in ended.stderr
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize("port", ["http", "80", "70000"])
def test_a_port_that_cannot_be_is_refused(tmp_path: Path, port: str) -> None:
    ended = launch(tmp_path, "--ranks", "2", "--", program(tmp_path, ""), MINDGRPO_PORT=port)
    assert ended.returncode == 2
    assert is_one_sentence(ended.stderr) and f"MINDGRPO_PORT={port}" in ended.stderr


def test_a_log_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "logs").touch()
    ended = launch(tmp_path, "--ranks", "1", "--", program(tmp_path, ""))
    assert ended.returncode == 2
    assert is_one_sentence(ended.stderr) and "MINDGRPO_LOG_DIR" in ended.stderr


@BOTH_WAYS
def test_a_program_sees_its_own_arguments_and_place(tmp_path: Path, fork: str) -> None:
    source = (
        "print(sys.argv, __name__, __file__, sys.path[0], os.getcwd(), 'mindspore' in sys.modules)"
    )
    path = program(tmp_path, source)
    words = ("--ranks", "1", "--", path, "--a.b", "c d", "")
    ended = launch(tmp_path, *words, MINDGRPO_FORK=fork, PYTHONPATH="")  # with all imports
    assert ended.returncode == 0, ended.stderr
    seen = f"{[path, '--a.b', 'c d', '']} __main__ {path} {tmp_path} {os.getcwd()} {fork == '1'}"
    assert ended.stdout == seen + "\n"


@BOTH_WAYS
def test_only_rank_0_speaks_and_every_rank_keeps_its_log(tmp_path: Path, fork: str) -> None:
    path = program(tmp_path, "print('rank', rank)")
    ended = launch(tmp_path, "--ranks", "3", "--", path, MINDGRPO_FORK=fork)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "rank 0\n"
    (logs,) = (tmp_path / "logs").iterdir()
    assert (logs / "worker_2.log").read_text() == "rank 2\n"


@pytest.mark.parametrize("ranks", ["1", "2"])
@pytest.mark.parametrize(
    ("source", "status"),
    [
        ("print('mindgrpo: no.'); sys.exit(2)", 2),
        ("raise ValueError('broken')", 1),
        ("sys.exit('message')", 1),
        ("sys.exit()", 0),
        ("sys.exit(7)", 7),
    ],
)
def test_a_status_is_passed_on(tmp_path: Path, ranks: str, source: str, status: int) -> None:
    ended = launch(tmp_path, "--ranks", ranks, "--", program(tmp_path, source))
    assert ended.returncode == status


@BOTH_WAYS
def test_the_rank_that_failed_first_is_named_with_its_last_lines(tmp_path: Path, fork: str) -> None:
    source = "if rank == '1': raise ValueError('broken here')\ntime.sleep(3600)"
    path = program(tmp_path, source)
    ended = launch(tmp_path, "--ranks", "2", "--", path, MINDGRPO_FORK=fork)
    assert ended.returncode == 1
    last = ended.stderr.splitlines()[-1]
    assert last.startswith(
        "mindgrpo: rank 1 failed: ValueError: broken here; its traceback is above"
    )
    assert "program.py" in ended.stderr and "full logs: " in last


@BOTH_WAYS
@pytest.mark.parametrize("ranks", ["1", "2"])
def test_a_rank_that_was_killed_is_named(tmp_path: Path, ranks: str, fork: str) -> None:
    last = str(int(ranks) - 1)
    source = f"if rank == '{last}': os.kill(os.getpid(), 9)\ntime.sleep(3600)"
    path = program(tmp_path, source)
    ended = launch(tmp_path, "--ranks", ranks, "--", path, MINDGRPO_FORK=fork)
    assert ended.returncode == 1
    assert f"rank {last} was killed by signal 9" in ended.stderr.splitlines()[-1]


@BOTH_WAYS
@pytest.mark.parametrize("ranks", ["1", "2"])
def test_ctrl_c_ends_the_processes_of_this_job_only(tmp_path: Path, ranks: str, fork: str) -> None:
    source = "print(os.getpid()); time.sleep(3600)"
    command = ["bash", str(ROOT / "scripts" / "launch.sh"), "--ranks", ranks, "--"]
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    job = subprocess.Popen(
        [*command, program(tmp_path, source)],
        env=environment(tmp_path, MINDGRPO_FORK=fork),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        # A terminal's job has not been told to ignore the signal, what pytest runs may have been.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert job.stdout is not None
    rank_0 = int(job.stdout.readline())
    job.send_signal(signal.SIGINT)
    assert job.wait() == 130
    assert not is_alive(rank_0)
    assert bystander.poll() is None
    bystander.kill()
    bystander.wait()


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@BOTH_WAYS
def test_a_rank_that_crashes_after_its_program_has_ended_well_fails_no_job(
    tmp_path: Path, fork: str
) -> None:
    """As where MindSpore's cluster is taken apart. Its scheduler, or the stand-in, then waits for ever."""
    source = """
import atexit, signal

def crash():
    status = os.environ["MINDGRPO_STATUS_DIR"]
    while not os.path.exists(os.path.join(status, "finished_0")):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGSEGV)

if rank == "1":
    atexit.register(crash)
"""
    ended = launch(tmp_path, "--ranks", "2", "--", program(tmp_path, source), MINDGRPO_FORK=fork)
    assert ended.returncode == 0, ended.stderr
    assert "signal" not in ended.stderr


def test_a_forked_rank_ends_with_the_worker_that_stands_in_for_it(tmp_path: Path) -> None:
    source = "print(os.getpid(), flush=True); time.sleep(3600)"
    command = ["bash", str(ROOT / "scripts" / "launch.sh"), "--ranks", "1", "--"]
    job = subprocess.Popen(
        [*command, program(tmp_path, source)],
        env=environment(tmp_path, MINDGRPO_FORK="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert job.stdout is not None
    rank = int(job.stdout.readline())
    server = parent_of(rank)
    (record,) = (tmp_path / "logs").glob("*/status/rank_0")
    worker = int(record.read_text().split()[1])
    assert worker not in (rank, server)
    os.kill(worker, signal.SIGKILL)
    assert job.wait() == 1
    assert "rank 0 was killed by signal 9" in job.communicate()[1]
    assert not is_alive(rank) and not is_alive(server)


def test_a_refused_configuration_leaves_no_process_and_no_folder(tmp_path: Path) -> None:
    path = program(tmp_path, "print('started')")
    ended = launch(tmp_path, "--ranks", "2", "--", path, "--config", "none.yaml", MINDGRPO_FORK="1")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert is_one_sentence(ended.stderr) and "none.yaml" in ended.stderr
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize(
    ("flag", "value", "allowed"),
    [
        ("--ranks", "3", "1, 2, 4, 8"),
        ("--example", "tiny", "tiny_arithmetic, tiny_moe, tiny_shapes"),
    ],
)
def test_quickstart_names_the_layouts_and_the_examples_that_it_has(
    flag: str, value: str, allowed: str
) -> None:
    command = ["bash", str(ROOT / "scripts" / "quickstart.sh"), flag, value]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 2
    assert is_one_sentence(ended.stderr) and f"{flag} {value}" in ended.stderr
    assert allowed in ended.stderr


def test_setup_refuses_a_python_that_does_not_run(tmp_path: Path) -> None:
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    (scripts / "setup_env.sh").write_text((ROOT / "scripts" / "setup_env.sh").read_text())
    ended = subprocess.run(
        ["bash", str(scripts / "setup_env.sh")],
        env=os.environ | {"PYTHON": "/nowhere/python3"},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 2
    assert is_one_sentence(ended.stderr) and "PYTHON=/nowhere/python3" in ended.stderr
    assert not (tmp_path / ".venv").exists()


PIP = """#!/bin/sh
echo "${PYTHONDONTWRITEBYTECODE-unset} $*" >>"$0.calls"
case "$*" in
*"pip install"*)
    printf 'Collecting one>=2\\n  Downloading one-2.whl (9 MB)\\nRequirement already satisfied\\n'
    printf 'Installing collected packages: one, two\\n'
    case "$*" in *"${FAILS:-no such words}"*) exit 1;; esac;;
*"pip --version"*) ;;
*) echo 3.11;;
esac
"""


def set_up(
    root: Path, *words: str, venv: str = ".venv", **variables: str
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Runs setup_env.sh of a clone whose environment has a Python that only says what it is asked."""
    (root / "scripts").mkdir(parents=True)
    for name in ("setup.py", "scripts/setup_env.sh"):
        (root / name).write_text((ROOT / name).read_text())
    python = fake_python(root / venv / "bin" / "python")
    python.write_text(PIP)
    ended = subprocess.run(
        ["bash", str(root / "scripts" / "setup_env.sh"), *words],
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"} | variables,
        capture_output=True,
        text=True,
    )
    calls = Path(f"{python}.calls")
    return ended, calls.read_text().splitlines() if calls.exists() else []


@pytest.mark.parametrize("fails", ["", "--no-deps mindspore", "numpy<2", "--editable"])
def test_setup_shows_what_pip_does_and_holds_it_to_numpy_1(tmp_path: Path, fails: str) -> None:
    root = tmp_path / "a clone"
    ended, _ = set_up(root, FAILS=fails or "no such words")
    assert ended.returncode == (2 if fails else 0)
    shown = {"  Downloading one-2.whl (9 MB)", "  Installing collected packages"}
    assert shown <= {*ended.stdout.splitlines()}
    held = f"file://{root}/mindgrpo/constraints.txt".replace(" ", "%20")
    assert (root / ".venv/pip.conf").read_text() == f"[install]\nconstraint = {held}\n"
    assert (root / ".venv/.mindgrpo-installed").exists() == (not fails)
    if fails:
        assert is_one_sentence(ended.stderr) and "pip could not install" in ended.stderr


def test_setup_compiles_what_a_run_imports_and_nothing_else(tmp_path: Path) -> None:
    """Also where Python is told to keep nothing: every rank would compile all it imports, at every start."""
    _, calls = set_up(tmp_path / "clone")
    installs = [call for call in calls if "pip install" in call]
    assert installs and all("--no-compile" in call for call in installs)
    *_, last, other = calls
    assert calls.index(last) > calls.index(installs[-1])
    for call in (last, other):
        assert call.startswith(" -c ")
    assert "import_for_ranks" in last + other


def test_setup_installs_every_requirement_together_at_last(tmp_path: Path) -> None:
    requirements = [one for one in metadata.requires("mindgrpo") or () if "extra ==" not in one]
    names = {re.split(r"[<>=]", one)[0] for one in requirements}
    _, calls = set_up(tmp_path / "clone")
    *_, last = (call for call in calls if "pip install" in call)
    assert names == {re.split(r"[<>=]", word)[0] for word in last.split("--no-compile ")[1].split()}
    _, calls = set_up(tmp_path / "other", "dev")
    *_, last = (call for call in calls if "pip install" in call)
    assert f"--editable {tmp_path / 'other'}[dev] mindspore" in last


def test_setup_goes_on_with_the_pip_that_is_there(tmp_path: Path) -> None:
    ended, calls = set_up(tmp_path / "clone", FAILS="--upgrade pip")
    assert ended.returncode == 0 and any("--no-deps mindspore" in call for call in calls)


def test_setup_makes_an_environment_of_its_own_for_another_mindspore(tmp_path: Path) -> None:
    root = tmp_path / "clone"
    ended, calls = set_up(root, venv=".venv-mindspore-2.9", MINDGRPO_MINDSPORE="2.9")
    assert ended.returncode == 0 and not (root / ".venv").exists()
    of_mindspore = [call for call in calls if "pip install" in call and " mindspore" in call]
    assert of_mindspore and all(" mindspore==2.9.*" in call for call in of_mindspore)
    ended, calls = set_up(tmp_path / "other", MINDGRPO_MINDSPORE="2.8")
    assert ended.returncode == 2 and not calls
    assert is_one_sentence(ended.stderr) and "MINDGRPO_MINDSPORE is '2.8'" in ended.stderr


def test_the_users_launch_script_names_all_that_it_misses_at_once() -> None:
    script = ROOT / "examples" / "grpo" / "qwen_grpo_tutorial" / "run_grpo_vllm.sh"
    bare = {"PATH": os.environ["PATH"]}
    ended = subprocess.run(["bash", str(script)], env=bare, capture_output=True, text=True)
    assert ended.returncode == 2 and ended.stdout == ""
    assert is_one_sentence(ended.stderr)
    assert "QWEN_MODEL_PATH" in ended.stderr and "DATASET_FILE" in ended.stderr
