"""Writes the one file that `mindgrpo doctor --device` leaves to send back: JSON that a person can read."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import mindgrpo
from mindgrpo.doctor.jobs import CheckLine, JobEnd
from mindgrpo.errors import UserError
from mindgrpo.run.machine_checks import installed_version

# A file that has this key is a report, which the next one may replace.
MARK = "mindgrpo_doctor"
# Variables by their beginnings that say how devices and ranks were set up.
SETUP = ("ASCEND_", "HCCL_", "LCCL_", "MS_", "MINDGRPO_", "RANK_", "DEVICE_ID", "GLOG_", "OMP_NUM")
PATHS = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV")
SECRET = ("KEY", "TOKEN", "SECRET", "PASSW", "CREDENTIAL")
PACKAGES = ("mindspore", "mindformers", "numpy", "transformers", "tokenizers", "safetensors")


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
    """Selects those that say how devices and ranks were set up; none whose name speaks of a secret."""
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
