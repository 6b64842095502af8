"""launch.sh for several hosts: what it refuses, and one run on two networks of this machine whose line is cut.

That results are those of one host is shown by scripts/faults/two_hosts.py, of which this runs the other half. Does not
prove anything about machines with clocks, processors or kernels of their own.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FAULTS = ROOT / "scripts" / "faults"
MAIN = "examples/grpo/qwen_grpo_tutorial/main.py"
TOKEN = "0123456789abcdef"


def _launch(*words: str, token: str = TOKEN) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"MINDGRPO_JOB_TOKEN": token}
    return subprocess.run(
        ["bash", str(ROOT / "scripts" / "launch.sh"), "--ranks", "8", *words, "--", MAIN],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


MASTER = ("--master", "10.0.0.1:17000")


@pytest.mark.parametrize(
    ("words", "said"),
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
    words: tuple[str, ...], said: str
) -> None:
    ended = _launch(*words)
    assert ended.returncode == 2 and said in ended.stderr
    assert ended.stderr.startswith("mindgrpo: ")


def test_a_secret_that_is_short_is_refused() -> None:
    ended = _launch("--hosts", "2", *MASTER, token="short")
    assert ended.returncode == 2 and "MINDGRPO_JOB_TOKEN has 5 characters" in ended.stderr


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(FAULTS))
    if why := importlib.import_module("two_hosts").missing():
        pytest.skip(why)
    return FAULTS / "two_hosts.py"


def _networks() -> set[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True)
    return set(listed.stdout.split())


def test_both_hosts_end_with_the_others_name_when_their_line_is_cut(script: Path) -> None:
    before = _networks()
    words = ["--cases", "cut", "--seconds", "4"]
    ended = subprocess.run(
        [sys.executable, str(script), *words], capture_output=True, text=True, timeout=240
    )
    told = json.loads(ended.stdout)
    assert told["good"] and ended.returncode == 0, told
    assert told["in"].endswith("of step 2")
    for line in told["last_lines"]:
        assert "cannot be reached for 4 s" in line and "was last seen in phase" in line
    assert _networks() <= before
