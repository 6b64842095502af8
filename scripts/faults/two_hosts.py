"""The bundled example on two hosts that are networks of one machine, and what follows when their line is cut.

    python scripts/faults/two_hosts.py [--steps 3] [--cases same cut kill] [--seconds 5] [--keep FOLDER] [main.py's]

A JSON line a case; status 1 if one is not good. `same`: 2 hosts of 4 ranks have the metrics and the final weights of
one host of 8. `cut`: the line is set down in step 2, and both hosts end by themselves within the deadline of --seconds
and MARGIN_SECONDS, with a status that is not 0, each with the name of the other, and leave nothing behind. `kill`: the
same after a rank of the second host was killed, but within MARGIN_SECONDS, and both name that rank. Makes two network
namespaces and a line between them, and takes them down whatever happens. Refuses to be run by others than root.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from job import Ended, Job
from kill_matrix import comparable, differences, words

HOSTS, RANKS = 2, 4
VICTIM = 3
CASES = ("same", "cut", "kill")
ADDRESSES = ("10.77.91.1", "10.77.91.2")
PORT = 17800
# From the deadline to the end of the last process: the launcher gives ranks 2 s to end by themselves.
MARGIN_SECONDS = 8.0
LONGEST_RUN = 300.0
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


def start(folder: Path, networks: Networks, arguments: list[str]) -> list[Job]:
    jobs = []
    for index, name in enumerate(networks.names):
        host = ["--hosts", f"{HOSTS}", "--host_index", f"{index}"]
        launcher = [*host, "--master", f"{ADDRESSES[0]}:{PORT}"]
        place = folder / f"host_{index}"
        jobs.append(Job(place, RANKS, arguments, launcher, ["ip", "netns", "exec", name]))
    return jobs


def finish(jobs: list[Job], struck_at: float, seconds: float) -> list[Ended]:
    return [job.end(struck_at, seconds) for job in jobs]


def stop(jobs: list[Job]) -> None:
    for job in jobs:
        if job.process.poll() is None:
            job.process.terminate()
    for job in jobs:
        job.process.wait(120)


def unlike(run: Path, reference: Path) -> list[str]:
    """Metrics and weights that differ in a bit; how long a reward took is no result."""
    return [what for what in differences(run, reference) if not what.endswith("/seconds")]


def largest_difference(run: Path, reference: Path) -> float:
    """Of all metrics, relative to the larger of 1 and the value."""
    pairs = zip(*(comparable(folder / "metrics.jsonl") for folder in (run, reference)), strict=True)
    found = [
        abs(mine[key] - other[key]) / max(1.0, abs(other[key]))
        for mine, other in pairs
        for key in mine.keys() & other.keys()
        if not key.endswith("/seconds")
        and isinstance(mine[key], int | float)
        and math.isfinite(mine[key])
    ]
    return max(found, default=math.inf)


def step_seconds(run: Path) -> float:
    """Of the fastest step."""
    rows = (run / "metrics.jsonl").read_text().splitlines()
    return min(float(json.loads(row)["time/step"]) for row in rows)


def same(folder: Path, networks: Networks, arguments: list[str]) -> dict[str, Any]:
    alone = Job(folder / "alone", RANKS, arguments)
    reference = alone.end(time.monotonic(), LONGEST_RUN)
    jobs = start(folder / "same", networks, arguments)
    try:
        ended = finish(jobs, time.monotonic(), LONGEST_RUN)
    finally:
        stop(jobs)
    told: dict[str, Any] = {
        "case": "same",
        "status": [reference.status, *(e.status for e in ended)],
    }
    if any(told["status"]):
        return told | {
            "good": False,
            "last_lines": [reference.last_line, *(e.last_line for e in ended)],
        }
    runs = jobs[0].folder / "run", alone.folder / "run"
    found = unlike(*runs)
    left = [what for one in ended for what in one.left]
    return told | {
        "good": not left and largest_difference(*runs) < 1e-4,
        "steps": len(comparable(runs[0] / "metrics.jsonl")),
        "bit_equal": not found,
        "different": found[:10],
        "largest_difference": largest_difference(*runs),
        "left": left,
        "step_seconds": {"two_hosts": step_seconds(runs[0]), "one_host": step_seconds(runs[1])},
    }


def await_step(job: Job, step: int, seconds: float) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until and job.process.poll() is None:
        found = job.where(0)
        if found is not None and found.step >= step:
            return True
        time.sleep(0.02)
    return False


def cut(folder: Path, networks: Networks, arguments: list[str], seconds: float) -> dict[str, Any]:
    names = list(ADDRESSES[::-1])
    return {"case": "cut", "deadline": seconds} | strike(
        folder / "cut", networks, arguments, lambda jobs: networks.cut(), names, seconds
    )


def kill(folder: Path, networks: Networks, arguments: list[str]) -> dict[str, Any]:
    def shoot(jobs: list[Job]) -> None:
        found = jobs[1].where(VICTIM)
        assert found is not None
        os.kill(found.pid, signal.SIGKILL)

    names = [f"rank {VICTIM} was killed by signal 9 in phase"] * HOSTS
    return {"case": "kill"} | strike(folder / "kill", networks, arguments, shoot, names, 0.0)


def strike(
    folder: Path,
    networks: Networks,
    arguments: list[str],
    blow: Callable[[list[Job]], None],
    names: list[str],
    seconds: float,
) -> dict[str, Any]:
    """What follows a blow in step 2; the last lines are to hold `names`."""
    jobs = start(folder, networks, arguments)
    try:
        reached = await_step(jobs[0], 2, LONGEST_RUN)
        struck_at = time.monotonic()
        if reached:
            blow(jobs)
        place = jobs[0].where(0)
        ended = finish(jobs, struck_at, seconds + MARGIN_SECONDS + 60.0)
    finally:
        stop(jobs)
    named = [name in one.last_line for name, one in zip(names, ended, strict=True)]
    limit = seconds + MARGIN_SECONDS
    left = [what for one in ended for what in one.left]
    ended_well = all(one.status not in (0, None) and one.seconds <= limit for one in ended)
    return {
        "good": reached and ended_well and all(named) and not left,
        "in": place.position if place else "",
        "seconds": [round(one.seconds, 2) for one in ended],
        "status": [one.status for one in ended],
        "named": named,
        "last_lines": [one.last_line for one in ended],
        "left": left,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--seconds", type=float, default=5.0, help="until a host counts as lost")
    parser.add_argument("--keep", type=Path, help="a folder for the runs, which then stay")
    given, more = parser.parse_known_args()
    if why := missing():
        print(f"mindgrpo: two hosts cannot be played here: {why}.", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    arguments = [*words(ARGUMENTS | {"rl_config.max_steps": given.steps}), *more]
    folder = given.keep or Path(tempfile.mkdtemp(prefix="mindgrpo-two-hosts-"))
    good = True
    try:
        for case in given.cases:
            # A line that was cut stays so.
            with two_networks() as networks:
                if case == "same":
                    told = same(folder, networks, arguments)
                elif case == "kill":
                    told = kill(folder, networks, arguments)
                else:
                    told = cut(folder, networks, arguments, given.seconds)
            print(json.dumps(told), flush=True)
            good = good and told["good"]
    finally:
        if given.keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
