"""Stores the experts of the tokens of ended samples beside a manifest: of a large model they are gigabytes.

They are the tensors of one safetensors file, in the order of the manifest's groups and samples. The first rank writes
it while a checkpoint is begun, a few samples at a time, and every rank reads it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from pathlib import Path

import numpy as np

from mindgrpo.checkpoint.format import (
    MANIFEST,
    DamagedCheckpoint,
    Manifest,
    StoredFile,
    StoredGroup,
)

FILE = "routes.safetensors"
CODES = {"uint8": "U8", "uint16": "U16"}
READ_BYTES = 1 << 20

# The numbers of a group and of a sample in it.
Key = tuple[int, int]
# Of a file: what each tensor begins with is its shape in tokens, layers and experts.
Tensors = Mapping[Key, tuple[np.dtype, tuple[int, int, int]]]


def tensors_of(groups: Sequence[StoredGroup]) -> Tensors:
    """Returns dtype and shape of what the file has of `groups`; nothing of version 1, whose manifests have it all."""
    return {
        (number, i): (np.dtype(sample.routes[0]).newbyteorder("<"), sample.routes[1])
        for number, group in enumerate(groups)
        for i, sample in enumerate(group.samples)
        if sample.routes is not None and len(sample.routes) == 2
    }


def num_bytes(tensors: Tensors) -> int:
    """Returns the bytes of the file, without its header."""
    return sum(prod(shape) * dtype.itemsize for dtype, shape in tensors.values())


def write_routes(path: Path, tensors: Tensors, arrays: Iterable[np.ndarray]) -> StoredFile:
    """Writes and syncs the file; `arrays` are those of `tensors`, in order. Raises OSError."""
    described: dict[str, object] = {"__metadata__": {"format": "mindgrpo"}}
    start = 0
    for (group, sample), (dtype, shape) in tensors.items():
        stop = start + prod(shape) * dtype.itemsize
        ends = {"shape": list(shape), "data_offsets": [start, stop]}
        described[f"{group}/{sample}"] = {"dtype": CODES[dtype.name], **ends}
        start = stop
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    data = hashlib.sha256()
    with path.open("xb") as stream:
        stream.write(header)
        for (dtype, _), array in zip(tensors.values(), arrays, strict=True):
            values = np.ascontiguousarray(array, dtype)
            data.update(values.data)
            stream.write(values.data)
        stream.flush()
        os.fsync(stream.fileno())
    return StoredFile(
        bytes=len(header) + start,
        header_bytes=len(header),
        header=hashlib.sha256(header).hexdigest(),
        data=data.hexdigest(),
    )


def check_routes(folder: Path, manifest: Manifest) -> None:
    """Raises DamagedCheckpoint unless the file, where the manifest has one, is the one that was written."""
    tensors = tensors_of(manifest.state.unfinished)
    if not tensors:
        return
    file, path = manifest.files.get(FILE), folder / FILE
    if file is None or file.bytes != file.header_bytes + num_bytes(tensors):
        raise DamagedCheckpoint(
            f"{folder / MANIFEST} is damaged: {FILE} does not have the experts of its samples; use an earlier "
            "checkpoint."
        )
    digest = hashlib.sha256()
    try:
        with path.open("rb") as stream:
            header = hashlib.sha256(stream.read(file.header_bytes)).hexdigest()
            while block := stream.read(READ_BYTES):
                digest.update(block)
    except OSError as error:
        raise DamagedCheckpoint(f"{path} cannot be read ({error.strerror}).") from None
    if (header, digest.hexdigest()) != (file.header, file.data):
        raise DamagedCheckpoint(
            f"{path} is damaged: it is not what was written; use an earlier checkpoint."
        )


def read_routes(folder: Path, manifest: Manifest) -> dict[Key, np.ndarray]:
    """Reads what `check_routes` has checked: [tokens, layers with experts, experts a token] by group and sample."""
    tensors = tensors_of(manifest.state.unfinished)
    if not tensors:
        return {}
    with (folder / FILE).open("rb") as stream:
        stream.seek(manifest.files[FILE].header_bytes)
        return {
            key: np.fromfile(stream, dtype, prod(shape)).reshape(shape).astype(dtype.name)
            for key, (dtype, shape) in tensors.items()
        }
