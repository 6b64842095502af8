"""The bundled example on two hosts that are networks of one machine, and what follows when one of them is lost.

    python scripts/faults/two_hosts.py [--cases same cut kill] [--steps 2] [--ranks 4] [--keep FOLDER] [MORE]

A JSON line a case; status 1 if one is not good. `same`: 2 hosts of 2 ranks have the completions and, to rounding, the
metrics of one host of 4. `cut`: the line is set down in step 2, and both hosts end by themselves within
LOST_WITHIN_SECONDS, with a status that is not 0 and the name of the other host, and leave nothing behind. `kill`: the
same after a rank of the second host was killed; that host names the rank. Makes two network namespaces and a line
between them, and takes them down whatever happens. Refuses to be run by others than root.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from job import Ended, Job
from kill_matrix import comparable
from run_cases import run_cases

from mindgrpo.launch.options import LOST_WITHIN_SECONDS

HOSTS, RANKS = 2, 4
ADDRESSES = ("10.77.91.1", "10.77.91.2")
PORT = 17800
LONGEST_RUN = 400.0
TOLERANCE = 1e-4
ARGUMENTS: dict[str, Any] = {
    "context.backend": "device",
    "rl_config.eval_steps": 1000,
    "rl_config.eval_samples": 8,
    "rl_config.prompts_per_step": 4,
    "rl_config.num_generations": 4,
    "actor_config.parallel_config.model_parallel": 2,
    "generate_config.parallel_config.model_parallel": 2,
    "generate_config.sampling_config.max_tokens": 16,
}


def missing() -> str:
    """Why networks cannot be made here; empty if they can."""
    if os.geteuid() != 0:
        return "only root may make networks"
    if shutil.which("ip") is None:
        return "there is no program ip (package iproute2)"
    name = f"mindgrpo-try-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return "" if made.returncode == 0 else f"networks cannot be made: {made.stderr.strip()}"


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


class Networks:
    """Two, with one line between them."""

    def __init__(self) -> None:
        mark = f"{os.getpid() % 100_000}"
        self.names = [f"mindgrpo-{mark}-{i}" for i in range(HOSTS)]
        self._ends = [f"mg{mark}n{i}" for i in range(HOSTS)]

    def make(self) -> None:
        for name in self.names:
            ip("netns", "add", name)
        first, second = self._ends
        pair = ("type", "veth", "peer", "name", second, "netns", self.names[1])
        ip("link", "add", first, "netns", self.names[0], *pair)
        for name, end, address in zip(self.names, self._ends, ADDRESSES, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", end)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", end, "up")

    def cut(self) -> None:
        ip("-n", self.names[1], "link", "set", self._ends[1], "down")

    def remove(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@contextmanager
def two_networks() -> Iterator[Networks]:
    networks = Networks()
    try:
        networks.make()
        yield networks
    finally:
        networks.remove()


def start(
    folder: Path,
    networks: Networks,
    ranks: int | None,
    arguments: Sequence[str],
    ascendjob: Sequence[Mapping[str, str]] = (),
) -> list[Job]:
    """`ascendjob` has the variables of a job's operator for each host; they say what `ranks` and flags else do."""
    jobs = []
    for index, name in enumerate(networks.names):
        before = ["ip", "netns", "exec", name]
        if ascendjob:
            launcher = ["--cluster", "ascendjob"]
            before += ["env", *(f"{key}={value}" for key, value in ascendjob[index].items())]
        else:
            host = ["--hosts", f"{HOSTS}", "--host_index", f"{index}"]
            launcher = [*host, "--master", f"{ADDRESSES[0]}:{PORT}"]
        jobs.append(Job(folder / f"host_{index}", ranks, arguments, launcher, before))
    return jobs


def stop(jobs: list[Job]) -> None:
    for job in jobs:
        if job.process.poll() is None:
            job.process.terminate()
    for job in jobs:
        job.process.wait(120)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def differences(run: Path, reference: Path) -> dict[str, float | bool]:
    """Of the steps that both have: the largest of all metrics, relative to 1 or the value, and of completions."""
    pairs = zip(
        *(comparable(folder / "metrics.jsonl") for folder in (run, reference)), strict=False
    )
    relative = [
        abs(mine[key] - other[key]) / max(1.0, abs(other[key]))
        for mine, other in pairs
        for key in mine.keys() & other.keys()
        if isinstance(mine[key], int | float) and math.isfinite(mine[key])
    ]
    ours, others = (
        [
            (row["step"], row["prompt"], row["token_ids"])
            for row in rows(folder / "completions.jsonl")
        ]
        for folder in (run, reference)
    )
    both = min(len(ours), len(others))
    same_completions = both > 0 and ours[:both] == others[:both]
    return {"metrics": max(relative, default=math.inf), "same_completions": same_completions}


def are_same(run: Path, reference: Path) -> bool:
    differ = differences(run, reference)
    return differ["metrics"] < TOLERANCE and bool(differ["same_completions"])


def step_seconds(run: Path) -> float:
    """Of the fastest step."""
    return min(float(row["time/step"]) for row in rows(run / "metrics.jsonl"))


def same(folder: Path, networks: Networks, ranks: int, arguments: Sequence[str]) -> dict[str, Any]:
    alone = Job(folder / "alone", ranks, arguments)
    reference = alone.end(time.monotonic(), LONGEST_RUN)
    jobs = start(folder / "same", networks, ranks, arguments)
    try:
        ended = [job.end(time.monotonic(), LONGEST_RUN) for job in jobs]
    finally:
        stop(jobs)
    statuses = [reference.status, *(one.status for one in ended)]
    if any(statuses):
        lines = [reference.last_line, *(one.last_line for one in ended)]
        return {"good": False, "status": statuses, "last_lines": lines}
    run, expected = jobs[0].folder / "run", alone.folder / "run"
    left = [what for one in ended for what in one.left]
    return {
        "good": not left and are_same(run, expected),
        "steps": len(rows(run / "metrics.jsonl")),
        "left": left,
        "differences": differences(run, expected),
        "step_seconds": {"two_hosts": step_seconds(run), "one_host": step_seconds(expected)},
    }


def await_step(jobs: list[Job], step: int, seconds: float) -> bool:
    """Step 0 is reached where the first rank has a heartbeat: all have met by then."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and all(job.process.poll() is None for job in jobs):
        heartbeat = jobs[0].where(0)
        if heartbeat is not None and heartbeat.step >= step:
            return True
        time.sleep(0.02)
    return False


def cut(
    folder: Path, networks: Networks, ranks: int, arguments: Sequence[str], step: int = 2
) -> dict[str, Any]:
    return cut_between(start(folder / "cut", networks, ranks, arguments), networks, step)


def cut_between(jobs: list[Job], networks: Networks, step: int) -> dict[str, Any]:
    lost = [rf"host 1 \(\S+, {ADDRESSES[1]}, ranks? .*\) is lost: ranks? .* cannot be reached"]
    lost += [rf"host 0 \({ADDRESSES[0]}, ranks? .*\) is lost: it ended or cannot be reached"]
    return strike(jobs, networks.cut, lost, step)


def kill(
    folder: Path, networks: Networks, ranks: int, arguments: Sequence[str], step: int = 2
) -> dict[str, Any]:
    victim = ranks - 1
    jobs = start(folder / "kill", networks, ranks, arguments)

    def shoot() -> None:
        heartbeat = jobs[1].where(victim)
        assert heartbeat is not None
        os.kill(heartbeat.pid, signal.SIGKILL)

    lost = [rf"host 1 \(\S+, {ADDRESSES[1]}, ranks? .*\) is lost: ranks? .* ended"]
    lost += [rf"rank {victim} was killed by signal 9 in phase"]
    return strike(jobs, shoot, lost, step)


def strike(
    jobs: list[Job], blow: Callable[[], None], patterns: list[str], step: int
) -> dict[str, Any]:
    """What follows a blow in a step; each host's last line is to match its pattern."""
    try:
        reached = await_step(jobs, step, LONGEST_RUN)
        struck_at = time.monotonic()
        if reached:
            blow()
        heartbeat = jobs[0].where(0)
        ended = end_all(jobs, struck_at)
    finally:
        stop(jobs)
    named = [
        bool(re.search(pattern, one.last_line))
        for pattern, one in zip(patterns, ended, strict=True)
    ]
    in_time = all(one.status != 0 and one.seconds <= LOST_WITHIN_SECONDS for one in ended)
    left = [what for one in ended for what in one.left]
    return {
        "good": reached and in_time and all(named) and not left,
        "in": heartbeat.position if heartbeat else "",
        "seconds": [round(one.seconds, 2) for one in ended],
        "status": [one.status for one in ended],
        "named": named,
        "last_lines": [one.last_line for one in ended],
        "left": left,
    }


def end_all(jobs: list[Job], struck_at: float) -> list[Ended]:
    """At the same time: each is looked at when it has ended, and not when those before it have."""
    with ThreadPoolExecutor(len(jobs)) as pool:
        return list(pool.map(lambda job: job.end(struck_at, LOST_WITHIN_SECONDS + 60.0), jobs))


# On two networks, from the folder, the number of ranks and main.py's arguments.
NetworksCase = Callable[[Path, Networks, int, Sequence[str]], dict[str, Any]]


def on_networks(
    case: NetworksCase, folder: Path, ranks: int, arguments: Sequence[str]
) -> dict[str, Any]:
    """Networks of the case's own: a line that was cut stays so."""
    with two_networks() as networks:
        return case(folder, networks, ranks, arguments)


def main() -> int:
    cases = {case.__name__: partial(on_networks, case) for case in (same, cut, kill)}
    return run_cases(__doc__, cases, missing(), ARGUMENTS, ranks=RANKS, steps=2)


if __name__ == "__main__":
    sys.exit(main())
