"""Plants small faults in copies of the tree, one at a time, and tells which test finds each, after how many seconds.

    python scripts/faults/planted.py [--tier quick|all] [--fault NAME ...] [--shard 1/3] [--output table.md]

Each fault of planted_edits.py is an edit of one or two lines that still runs. It is made in a copy of what git tracks
or would track, a tier's tests run there until the first one fails (`pytest --tier TIER --first FILE -x`, the files
nearest to the changed one by themselves and then all), and the copy goes. The quick tier may miss MISSES of all, the
whole suite none: status 1 where more were missed. `--baseline` runs the tier without a fault before, which has to be
green, `--list` names the faults, and `--check` says whether each can still be planted. Further arguments go to pytest.

How they were chosen: from the package alone, room by room and before a look at the tests, as mistakes that somebody
makes in an ordinary change: a sign, a bound, an off-by-one, a sum over the wrong group, a mask or a step left out.
Every room has one at least, and those have more in which a wrong number shows nowhere. What crashes by itself was left
out.

To add one, read a file of the package and ask what could be wrong in it unnoticed; add a Fault, with the text as it
stands and as the mistake would have it, run `--check` and then `--fault NAME`. A fault that the tests miss stays in the
list, and gets a test: never the other way round, as a fault that is made for a test proves nothing.

A copy leaves nothing behind: its kernels have names by the content of their sources, and a fault in C keeps them in a
cache of its own. Whatever a run started is ended with it.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

import tiers  # noqa: E402
from import_graph import distance_to  # noqa: E402
from planted_edits import FAULTS, Fault  # noqa: E402

NATIVE = Path("mindgrpo/backend/kernels/native")
# How many of all a tier may miss, and the most seconds that it may take for one.
MISSES = {"quick": 6, "all": 0}
SECONDS = {"quick": 900, "all": 3 * 3600}
# In the environment of all that a run starts, with its folder.
MARK = "MINDGRPO_PLANTED_IN"
FOUND = re.compile(r"^(?:FAILED|ERROR) (tests/.*?)(?: - .*)?$", re.MULTILINE)
# Pytest's status; STOPPED is that of -x with workers.
PASSED, FAILED, STOPPED, NO_TESTS = 0, 1, 2, 5
NEAREST = 6


class Outcome(NamedTuple):
    fault: Fault
    is_caught: bool
    how: str
    seconds: float


def edited(fault: Fault) -> str:
    """Returns the file's text with the fault. Raises SystemExit where it cannot be planted any more."""
    text = (ROOT / fault.file).read_text(encoding="utf-8")
    if (count := text.count(fault.old)) != 1:
        sys.exit(f"{fault.name}: {fault.old!r} occurs {count} times in {fault.file}, not once")
    return text.replace(fault.old, fault.new)


def check(faults: Sequence[Fault]) -> None:
    """Raises SystemExit, or what the compiler raises, where a fault cannot be planted or would not run."""
    names = [fault.name for fault in faults]
    if twice := {name for name in names if names.count(name) > 1}:
        sys.exit(f"two faults have one name: {', '.join(sorted(twice))}")
    for fault in faults:
        text = edited(fault)
        if fault.file.endswith(".py"):
            compile(text, fault.file, "exec")
        elif fault.is_native and (compiler := shutil.which(os.environ.get("CC") or "cc")):
            with tempfile.TemporaryDirectory() as folder:
                sources = Path(shutil.copytree(ROOT / NATIVE, Path(folder) / "native"))
                (sources / Path(fault.file).name).write_text(text, encoding="utf-8")
                flags = ("-march=native", "-std=gnu11", "-fsyntax-only")
                subprocess.run([compiler, *flags, *sources.glob("*.c")], check=True)


def copy_tree(target: Path) -> None:
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if os.path.lexists(ROOT / name):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name, follow_symlinks=False)


def end_all(folder: Path) -> None:
    """Kills all that has the mark of `folder`: pytest, its workers, and jobs in sessions of their own."""
    mark = f"\0{MARK}={folder}\0".encode()
    found = True
    while found:
        found = False
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended, or is another user's
                if mark in b"\0" + (entry / "environ").read_bytes():
                    os.kill(int(entry.name), signal.SIGKILL)
                    found = True
        time.sleep(0.05)


def run(fault: Fault | None, tier: str, timeout: float, more: Sequence[str]) -> tuple[bool, str]:
    """Runs the tier in a copy with the fault; returns whether it was caught, and what by or why not."""
    with tempfile.TemporaryDirectory("", "mindgrpo-planted-", ignore_cleanup_errors=True) as made:
        folder = Path(made).resolve()
        tree, log = folder / "tree", folder / "log"
        copy_tree(tree)
        environment = {**os.environ, "PYTHONPATH": str(tree), MARK: str(folder)}
        words = ["--tier", tier, "-n", "2", "-x", "-q"]
        if fault is not None:
            (tree / fault.file).write_text(edited(fault), encoding="utf-8")
            words += ["--first", str(NATIVE / "library.py") if fault.is_native else fault.file]
            if fault.is_native:
                environment["XDG_CACHE_HOME"] = str(folder / "cache")
        seen = [sys.executable, "-c", "import mindgrpo; print(mindgrpo.__file__)"]
        taken = subprocess.check_output(seen, cwd=folder, env=environment, text=True).strip()
        assert Path(taken) == tree / "mindgrpo/__init__.py", f"{taken} is imported, not the copy"
        # Most are caught by the nearest files, without a collection of all.
        for targets in ([*nearest(fault, tier)] if fault is not None else [], ["tests"]):
            if not targets:
                continue
            command = [sys.executable, "-m", "pytest", *targets, *words, *more]
            with log.open("wb") as output:
                process = subprocess.Popen(
                    command,
                    cwd=tree,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                )
            try:
                status = process.wait(timeout)
            except subprocess.TimeoutExpired:
                return True, "time-out"
            finally:
                end_all(folder)
                process.wait()
            text = log.read_text(encoding="utf-8", errors="replace")
            if status in (FAILED, STOPPED) and (first := FOUND.search(text)):
                return True, first[1]
            if status not in (PASSED, NO_TESTS):
                print(text[-2000:], file=sys.stderr)
                return False, f"nothing: pytest ended with {status}"
        return False, "nothing"


def nearest(fault: Fault, tier: str) -> list[str]:
    """Returns the NEAREST test files of the tier that import the changed file most directly."""
    changed = [ROOT / (NATIVE / "library.py" if fault.is_native else fault.file)]
    reached = [
        (distance, path)
        for path in tiers.test_files()
        if tier == "all" or tiers.is_quick(path)
        if (distance := distance_to(path, changed)) < float("inf")
    ]
    return [str(path.relative_to(ROOT)) for _, path in sorted(reached)[:NEAREST]]


def table(outcomes: Sequence[Outcome]) -> str:
    lines = ["| fault | room | caught by | seconds |", "| --- | --- | --- | ---: |"]
    for fault, _, how, seconds in outcomes:
        by = how.replace("|", r"\|")
        lines.append(f"| {fault.name} | {fault.room} | {by} | {seconds:.0f} |")
    return "\n".join(lines)


def arguments() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tier", choices=MISSES, default="quick")
    names = [fault.name for fault in FAULTS]
    parser.add_argument("--fault", nargs="+", metavar="NAME", choices=names, default=names)
    parser.add_argument("--shard", default="1/1", help="I/N: every Nth fault, from the Ith on")
    parser.add_argument("--timeout", type=float, help="seconds for one fault; late is caught")
    parser.add_argument("--output", type=Path, help="a file for the table")
    for flag in ("--baseline", "--list", "--check"):
        parser.add_argument(flag, action="store_true")
    return parser.parse_known_args()


def main() -> int:
    asked, more = arguments()
    number, shards = map(int, asked.shard.split("/"))
    faults = [fault for fault in FAULTS if fault.name in asked.fault][number - 1 :: shards]
    if asked.list:
        print("\n".join(f"{own.name} ({own.file}): {own.wrong}" for own in faults))
        return 0
    check(faults)
    if asked.check:
        print(f"{len(faults)} faults can be planted")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    timeout = asked.timeout or SECONDS[asked.tier]
    if asked.baseline:
        started = time.monotonic()
        is_red, how = run(None, asked.tier, timeout, more)
        print(f"without a fault: {how} fails, {time.monotonic() - started:.0f} s", flush=True)
        if is_red or how != "nothing":
            return 2
    outcomes: list[Outcome] = []
    for fault in faults:
        started = time.monotonic()
        is_caught, how = run(fault, asked.tier, timeout, more)
        seconds = time.monotonic() - started
        outcomes.append(Outcome(fault, is_caught, how, seconds))
        number = len(outcomes)
        print(f"{number} of {len(faults)}: {fault.name}: {how}, {seconds:.0f} s", flush=True)
        if asked.output is not None:
            asked.output.write_text(table(outcomes) + "\n", encoding="utf-8")
    missed = [own.fault.name for own in outcomes if not own.is_caught]
    print(f"\n{table(outcomes)}\n")
    print(f"tier {asked.tier} caught {len(outcomes) - len(missed)} of {len(outcomes)} faults")
    # A part of the list may miss its part.
    return int(len(missed) > MISSES[asked.tier] * len(outcomes) // len(FAULTS))


if __name__ == "__main__":
    sys.exit(main())
