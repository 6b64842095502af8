"""Opens a model directory and loads it into a rank's weights: each rank reads only its slices.

Also random weights, for benches.
"""

from __future__ import annotations

import zlib
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

from mindgrpo.errors import UserError
from mindgrpo.parallel.sharding import Box, ParameterSpec
from mindgrpo.strict_files import read_object
from mindgrpo.weights.expert_files import stacked
from mindgrpo.weights.local_weights import Weights
from mindgrpo.weights.mindspore_files import (
    are_mindformers,
    by_huggingface,
    check_not_concatenated,
    open_ckpt,
)
from mindgrpo.weights.model_files import (
    SCORE,
    VISUAL,
    ModelFiles,
    ModelTensor,
    SafetensorsDirectory,
    TensorSlice,
    whole_box,
)

# Files that older exporters leave in: computed, not learnt.
COMPUTED_SUFFIXES = ("rotary_emb.inv_freq",)
# Identifies multi-token prediction layers behind the model's own, which are not read.
OF_FURTHER_TOKENS = "eh_proj.weight"
# Files of tied weights may hold both. Those of a model with a scalar head may hold the head of the model before it.
HEAD, EMBEDDINGS = "lm_head.weight", "model.embed_tokens.weight"
ROWS_COMPARED = 4096
FP8_SCALE = ".weight_scale_inv"
# The names of a vision-language model's parts in memory, which some files have, and in published files.
IN_MEMORY = {"model.visual.": VISUAL, "model.language_model.": "model."}
# A convolution in files, of patches that do not overlap; a product of [out, values of a patch] here.
PATCH_EMBEDDING = f"{VISUAL}patch_embed.proj.weight"
# The scalar head's names in the files of TRL and OpenRLHF, which may have a bias beside it.
OTHER_SCORES = ("v_head.summary.weight", "value_head.weight", "v_head.weight")


def open_weights(directory: str | Path) -> ModelFiles:
    """Opens a model's safetensors, else its .ckpt files, by parameter names. Raises UserError.

    Parameters have Hugging Face's names, except that a layer's experts are stacked, [experts, out, in].
    """
    files = open_tensors(directory)
    return ModelFiles(files.path, stacked(files.slices, files.path))


def open_tensors(directory: str | Path) -> ModelFiles:
    """Opens the same files by Hugging Face's tensor names, whose experts are not stacked."""
    folder = Path(directory)
    is_ckpt = any(folder.glob("*.ckpt")) and not any(folder.glob("*.safetensors*"))
    files = open_ckpt(folder) if is_ckpt else SafetensorsDirectory(folder)
    if any(name.startswith((VISUAL, *IN_MEMORY)) for name in files.names):
        return _with_encoder(files)
    if not are_mindformers(files.names):
        return files
    check_not_concatenated(files.names, str(directory))
    return by_huggingface(files)


def _with_encoder(files: ModelFiles) -> ModelFiles:
    """Returns a vision-language model's tensors by their published names, the patch embedding as a matrix."""
    slices: dict[str, Sequence[TensorSlice]] = {}
    for name, own in files.slices.items():
        prefix = next((prefix for prefix in IN_MEMORY if name.startswith(prefix)), "")
        slices[IN_MEMORY.get(prefix, "") + name.removeprefix(prefix)] = own
    if PATCH_EMBEDDING in slices:
        ((_, tensor),) = slices[PATCH_EMBEDDING]
        rows, *others = tensor.shape
        slices[PATCH_EMBEDDING] = [(whole_box((rows, prod(others))), tensor)]
    return ModelFiles(files.path, slices)


@dataclass(frozen=True)
class EncoderFiles:
    """The vision encoder in the files of a vision-language model, by the files' own names and shapes."""

    tensors: Mapping[str, ModelTensor]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    def name_of(self, name: str) -> str:
        """Returns the name that these files have for a parameter of the language model."""
        is_in_memory = any(own.startswith(tuple(IN_MEMORY)) for own in self.tensors)
        prefix, published = list(IN_MEMORY.items())[-1]
        if not is_in_memory or not name.startswith(published):
            return name
        return prefix + name.removeprefix(published)

    def read(self, name: str) -> np.ndarray:
        """Returns a tensor, float32 in the shape that files have."""
        tensor = self.tensors[name]
        return ModelFiles(tensor.file.parent, {name: tensor}).read(name)

    def differing(self, other: EncoderFiles) -> str | None:
        """Returns the published name of the first tensor that `other` lacks or has with other values, else None."""
        named, theirs = self._published(), other._published()
        for name in sorted(named.keys() | theirs.keys()):
            if name not in named or name not in theirs:
                return name
            if not np.array_equal(self.read(named[name]), other.read(theirs[name])):
                return name
        return None

    def _published(self) -> dict[str, str]:
        return {name[name.index(VISUAL) :]: name for name in self.tensors}


def encoder_files(directory: str | Path) -> EncoderFiles | None:
    """Opens the vision encoder of a model directory; None for a model without one. Raises UserError."""
    if not _has_encoder(directory):
        return None
    slices = SafetensorsDirectory(Path(directory)).slices
    own = {name: held[0][1] for name, held in slices.items() if VISUAL in name}
    return EncoderFiles(own)


def check_tensors(
    directory: str | Path, specs: tuple[ParameterSpec, ...], may_lack_score: bool = False
) -> ModelFiles:
    """Opens a model directory and checks every name, shape and dtype against `specs`. Raises UserError.

    With `may_lack_score`, a scalar head may be missing. Of a vision-language model, `specs` are the language model's
    or the vision encoder's, and the tensors of the other are ignored.
    """
    files = open_weights(directory)
    wanted = {spec.name: spec.shape for spec in specs}
    if any(name.startswith(VISUAL) for name in files.names) and _has_encoder(directory):
        is_encoder = specs[0].name.startswith(VISUAL)
        kept = [name for name in files.names if name.startswith(VISUAL) == is_encoder]
        files = ModelFiles(files.path, {name: files.slices[name] for name in kept})
    has_scalar_head = SCORE in wanted
    if has_scalar_head:
        files = _with_score(files, directory, may_lack_score)
        if SCORE not in files.names:
            del wanted[SCORE]
    if any(name.endswith(FP8_SCALE) for name in files.names):
        raise UserError(
            f"The weights in '{directory}' are fp8 with scales (tensors named *{FP8_SCALE}), which are not read; "
            "convert them to bfloat16 first, as DeepSeek-V3's inference/fp8_cast_bf16.py does."
        )
    unread = tuple(
        name.removesuffix(OF_FURTHER_TOKENS)
        for name in files.names
        if name.endswith(f".{OF_FURTHER_TOKENS}")
    )
    present = {
        name
        for name in files.names
        if not name.endswith(COMPUTED_SUFFIXES) and not name.startswith(unread)
    }
    has_second_head = HEAD not in wanted and HEAD in present
    if has_second_head:
        present.discard(HEAD)
        has_second_head = not has_scalar_head
    missing = [name for name in wanted if name not in present]
    if missing:
        raise UserError(
            f"The model directory '{directory}' lacks {len(missing)} tensors that its config.json asks for "
            f"(first: {missing[0]}); restore its safetensors files."
        )
    extra = sorted(present - set(wanted))
    if extra:
        raise UserError(
            f"The model directory '{directory}' has {len(extra)} tensors that its config.json has no place for "
            f"(first: {extra[0]}); it is another architecture, use a model of a supported family."
        )
    for name, shape in wanted.items():
        if tuple(files.shape(name)) != shape:
            raise UserError(
                f"{name} in '{directory}' has shape {list(files.shape(name))}, but config.json makes it "
                f"{list(shape)}; restore the directory from its source."
            )
        files.check_dtype(name)
    if has_second_head:
        _check_tied(files, str(directory))
    return files


def _has_encoder(directory: str | Path) -> bool:
    path = Path(directory) / "config.json"
    return "vision_config" in read_object(path, "the model's", "restore it from its source.")


def _with_score(files: ModelFiles, directory: str | Path, may_lack: bool) -> ModelFiles:
    """Returns the files with the scalar head under its name in Hugging Face's classifiers. Raises UserError."""
    known = set(files.names)
    name = next((name for name in (SCORE, *OTHER_SCORES) if name in known), None)
    if name is None and may_lack:
        return files
    if name is None:
        others = ", ".join(OTHER_SCORES)
        raise UserError(
            f"The model in '{directory}' has no scalar head ({SCORE}; {others}), so it scores nothing; name a sequence "
            "classifier with one label, or a model that was trained with a value head."
        )
    bias = f"{name.removesuffix('weight')}bias"
    if bias in known and np.any(files.read(bias)):
        raise UserError(
            f"The scalar head in '{directory}' has a bias ({bias}), which is not computed here; train the head without."
        )
    slices = {each: own for each, own in files.slices.items() if each not in (name, bias)}
    return ModelFiles(files.path, slices | {SCORE: files.slices[name]})


def _check_tied(files: ModelFiles, directory: str) -> None:
    """Raises UserError where lm_head differs from the embeddings, though config.json ties them."""
    rows, columns = files.shape(EMBEDDINGS)
    is_alike = files.shape(HEAD) == (rows, columns)
    for start in range(0, rows, ROWS_COMPARED):
        box = Box((start, 0), (min(rows, start + ROWS_COMPARED), columns))
        if not is_alike or not np.array_equal(files.read(HEAD, box), files.read(EMBEDDINGS, box)):
            raise UserError(
                f"'{directory}' has a {HEAD} that differs from {EMBEDDINGS} (rows {start} to {box.stop[0] - 1}), "
                "but its config.json says tie_word_embeddings, as if they were one; set that to false, or remove "
                f"{HEAD} if the model was trained without it."
            )


def load_weights(weights: Weights, directory: str | Path) -> None:
    """Loads a model directory into this rank's weights, after checking names, shapes and dtypes. Raises UserError."""
    fill(weights, check_tensors(directory, weights.layout.specs))


def fill(weights: Weights, files: ModelFiles, names: Container[str] | None = None) -> None:
    """Reads this rank's slices, only of the parameters `names` if given; what files may lack is 0. Raises UserError."""
    known = set(files.names)
    with weights.on_host(write=True) as host:
        for name, part in host.hf_views.items():
            if names is None or name in names:
                if name in known:
                    files.read_into(part, name, weights.boxes[name])
                else:
                    part[...] = 0


def generator_of(name: str, seed: int) -> np.random.Generator:
    """Returns the random generator for the initial values of parameter `name`."""
    key = np.uint64((seed << 32) | zlib.crc32(name.encode()))
    return np.random.Generator(np.random.Philox(key=key))


def fill_random(weights: Weights, seed: int, scale: float = 0.02) -> None:
    """Fills the weights at random, alike under every layout: a tensor's values depend on the seed and its name only."""
    with weights.on_host(write=True) as host:
        for spec in weights.specs():
            part = host.hf_views.get(spec.name)
            if part is None:
                continue
            if len(spec.shape) == 1 and spec.name.endswith("norm.weight"):
                part[...] = 1.0
                continue
            _fill(part, spec.name, spec.shape, weights.boxes[spec.name], seed, np.float32(scale))


def _fill(
    part: np.ndarray, name: str, shape: Sequence[int], box: Box, seed: int, scale: np.float32
) -> None:
    """Draws `box` of a parameter; stacked experts one by one, each by its own name."""
    if len(shape) > 2:
        inner = Box(box.start[1:], box.stop[1:])
        for index, one in enumerate(part, box.start[0]):
            _fill(one, f"{name}.{index}", shape[1:], inner, seed, scale)
        return
    values = generator_of(name, seed).standard_normal(shape, dtype=np.float32)
    part[...] = values[box.slices] * scale
