"""Checkpoints by real ranks, of layouts that fill the world or less of it, for job.py. Judges nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import cases as c
import numpy as np

from mindgrpo.backend.contract import Backend
from mindgrpo.checkpoint.format import Identity, Manifest, RunState, read_manifest
from mindgrpo.checkpoint.load import load_role
from mindgrpo.checkpoint.save import Saver, values_digest
from mindgrpo.weights.checksum import host_sums
from mindgrpo.weights.local_weights import Weights

Grid3 = tuple[int, int, int]
IDENTITY = Identity(code="", config={}, model={}, data="", batch={}, unsaved={})


def saved_and_loaded(
    folder: Path, backend: Backend, filled: Callable[[Grid3], Weights]
) -> dict[str, Any]:
    """Every layout of the world's c.saved_by, saved and then loaded into the next one's."""
    saver, found = Saver(folder, backend), {}
    saved = c.saved_by((backend.world_size, "shared_memory" if backend.shares_memory else "device"))
    following = (*saved[1:], saved[0])
    for step, (source, target) in enumerate(zip(saved, following, strict=True), start=1):
        given, expected = filled(source), filled(target)
        state = RunState(step=step, prompts=0, updates=0, weights_version=0)

        def complete(stored: dict[str, Any], state: RunState = state) -> Manifest:
            return Manifest(layout="", state=state, identity=IDENTITY, **stored)

        roles = {"policy": given, "first_moments": given}
        saver.begin(step, roles, complete, background=step % 2 == 0)
        checkpoint = saver.commit()
        manifest = read_manifest(checkpoint)
        taken = Weights(expected.layout, backend.rank, backend)
        with taken.on_host(write=True) as host:
            for run in host.flat_buffers:
                run[...] = np.nan
        load_role(checkpoint, manifest, "first_moments", taken)
        found[c.pair_name(source, target)] = {
            "same": host_sums(taken) == host_sums(expected),
            "held": len(host_sums(taken)),
            "sums": values_digest(taken, backend) == manifest.sums["policy"],
            "files": sorted(manifest.files),
        }
    return found
