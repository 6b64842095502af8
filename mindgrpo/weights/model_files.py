"""A model directory's tensors by their Hugging Face names, whatever the files are: safetensors or .ckpt, MindFormers'
names or Hugging Face's.

Refuses to guess: both kinds of files in one directory, or none, is an error of the reader that it asks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np

from mindgrpo.parallel.sharding import Box
from mindgrpo.weights.mindformers_names import are_mindformers, check_apart, to_huggingface
from mindgrpo.weights.mindspore_ckpt import CkptDirectory
from mindgrpo.weights.safetensors_files import SafetensorsDirectory


class WeightFiles(Protocol):
    @property
    def names(self) -> tuple[str, ...]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def check_dtype(self, name: str) -> None:
        """Raises UserError for what `read` cannot give."""

    def read(self, name: str, box: Box | None = None) -> np.ndarray:
        """A fresh float32 array of the box (everything without one)."""


class Renamed:
    """Files whose tensors have MindFormers' names."""

    def __init__(self, files: WeightFiles, where: str) -> None:
        self._files = files
        check_apart(files.names, where)
        self._theirs = {to_huggingface(name): name for name in files.names}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._theirs)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._files.shape(self._theirs[name])

    def check_dtype(self, name: str) -> None:
        self._files.check_dtype(self._theirs[name])

    def read(self, name: str, box: Box | None = None) -> np.ndarray:
        return self._files.read(self._theirs[name], box)


def open_weights(directory: str | Path) -> WeightFiles:
    """Raises UserError for what is no model directory."""
    folder = Path(directory)
    files: WeightFiles
    if any(folder.glob("*.ckpt")) and not any(folder.glob("*.safetensors*")):
        files = CkptDirectory(folder)
    else:
        files = SafetensorsDirectory(folder)
    return Renamed(files, str(directory)) if are_mindformers(files.names) else files
