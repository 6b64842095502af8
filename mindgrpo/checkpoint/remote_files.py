"""Stores the remote arrays of ended samples beside a manifest: of a large model they are gigabytes.

One is the tensors of a safetensors file, in the order of the manifest's groups and samples. The first rank writes it
while a checkpoint is begun, a few samples at a time, and every rank reads it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from pathlib import Path

import numpy as np

from mindgrpo.algorithm.token_arrays import TOKEN_ARRAYS
from mindgrpo.checkpoint.format import (
    MANIFEST,
    DamagedCheckpoint,
    Manifest,
    StoredFile,
    StoredGroup,
)

CODES = {"uint8": "U8", "uint16": "U16"}
READ_BYTES = 1 << 20

# The numbers of a group and of a sample in it.
Key = tuple[int, int]
# Of a file: dtype and shape, which begins with the number of tokens.
Tensors = Mapping[Key, tuple[np.dtype, tuple[int, ...]]]
# By the names of arrays.
Files = Mapping[str, Tensors]


def file_of(name: str) -> str:
    return f"{name}.safetensors"


def files_of(groups: Sequence[StoredGroup]) -> Files:
    """Returns what the file of each array has of `groups`; nothing of version 1, whose manifests have it all."""
    files: dict[str, dict[Key, tuple[np.dtype, tuple[int, ...]]]] = {}
    for number, group in enumerate(groups):
        for i, sample in enumerate(group.samples):
            for name, (dtype, shape, *inline) in sample.remote.items():
                if not inline:
                    tensors = files.setdefault(name, {})
                    tensors[number, i] = np.dtype(dtype).newbyteorder("<"), shape
    return files


def num_bytes(files: Files) -> int:
    """Returns the bytes of files, without their headers."""
    tensors = (tensor for file in files.values() for tensor in file.values())
    return sum(prod(shape) * dtype.itemsize for dtype, shape in tensors)


def write_file(path: Path, tensors: Tensors, arrays: Iterable[np.ndarray]) -> StoredFile:
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


def check_files(folder: Path, manifest: Manifest) -> None:
    """Raises DamagedCheckpoint unless the files, where the manifest has some, are those that were written."""
    for name, tensors in files_of(manifest.state.unfinished).items():
        file, path = manifest.files.get(file_of(name)), folder / file_of(name)
        if file is None or file.bytes != file.header_bytes + num_bytes({name: tensors}):
            raise DamagedCheckpoint(
                f"{folder / MANIFEST} is damaged: {path.name} does not have {TOKEN_ARRAYS[name].title} of its samples; "
                "use an earlier checkpoint."
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


def read_files(folder: Path, manifest: Manifest) -> dict[Key, dict[str, np.ndarray]]:
    """Reads what `check_files` has checked: [tokens, ...] by group and sample, and by name."""
    arrays: dict[Key, dict[str, np.ndarray]] = {}
    for name, tensors in files_of(manifest.state.unfinished).items():
        with (folder / file_of(name)).open("rb") as stream:
            stream.seek(manifest.files[file_of(name)].header_bytes)
            for key, (dtype, shape) in tensors.items():
                values = np.fromfile(stream, dtype, prod(shape)).reshape(shape)
                arrays.setdefault(key, {})[name] = values.astype(dtype.name)
    return arrays
