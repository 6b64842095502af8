"""Loads a checkpoint's tensors into a rank's weights, whatever layout saved them: each reads what overlaps its own."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from mindgrpo.checkpoint.format import (
    MANIFEST,
    DamagedCheckpoint,
    Manifest,
    StoredChunk,
    StoredFile,
    StoredTensor,
)
from mindgrpo.checkpoint.shards import copy
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


class ShardReader:
    """The files of one checkpoint; the header of each is verified when it is first read from."""

    def __init__(self, folder: Path, files: dict[str, StoredFile]) -> None:
        self._folder, self._files = folder, files
        self._verified: set[str] = set()

    def read(self, chunk: StoredChunk) -> np.ndarray:
        """Returns a fresh float32 array of the chunk's shape. Raises DamagedCheckpoint."""
        path, file = self._folder / chunk.file, self._files[chunk.file]
        try:
            with path.open("rb") as stream:
                if chunk.file not in self._verified:
                    if hashlib.sha256(stream.read(file.header_bytes)).hexdigest() != file.header:
                        raise _changed(path, "its header is not the one that was")
                    self._verified.add(chunk.file)
                stream.seek(file.header_bytes + chunk.offset)
                values = np.empty(chunk.box.shape, "<f4")
                num_read = stream.readinto(values.reshape(-1).view(np.uint8).data)
        except OSError as error:
            raise DamagedCheckpoint(f"{path} cannot be read ({error.strerror}).") from None
        if num_read != values.nbytes or hashlib.sha256(values.data).hexdigest() != chunk.digest:
            raise _changed(
                path, f"bytes {chunk.offset} to {chunk.end} of its data are not those that were"
            )
        return values


def _changed(path: Path, what: str) -> DamagedCheckpoint:
    return DamagedCheckpoint(f"{path} is damaged: {what} written; use an earlier checkpoint.")


def load_role(folder: Path, manifest: Manifest, role: str, weights: Weights) -> None:
    """Fills `weights`, which must be in memory. Raises DamagedCheckpoint."""
    reader = ShardReader(folder, manifest.files)
    with weights.on_host(write=True) as host:
        for name, view in host.hf_views.items():
            read_box(reader, manifest.tensors[role][name], weights.boxes[name], view)


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
