"""Five hundred steps of a very small model, looked at from outside: memory, files, threads, /dev/shm and logs.

    python scripts/faults/long_run.py [--steps 500] [--ranks 8] [--from_step 50] [--keep FOLDER] [main.py's arguments]

A JSON line every 50 steps, with the least and the most memory in the last WINDOW of them, then one with the verdict;
status 1 if the resident memory of the ranks, or of vLLM's
engines, grew by GROWTH or more after --from_step, a rank's open files, threads, the job's processes or /dev/shm are
not what they were, or a log was not turned over. The run saves, evaluates, scores in its pool and writes to TensorBoard
as it goes. Memory is the sum over ranks, the mean over a window of WINDOW steps at each end, as one look may fall into
a rollout and the next into an update. Refuses to look at processes that are not this job's.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from job import SHARED_MEMORY, Job
from kill_matrix import words

GROWTH = 0.02
WINDOW = 25  # steps
LOOK_SECONDS = 0.25
LONGEST_RUN = 3600.0
LOG_BACKUPS = 2
ENGINE = re.compile("mindgrpo_engine|^VLLM::")
LOG_MEGABYTES = 0.01
ARGUMENTS: dict[str, Any] = {
    "rl_config.prompts_per_step": 4,
    "rl_config.num_generations": 4,
    "rl_config.eval_steps": 50,
    "rl_config.eval_samples": 16,
    "rl_config.save_ckpt_interval": 25,
    "rl_config.save_max_ckpt_num": 2,
    "rl_config.epochs": 1000,
    "generate_config.sampling_config.max_tokens": 16,
    "monitor_config.log_max_megabytes": LOG_MEGABYTES,
    "monitor_config.log_backups": LOG_BACKUPS,
}


@dataclass(frozen=True)
class Look:
    """Of the job at a time; sums over the ranks, and over the processes of vLLM's engines, bytes."""

    step: int
    rss: int
    pss: int
    engines_rss: int
    engines_pss: int
    files: tuple[int, ...]
    threads: tuple[int, ...]
    processes: int
    shared_memory: int
    log_bytes: int


def counted(path: Path) -> int:
    return sum(1 for _ in path.iterdir())


def bytes_of(path: Path, name: str) -> int:
    lines = path.read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def look(job: Job, pids: dict[int, int], step: int) -> Look:
    processes = [Path("/proc") / str(pid) for _, pid in sorted(pids.items())]
    running = job.processes()
    engines = [Path("/proc") / str(pid) for pid, name in running if ENGINE.search(name)]
    mark = f"mindgrpo-{job.process.pid}-"
    assert job.status_folder is not None
    logs = [path for path in job.status_folder.parent.rglob("*") if path.is_file()]
    return Look(
        step=step,
        rss=sum(bytes_of(path / "status", "VmRSS") for path in processes),
        pss=sum(bytes_of(path / "smaps_rollup", "Pss") for path in processes),
        engines_rss=sum(bytes_of(path / "status", "VmRSS") for path in engines),
        engines_pss=sum(bytes_of(path / "smaps_rollup", "Pss") for path in engines),
        files=tuple(counted(path / "fd") for path in processes),
        threads=tuple(counted(path / "task") for path in processes),
        processes=len(running),
        shared_memory=sum(p.stat().st_size for p in SHARED_MEMORY.glob(f"{mark}*")),
        log_bytes=sum(path.stat().st_size for path in logs),
    )


def steps_done(job: Job) -> int:
    metrics = job.folder / "run" / "metrics.jsonl"
    return len(metrics.read_bytes().splitlines()) if metrics.exists() else 0


def looks(job: Job, ranks: int, last_step: int) -> Iterator[Look]:
    """Until the last steps: then ranks close."""
    until = time.monotonic() + LONGEST_RUN
    pids: dict[int, int] = {}
    while job.process.poll() is None and time.monotonic() < until:
        time.sleep(LOOK_SECONDS)
        step = steps_done(job)
        if step >= last_step - 1:
            return
        if step == 0:
            continue
        if len(pids) < ranks:
            found = {rank: job.where(rank) for rank in range(ranks)}
            pids = {rank: snapshot.pid for rank, snapshot in found.items() if snapshot}
        try:
            yield look(job, pids, step)
        except OSError:
            return  # a rank has ended; the job's status tells


def window(seen: list[Look], first: int, last: int) -> list[Look]:
    return [one for one in seen if first <= one.step < last]


def memory_of(seen: list[Look], step: int) -> dict[str, Any]:
    """The least and the most of each sum, in MB, over the steps before `step`."""
    told: dict[str, Any] = {"step": step}
    recent = window(seen, step - WINDOW, step)
    for name in ("rss", "pss", "engines_rss", "engines_pss") if recent else ():
        sizes = [getattr(one, name) / 1e6 for one in recent]
        told[f"{name}_MB"] = [round(min(sizes), 1), round(max(sizes), 1)]
    return told


def counts(seen: list[Look]) -> dict[str, Any]:
    """The steady numbers of a window: what comes and goes within a step is not there most of the time."""
    return {
        "files": statistics.mode(one.files for one in seen),
        "threads": statistics.mode(one.threads for one in seen),
        "processes": statistics.mode(one.processes for one in seen),
        "shared_memory": statistics.mode(one.shared_memory for one in seen),
    }


def verdict(seen: list[Look], start: int, num_steps: int, logs: Path) -> dict[str, Any]:
    early, late = window(seen, start, start + WINDOW), window(seen, num_steps - WINDOW, num_steps)
    told: dict[str, Any] = {}
    for name in ("rss", "pss", "engines_rss"):
        before, after = (statistics.mean(getattr(one, name) for one in w) for w in (early, late))
        if not before:
            continue
        told[name] = {
            "before_MB": round(before / 1e6, 1),
            "after_MB": round(after / 1e6, 1),
            "growth": round(after / before - 1, 4),
        }
    told["before"], told["after"] = counts(early), counts(late)
    turned = sorted(path.name for path in logs.glob("worker_0.log*"))
    told["logs"] = {"files": turned, "bytes": late[-1].log_bytes}
    wrong = [f"{n} changed" for n in told["before"] if told["before"][n] != told["after"][n]]
    for name in ("rss", "engines_rss"):
        if name in told and told[name]["growth"] >= GROWTH:
            wrong.append(f"{name} grew by {told[name]['growth']:.1%}")
    if len(turned) != 1 + LOG_BACKUPS:
        wrong.append("logs were not turned over")
    return {"good": not wrong, "wrong": wrong, **told}


def arguments() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--from_step", type=int, default=50)
    parser.add_argument("--keep", type=Path)
    given, more = parser.parse_known_args()
    if given.steps < given.from_step + 2 * WINDOW:
        parser.error(f"--steps must be {given.from_step + 2 * WINDOW} or more")
    return given, more


def main() -> int:
    given, more = arguments()
    folder = given.keep or Path(tempfile.mkdtemp(prefix="mindgrpo-long-"))
    board = {"rl_config.max_steps": given.steps, "rl_config.tensorboard_dir": folder / "board"}
    seen: list[Look] = []
    with Job(folder, given.ranks, [*words(ARGUMENTS | board), *more]) as job:
        for one in looks(job, given.ranks, given.steps):
            if seen and one.step // 50 > seen[-1].step // 50:
                print(json.dumps(memory_of(seen, one.step)), flush=True)
            seen.append(one)
        print(json.dumps(memory_of(seen, given.steps)), flush=True)
        status = job.process.wait(LONGEST_RUN)
        done = steps_done(job)
        assert job.status_folder is not None
        told = verdict(seen, given.from_step, given.steps, job.status_folder.parent)
    if status or done != given.steps:
        told = told | {"good": False, "wrong": [*told["wrong"], f"status {status}, {done} steps"]}
    print(json.dumps({"steps": done, "ranks": given.ranks, **told}))
    if given.keep is None:
        shutil.rmtree(folder)
    return 0 if told["good"] else 1


if __name__ == "__main__":
    os.environ.setdefault("GLOG_v", "3")
    sys.exit(main())
