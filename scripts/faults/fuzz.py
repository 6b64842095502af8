"""Spoils everything that a user hands over and looks how it is refused: fuzz.py [--cases N] [--seed S] [--only KIND].

Each case is a folder of valid input with something spoiled in it (inputs.py, hostile.py) and a command that reads it,
run by the programs' own entry in a child that is forked from this process. Such a command must end by itself with
status 0 (what was spoiled does not matter) or 2 and one sentence, and leave no process and no file behind. Prints what
did not, how to see it again (--case N), and a summary as one line of JSON; its status is 1 if anything failed. Refuses
to tell whether a sentence is a good one.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import io
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]

import inputs  # noqa: E402
from seeds import ROOT, make_seeds  # noqa: E402

DEADLINE = 40.0
MEMORY = 1 << 30  # beyond what the imports hold
# Of a program whose output nobody reads.
UNREAD = 128 + signal.SIGPIPE
PR_SET_CHILD_SUBREAPER = 36
SPARSE_PARTS = (0, 16 << 20, 48 << 20)
NOISE = ("Traceback", "Warning", "panicked", "Exception ignored")


@dataclass(frozen=True)
class Outcome:
    number: int
    kind: str
    words: list[str]
    status: int | None  # None: not in time; negative: a signal
    seconds: float
    said: str
    faults: list[str]


def case_of(number: int, seed: int, only: str | None) -> tuple[str, random.Random]:
    draw = random.Random(f"{seed}/{number}")
    names = list(inputs.KINDS)
    kind = draw.choices(names, [inputs.KINDS[name].weight for name in names])[0]
    return only or kind, draw


def copied(seeds: Path, target: Path, kind: str) -> None:
    shutil.copytree(seeds, target, ignore=shutil.ignore_patterns("*.mindrecord"))
    if kind != "mindrecord":
        return
    source = seeds / "rows.mindrecord"
    with source.open("rb") as whole, (target / source.name).open("wb") as part:
        for start in SPARSE_PARTS:
            whole.seek(start)
            part.seek(start)
            part.write(whole.read(4096))
        part.truncate(source.stat().st_size)


def run_case(number: int, kind: str, draw: random.Random, seeds: Path, place: Path) -> Outcome:
    folder, outside = place / "work", place / "beside"
    copied(seeds, folder, kind)
    (outside / "tmp").mkdir(parents=True)
    words = inputs.KINDS[kind].spoil(folder, draw)
    before = files_in(place)
    started = time.monotonic()
    pid = os.fork()
    if pid == 0:
        become(words, folder, outside)
    status = waited(pid, started + DEADLINE)
    seconds = time.monotonic() - started
    said = (outside / "err").read_text("utf-8", "replace")
    faults = [
        *faults_of(status, said, words[:1] + words[2:3] == ["console", "closed"]),
        *left_over(pid),
    ]
    expected = {"beside/err", "beside/out"}
    made = files_in(place) - before - expected
    if status == 0:
        made = {name for name in made if not name.startswith("work/out/")}
    if made:
        faults.append(f"files left: {sorted(made)[:5]}")
    return Outcome(number, kind, words, status, seconds, said, faults)


def files_in(place: Path) -> set[str]:
    return {path.relative_to(place).as_posix() for path in place.rglob("*") if not path.is_dir()}


def become(words: list[str], folder: Path, outside: Path) -> NoReturn:
    """The child. Ends like the program would."""
    os.setsid()
    os.chdir(folder)
    for number, name in ((1, "out"), (2, "err")):
        opened = os.open(outside / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(opened, number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ["TMPDIR"], tempfile.tempdir = str(outside / "tmp"), None
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY, held + MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    status = 1
    try:
        status = run_words(on_console(words) if words[0] == "console" else words)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(bool(end.code))
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(status)


def on_console(words: list[str]) -> list[str]:
    """Makes of standard output what the first words say; returns the others."""
    _, encoding, output, *rest = words
    if output == "full":
        os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
    elif output == "closed":
        reader, writer = os.pipe()
        os.dup2(writer, 1)
        os.close(reader)
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(os.fdopen(number, "wb", closefd=False), encoding, "strict")
        for number in (1, 2)
    )
    return rest


def run_words(words: list[str]) -> int:
    from mindgrpo.backend.connect import refuse_other_launchers
    from mindgrpo.cli.verbs import main
    from mindgrpo.errors import UserError

    if words[0] == "env":
        pairs = [word for word in words[1:] if "=" in word and not word.startswith("--")]
        pairs = pairs[: words.index("check") - 1]
        for name, _, value in (pair.partition("=") for pair in pairs):
            os.environ[name] = value
        words = words[words.index("check") :]
        try:
            refuse_other_launchers(os.environ, ["my_run.py"])
        except UserError as error:
            print(f"mindgrpo: {error}", file=sys.stderr)
            return 2
    if words[0] == "convert":
        path = ROOT / "examples" / "grpo" / "qwen_grpo_tutorial" / "rlhf_data.py"
        spec = importlib.util.spec_from_file_location("rlhf_data", path)
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return int(module.main(words[1:]))
    return main(words)


def waited(pid: int, until: float) -> int | None:
    pause = 0.002
    while time.monotonic() < until:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(pause)
        pause = min(0.02, pause * 1.3)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def faults_of(status: int | None, said: str, is_unread: bool) -> list[str]:
    if status is None:
        return [f"hangs for {DEADLINE:g} s"]
    if status not in (0, 2) and not (is_unread and status == UNREAD):
        return [f"ends with status {status}"]
    faults = [
        f"says {word}" for word in NOISE if word in said and not said.startswith("mindgrpo: ")
    ]
    lines = said.splitlines()
    # A line for each thing that has to change.
    others = [line for line in lines if not line.startswith("mindgrpo: ")]
    if status == 2 and (others or not lines):
        faults.append(f"says {len(lines)} lines, {len(others)} of them no sentence")
    longest = max(map(len, lines), default=0)
    if status == 2 and longest > 2100:
        faults.append(f"says {longest} letters in a line")
    return faults


def left_over(pid: int) -> list[str]:
    """Orphans come to this process, which is their subreaper. They have a moment to end."""
    until = time.monotonic() + 1.0
    while children := [int(one) for one in children_now() if one]:
        for child in children:
            os.waitpid(child, os.WNOHANG)
        if time.monotonic() > until:
            for child in children:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
            return [f"{len(children)} processes left"]
        time.sleep(0.01)
    return []


def children_now() -> list[str]:
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()


def outcomes(
    numbers: range, seed: int, only: str | None, seeds: Path, keep: Path | None
) -> Iterator[Outcome]:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in numbers:
        kind, draw = case_of(number, seed, only)
        with tempfile.TemporaryDirectory(prefix="mindgrpo-fuzz-") as name:
            yield run_case(number, kind, draw, seeds, Path(name))
            if keep is not None:
                shutil.copytree(Path(name), keep, dirs_exist_ok=True)


def warm_up() -> None:
    """Everything that a case imports, so that the fork of it costs little."""
    for name in (
        "mindgrpo.run.preflight",
        "mindgrpo.run.model_export",
        "mindgrpo.cli.score",
        "mindgrpo.cli.plan",
        "pyarrow",
    ):
        try:
            importlib.import_module(name)
        except ImportError:
            continue
    for name in (
        "mindgrpo.monitor.run_directory",
        "mindgrpo.config.reference",
        "mindgrpo.data.convert",
        "mindgrpo.data.chat_template",
        "transformers.utils.chat_template_utils",
    ):
        importlib.import_module(name)


def work(start: int, given: argparse.Namespace, seeds: Path) -> None:
    """One of the processes that cases are forked from: every PROCESSES-th case. Writes a line of JSON each."""
    warm_up()
    for outcome in outcomes(
        range(start, given.cases, given.processes), given.seed, given.only, seeds, None
    ):
        line = {
            **vars(outcome),
            "said": outcome.said[:3000],
            "words": [word[:200] for word in outcome.words],
        }
        os.write(1, json.dumps(line).encode() + b"\n")


def gathered(given: argparse.Namespace, seeds: Path) -> list[dict[str, Any]]:
    command = [sys.executable, __file__, "--cases", str(given.cases), "--seed", str(given.seed)]
    command += ["--processes", str(given.processes), "--seeds", str(seeds)] + (
        ["--only", given.only] if given.only else []
    )
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    environment["HF_ENDPOINT"] = "http://127.0.0.1:9"  # where nobody answers, and at once
    # Python's own files beside a user's module are not the program's.
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    lines = seeds.parent / "lines"
    workers = []
    for start in range(given.processes):
        with open(f"{lines}{start}", "wb") as file:
            workers.append(
                subprocess.Popen([*command, "--from", str(start)], stdout=file, env=environment)
            )
    broken = [worker for worker in workers if worker.wait() != 0]
    texts = "".join(Path(f"{lines}{start}").read_text() for start in range(given.processes))
    if broken:
        print("a process that forks the cases has ended early", file=sys.stderr)
    return [json.loads(line) for line in texts.splitlines()]


def report(found: list[dict[str, Any]], seconds: float, cases: int) -> bool:
    bad = [one for one in found if one["faults"]]
    for one in bad[:40]:
        last = (one["said"].strip().splitlines() or [""])[-1]
        print(f"--case {one['number']} ({one['kind']}): {', '.join(one['faults'])}: {last[:300]}")
    slowest = max(
        found, key=lambda one: one["seconds"], default={"number": -1, "kind": "", "seconds": 0.0}
    )
    print(
        json.dumps(
            {
                "bench": "fuzz",
                "cases": len(found),
                "failed": len(bad) + cases - len(found),
                "seconds": round(seconds, 1),
                "refused": sum(one["status"] == 2 for one in found),
                "harmless": sum(one["status"] == 0 for one in found),
                "by_kind": dict(Counter(one["kind"] for one in found)),
                "failed_by_kind": dict(Counter(one["kind"] for one in bad)),
                "slowest": {key: slowest[key] for key in ("number", "kind", "seconds")},
            }
        )
    )
    return not bad and len(found) == cases


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Spoils what users hand over and looks how it is refused."
    )
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=sorted(inputs.KINDS))
    parser.add_argument("--case", type=int, help="run this one, say all, and keep its folder")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seeds", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--from", dest="start", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    given = arguments()
    if given.start is not None:
        work(given.start, given, given.seeds)
        return 0
    with tempfile.TemporaryDirectory(prefix="mindgrpo-fuzz-") as name:
        seeds = Path(name) / "seeds"
        make_seeds(seeds)
        if given.case is None:
            started = time.monotonic()
            return (
                0 if report(gathered(given, seeds), time.monotonic() - started, given.cases) else 1
            )
        warm_up()
        keep = Path(tempfile.mkdtemp(prefix="mindgrpo-case-"))
        (outcome,) = outcomes(
            range(given.case, given.case + 1), given.seed, given.only, seeds, keep
        )
        print(f"{outcome}\n{outcome.said}\nits folder: {keep}")
        return int(bool(outcome.faults))


if __name__ == "__main__":
    sys.exit(main())
