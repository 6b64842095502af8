"""Memory of whole steps on ranks of one host, beside what the roles' weights must take.

memory.py [--work W.json] [--train dp,tp,pp --infer dp,tp] [--steps 3] prints one JSON line. A thread of rank 0 reads
every rank's memory ten times a second and keeps the largest sum in each phase. `rss` counts the interpreter and its
libraries once a rank, though ranks share them; `pss` counts a page that n processes share as 1/n in each. `base` is
what the ranks take before they hold a model, and `formula` weights + gradients + Adam's moments + the generator's
copies + the reference, float32. Refuses to guess what lies between two readings.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import launching
from work import read_work

from mindgrpo.grpo.state import State

FIELDS = ("Rss", "Pss")


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=launching.HERE / "work_500mb.json")
    parser.add_argument("--train", type=launching.degrees, default=(1, 4, 2), help="dp,tp,pp")
    parser.add_argument("--infer", type=launching.degrees, default=(2, 4), help="dp,tp")
    parser.add_argument("--steps", type=int, default=3)
    return parser.parse_args()


def memory_of(pids: list[int]) -> dict[str, int]:
    """Bytes, summed over processes."""
    total = dict.fromkeys(FIELDS, 0)
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            name, _, rest = line.partition(":")
            if name in total:
                total[name] += int(rest.split()[0]) * 1024
    return total


class Watch(threading.Thread):
    """The largest sums seen, by what `phase` says at the time."""

    def __init__(self, pids: list[int], phase: Any) -> None:
        super().__init__(daemon=True)
        self.peaks: dict[str, dict[str, int]] = {}
        self._pids, self._phase, self._over = pids, phase, threading.Event()

    def run(self) -> None:
        while not self._over.wait(0.1):
            before = self._phase()
            seen = memory_of(self._pids)
            # What was read while the phase changed belongs to neither.
            if before == self._phase():
                peaks = self.peaks.setdefault(before, dict.fromkeys(FIELDS, 0))
                for field in FIELDS:
                    peaks[field] = max(peaks[field], seen[field])

    def end(self) -> None:
        self._over.set()
        self.join()


def measure(given: argparse.Namespace) -> None:
    import assembly

    work = read_work(given.work)
    backend = assembly.join_ranks()
    if backend is None:
        return
    pids = backend.world.gather_objects(os.getpid())
    base = memory_of(pids) if backend.rank == 0 else {}
    backend.world.barrier()
    config = assembly.configuration(
        work, given.train, given.infer, assembly.Rows.of(work, given.train[0])
    )
    plan = assembly.plan_of(config, assembly.model_of(work), backend.world_size)
    roles = assembly.roles_of(plan, backend)
    stepper = assembly.stepper_of(roles, work)
    state = State()
    stepper.run(state)  # compiles
    watch = Watch(pids, lambda: roles.residency.phase)
    if backend.rank == 0:
        watch.start()
    for _ in range(given.steps):
        stepper.run(state)
        time.sleep(0.2)  # so that the update's end is read too
        backend.world.barrier()
    by_role = {name: role.num_bytes for name, role in roles.residency.roles.items()}
    told = backend.world.gather_objects(by_role)
    if backend.rank == 0:
        watch.end()
        launching.give_figures(figures(base, watch.peaks, told))
    backend.close()


def figures(
    base: dict[str, int], peaks: dict[str, dict[str, int]], told: list[dict[str, int]]
) -> dict[str, Any]:
    parts = {name: sum(rank.get(name, 0) for rank in told) for name in told[0]}
    cache = parts.pop("kv_cache")
    formula = sum(parts.values())
    rss, pss = (max(peak[field] for peak in peaks.values()) for field in FIELDS)
    return {
        "bench": "memory",
        "rss_peak": rss,
        "pss_peak": pss,
        "rss_base": base["Rss"],
        "pss_base": base["Pss"],
        "formula": formula,
        "formula_parts": parts,
        "kv_cache": cache,
        "pss_of_formula": pss / formula,
        "rss_above_base_of_formula": (rss - base["Rss"]) / formula,
        "rss_of_formula": rss / formula,
        "peaks_by_phase": peaks,
    }


def main() -> None:
    given = options()
    if launching.is_rank():
        measure(given)
        return
    ranks = given.train[0] * given.train[1] * given.train[2]
    print(json.dumps(launching.run_on_ranks(__file__, sys.argv[1:], ranks)))


if __name__ == "__main__":
    main()
