"""A checkpoint's tensors into a rank's weights, whatever layout saved them: each rank reads what overlaps its slices.

Refuses tensors that are missing, of another shape, or whose bytes are not those that were written.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from mindgrpo.checkpoint import tiles
from mindgrpo.checkpoint.manifest import MANIFEST, DamagedCheckpoint, Manifest, StoredTensor
from mindgrpo.checkpoint.shard import ShardReader
from mindgrpo.errors import UserError
from mindgrpo.parallel.sharding import Box
from mindgrpo.weights.local_weights import Weights


def check_tensors(folder: Path, manifest: Manifest, roles: Mapping[str, Weights]) -> None:
    """Raises UserError if the checkpoint is not one of these roles' tensors, all of them and no others."""
    path = folder / MANIFEST
    if set(manifest.tensors) != set(roles):
        raise UserError(
            f"{path} holds {_listed(manifest.tensors)}, but this run needs {_listed(roles)}; the configurations "
            "differ in actor_config.lora or ref_config.sync_ref_model."
        )
    for role, weights in roles.items():
        stored = manifest.tensors[role]
        shapes = {spec.name: spec.shape for spec in weights.layout.specs}
        for name in sorted(shapes.keys() ^ stored.keys()):
            which = "has no" if name in shapes else "has a"
            raise UserError(
                f"{path} {which} tensor {name} of {role}, unlike this run's model; give the configuration of the run "
                "that wrote it."
            )
        for name, shape in shapes.items():
            if stored[name].shape != shape:
                raise UserError(
                    f"{name} of {role} has the shape {list(stored[name].shape)} in {path}, but {list(shape)} in this "
                    "run's model; give the configuration of the run that wrote it."
                )


def _listed(roles: Mapping[str, object]) -> str:
    return ", ".join(sorted(roles)) or "nothing"


def load_role(folder: Path, manifest: Manifest, role: str, weights: Weights) -> None:
    """Fills `weights`, whose place in memory must be at hand. Raises DamagedCheckpoint."""
    reader = ShardReader(folder, manifest.files)
    for name, part in weights.parts.items():
        read_box(reader, manifest.tensors[role][name], weights.boxes[name], part)
    weights.pool.push()


def read_box(reader: ShardReader, tensor: StoredTensor, box: Box, out: np.ndarray) -> None:
    """The part `box` of a tensor into `out`, which has its shape."""
    missing = box.size
    for piece in tensor.pieces:
        common = piece.box.intersect(box)
        if common is None:
            continue
        values = reader.read(piece)
        part = values[common.within(piece.box).slices]
        tiles.copy(out[common.within(box).slices], part)
        missing -= common.size
    if missing:
        raise DamagedCheckpoint(f"{missing} elements of {box} are in no piece of the checkpoint.")
