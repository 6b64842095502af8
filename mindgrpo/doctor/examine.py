"""Climbs the ladder of `mindgrpo doctor --device` up to the first rung that fails, and writes what is found."""

from __future__ import annotations

import json
import os
import tarfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml

import mindgrpo
from mindgrpo.backend.dtypes import Dtype, resolve_compute_dtype
from mindgrpo.backend.targets import Target
from mindgrpo.doctor import first_step
from mindgrpo.doctor.jobs import (
    ENDED_REMEDY,
    CheckLine,
    JobEnd,
    Records,
    fails,
    merged,
    read_records,
    run_job,
    skipped,
)
from mindgrpo.doctor.probes.host import HOST_CHECKS, HostState
from mindgrpo.errors import UserError

PROGRAM = Path(__file__).with_name("on_ranks.py")
# Of kernels: their checks go on in another process after one that ends its own.
IN_TURNS = ("float32", "fused", "bfloat16")
STEP = "first_step"


class Rung(NamedTuple):
    """Names what makes its checks: sections of on_ranks.py, on `ranks` ranks (0: all); none: a look at the host."""

    sections: tuple[str, ...] = ()
    ranks: int = 1


# In order: each needs what the ones before it have shown.
RUNGS = {
    "versions": Rung(),
    "devices": Rung(),
    **{name: Rung((name,)) for name in IN_TURNS},
    "one_rank": Rung(("rates", "weights", STEP)),
    "mp2": Rung(("communication", "weights", STEP), 2),
    "pp2": Rung((STEP,), 2),
    "all_ranks": Rung(("communication", "weights", STEP), 0),
}
# Seconds after which a job is ended.
DEADLINES = {STEP: 1200.0} | dict.fromkeys(IN_TURNS, 3600.0)
WITHOUT = f"the example is in the repository alone, for {[*first_step.LAYOUTS]} ranks"
# Beside the report: what a configuration can take, and all that is to be sent back.
SETTINGS, ARCHIVE = ".yaml", ".tar.gz"
# Of jobs, into the archive.
KEPT, KEPT_BYTES = (".log", ".jsonl", ".txt"), 64 << 20
# A file that has this key is a report, which the next one may replace.
MARK = "mindgrpo_doctor"
# Variables by their beginnings that say how devices and ranks were set up.
SETUP = ("ASCEND_", "HCCL_", "LCCL_", "MS_", "MINDGRPO_", "RANK_", "DEVICE_ID", "GLOG_", "OMP_NUM")
PATHS = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV")
SECRET = ("KEY", "TOKEN", "SECRET", "PASSW", "CREDENTIAL")


def dtype_of(target: Target) -> Dtype:
    """Returns the dtype of a run without context.compute_dtype."""
    return resolve_compute_dtype("auto", target, True, False, "auto")


@dataclass
class Examination:
    """Examines `num_ranks` ranks of `target`; jobs work in `folder`. `jobs` are those that ended, by their rungs."""

    target: Target
    num_ranks: int
    environment: Mapping[str, str]
    folder: Path
    jobs: dict[str, JobEnd] = field(default_factory=dict)

    def climb(self, wanted: Sequence[str]) -> Iterator[tuple[str, list[CheckLine], float]]:
        """Yields (rung, its lines, its seconds), as they are done; the last is the first one that fails."""
        for name in wanted:
            started = time.monotonic()
            try:
                lines = self._lines(name, RUNGS[name])
            except Exception as error:
                lines = [fails(name, f"{type(error).__name__}: {error}", "send this report")]
            yield name, lines, time.monotonic() - started
            if any(line.status == "fails" for line in lines):
                return

    def _lines(self, name: str, rung: Rung) -> list[CheckLine]:
        if not rung.sections:
            return HOST_CHECKS[name](HostState.look(self.environment), self.num_ranks)
        num_ranks = rung.ranks or self.num_ranks
        if num_ranks > self.num_ranks:
            return [skipped(name, f"there is one rank; give --ranks {num_ranks} or more")]
        if not rung.ranks and num_ranks <= 2:
            return [skipped(name, "the rungs before it had them")]
        has_step = first_step.EXAMPLE.is_file() and num_ranks in first_step.LAYOUTS
        sections = [own for own in rung.sections if own != STEP or has_step]
        missing = [skipped("first step", WITHOUT)] if len(sections) < len(rung.sections) else []
        if not sections:
            return missing
        folder = self.folder / name
        folder.mkdir(parents=True)
        keys = first_step.words(name, num_ranks, self.target.device, folder / "run")
        words = [str(PROGRAM), ",".join(sections), str(folder), self.target.device]
        deadline, first, goes_on = DEADLINES[rung.sections[-1]], 0, True
        while goes_on:
            command = [*words, str(first), *keys]
            end = run_job(num_ranks, command, self.environment, deadline, folder, first_step.ROOT)
            self.jobs[f"{name},{first}" if first else name] = end
            records = read_records(folder, num_ranks)[0]
            begun = [row for row in records if "starts" in row]
            before, first = first, len(begun)
            is_stuck = end.status is None and first == before + 1
            goes_on = name in IN_TURNS and bool(end.ending) and first > before and not is_stuck
            if goes_on and "line" not in records[-1]:
                seen, own = f"its process did not end: {end.ending}", begun[-1]
                Records(folder, 0).ends(fails(own["starts"], seen, ENDED_REMEDY, **own["figures"]))
        lines = merged(read_records(folder, num_ranks), end.ending)
        if STEP not in sections or any(line.status == "fails" for line in lines):
            return lines + missing
        return lines + first_step.compared_run(folder / "run", dtype_of(self.target))


@dataclass
class DoctorReport:
    """Collects the lines of all checks; `machine` are the plain doctor's."""

    runs_on: str
    command: str
    machine: Sequence[str]
    environment: Mapping[str, str]
    lines: list[dict[str, Any]] = field(default_factory=list)
    started_at: float = field(default_factory=time.time)

    def add(self, rung: str, lines: Sequence[CheckLine]) -> None:
        for line in lines:
            own = {key: value for key, value in asdict(line).items() if value not in ("", {})}
            self.lines.append({"rung": rung, **own})

    def count(self, status: str) -> int:
        return sum(line["status"] == status for line in self.lines)

    def content(self, jobs: Mapping[str, JobEnd]) -> dict[str, Any]:
        system = os.uname()
        return {
            MARK: 1,
            "mindgrpo": mindgrpo.__version__,
            "command": self.command,
            "started": time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(self.started_at)),
            "seconds": round(time.time() - self.started_at, 1),
            "runs_on": self.runs_on,
            "results": {name: self.count(name) for name in ("ok", "fails", "skipped")},
            "system": f"{system.sysname} {system.release} {system.machine}",
            "lines": self.lines,
            "machine": list(self.machine),
            "environment": telling_variables(self.environment),
            "jobs": {
                name: {key: own for key, own in asdict(end).items() if key != "output"}
                for name, end in jobs.items()
            },
        }

    def settings(self) -> dict[str, Any]:
        """Returns keys of `context`: kernels to do without, and the rates that were measured last."""
        plain: set[str] = set()
        roofline: dict[str, float] = {}
        for line in self.lines:
            figures = line.get("figures", {})
            if line["status"] == "fails":
                plain |= {*figures.get("kernels", ())}
            roofline |= figures.get("roofline", {})
        both = {"plain_kernels": sorted(plain), "roofline": roofline}
        return {key: value for key, value in both.items() if value}

    def write(self, path: Path, jobs: Mapping[str, JobEnd], folder: Path) -> None:
        """Writes the report, the settings, and the archive of both with the jobs' logs in `folder`."""
        text = json.dumps(self.content(jobs), indent=1, ensure_ascii=False)
        path.write_text(text + "\n", encoding="utf-8")
        head = f"# Measured by mindgrpo doctor on {self.runs_on}: keys of `context`.\n"
        own = yaml.safe_dump(self.settings(), sort_keys=False, default_flow_style=None, width=100)
        path.with_suffix(SETTINGS).write_text(head + own, encoding="utf-8")
        with tarfile.open(path.with_suffix(ARCHIVE), "w:gz") as archive:
            for file in (path, path.with_suffix(SETTINGS)):
                archive.add(file, file.name)
            for file in sorted(folder.rglob("*")):
                if file.is_file() and file.suffix in KEPT and file.stat().st_size <= KEPT_BYTES:
                    archive.add(file, f"{path.stem}/{file.relative_to(folder)}")


def telling_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Selects variables that say how devices and ranks were set up; none whose name contains that of a secret."""
    return {
        name: environment[name]
        for name in sorted(environment)
        if (name in PATHS or name.startswith(SETUP))
        and not any(word in name.upper() for word in SECRET)
    }


def check_output(path: Path) -> None:
    """Raises UserError where a report cannot be written, or a file that is no report's would be replaced."""
    if path.suffix != ".json":
        raise UserError(f"--output {path} must end with .json; other files are written beside it.")
    try:
        is_report = MARK in json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        is_report = False
    beside = [path, path.with_suffix(SETTINGS), path.with_suffix(ARCHIVE)]
    others = [] if is_report else [own for own in beside if own.exists()]
    if others:
        raise UserError(
            f"--output {path}: {others[0]} exists and is not a report of the doctor, and only those are replaced; give "
            "another file."
        )
    if not os.access(path if is_report else path.absolute().parent, os.W_OK):
        raise UserError(f"--output {path} cannot be written; give a file in a folder that can.")
