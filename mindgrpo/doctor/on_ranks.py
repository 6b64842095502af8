"""Makes the doctor's checks on a rank: on_ranks.py SECTIONS FOLDER DEVICE FIRST KEYS, where FOLDER takes what was seen.

FIRST is the number of the first check, where another process made the earlier ones. KEYS are the first step's.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from mindgrpo.backend.connect import RuntimeSettings, connect
from mindgrpo.backend.targets import Target
from mindgrpo.doctor.examine import STEP, dtype_of
from mindgrpo.doctor.first_step import step_lines
from mindgrpo.doctor.jobs import ENDED_REMEDY, STACKS, CheckLine, Records, Starts, fails
from mindgrpo.doctor.probes.kernels import kernel_lines
from mindgrpo.doctor.probes.transfers import communication_lines, rate_lines, weight_lines

PROBES = {"communication": communication_lines, "weights": weight_lines, "rates": rate_lines}


def lines_of(
    sections: Sequence[str], target: Target, first: int, keys: Sequence[str], starts: Starts
) -> Iterator[CheckLine]:
    """Makes the checks, up to the first section in which one fails: on all ranks alike."""
    if sections[0] != STEP:
        settings = RuntimeSettings(compute_dtype=dtype_of(target))
        backend = connect(target, dict(os.environ), settings)
        for name in sections[: -1 if STEP in sections else None]:
            has_failed, probe = False, partial(kernel_lines, name, target, first)
            if name in PROBES:
                probe = partial(PROBES[name], backend, target)
            for line in probe(starts):
                has_failed |= line.status == "fails"
                yield line
            if has_failed:
                return
        backend.close()
    if STEP in sections:
        yield from step_lines(keys, starts)


def main() -> None:
    names, folder, device, first, *keys = sys.argv[1:]
    faulthandler.register(STACKS, all_threads=True)
    records = Records(Path(folder), int(os.environ.get("RANK_ID", "0")))
    target = Target(device, "device")
    try:
        for line in lines_of(names.split(","), target, int(first), keys, records.starts):
            records.ends(line)
    except Exception as error:
        # A line, and the end of this rank: the others may wait for it.
        seen = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        records.ends(fails(records.check, seen, ENDED_REMEDY, exception=str(error)))
        raise


if __name__ == "__main__":
    main()
