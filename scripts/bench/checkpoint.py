"""Seconds of saving weights and both moments on all ranks, of the copy that a background save waits for, and loading.

checkpoint.py [--work W.json | --model DIR] [--train dp,tp,pp] [--infer dp,tp] [--repeats 7] [--folder DIR] prints one
JSON line; what was saved in --train's layout is loaded in --infer's. `disk_GB_per_s` is a plain write and fsync of as
many bytes by as many ranks. Refuses to leave anything in the folder, and to count the disk's own cache as the disk:
files are synced.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import launching
import moving
import numpy as np

from mindgrpo.backend.contract import Backend
from mindgrpo.checkpoint.folders import folder_of
from mindgrpo.checkpoint.format import Identity, Manifest, RunState, read_manifest
from mindgrpo.checkpoint.load import load_role
from mindgrpo.checkpoint.save import Saver
from mindgrpo.weights.local_weights import Weights
from mindgrpo.weights.pretrained import fill_random

KEY = "MINDGRPO_BENCH_FOLDER"
ROLES = ("policy", "first_moments", "second_moments")


def main() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--folder", type=Path)
    own, rest = parser.parse_known_args()
    sys.argv[1:] = rest
    given = moving.options(__doc__.splitlines()[0])
    if launching.is_rank():
        measure(given)
        return
    with tempfile.TemporaryDirectory(dir=own.folder, prefix="checkpoint-bench-") as folder:
        os.environ[KEY] = folder
        print(json.dumps(launching.run_on_ranks(__file__, rest, moving.num_ranks(given))))


class Disk:
    """Saves, copies and plainly writes the roles of --train's layout into the bench's folder."""

    def __init__(self, backend: Backend, given: argparse.Namespace) -> None:
        self.folder = Path(os.environ[KEY])
        self._backend, self._roles = backend, roles_in(backend, given, given.train, True)
        self._saver = Saver(self.folder, backend)
        self._block = np.ones(1 << 20, np.uint8)
        self.num_bytes = 0

    def copy(self) -> None:
        self._begin(True)

    def save(self) -> None:
        self._begin(False)
        self._saver.commit()

    def _begin(self, background: bool) -> None:
        identity = Identity(code="", config={}, model={}, data="", batch={}, unsaved={})
        state = RunState(step=1, prompts=0, updates=0, weights_version=0)

        def complete(stored: dict[str, Any]) -> Manifest:
            return Manifest(layout="", state=state, identity=identity, **stored)

        self.num_bytes = self._saver.begin(1, self._roles, complete, background)

    def clear(self) -> None:
        if self._saver.pending is not None:
            self._saver.commit()
        self._backend.world.barrier()
        if self._backend.rank == 0:
            shutil.rmtree(folder_of(self.folder, 1), ignore_errors=True)

    def write(self) -> None:
        with (self.folder / f"plain_{self._backend.rank}").open("wb") as stream:
            for _ in range(self.num_bytes // self._backend.world_size >> 20):
                stream.write(self._block.data)
            stream.flush()
            os.fsync(stream.fileno())


def roles_in(
    backend: Backend, given: argparse.Namespace, degrees: tuple[int, ...], is_filled: bool
) -> dict[str, Weights]:
    place = moving.layout(moving.model_of(given), degrees)
    roles = {name: Weights(place, backend.rank, backend) for name in ROLES}
    for seed, role in enumerate(roles.values()):
        if is_filled:
            fill_random(role, seed)
    return roles


def measure(given: argparse.Namespace) -> None:
    import assembly

    backend = assembly.join_ranks()
    if backend is None:
        return
    disk = Disk(backend, given)
    turns = moving.Alternating(backend, given.repeats)
    measured = turns.medians(
        copy=(disk.clear, disk.copy),
        save=(disk.clear, disk.save),
        disk=(moving.nothing, disk.write),
    )
    saved = folder_of(disk.folder, 1)
    manifest, taken = read_manifest(saved), roles_in(backend, given, given.infer, False)

    def load() -> None:
        for name, weights in taken.items():
            load_role(saved, manifest, name, weights)

    measured |= turns.medians(load=(moving.nothing, load))
    expected = roles_in(backend, given, given.infer, True)
    same = all(
        np.array_equal(part, expected[name].arrays.hf_views[key])
        for name, weights in taken.items()
        for key, part in weights.arrays.hf_views.items()
    )
    every = backend.world.gather_objects((same, sum(w.num_bytes for w in taken.values())))
    if backend.rank == 0:
        launching.give_figures(
            {
                "bench": "checkpoint",
                "bytes": manifest.num_bytes,
                "save_s": measured["save"],
                "copy_s": measured["copy"],
                "load_s": measured["load"],
                "save_GB_per_s": disk.num_bytes / measured["save"] / 1e9,
                "load_GB_per_s": sum(size for _, size in every) / measured["load"] / 1e9,
                "disk_GB_per_s": disk.num_bytes / measured["disk"] / 1e9,
                "bit_exact": all(same for same, _ in every),
                "train": given.train,
                "infer": given.infer,
            }
        )
    backend.close()


if __name__ == "__main__":
    main()
