"""The Ray starter of the examples on two Ray nodes of this machine: a run's results, and a node that is lost.

    python scripts/faults/ray_job.py [--cases same lost] [--steps 3] [--ranks 4] [--keep FOLDER] [MORE]

A JSON line a case; status 1 if one is not good. The nodes are two networks, each with a raylet. `same`: the run has the
metrics, completions and weights of one of two hosts that the launcher's own flags started, bit for bit; times
excepted. `lost`: the second node's raylet is killed in step 2; the last line names that node, and all ranks end.
Needs root and the package ray.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from job import EXAMPLE, PROGRAM, ROOT
from run_cases import run_cases
from slurm_job import num_rows, unequal, wait_until
from two_hosts import (
    ADDRESSES,
    ARGUMENTS,
    LONGEST_RUN,
    Networks,
    missing,
    on_networks,
    start,
    stop,
)

NAMES = ("first-node", "second-node")
PORT = 6389
STARTER = "examples/cluster/ray_start.py"
# From the loss to the end of the starter: ranks save, MINDGRPO_STOP_SECONDS at most.
LOST_SECONDS = 120.0


def cannot() -> str:
    """Why there can be no such cluster here; empty if there can."""
    if importlib.util.find_spec("ray") is None:
        return "the package ray is not installed (pip install 'mindgrpo[ray]')"
    return missing()


class RayNodes:
    """The processes of Ray on both networks, in sessions of their own."""

    def __init__(self, folder: Path, networks: Networks) -> None:
        self._folder, self._networks = folder, networks
        self._nodes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        ray = [str(Path(sys.executable).parent / "ray"), "start", "--block", "--num-cpus=2"]
        ray += ["--object-store-memory=80000000", "--disable-usage-stats"]
        first = [
            "--head",
            f"--port={PORT}",
            "--include-dashboard=false",
            f"--temp-dir={self._folder}",
        ]
        for index, more in enumerate((first, [f"--address={ADDRESSES[0]}:{PORT}"])):
            command = [
                *ray,
                *more,
                f"--node-ip-address={ADDRESSES[index]}",
                f"--node-name={NAMES[index]}",
            ]
            with (self._folder / f"{NAMES[index]}.screen").open("w") as screen:
                node = subprocess.Popen(
                    [*self.on(index), *command],
                    env=self.environment(),
                    stdout=screen,
                    stderr=screen,
                    start_new_session=True,
                )
            self._nodes.append(node)
            wait_until(partial(self._has_joined, index), "a node of Ray had not started")

    def _has_joined(self, index: int) -> bool:
        screen = (self._folder / f"{NAMES[index]}.screen").read_text()
        if self._nodes[index].poll() is not None:
            raise RuntimeError(f"Ray does not start here:\n{screen[-1500:]}")
        return "will now block" in screen

    def raylets(self, session: int) -> list[int]:
        pids = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdecimal() and os.getsid(int(entry.name)) == session:
                    name = (entry / "comm").read_text().strip()
                    pids += [int(entry.name)] if name == "raylet" else []
            except OSError:
                continue
        return pids

    def kill_raylet(self, index: int) -> None:
        for pid in self.raylets(self._nodes[index].pid):
            os.kill(pid, signal.SIGKILL)

    def on(self, index: int) -> list[str]:
        return ["ip", "netns", "exec", self._networks.names[index]]

    def environment(self) -> dict[str, str]:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        return os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)}

    def stop(self) -> None:
        for node in reversed(self._nodes):
            node.terminate()  # `ray start --block` ends what it started
        for node in self._nodes:
            try:
                node.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(node.pid, signal.SIGKILL)


@contextmanager
def two_nodes(folder: Path, networks: Networks) -> Iterator[RayNodes]:
    # The sockets of Ray have short paths only.
    own = Path(tempfile.mkdtemp(prefix="mgray-"))
    nodes = RayNodes(own, networks)
    try:
        nodes.start()
        yield nodes
    finally:
        nodes.stop()
        shutil.copytree(
            own, folder / "ray", symlinks=True, ignore=shutil.ignore_patterns("sockets")
        )
        shutil.rmtree(own, ignore_errors=True)


def begin(
    nodes: RayNodes, folder: Path, ranks: int, arguments: Sequence[str]
) -> subprocess.Popen[bytes]:
    (folder / "by_ray").mkdir(parents=True)
    (folder / "by_ray" / "examples").symlink_to(ROOT / "examples")
    program = [PROGRAM, "--config", EXAMPLE, *arguments, "--output_dir", str(folder / "run")]
    address = f"--address={ADDRESSES[0]}:{PORT}"
    command = [
        sys.executable,
        str(ROOT / STARTER),
        address,
        "--hosts=2",
        f"--ranks={ranks}",
        "--",
        *program,
    ]
    with (folder / "screen").open("w") as screen:
        return subprocess.Popen(
            [*nodes.on(0), *command],
            cwd=folder / "by_ray",
            env=nodes.environment() | {"MINDGRPO_LOG_DIR": str(folder / "logs")},
            stdout=screen,
            stderr=screen,
        )


def same(folder: Path, networks: Networks, ranks: int, arguments: Sequence[str]) -> dict[str, Any]:
    with two_nodes(folder, networks) as nodes:
        status = begin(nodes, folder, ranks, arguments).wait(LONGEST_RUN)
    jobs = start(folder / "by_flags", networks, ranks, arguments)
    try:
        expected = [job.end(time.monotonic(), LONGEST_RUN).status for job in jobs]
    finally:
        stop(jobs)
    if status or any(expected):
        return {"good": False, "status": status, "by_flags": expected, "last_lines": tail(folder)}
    wrong = unequal(folder / "run", folder / "by_flags" / "host_0" / "run")
    return {"good": not wrong, "steps": num_rows(folder / "run"), "different": wrong}


def lost(folder: Path, networks: Networks, ranks: int, arguments: Sequence[str]) -> dict[str, Any]:
    with two_nodes(folder, networks) as nodes:
        starter = begin(nodes, folder, ranks, [*arguments, "--rl_config.max_steps", "500"])
        wait_until(
            lambda: num_rows(folder / "run") > 0 or starter.poll() is not None, "there was no step"
        )
        nodes.kill_raylet(1)
        struck_at = time.monotonic()
        try:
            status = starter.wait(LOST_SECONDS)
        except subprocess.TimeoutExpired:
            starter.terminate()
            status = -starter.wait()
        seconds = time.monotonic() - struck_at
        wait_until(lambda: not ranks_of(folder), "the ranks had not ended")
    lines = (folder / "screen").read_text().splitlines()
    name = re.escape(f"node {NAMES[1]} ({ADDRESSES[1]}, host 1) is lost")
    named = [line for line in lines if re.search(name, line)]
    return {
        "good": status == 1 and len(named) > 0 and re.search(name, lines[-1]) is not None,
        "status": status,
        "seconds": round(seconds, 1),
        "named": named,
        "saved": any("checkpoint: " in line for line in lines),
        "last_lines": lines[-1:],
    }


def ranks_of(folder: Path) -> list[int]:
    """Processes of the job: its log folder is in their environment."""
    mark = f"MINDGRPO_STATUS_DIR={folder / 'logs'}".encode()
    pids = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and mark in (entry / "environ").read_bytes():
                pids.append(int(entry.name))
        except OSError:
            continue
    return pids


def tail(folder: Path) -> list[str]:
    return (folder / "screen").read_text().splitlines()[-15:]


def main() -> int:
    """`--ranks` are those of both nodes."""
    cases = {case.__name__: partial(on_networks, case) for case in (same, lost)}
    return run_cases(__doc__, cases, cannot(), ARGUMENTS, ranks=4, steps=3)


if __name__ == "__main__":
    sys.exit(main())
