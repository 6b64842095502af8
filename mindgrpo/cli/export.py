"""Writes a run's model, one of its checkpoints or any model directory in another dtype, cut or naming.

One process, without a device, a tensor at a time; no file is overwritten.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mindgrpo.backend.dtypes import Dtype
from mindgrpo.backend.kernels.native.library import float32_product
from mindgrpo.checkpoint.folders import Candidate, find, folder_of, steps_in
from mindgrpo.checkpoint.format import MANIFEST, Manifest, read_manifest
from mindgrpo.checkpoint.load import checkpoint_files
from mindgrpo.cli.arguments import Arguments
from mindgrpo.cli.arguments import path as path_of
from mindgrpo.data.chat_template import ChatTemplate
from mindgrpo.data.hub_names import local_copy
from mindgrpo.data.tokenizer import Tokenizer, load_tokenizer, write_tokenizer
from mindgrpo.errors import UserError
from mindgrpo.models.decoder_config import read_config
from mindgrpo.models.lora import adapter_names, add_product, factor_box
from mindgrpo.models.parameters import parameter_specs
from mindgrpo.parallel.sharding import Box
from mindgrpo.run.model_export import experts_of, write_companions
from mindgrpo.run.named_sources import fetch_local
from mindgrpo.weights.expert_files import file_tensors
from mindgrpo.weights.mindspore_files import FAMILIES, to_mindformers
from mindgrpo.weights.model_files import (
    MAX_SHARD_BYTES,
    NAME_MAP_FILE,
    VISUAL,
    ModelFiles,
    ModelTensor,
    SafetensorsWriter,
    TensorSlice,
    whole_box,
)
from mindgrpo.weights.pretrained import check_tensors, encoder_files, open_weights

FORMATS = ("huggingface", "mindformers")


def policy_files(folder: Path, manifest: Manifest, base: ModelFiles | None) -> ModelFiles:
    """Returns the policy of a checkpoint as a model's tensors; adapters are added to `base`. Raises UserError."""
    role = "policy" if base is None else "adapters"
    if role not in manifest.tensors:
        raise UserError(
            f"{folder / MANIFEST} lists no tensors of '{role}', the weights that are to be exported."
        )
    stored = checkpoint_files(folder, manifest, role)
    if base is None:
        return stored
    model, lora = base, manifest.lora
    scale = lora.alpha / lora.rank if lora is not None else 0.0

    def merged(name: str, box: Box) -> np.ndarray:
        values, factors = model.read(name, box), adapter_names(name)
        if factors[1] in stored.names:
            a, b = (stored.read(own, factor_box(box, stored.shape(own))) for own in factors)
            add_product(values, a, b, np.float32(scale), float32_product)
        return values

    def tensor(name: str, box: Box) -> TensorSlice:
        return box, ModelTensor(folder, "F32", box.shape, partial(merged, name, box))

    def parts(name: str) -> list[TensorSlice]:
        # Of experts each by itself, as files have them and are written.
        whole = whole_box(model.shape(name))
        if len(whole.shape) < 3:
            return [tensor(name, whole)]
        numbers = range(whole.shape[0])
        return [tensor(name, Box((i, 0, 0), (i + 1, *whole.shape[1:]))) for i in numbers]

    return ModelFiles(folder, {name: parts(name) for name in model.names})


@dataclass(frozen=True)
class Source:
    """What is exported: tensors, the directory whose configuration belongs to them, and the checkpoint if it is one."""

    files: ModelFiles
    beside: Path
    checkpoint: Candidate | None = None


def open_source(source: Path, model: Path | None) -> Source:
    """Opens what --from names. Raises UserError."""
    is_checkpoint = (source / MANIFEST).is_file()
    if not is_checkpoint and (source / "hf" / "config.json").is_file():
        source = source / "hf"
    elif is_checkpoint or steps_in(source):
        return _open_checkpoint(source, model)
    beside = model or source
    read_config(beside)
    return Source(open_weights(source), beside)


def best_checkpoint(run: Path) -> Path:
    """Returns the checkpoint that `rl_config.save_ckpt_best` kept. Raises UserError."""
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


def _open_checkpoint(source: Path, model: Path | None) -> Source:
    start = find(str(source), None, "", source)
    assert start is not None
    checkpoint = start.candidates[0]
    folder, manifest = checkpoint.folder, checkpoint.manifest
    base: Any = manifest.identity.config.get("actor_config.load")
    beside = model or local_copy(str(base), "model")
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
    return Source(files, beside, checkpoint)


def own_tokenizer(source: Source, directory: Path | None) -> tuple[Tokenizer, bool] | None:
    """Returns the tokenizer of a checkpoint's run, and whether its chat template was chosen; None where both are those
    of its model.

    `directory` has the tokenizer, if it is elsewhere now. Raises UserError.
    """
    if source.checkpoint is None:
        return None if directory is None else (load_tokenizer(directory), False)
    folder, identity = source.checkpoint.folder, source.checkpoint.manifest.identity
    stored, named = identity.tokenizer, identity.config.get("rl_config.tokenizer_dir")
    template = identity.config.get("rl_config.chat_template")
    if directory is None and not named and template is None:
        return None
    directory = directory or (local_copy(str(named), "tokenizer") if named else source.beside)
    if not directory.is_dir():
        raise UserError(
            f"The run of {folder} had the tokenizer in '{directory}', which is not there now; name it with "
            "--tokenizer_dir DIR."
        )
    tokenizer = load_tokenizer(directory)
    if stored is not None and stored.is_chosen and stored.template is not None:
        own = ChatTemplate(stored.template, f"the chat template of {folder}", stored.turn_end)
        tokenizer = replace(tokenizer, template=own)
    else:
        tokenizer = tokenizer.with_template(template)
    return tokenizer, template is not None


def convert(
    source: Path,
    target: Path,
    dtype: Dtype,
    max_shard_bytes: int,
    names: str = "huggingface",
    model: Path | None = None,
    tokenizer_dir: Path | None = None,
) -> list[Path]:
    """Writes the new directory and returns its files. Raises UserError.

    `model` has the config.json of a checkpoint and its tokenizer, unless that of the run was another, which is in
    `tokenizer_dir` if it has been moved.
    """
    opened = open_source(source, model)
    files, beside = opened.files, opened.beside
    own = own_tokenizer(opened, tokenizer_dir)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"'{target}' exists and is not an empty folder; choose another --output.")
    is_mindformers = names == "mindformers"
    family = read_config(beside).model_type
    if is_mindformers and family not in FAMILIES:
        raise UserError(
            f"--format is mindformers, but MindFormers has no names for the tensors of '{family}' ({beside}), only of "
            f"{', '.join(FAMILIES)}; leave --format out."
        )
    encoder = None if is_mindformers else encoder_files(beside)
    if encoder is not None:
        own_names = [name for name in files.names if not name.startswith(VISUAL)]
        files = ModelFiles(files.path, {name: files.slices[name] for name in own_names})
    for name in files.names:
        files.check_dtype(name)
    shapes = {name: files.shape(name) for name in files.names}
    tensors = file_tensors(shapes, "stacked" if is_mindformers else experts_of(beside))
    rename = to_mindformers if is_mindformers else (encoder.name_of if encoder else str)
    written = {rename(t.name): t for t in tensors}
    shapes = {name: tensor.shape for name, tensor in written.items()}
    shapes |= {} if encoder is None else encoder.shapes
    with SafetensorsWriter(target, shapes, max_shard_bytes, dtype) as writer:
        for name, tensor in written.items():
            for rows in tensor.in_rows(1):
                writer.add(name, rows.made_of(files.read))
        if encoder is not None:
            for name in encoder.tensors:
                writer.add(name, encoder.read(name))
    if is_mindformers:  # its index, beside Hugging Face's
        (target / NAME_MAP_FILE).write_text(json.dumps(writer.weight_map, indent=2) + "\n")
    write_companions(beside, target, dtype)
    if own is not None:
        write_tokenizer(own[0], target, with_template=own[1])
    return sorted(target.iterdir())


def parser() -> Arguments:
    flags = Arguments(prog="mindgrpo export")
    text = "a run, one of its checkpoints, or a model directory"
    flags.add_argument("--from", dest="source", required=True, type=path_of, help=text)
    text = "of a run: the checkpoint that rl_config.save_ckpt_best kept"
    flags.add_argument("--best", action="store_true", help=text)
    text = "the new model directory"
    flags.add_argument("--output", required=True, type=path_of, help=text)
    dtypes = ("float32", "bfloat16", "float16")
    flags.add_argument("--dtype", default=dtypes[0], choices=dtypes, help="default: float32")
    text = f"size of a file at most (default: {MAX_SHARD_BYTES})"
    flags.add_argument("--max_shard_bytes", type=int, default=MAX_SHARD_BYTES, help=text)
    text = "whose names the tensors get (default: huggingface)"
    flags.add_argument("--format", default=FORMATS[0], choices=FORMATS, help=text)
    text = "of a checkpoint: the model that its run began with, for config.json and tokenizer"
    flags.add_argument("--model", type=path_of, help=text)
    text = "the tokenizer to store with the model (default: that of the run)"
    flags.add_argument("--tokenizer_dir", type=path_of, help=text)
    return flags


def main(argv: Sequence[str]) -> None:
    flags = parser().parse_args(list(argv))
    shards = flags.max_shard_bytes
    source = fetch_local(str(flags.source), "model", "--from")
    source = best_checkpoint(source) if flags.best else source
    model = flags.model and fetch_local(str(flags.model), "model", "--model")
    places = model, flags.tokenizer_dir
    for file in convert(source, flags.output, flags.dtype, shards, flags.format, *places):
        print(file)
