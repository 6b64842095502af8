"""A run's model, one of its checkpoints or any model directory, as a directory of another dtype, cut or naming.

One process, without a device, a tensor at a time; no file is overwritten.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mindgrpo.checkpoint.folders import find, folder_of, steps_in
from mindgrpo.checkpoint.format import MANIFEST, Manifest, read_manifest
from mindgrpo.checkpoint.load import ShardReader, read_box
from mindgrpo.cli.arguments import Arguments
from mindgrpo.cli.arguments import path as path_of
from mindgrpo.errors import UserError
from mindgrpo.models.decoder_config import read_config
from mindgrpo.models.lora_specs import adapter_names
from mindgrpo.models.parameters import parameter_specs
from mindgrpo.parallel.sharding import Box
from mindgrpo.weight_sync.hf_export import write_companions
from mindgrpo.weights.mindformers_names import FAMILIES, to_mindformers
from mindgrpo.weights.model_files import ModelFiles, ModelTensor, SafetensorsDirectory
from mindgrpo.weights.pretrained import check_tensors, open_weights
from mindgrpo.weights.safetensors_writer import (
    INDEX_FILE,
    MAX_SHARD_BYTES,
    NAME_MAP_FILE,
    SafetensorsWriter,
)

FORMATS = ("huggingface", "mindformers")


def policy_files(folder: Path, manifest: Manifest, base: ModelFiles | None) -> ModelFiles:
    """Returns the policy of a checkpoint as a model's tensors; adapters are added to `base`. Raises UserError."""
    role = "policy" if base is None else "adapters"
    if role not in manifest.tensors:
        raise UserError(
            f"{folder / MANIFEST} lists no tensors of '{role}', the weights that are to be exported."
        )
    reader, tensors = ShardReader(folder, manifest.files), manifest.tensors[role]
    scale = manifest.lora.alpha / manifest.lora.rank if manifest.lora is not None else 0.0

    def stored(name: str) -> np.ndarray:
        shape = tensors[name].shape
        values = np.empty(shape, np.float32)
        read_box(reader, tensors[name], Box((0,) * len(shape), shape), values)
        return values

    def merged(name: str) -> np.ndarray:
        assert base is not None
        values = base.read(name)
        a_name, b_name = adapter_names(name)
        if b_name in tensors:
            values += np.float32(scale) * (stored(b_name) @ stored(a_name))
        return values

    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    if base is not None:
        shapes = {name: base.shape(name) for name in base.names}
    values_of = stored if base is None else merged
    return ModelFiles(
        folder,
        {
            name: ModelTensor(folder, "F32", s, partial(values_of, name))
            for name, s in shapes.items()
        },
    )


def open_source(source: Path, model: Path | None) -> tuple[ModelFiles, Path]:
    """The tensors, and the directory whose configuration and tokenizer belong to them. Raises UserError."""
    is_checkpoint = (source / MANIFEST).is_file()
    if not is_checkpoint and (source / "hf" / "config.json").is_file():
        source = source / "hf"
    elif is_checkpoint or steps_in(source):
        return _open_checkpoint(source, model)
    beside = model or source
    read_config(beside)
    return open_weights(source), beside


def best_checkpoint(run: Path) -> Path:
    """The checkpoint that `rl_config.save_ckpt_best` kept. Raises UserError."""
    steps = steps_in(run)
    best = read_manifest(folder_of(run, steps[-1])).state.best if steps else None
    if best is None:
        what = "has no checkpoint that was marked as the best" if steps else "holds no checkpoint"
        raise UserError(
            f"--best is given, but --from {run} {what}; leave out --best, and set rl_config.save_ckpt_best to a "
            "reward function before the next run."
        )
    folder = folder_of(run, best.step)
    if not folder.is_dir():
        raise UserError(
            f"--best is given, but {folder}, the best checkpoint of the run, is not there now; leave out --best."
        )
    return folder


def _open_checkpoint(source: Path, model: Path | None) -> tuple[ModelFiles, Path]:
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
    files = policy_files(folder, manifest, base)
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
        raise UserError(f"'{target}' exists and is not an empty folder; choose another --output.")
    is_mindformers = names == "mindformers"
    family = read_config(beside).model_type
    if is_mindformers and family not in FAMILIES:
        raise UserError(
            f"--format is mindformers, but MindFormers has no names for the tensors of '{family}' ({beside}), only of "
            f"{', '.join(FAMILIES)}; leave --format out."
        )
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
    parser.add_argument("--best", action="store_true")
    parser.add_argument("--output", required=True, type=path_of)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--max_shard_bytes", type=int, default=MAX_SHARD_BYTES)
    parser.add_argument("--format", default=FORMATS[0], choices=FORMATS)
    parser.add_argument("--model", type=path_of)
    flags = parser.parse_args(list(argv))
    shards = flags.max_shard_bytes
    source = best_checkpoint(flags.source) if flags.best else flags.source
    for file in convert(source, flags.output, flags.dtype, shards, flags.format, flags.model):
        print(file)
