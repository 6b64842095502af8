"""Makes the checks of `mindgrpo doctor --device` one after the other, and writes their lines to a file to send back."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import mindgrpo
from mindgrpo.backend.dtypes import Dtype, resolve_compute_dtype
from mindgrpo.backend.targets import Target, choose_target
from mindgrpo.doctor import first_step
from mindgrpo.doctor.jobs import (
    ENDED_REMEDY,
    CheckLine,
    JobEnd,
    Records,
    fails,
    merged,
    ok,
    read_records,
    run_job,
    skipped,
)
from mindgrpo.doctor.probes.host import HOST_CHECKS, HostState
from mindgrpo.errors import UserError
from mindgrpo.run.machine_checks import installed_version

# Seconds after which a job is ended: of its sections together.
DEADLINES = {"communication": 300.0, "weights": 300.0, "kernels": 600.0, "first_step": 1200.0}
PROGRAM = Path(__file__).with_name("on_ranks.py")
# In the order of the report.
SECTIONS = ("driver", "versions", "memory", "communication", "weights", "kernels", "first_step")
# Those that one job makes on all ranks.
ON_ALL_RANKS = ("communication", "weights")
# A file that has this key is a report, which the next one may replace.
MARK = "mindgrpo_doctor"
# Variables by their beginnings that say how devices and ranks were set up.
SETUP = ("ASCEND_", "HCCL_", "LCCL_", "MS_", "MINDGRPO_", "RANK_", "DEVICE_ID", "GLOG_", "OMP_NUM")
PATHS = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV")
SECRET = ("KEY", "TOKEN", "SECRET", "PASSW", "CREDENTIAL")
PACKAGES = ("mindspore", "mindformers", "numpy", "transformers", "tokenizers", "safetensors")


def target_here(device: str | None = None) -> Target:
    """Returns the backend for devices on `device`, or on the one that is available. Raises UserError."""
    return choose_target(device, "device")


def dtype_of(target: Target) -> Dtype:
    """Returns the dtype of a run without context.compute_dtype."""
    return resolve_compute_dtype("auto", target, True, False, "auto")


@dataclass
class Examination:
    """Examines `num_ranks` ranks of `target`; jobs work in `folder`. `jobs` are those that ended, by their sections."""

    target: Target
    num_ranks: int
    environment: Mapping[str, str]
    folder: Path
    jobs: dict[str, JobEnd] = field(default_factory=dict)

    def sections(self, wanted: Sequence[str]) -> Iterator[tuple[str, list[CheckLine], float]]:
        """Yields (section, its lines, its job's or its own seconds), as they are done."""
        host = HostState.look(self.environment)
        for section, check in HOST_CHECKS.items():
            if section in wanted:
                yield self._timed(section, partial(check, host, self.num_ranks))
        chosen = [name for name in ON_ALL_RANKS if name in wanted]
        if chosen:
            end = self._job(chosen, self.num_ranks)
            records = read_records(self._folder(chosen), self.num_ranks)
            for name, lines in merged(records, chosen, end.ending).items():
                yield name, _without_ok(name, lines), end.seconds
        if "kernels" in wanted:
            yield self._timed("kernels", self._kernels)
        if "first_step" in wanted:
            yield self._timed("first_step", self._first_step)

    def _timed(
        self, section: str, check: Callable[[], list[CheckLine]]
    ) -> tuple[str, list[CheckLine], float]:
        started = time.monotonic()
        try:
            lines = check()
        except Exception as error:
            # What one check could not do must not hide what the others found.
            lines = [fails(section, f"{type(error).__name__}: {error}", "send this report")]
        return section, lines, time.monotonic() - started

    def _folder(self, sections: Sequence[str]) -> Path:
        folder = self.folder / ",".join(sections)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _job(self, sections: Sequence[str], num_ranks: int, first: int = 0) -> JobEnd:
        """Runs sections on ranks.

        `first` is the number of the first check, where the sections' earlier ones were made by another job.
        """
        folder, name = self._folder(sections), ",".join(sections)
        command = [str(PROGRAM), name, str(folder), self.target.device, str(first)]
        deadline = max(DEADLINES[section] for section in sections)
        logs = folder / str(first)
        end = run_job(num_ranks, command, self.environment, deadline, logs)
        self.jobs[f"{name},{first}" if first else name] = end
        return end

    def _kernels(self) -> list[CheckLine]:
        """Makes the checks in a process until one raises or ends it; the next process begins after that check."""
        section, first = ("kernels",), 0
        while True:
            end = self._job(section, 1, first)
            records = read_records(self._folder(section), 1)
            begun = [
                row["starts"] for row in records[0] if row.get("starts", "kernels") != "kernels"
            ]
            before, first = first, len(begun)
            is_stuck = end.status is None and first == before + 1
            if not end.ending or first == before or is_stuck:
                return _without_ok("kernels", merged(records, section, end.ending)["kernels"])
            if "line" not in records[0][-1]:
                seen = f"its process did not end: {end.ending}"
                own = Records(self._folder(section), 0)
                own.section = "kernels"
                own.ends(fails(begun[-1], seen, ENDED_REMEDY))

    def _first_step(self) -> list[CheckLine]:
        if not first_step.EXAMPLE.is_file():
            reason = "the bundled example is in the repository, not in the package: use a clone"
            return [skipped("first step", reason)]
        num_ranks = max(size for size in first_step.LAYOUTS if size <= self.num_ranks)
        folder = self.folder / "first_step"
        run = folder / "run"
        keys = first_step.words(num_ranks, self.target.device, run)
        command = [str(PROGRAM), "first_step", str(folder), self.target.device, *keys]
        deadline, root = DEADLINES["first_step"], first_step.ROOT
        end = run_job(num_ranks, command, self.environment, deadline, folder, root)
        self.jobs["first_step"] = end
        check = f"first step of the example on {num_ranks} rank{'s' * (num_ranks > 1)}"
        if end.ending:
            return [fails(check, end.ending, ENDED_REMEDY)]
        step = first_step.read_step(run)
        committed = json.loads(first_step.COMMITTED.read_text(encoding="utf-8"))
        done = ok(check, f"done, {end.seconds:.0f} s with start and compilation", **step)
        return [done, *first_step.compared(step, committed, dtype_of(self.target))]


def _without_ok(section: str, lines: Sequence[CheckLine]) -> list[CheckLine]:
    """Drops a section's own line unless it failed outside of its checks."""
    return [line for line in lines if line.check != section or line.status != "ok"]


@dataclass
class DoctorReport:
    """Collects the lines of all checks; `machine` are the plain doctor's."""

    target: str
    num_ranks: int
    command: str
    machine: Sequence[str]
    environment: Mapping[str, str]
    lines: list[dict[str, Any]] = field(default_factory=list)
    started_at: float = field(default_factory=time.time)

    def add(self, section: str, lines: Sequence[CheckLine], seconds: float) -> None:
        for line in lines:
            own = asdict(line)
            own = {key: value for key, value in own.items() if value not in ("", {})}
            self.lines.append({"section": section, **own, "section_seconds": round(seconds, 2)})

    @property
    def runs_on(self) -> str:
        return f"{self.target}, {self.num_ranks} rank{'s' * (self.num_ranks > 1)}"

    def count(self, status: str) -> int:
        return sum(line["status"] == status for line in self.lines)

    def content(self, jobs: Mapping[str, JobEnd]) -> dict[str, Any]:
        system, python = os.uname(), ".".join(map(str, sys.version_info[:3]))
        versions = {name: installed_version(name) or "not installed" for name in PACKAGES}
        return {
            MARK: 1,
            "mindgrpo": mindgrpo.__version__,
            "command": self.command,
            "started": time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(self.started_at)),
            "seconds": round(time.time() - self.started_at, 1),
            "runs_on": self.runs_on,
            "results": {name: self.count(name) for name in ("ok", "fails", "skipped")},
            "system": f"{system.sysname} {system.release} {system.machine}",
            "versions": {"python": python, **versions},
            "lines": self.lines,
            "machine": list(self.machine),
            "environment": telling_variables(self.environment),
            "jobs": {name: self._job(name, end) for name, end in jobs.items()},
        }

    def _job(self, name: str, end: JobEnd) -> dict[str, Any]:
        """Describes a job's end, with the tails of its logs where one of its lines failed."""
        kept = {"status": end.status, "seconds": round(end.seconds, 1)}
        sections = name.split(",")
        failed = any(
            line["status"] == "fails" and line["section"] in sections for line in self.lines
        )
        if not failed:
            return kept
        logs = {file: text.splitlines() for file, text in end.logs.items()}
        return kept | {"output": end.output.splitlines(), "logs": logs}

    def write(self, path: Path, jobs: Mapping[str, JobEnd]) -> None:
        text = json.dumps(self.content(jobs), indent=1, ensure_ascii=False)
        path.write_text(text + "\n", encoding="utf-8")


def telling_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Selects variables that say how devices and ranks were set up; none whose name contains that of a secret."""
    return {
        name: environment[name]
        for name in sorted(environment)
        if (name in PATHS or name.startswith(SETUP))
        and not any(word in name.upper() for word in SECRET)
    }


def check_output(path: Path) -> None:
    """Raises UserError where a report cannot be written, or would replace a file that is none."""
    if path.is_dir():
        raise UserError(f"--output {path} is a folder; give a file, such as {path}/report.json.")
    if path.exists():
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            content = None
        if not isinstance(content, dict) or MARK not in content:
            raise UserError(
                f"--output {path} exists and is not a report of the doctor, and only those are replaced; give another "
                "file."
            )
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise UserError(f"--output {path} cannot be written; give a file in a folder that can.")
