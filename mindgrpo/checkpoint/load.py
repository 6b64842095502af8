"""Loads a checkpoint's tensors into a rank's weights, whatever layout saved them: each reads what overlaps its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from mindgrpo.checkpoint.format import MANIFEST, DamagedCheckpoint, Manifest, StoredTensor
from mindgrpo.checkpoint.shards import ShardReader, copy
from mindgrpo.errors import UserError
from mindgrpo.parallel.sharding import Box
from mindgrpo.weights.local_weights import Weights


def check_tensors(folder: Path, manifest: Manifest, roles: Mapping[str, Weights]) -> None:
    """Raises UserError if the checkpoint is not one of these roles' tensors, all of them and no others."""
    path, remedy = folder / MANIFEST, "give the configuration of the run that wrote it."
    if set(manifest.tensors) != set(roles):
        raise UserError(
            f"{path} holds {_listed(manifest.tensors)}, but this run needs {_listed(roles)}; the configurations "
            "differ in actor_config.lora or ref_config.sync_ref_model."
        )
    for role, weights in roles.items():
        stored = manifest.tensors[role]
        shapes = {spec.name: spec.shape for spec in weights.layout.specs}
        for name in sorted(shapes.keys() ^ stored.keys()):
            has = "has no" if name in shapes else "has a"
            raise UserError(
                f"{path} {has} tensor {name} of {role}, unlike this run's model; {remedy}"
            )
        for name, shape in shapes.items():
            if stored[name].shape != shape:
                raise UserError(
                    f"{name} of {role} has the shape {list(stored[name].shape)} in {path}, but {list(shape)} in this "
                    f"run's model; {remedy}"
                )


def _listed(roles: Mapping[str, object]) -> str:
    return ", ".join(sorted(roles)) or "nothing"


def load_role(folder: Path, manifest: Manifest, role: str, weights: Weights) -> None:
    """Fills `weights`, which must be in memory. Raises DamagedCheckpoint."""
    reader = ShardReader(folder, manifest.files)
    for name, view in weights.hf_views.items():
        read_box(reader, manifest.tensors[role][name], weights.boxes[name], view)
    weights.pool.push()


def read_box(reader: ShardReader, tensor: StoredTensor, box: Box, out: np.ndarray) -> None:
    """Reads the slice `box` of a tensor into `out`, which has its shape. Raises DamagedCheckpoint."""
    missing = box.size
    for chunk in tensor.chunks:
        common = chunk.box.intersect(box)
        if common is None:
            continue
        values = reader.read(chunk)[common.within(chunk.box).slices]
        copy(out[common.within(box).slices], values)
        missing -= common.size
    if missing:
        raise DamagedCheckpoint(f"{missing} elements of {box} are in no chunk of the checkpoint.")
