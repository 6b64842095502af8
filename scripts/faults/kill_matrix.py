"""Kills a rank in every phase of a bundled example and looks at what follows.

    python scripts/faults/kill_matrix.py [--times 3] [--phases rollout ...] [--config FILE] [--no-resume]
        [--keep FOLDER]

A JSON line a case, then a table. A case is good when the job ends by itself in time with a status that is not 0, the
last line names the rank and the phase, nothing is left, and the resumed run has the metrics and the final weights of
one that nobody hurt. Which rank, and when in the run, comes from --seed. Status 1 if a case is not good.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from job import EXAMPLE, Ended, Job

STEPS = 4
ATTEMPTS = 6  # to meet a rank in a phase of a millisecond
PHASES = (  # phase, how often it comes in the run (about), seconds within which the job has to end
    ("load", 1, 10.0),
    ("compile", 4, 30.0),
    ("rollout", 2, 10.0),
    ("score", 3, 10.0),
    ("reference", 3, 10.0),
    ("old_logps", 3, 10.0),
    ("update", 3, 10.0),
    ("reshard", 1, 10.0),
    ("sync_reference", 4, 10.0),
    ("checkpoint", 2, 10.0),
    ("evaluate", 2, 10.0),
    ("export", 1, 10.0),
)
TO_GET_THERE = 240.0
ARGUMENTS = {
    "rl_config.max_steps": STEPS,
    "rl_config.eval_steps": 2,
    "rl_config.eval_samples": 32,
    "rl_config.prompts_per_step": 8,
    # For a pass of its own for old log-probs.
    "rl_config.updates_per_rollout": 2,
    "context.batch_invariant": "false",
    "ref_config.sync_ref_model": "true",
    "ref_config.ref_model_sync_steps": 1,
}
CHECKPOINTS = {"rl_config.save_ckpt_interval": 1}
# Of time (every key that ends with seconds, too) and memory, the same run twice does not say the same.
NOT_COMPARED = ("time/", "memory/rss", "compiles", "late_compiles")


@dataclass(frozen=True)
class Case:
    phase: str
    number: int
    victim: int
    occurrence: int
    limit: float


def cases(names: list[str], times: int, ranks: int, seed: int) -> Iterator[Case]:
    for phase, comes, limit in PHASES:
        chance = random.Random(f"{seed} {phase}")
        for number in range(times):
            victim, occurrence = chance.randrange(ranks), 1 + chance.randrange(comes)
            if not names or phase in names:
                yield Case(phase, number, victim, occurrence, limit)


def words(settings: dict[str, Any]) -> list[str]:
    return [word for key, value in settings.items() for word in (f"--{key}", str(value))]


def comparable(metrics: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [
        {k: v for k, v in row.items() if not (k.startswith(NOT_COMPARED) or k.endswith("/seconds"))}
        for row in rows
    ]


def differences(run: Path, reference: Path) -> list[str]:
    """Bit by bit: metrics step by step, and the final weights."""
    found = []
    ours, theirs = (comparable(folder / "metrics.jsonl") for folder in (run, reference))
    if len(ours) != len(theirs):
        found.append(f"{len(ours)} steps instead of {len(theirs)}")
    for mine, other in zip(ours, theirs, strict=False):
        found += [
            f"step {other['step']}: {k}"
            for k in sorted(mine | other)
            if mine.get(k) != other.get(k)
        ]
    for path in sorted((reference / "hf").glob("*.safetensors")):
        same = run / "hf" / path.name
        if not same.exists() or same.read_bytes() != path.read_bytes():
            found.append(f"weights: {path.name}")
    return found


def judge(case: Case, ended: Ended, where: str) -> list[str]:
    wrong = [f"left: {what}" for what in ended.left]
    if ended.status == 0:
        wrong.append("status 0")
    if ended.seconds > case.limit:
        wrong.append(f"took {ended.seconds:.1f} s, more than {case.limit:.0f}")
    if f"rank {case.victim} was killed by signal 9 in {where}" not in ended.last_line:
        wrong.append(f"last line: {ended.last_line}")
    return wrong


def strike(case: Case, job: Job) -> tuple[Ended | None, str]:
    stopped = job.stop_in(case.victim, case.phase, case.occurrence, TO_GET_THERE)
    if stopped is None:
        return None, ""
    struck_at = time.monotonic()
    os.kill(stopped.pid, signal.SIGKILL)
    return job.end(struck_at, case.limit + 60.0), stopped.position


def run_case(
    case: Case, ranks: int, folder: Path, reference: Path | None, given: list[str]
) -> dict[str, Any]:
    told: dict[str, Any] = {"phase": case.phase, "number": case.number, "rank": case.victim}
    ended, where = None, ""
    for _ in range(ATTEMPTS):
        if ended is None:
            shutil.rmtree(folder, ignore_errors=True)
            with Job(folder, ranks, given) as job:
                ended, where = strike(case, job)
    if ended is None:
        return told | {
            "good": False,
            "wrong": [f"rank {case.victim} was never in phase {case.phase}"],
        }
    wrong = judge(case, ended, where)
    told |= {"where": where, "seconds": round(ended.seconds, 2), "status": ended.status}
    if reference is not None:
        wrong += resume(ranks, folder, reference, given)
    return told | {"good": not wrong, "wrong": wrong, "last_line": ended.last_line}


def resume(ranks: int, folder: Path, reference: Path, given: list[str]) -> list[str]:
    if not (folder / "run").exists():
        return []  # killed before there was a run to go on with
    with Job(folder, ranks, [*given, "--resume_training", "true"]) as again:
        status = again.process.wait(TO_GET_THERE)
    if status:
        return [f"resuming ended with status {status}: {again.screen.splitlines()[-1]}"]
    return [f"after resuming: {what}" for what in differences(folder / "run", reference)]


def table(rows: list[dict[str, Any]]) -> str:
    lines = [f"{'phase':15} {'killed':>6} {'good':>5} {'seconds to the end, longest':>28}  ranks"]
    for phase, _, limit in PHASES:
        of = [row for row in rows if row["phase"] == phase]
        if of:
            longest = max((row.get("seconds", 0.0) for row in of), default=0.0)
            ranks = " ".join(str(row["rank"]) for row in of)
            good = sum(row["good"] for row in of)
            lines.append(
                f"{phase:15} {len(of):6} {good:5} {longest:20.1f} of {limit:4.0f}  {ranks}"
            )
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--config", default=EXAMPLE, help="of the run, from the repository on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--phases", nargs="*", default=[], choices=[phase for phase, *_ in PHASES])
    parser.add_argument("--no-resume", dest="resume", action="store_false")
    parser.add_argument(
        "--keep",
        type=Path,
        help="leaves runs and logs in this folder, and takes the unhurt run from it",
    )
    return parser.parse_args()


def main() -> int:
    given = arguments()
    folder = given.keep or Path(tempfile.mkdtemp(prefix="mindgrpo-kill-"))
    folder.mkdir(parents=True, exist_ok=True)
    settings = ["--config", given.config]
    settings += words(ARGUMENTS | (CHECKPOINTS if given.resume else {}))
    reference = None
    if given.resume:
        reference = folder / "unhurt" / "run"
        if not (reference / "summary.json").exists():
            with Job(folder / "unhurt", given.ranks, settings) as unhurt:
                if unhurt.process.wait(TO_GET_THERE):
                    sys.exit(f"the run that nobody hurt failed: {unhurt.screen}")
    rows = []
    for case in cases(given.phases, given.times, given.ranks, given.seed):
        if case.phase == "checkpoint" and not given.resume:
            continue
        place = folder / f"{case.phase}-{case.number}"
        rows.append(run_case(case, given.ranks, place, reference, settings))
        print(json.dumps(rows[-1]), flush=True)
    print(table(rows))
    if given.keep is None:
        shutil.rmtree(folder)
    return 0 if all(row["good"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
