"""The tensors of one publish: which a checkpoint of the model has, which are due, where each lies, and its checksum.

A publish is a transaction: begin with the names of all tensors, load each of them once, commit. Names are those of
Hugging Face, but that each matrix of a layer's experts is one tensor [experts, out, in].
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mindgrpo_engine.protocol import EngineFailure, checksum

Shapes = dict[str, tuple[int, ...]]

NUM_NAMED = 3
ALIGNMENT = 64
# The rows of two matrices of each expert in one tensor, as transformers has them in memory, and the matrices.
FUSED = "mlp.experts.gate_up_proj"
INWARD = ("mlp.experts.gate_proj.weight", "mlp.experts.up_proj.weight")
OUTWARD = "mlp.experts.down_proj"
EXPERT_DIMS = 3
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)
# What Mixtral's files have in place of others' names; vLLM's class of it knows no others.
OF_MIXTRAL = {
    ".mlp.": ".block_sparse_moe.",
    "gate_proj": "w1",
    "up_proj": "w3",
    "down_proj": "w2",
}


@dataclass(frozen=True)
class Checkpoint:
    """Shapes by Hugging Face name; tied names are second names of another tensor, and need not be sent."""

    shapes: Shapes
    tied: frozenset[str]

    @classmethod
    def of(cls, folder: str) -> Checkpoint:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(folder)
        if hasattr(config, "vision_config"):
            # The language model of Qwen2.5-VL, which transformers has no class for: a Qwen2 by shapes and names.
            sizes = {name: getattr(config.get_text_config(), name) for name in SIZES}
            tied = {"tie_word_embeddings": config.tie_word_embeddings}
            config = AutoConfig.for_model("qwen2", **sizes, **tied)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        tensors = model.state_dict().items()
        shapes = dict(pair for name, tensor in tensors for pair in _named(name, tensor.shape))
        ties = config.tie_word_embeddings
        return cls(shapes, frozenset({"lm_head.weight"} & shapes.keys() if ties else ()))

    def check(self, tensors: Shapes) -> None:
        missing = [name for name in self.shapes if name not in tensors and name not in self.tied]
        _refuse_any(missing, "the publish lacks tensors of the model's checkpoint")
        extra = [name for name in tensors if name not in self.shapes]
        _refuse_any(extra, "the publish has tensors that the model's checkpoint has not")
        wrong = [
            f"{name} of {list(shape)} instead of {list(self.shapes[name])}"
            for name, shape in tensors.items()
            if shape != self.shapes[name]
        ]
        _refuse_any(wrong, "the publish has tensors of another shape than the model's checkpoint")


def in_checkpoint(tensors: Iterable[tuple[str, Any]], model_type: str) -> Iterator[tuple[str, Any]]:
    """Yields the tensors of a publish by the names of the model's files, a layer's experts one by one."""
    renamed = OF_MIXTRAL if model_type == "mixtral" else {}
    for name, tensor in tensors:
        own = name
        for word, of_files in renamed.items():
            own = own.replace(word, of_files)
        if tensor.ndim < EXPERT_DIMS:
            yield own, tensor
            continue
        module, matrix = own.split(".experts.")
        for index, expert in enumerate(tensor):
            yield f"{module}.experts.{index}.{matrix}", expert


def _named(name: str, shape: Sequence[int]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields a publish's name and shape of what transformers has in memory by this name."""
    if name.endswith(FUSED):
        number, both, hidden = shape
        for own in INWARD:
            yield name.removesuffix(FUSED) + own, (number, both // 2, hidden)
    else:
        yield f"{name}.weight" if name.endswith(OUTWARD) else name, tuple(shape)


def _refuse_any(names: list[str], sentence: str) -> None:
    if names:
        named = ", ".join(names[:NUM_NAMED])
        rest = f", and {len(names) - NUM_NAMED} more" if len(names) > NUM_NAMED else ""
        raise EngineFailure(f"{sentence}: {named}{rest}")


@dataclass(frozen=True)
class SharedTensor:
    """One tensor in the shared file, from offset on, its last dim fastest, or `transposed` the one before; crc as
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
    """The tensors of one publish that are still due."""

    version: int
    due: Shapes

    def take(self, tensors: list[SharedTensor]) -> None:
        """Notes that these tensors arrive now."""
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
