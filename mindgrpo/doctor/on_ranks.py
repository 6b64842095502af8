"""Makes the doctor's checks on a rank: on_ranks.py SECTIONS FOLDER DEVICE, where FOLDER takes what was seen.

SECTIONS are `communication` and `weights`, `kernels` with the number of the first check, or `first_step` with further
arguments.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from mindgrpo.backend.connect import RuntimeSettings, connect
from mindgrpo.backend.contract import Backend
from mindgrpo.backend.targets import Target
from mindgrpo.doctor.examine import dtype_of
from mindgrpo.doctor.first_step import train_one_step
from mindgrpo.doctor.jobs import ENDED_REMEDY, CheckLine, Records, fails
from mindgrpo.doctor.probes.kernels import kernel_lines
from mindgrpo.doctor.probes.transfers import communication_lines, weight_lines

Lines = Callable[[Callable[[str], None]], Iterator[CheckLine]]


def sections_of(names: str, backend: Backend, target: Target, first: int) -> dict[str, Lines]:
    known: dict[str, Lines] = {
        "communication": partial(communication_lines, backend),
        "weights": partial(weight_lines, backend, target),
        "kernels": partial(kernel_lines, target.device, first),
    }
    return {name: known[name] for name in names.split(",")}


def run_sections(sections: dict[str, Lines], records: Records) -> None:
    """Makes the checks. One that raises is a line, and ends this rank: the others may wait for it."""
    for name, lines in sections.items():
        records.section = name
        records.starts(name)
        try:
            for line in lines(records.starts):
                records.ends(line)
            records.ends(CheckLine("ok", name, "done"))
        except Exception as error:
            seen = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            records.ends(fails(records.check, seen, ENDED_REMEDY))
            raise


def main() -> None:
    names, folder, device = sys.argv[1:4]
    if names == "first_step":
        train_one_step(sys.argv[4:])
        return
    target = Target(device, "device")
    settings = RuntimeSettings(compute_dtype=dtype_of(target))
    backend = connect(target, dict(os.environ), settings)
    first = int(sys.argv[4]) if sys.argv[4:] else 0
    run_sections(sections_of(names, backend, target, first), Records(Path(folder), backend.rank))
    backend.close()


if __name__ == "__main__":
    main()
