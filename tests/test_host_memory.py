"""The host's memory, watched: what is written and said, and how a run and no other program is ended.

Memory that runs out is played by figures. Does not prove that a run is ended before the system does it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tables import each_row

from mindgrpo.config.observation import MonitorConfig
from mindgrpo.monitor.host_memory import HostMemory, HostMemoryMonitor, host_memory

ROOT = Path(__file__).resolve().parent.parent
GIB = 2**30


class Host:
    """A host of 100 GiB whose use is set by the test, and what the monitor did."""

    def __init__(self) -> None:
        self.used = 50
        self.said: list[str] = []
        self.ended = 0

    def read(self) -> HostMemory:
        return HostMemory(self.used * GIB, 100 * GIB)

    def end(self) -> None:
        self.ended += 1


@pytest.fixture
def host() -> Host:
    return Host()


Make = Callable[..., HostMemoryMonitor]


@pytest.fixture
def make(host: Host, tmp_path: Path) -> Iterator[Make]:
    made = []

    def monitor(processes: dict[int, int] | None = None, **settings: Any) -> HostMemoryMonitor:
        own = {0: os.getpid()} if processes is None else processes
        path = tmp_path / "host_memory.jsonl"
        config = MonitorConfig(**settings)
        made.append(HostMemoryMonitor(config, path, own, host.said.append, host.read, host.end))
        return made[-1]

    yield monitor
    for each in made:
        each.stop()


def rows_of(folder: Path) -> list[dict[str, Any]]:
    path = folder / "host_memory.jsonl"
    return [json.loads(line) for line in path.open()] if path.exists() else []


def test_every_look_is_written_with_the_hosts_and_the_ranks_memory(
    make: Make, host: Host, tmp_path: Path
) -> None:
    monitor = make(host_monitor_interval=1.0)
    monitor.look()
    monitor.step = 2
    host.used = 60
    monitor.look()
    rows = rows_of(tmp_path)
    assert [(row["step"], row["share"]) for row in rows] == [(1, 0.5), (2, 0.6)]
    assert rows[0]["used"] == 50 * GIB and rows[0]["total"] == 100 * GIB
    assert rows[0]["rss"]["0"] > 2**20
    assert host.said == []


def test_the_steps_that_were_asked_for_are_written_and_no_others(
    make: Make, tmp_path: Path
) -> None:
    monitor = make(host_monitor_interval=1.0, host_monitor_steps=[2, [4, 5]])
    for step in range(1, 7):
        monitor.step = step
        monitor.look()
    assert [row["step"] for row in rows_of(tmp_path)] == [2, 4, 5]


def test_above_the_threshold_is_told_once_until_it_was_well_below(make: Make, host: Host) -> None:
    monitor = make(host_monitor_interval=1.0, host_max_memory_threshold=0.9)
    for used in (91, 92, 89, 91, 80, 91):
        host.used = used
        monitor.look()
    assert [words.split("used to ")[1][:5] for words in host.said] == ["91.0%", "91.0%"]
    assert "above monitor_config.host_max_memory_threshold 0.9" in host.said[0]
    assert monitor.exceeded is None and host.ended == 0


def test_with_protection_the_run_is_asked_to_end_and_ended_where_that_cannot_wait(
    make: Make, host: Host
) -> None:
    monitor = make(host_memory_protection=True, host_max_memory_threshold=0.9)
    monitor.look()
    assert monitor.exceeded is None
    host.used = 93
    monitor.look()
    assert monitor.exceeded is not None and "93.0%" in monitor.exceeded
    assert host.ended == 0
    host.used = 96
    monitor.look()
    assert host.ended == 1
    assert "ending this run at once" in host.said[-1]


@pytest.mark.parametrize(
    ("settings", "seconds"),
    [
        ({}, None),
        ({"host_monitor_interval": 0.0}, None),
        ({"host_monitor_interval": 0.5}, 0.5),
        ({"host_memory_protection": True}, 1.0),
        ({"host_memory_protection": True, "host_monitor_interval": 5.0}, 5.0),
    ],
)
def test_how_often_it_looks(settings: dict[str, Any], seconds: float | None) -> None:
    assert MonitorConfig(**settings).seconds == seconds


def test_its_thread_looks_until_it_is_stopped(make: Make, tmp_path: Path) -> None:
    monitor = make(host_monitor_interval=0.01)
    monitor.start()
    while len(rows_of(tmp_path)) < 3:
        time.sleep(0.01)
    monitor.stop()
    assert not monitor._thread.is_alive()


def test_a_rank_that_has_ended_counts_nothing(make: Make, tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    monitor = make({0: os.getpid(), 1: ended.pid}, host_monitor_interval=1.0)
    ended.communicate(b"\n")
    monitor.look()
    assert rows_of(tmp_path)[0]["rss"]["1"] == 0


ENDING = """
import os, sys
from pathlib import Path
from mindgrpo.config.observation import MonitorConfig
from mindgrpo.monitor.host_memory import HostMemory, HostMemoryMonitor
settings = MonitorConfig(host_memory_protection=True, host_monitor_interval=0.05)
full = lambda: HostMemory(99, 100)
monitor = HostMemoryMonitor(settings, Path(sys.argv[1]), {0: os.getpid()}, print, full)
monitor.start()
import time; time.sleep(3600)
"""


def test_what_it_ends_is_its_own_process_and_no_other(tmp_path: Path) -> None:
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    try:
        ended = subprocess.run(
            [sys.executable, "-c", ENDING, str(tmp_path / "host_memory.jsonl")],
            env=os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parent.parent)},
            capture_output=True,
            text=True,
        )
        assert ended.returncode == 1
        assert "ending this run at once" in ended.stdout
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_the_modules_that_watch_signal_no_process() -> None:
    source = (Path(__file__).parent.parent / "mindgrpo/monitor/host_memory.py").read_text()
    for word in (".kill(", ".terminate(", "killpg", "signal", "process_iter", "pids("):
        assert word not in source, word


def a_container(root: Path, limit: str, used: int, files: int) -> None:
    folder = root / "sys/fs/cgroup"
    folder.mkdir(parents=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1\ninactive_file {files}\n")


def test_a_containers_limit_counts_and_files_that_can_be_dropped_do_not(tmp_path: Path) -> None:
    a_container(tmp_path, str(2**20), 900_000, 300_000)
    assert host_memory(tmp_path) == HostMemory(600_000, 2**20)


@each_row(
    "lines, folder, names",
    [
        ("0::/slurm/job_7/step_0", "sys/fs/cgroup/slurm/job_7", ("memory.max", "memory.current")),
        (
            "4:cpu,memory:/jobs/7\n0::/",
            "sys/fs/cgroup/memory/jobs/7",
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ),
    ],
)
def test_the_limit_of_a_job_counts_above_which_only_the_machine_s_is(
    tmp_path_factory: pytest.TempPathFactory, lines: str, folder: str, names: tuple[str, str]
) -> None:
    root = tmp_path_factory.mktemp("root")
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(f"{lines}\n")
    (root / folder).mkdir(parents=True)
    for name, text in zip((*names, "memory.stat"), (2**20, 600_000, "anon 1"), strict=True):
        (root / folder / name).write_text(f"{text}\n")
    assert host_memory(root) == HostMemory(600_000, 2**20)


def test_nothing_else_reads_the_machine_s_memory() -> None:
    package = ROOT / "mindgrpo"
    readers = [
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if re.search(r"virtual_memory\(|MemTotal|SC_PHYS_PAGES", path.read_text(encoding="utf-8"))
    ]
    assert readers == ["monitor/host_memory.py"]


@pytest.mark.parametrize("limit", ["max", str(2**62)])
def test_a_container_without_a_limit_is_the_host(tmp_path: Path, limit: str) -> None:
    a_container(tmp_path, limit, 900_000, 0)
    assert host_memory(tmp_path).total == psutil.virtual_memory().total
