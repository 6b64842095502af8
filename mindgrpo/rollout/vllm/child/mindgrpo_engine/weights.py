"""Weights of one publish in shared memory: which tensors are due, where each lies, and whether it came over whole.

A publish is a transaction: begin with the names of all tensors, load each of them once, commit.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from typing import Any

from mindgrpo_engine.checksum import checksum
from mindgrpo_engine.expected import Shapes
from mindgrpo_engine.messages import EngineFailure

ALIGNMENT = 64


@dataclass(frozen=True)
class SharedTensor:
    """One tensor in the shared file, from offset on, its last dim fastest, or `transposed` its first; crc as
    `checksum` has it."""

    name: str
    shape: tuple[int, ...]
    offset: int
    crc: int
    transposed: bool = False

    @classmethod
    def read(cls, entry: dict[str, Any]) -> SharedTensor:
        shape, transposed = tuple(entry["shape"]), entry.get("transposed", False)
        return cls(entry["name"], shape, entry["offset"], entry["crc"], transposed)

    @property
    def num_elements(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass
class Publish:
    """The tensors of one publish that are still to come."""

    version: int
    due: Shapes

    def take(self, tensors: list[SharedTensor]) -> None:
        """Notes that these tensors come now."""
        for tensor in tensors:
            shape = self.due.pop(tensor.name, None)
            if shape is None:
                raise EngineFailure(f"{tensor.name} was not announced or has been loaded before")
            if shape != tensor.shape:
                raise EngineFailure(
                    f"{tensor.name} has shape {list(tensor.shape)}, announced was {list(shape)}"
                )
            if tensor.offset % ALIGNMENT:
                raise EngineFailure(f"{tensor.name} is not aligned to {ALIGNMENT} bytes")

    def check_complete(self, version: int) -> None:
        if version != self.version:
            raise EngineFailure(f"version {version} is committed, but {self.version} was begun")
        if self.due:
            names = ", ".join(list(self.due)[:3])
            raise EngineFailure(f"{len(self.due)} tensors have not been loaded, such as {names}")


class SharedFile:
    """The shared file of the weights, mapped from the engine's process and anew where it has grown."""

    def __init__(self, pid: int, descriptor: int) -> None:
        self._path = f"/proc/{pid}/fd/{descriptor}"
        self._mapping: mmap.mmap | None = None

    def mapped(self, num_bytes: int) -> mmap.mmap:
        if self._mapping is None or len(self._mapping) < num_bytes:
            descriptor = os.open(self._path, os.O_RDWR)
            try:
                size = os.fstat(descriptor).st_size
                if size < num_bytes:
                    raise EngineFailure(f"the shared file has {size} bytes of {num_bytes}")
                self._mapping = mmap.mmap(descriptor, size)
            finally:
                os.close(descriptor)
        return self._mapping


def check_sample(tensor: SharedTensor, data: memoryview) -> None:
    crc = checksum(data)
    if crc != tensor.crc:
        raise EngineFailure(
            f"{tensor.name} has checksum {crc} in shared memory, announced was {tensor.crc}"
        )
