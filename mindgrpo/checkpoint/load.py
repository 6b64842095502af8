"""Loads a checkpoint's tensors into a rank's weights, whatever layout saved them: each reads what overlaps its own."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np

from mindgrpo.checkpoint.format import (
    MANIFEST,
    DamagedCheckpoint,
    Manifest,
    StoredChunk,
)
from mindgrpo.errors import UserError
from mindgrpo.weights.local_weights import Weights
from mindgrpo.weights.model_files import ModelFiles, ModelTensor
from mindgrpo.weights.pretrained import fill


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


def checkpoint_files(folder: Path, manifest: Manifest, role: str) -> ModelFiles:
    """Returns a role's parameters as the checkpoint's chunks of them, each verified when it is read.

    Reading raises DamagedCheckpoint. The header of each file is verified when it is first read from.
    """
    verified: set[str] = set()

    def values(chunk: StoredChunk) -> np.ndarray:
        path, file = folder / chunk.file, manifest.files[chunk.file]
        try:
            with path.open("rb") as stream:
                if chunk.file not in verified:
                    if hashlib.sha256(stream.read(file.header_bytes)).hexdigest() != file.header:
                        raise _changed(path, "its header is not the one that was")
                    verified.add(chunk.file)
                stream.seek(file.header_bytes + chunk.offset)
                array = np.empty(chunk.box.shape, "<f4")
                num_read = stream.readinto(array.reshape(-1).view(np.uint8).data)
        except OSError as error:
            raise DamagedCheckpoint(f"{path} cannot be read ({error.strerror}).") from None
        if num_read != array.nbytes or hashlib.sha256(array.data).hexdigest() != chunk.digest:
            raise _changed(
                path, f"bytes {chunk.offset} to {chunk.end} of its data are not those that were"
            )
        return array

    def of_file(chunk: StoredChunk) -> ModelTensor:
        return ModelTensor(folder / chunk.file, "F32", chunk.box.shape, partial(values, chunk))

    return ModelFiles(
        folder,
        {
            name: [(chunk.box, of_file(chunk)) for chunk in tensor.chunks]
            for name, tensor in manifest.tensors[role].items()
        },
    )


def _changed(path: Path, what: str) -> DamagedCheckpoint:
    return DamagedCheckpoint(f"{path} is damaged: {what} written; use an earlier checkpoint.")


def load_role(folder: Path, manifest: Manifest, role: str, weights: Weights) -> None:
    """Fills `weights`, which must be in memory. Raises DamagedCheckpoint."""
    fill(weights, checkpoint_files(folder, manifest, role))
