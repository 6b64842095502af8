"""A run's model, one of its checkpoints or any model directory, as a directory of another dtype, cut or naming.

One process, without a device, a tensor at a time. Refuses to write over anything.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mindgrpo.checkpoint.find import find
from mindgrpo.checkpoint.folders import steps_in
from mindgrpo.checkpoint.load import read_box
from mindgrpo.checkpoint.manifest import MANIFEST, Manifest
from mindgrpo.checkpoint.shard import ShardReader
from mindgrpo.cli.arguments import Arguments
from mindgrpo.cli.arguments import path as path_of
from mindgrpo.errors import UserError
from mindgrpo.grpo.hf_export import MAX_SHARD_BYTES, write_companions
from mindgrpo.models.families import parameter_specs, read_config
from mindgrpo.models.lora_specs import adapter_names
from mindgrpo.parallel.sharding import Box
from mindgrpo.weights.mindformers_names import to_mindformers
from mindgrpo.weights.model_files import WeightFiles, open_weights
from mindgrpo.weights.pretrained import check_tensors
from mindgrpo.weights.safetensors_files import SafetensorsDirectory
from mindgrpo.weights.safetensors_writer import INDEX_FILE, NAME_MAP_FILE, SafetensorsWriter

FORMATS = ("huggingface", "mindformers")


class CheckpointFiles:
    """The policy of a checkpoint as a model's tensors; adapters are added to `base`."""

    def __init__(self, folder: Path, manifest: Manifest, base: WeightFiles | None) -> None:
        self._reader = ShardReader(folder, manifest.files)
        self._base = base
        self._scale = 0.0
        if manifest.lora is not None:
            self._scale = manifest.lora.alpha / manifest.lora.rank
        role = "policy" if base is None else "adapters"
        if role not in manifest.tensors:
            raise UserError(
                f"{folder / MANIFEST} lists no tensors of '{role}', the weights that are to be exported."
            )
        self._tensors = manifest.tensors[role]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._tensors) if self._base is None else self._base.names

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape if self._base is None else self._base.shape(name)

    def check_dtype(self, name: str) -> None:
        """Every checkpoint is float32."""
        if self._base is not None:
            self._base.check_dtype(name)

    def read(self, name: str, box: Box | None = None) -> np.ndarray:
        """A fresh float32 array of the box (everything without one)."""
        whole = self._whole(name)
        return whole if box is None else whole[box.slices].copy()

    def _whole(self, name: str) -> np.ndarray:
        if self._base is None:
            return self._stored(name)
        values = self._base.read(name)
        a_name, b_name = adapter_names(name)
        if b_name in self._tensors:
            values += np.float32(self._scale) * (self._stored(b_name) @ self._stored(a_name))
        return values

    def _stored(self, name: str) -> np.ndarray:
        tensor = self._tensors[name]
        values = np.empty(tensor.shape, np.float32)
        read_box(self._reader, tensor, Box((0,) * len(tensor.shape), tensor.shape), values)
        return values


def open_source(source: Path, model: Path | None) -> tuple[WeightFiles, Path]:
    """The tensors, and the directory whose configuration and tokenizer belong to them. Raises UserError."""
    is_checkpoint = (source / MANIFEST).is_file()
    if not is_checkpoint and (source / "hf" / "config.json").is_file():
        source = source / "hf"
    elif is_checkpoint or steps_in(source):
        return _open_checkpoint(source, model)
    beside = model or source
    read_config(beside)
    return open_weights(source), beside


def _open_checkpoint(source: Path, model: Path | None) -> tuple[WeightFiles, Path]:
    start = find(str(source), None, "", source)
    assert start is not None
    folder, manifest = start.candidates[0].folder, start.candidates[0].manifest
    base: Any = manifest.identity.config.get("actor_config.load")
    beside = model or Path(str(base))
    if not (beside / "config.json").is_file():
        raise UserError(
            f"The run of {folder} began with the model '{beside}', which is not there now; name it with --model DIR."
        )
    specs = parameter_specs(read_config(beside))
    base = None
    if manifest.lora is not None:
        base = check_tensors(beside, specs)
    files = CheckpointFiles(folder, manifest, base)
    if {spec.name: spec.shape for spec in specs} != {n: files.shape(n) for n in files.names}:
        raise UserError(
            f"{folder} holds another model than '{beside}'; name the one that its run began with, as --model DIR."
        )
    return files, beside


def convert(
    source: Path,
    target: Path,
    dtype: str,
    max_shard_bytes: int,
    names: str = "huggingface",
    model: Path | None = None,
) -> list[Path]:
    """The files of the new directory. `model` gives a checkpoint's config.json and tokenizer. Raises UserError."""
    files, beside = open_source(source, model)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(
            f"'{target}' exists and is not an empty folder, and nothing is written over; choose another --output."
        )
    is_mindformers = names == "mindformers"
    for name in files.names:
        files.check_dtype(name)
    with SafetensorsWriter(target, max_shard_bytes, dtype) as writer:
        for name in files.names:
            writer.add(to_mindformers(name) if is_mindformers else name, files.read(name))
    if is_mindformers:
        _write_name_map(target)
    write_companions(beside, target, dtype)
    return sorted(target.iterdir())


def _write_name_map(target: Path) -> None:
    """MindFormers' index beside Hugging Face's."""
    index = target / INDEX_FILE
    if index.is_file():
        weight_map = json.loads(index.read_text())["weight_map"]
    else:
        (only,) = target.glob("*.safetensors")
        weight_map = dict.fromkeys(SafetensorsDirectory(target).names, only.name)
    (target / NAME_MAP_FILE).write_text(json.dumps(weight_map, indent=2) + "\n")


def main(argv: Sequence[str]) -> None:
    parser = Arguments(prog="mindgrpo export")
    parser.add_argument("--from", dest="source", required=True, type=path_of)
    parser.add_argument("--output", required=True, type=path_of)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--max_shard_bytes", type=int, default=MAX_SHARD_BYTES)
    parser.add_argument("--format", default=FORMATS[0], choices=FORMATS)
    parser.add_argument("--model", type=path_of)
    flags = parser.parse_args(list(argv))
    shards = flags.max_shard_bytes
    for file in convert(flags.source, flags.output, flags.dtype, shards, flags.format, flags.model):
        print(file)
