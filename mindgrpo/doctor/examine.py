"""Makes the checks of `mindgrpo doctor --device` one after the other, whatever comes of each, and gives their lines."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from mindgrpo.backend.probes.host import HOST_CHECKS, Host
from mindgrpo.backend.probes.line import Line, fails, ok, skipped
from mindgrpo.backend.targets import Target
from mindgrpo.doctor import first_step
from mindgrpo.doctor.jobs import JobEnd, run_job
from mindgrpo.doctor.records import ENDED_REMEDY, merged, read_records
from mindgrpo.doctor.settings import DEADLINES, dtype_of, example_ranks

PROGRAM = Path(__file__).with_name("on_ranks.py")
# In the order of the report.
SECTIONS = ("driver", "versions", "memory", "communication", "weights", "kernels", "first_step")
# Sections that one job makes, and whether on all ranks or on one.
JOBS = ((("communication", "weights"), True), (("kernels",), False))


@dataclass
class Examination:
    """On `num_ranks` ranks of `target`; jobs work in `folder`. `jobs` are those that ended, by their sections."""

    target: Target
    num_ranks: int
    environment: Mapping[str, str]
    folder: Path
    jobs: dict[str, JobEnd] = field(default_factory=dict)

    def sections(self, wanted: Sequence[str]) -> Iterator[tuple[str, list[Line], float]]:
        """(section, its lines, its job's or its own seconds), as they are done."""
        host = Host.look(self.environment)
        for section, check in HOST_CHECKS.items():
            if section in wanted:
                yield self._timed(section, partial(check, host, self.num_ranks))
        for names, on_all in JOBS:
            chosen = [name for name in names if name in wanted]
            if not chosen:
                continue
            num_ranks = self.num_ranks if on_all else 1
            lines = self._job(chosen, num_ranks)
            seconds = self.jobs[",".join(chosen)].seconds
            for name in chosen:
                yield name, lines[name], seconds
        if "first_step" in wanted:
            yield self._timed("first_step", self._first_step)

    def _timed(
        self, section: str, check: Callable[[], list[Line]]
    ) -> tuple[str, list[Line], float]:
        started = time.monotonic()
        try:
            lines = check()
        except Exception as error:
            # What one check could not do must not hide what the others found.
            lines = [fails(section, f"{type(error).__name__}: {error}", "send this report")]
        return section, lines, time.monotonic() - started

    def _job(self, sections: Sequence[str], num_ranks: int) -> dict[str, list[Line]]:
        name = ",".join(sections)
        folder = self.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        command = [str(PROGRAM), name, str(folder), self.target.device]
        deadline = max(DEADLINES[section] for section in sections)
        end = run_job(num_ranks, command, self.environment, deadline, folder)
        self.jobs[name] = end
        lines = merged(read_records(folder, num_ranks), sections, end.ending)
        return {section: _without_ok(section, own) for section, own in lines.items()}

    def _first_step(self) -> list[Line]:
        if not first_step.EXAMPLE.is_file():
            reason = "the bundled example is in the repository, not in the package: use a clone"
            return [skipped("first step", reason)]
        num_ranks = example_ranks(self.num_ranks)
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


def _without_ok(section: str, lines: Sequence[Line]) -> list[Line]:
    """A section's own line is of interest only where it failed outside of its checks."""
    return [line for line in lines if line.check != section or line.status != "ok"]
