"""Prints what this machine lacks for a run, with remedies.

With --device it examines the machine's devices, or its processors in their place (context.backend device), on a ladder
of rungs up to one real training step on N ranks, and stops at the first rung that fails. A line is ok, fails (with a
remedy) or skipped (with the reason); --only names rungs: versions, devices, float32, fused, bfloat16, one_rank, mp2,
pp2, all_ranks. Writes doctor_report.json (--output) with all lines, versions and the environment's variables that
matter, and beside it .yaml with keys of `context` that a run can take, and .tar.gz with all of it and the jobs' logs,
to be sent back; an earlier report is replaced, and no other file. Ends with status 1 where a line fails, with 2 where
the command cannot work.
"""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from mindgrpo.backend.targets import choose_target
from mindgrpo.cli.arguments import Arguments, path
from mindgrpo.doctor.examine import (
    ARCHIVE,
    RUNGS,
    SETTINGS,
    DoctorReport,
    Examination,
    check_output,
)
from mindgrpo.doctor.probes.host import HostState
from mindgrpo.errors import UserError, counted
from mindgrpo.launch.options import POSITIVE
from mindgrpo.run.machine_checks import findings

OUTPUT = "doctor_report.json"
# On processors, which can be any number of ranks.
DEFAULT_RANKS = 2


def main(argv: Sequence[str]) -> None:
    options = _options(argv)
    if options.device:
        sys.exit(_examine(options, argv))
    checks = findings()
    print("\n".join(str(finding) for finding in checks))
    if any(finding.level == "error" for finding in checks):
        sys.exit(1)


def parser() -> Arguments:
    flags = Arguments(prog="mindgrpo doctor", allow_abbrev=False)
    flags.add_argument("--device", action="store_true", help="examine devices, rung by rung")
    text = f"with --device: number of ranks (default: the devices; {DEFAULT_RANKS} without any)"
    flags.add_argument("--ranks", metavar="N", help=text)
    text = f"with --device: only these rungs, of {', '.join(RUNGS)}"
    flags.add_argument("--only", metavar="RUNG,...", help=text)
    text = f"with --device: the report (default: {OUTPUT})"
    flags.add_argument("--output", type=path, metavar="FILE.json", help=text)
    return flags


def _options(argv: Sequence[str]) -> Namespace:
    options = parser().parse_args(list(argv))
    if not options.device:
        for name in ("ranks", "only", "output"):
            if getattr(options, name) is not None:
                raise UserError(f"--{name} has no effect without --device; add it.")
        return options
    names = tuple(RUNGS) if options.only is None else options.only.split(",")
    unknown = [name for name in names if name not in RUNGS]
    if unknown:
        raise UserError(f"--only names '{unknown[0]}', but must be of {', '.join(RUNGS)}.")
    options.only = [name for name in RUNGS if name in names]  # in the order of the ladder
    ranks = options.ranks
    if ranks is not None and not (ranks.isdecimal() and int(ranks[:6]) in POSITIVE):
        raise UserError(f"--ranks {ranks} is not a positive whole number.")
    options.output = options.output or Path(OUTPUT)
    check_output(options.output)
    return options


def _examine(options: Namespace, argv: Sequence[str]) -> int:
    target = choose_target(None, "device")
    known = 0 if target.keeps_weights_on_host else HostState.look(os.environ).num_devices
    num_ranks = int(options.ranks) if options.ranks else known or DEFAULT_RANKS
    command = f"mindgrpo doctor {shlex.join(argv)}"
    runs_on = f"{target}, {counted(num_ranks, 'rank')}"
    machine = [str(finding) for finding in findings()]
    report = DoctorReport(runs_on, command, machine, os.environ)
    print(f"examines {runs_on}; report: {options.output}", flush=True)
    with tempfile.TemporaryDirectory(prefix="mindgrpo-doctor-") as folder:
        examination = Examination(target, num_ranks, os.environ, Path(folder))
        try:
            for rung, lines, seconds in examination.climb(options.only):
                report.add(rung, lines)
                # After each rung: whatever ends this program leaves what was seen before.
                report.write(options.output, examination.jobs, Path(folder))
                print(f"{rung} ({seconds:.0f} s)", *map(str, lines), sep="\n  ", flush=True)
        except KeyboardInterrupt:
            print(f"stopped; {options.output} has the lines so far", file=sys.stderr)
            return 130
    failed = [line["check"] for line in report.lines if line["status"] == "fails"]
    verdict = f"stopped at {rung}, where {', '.join(failed)} fail" if failed else "no line fails"
    print(f"{verdict}; {report.count('ok')} ok, {report.count('skipped')} skipped")
    if report.settings():
        settings = options.output.with_suffix(SETTINGS)
        read = f'"$(cat {shlex.quote(str(settings))})"'
        print(f"{settings} has what was measured for runs, and kernels that they can do without:")
        print(f"  python -m mindgrpo train --config FILE --context {read}")
    print(f"to send back: {options.output.with_suffix(ARCHIVE)}")
    return 1 if failed else 0
