"""Reads MindSpore's .ckpt files, and translates a decoder's tensor names between MindFormers and Hugging Face.

The values are the same, [out, in], except that a layer's experts are one tensor [experts, out, in], or [experts, in,
out] with MindFormers' grouped GEMMs (use_gmm). Tensors that MindFormers concatenated (qkv_concat) are an error, because
their order depends on its version. .ckpt files are parsed with MindSpore's protobuf class, which executes nothing, and
held in memory whole, as MindSpore does; `export` converts a large model to safetensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindgrpo.errors import UserError
from mindgrpo.weights.model_files import (
    STORED_AS,
    ModelFiles,
    ModelTensor,
    TensorSlice,
    whole_box,
)

# Values of model_type whose tensors have names in MindFormers.
FAMILIES = ("qwen2", "llama", "qwen3", "mixtral")
# Hugging Face's names -> MindFormers': whole names, or the module before a name's last word.
MINDFORMERS = {
    "model.embed_tokens.weight": "model.tok_embeddings.embedding_weight",
    "model.norm.weight": "model.norm_out.weight",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "self_attn.q_norm": "attention.q_norm",
    "self_attn.k_norm": "attention.k_norm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    # The parameters of a layer's experts, as research/mixtral/convert_weight.py there names them.
    "mlp.gate": "feed_forward.router.dense",
    "mlp.experts.gate_proj": "feed_forward.ffn.w1",
    "mlp.experts.down_proj": "feed_forward.ffn.w2",
    "mlp.experts.up_proj": "feed_forward.ffn.w3",
}
HUGGINGFACE = {theirs: ours for ours, theirs in MINDFORMERS.items()}
# MindFormers' names in models with shared experts, and in later models.
HUGGINGFACE |= {
    theirs.replace("feed_forward", "feed_forward.routed_experts"): ours
    for theirs, ours in HUGGINGFACE.items()
    if theirs.startswith(("feed_forward.ffn", "feed_forward.router"))
}
CONCATENATED = ("w_qkv", "w_gate_hidden")


def _renamed(name: str, table: dict[str, str]) -> str:
    # model.layers.3.self_attn.q_proj.weight: the one or two modules before the last word.
    modules = rf"(?<=\.)({'|'.join(map(re.escape, table))})(?=\.\w+$)"
    return table.get(name) or re.sub(modules, lambda match: table[match[1]], name)


def to_mindformers(name: str) -> str:
    return _renamed(name, MINDFORMERS)


def to_huggingface(name: str) -> str:
    return _renamed(name, HUGGINGFACE)


def are_mindformers(names: Iterable[str]) -> bool:
    return MINDFORMERS["model.embed_tokens.weight"] in names


def by_huggingface(files: ModelFiles) -> ModelFiles:
    """Renames a model's tensors from MindFormers to Hugging Face, with experts stacked. Raises UserError."""
    slices = {to_huggingface(name): own for name, own in files.slices.items()}
    embedding = slices[to_huggingface(MINDFORMERS["model.embed_tokens.weight"])]
    hidden = (embedding[0][1].shape or (0,))[-1]
    turned = {
        name: _out_by_in(name, own, hidden) if ".mlp.experts." in name else own
        for name, own in slices.items()
    }
    return ModelFiles(files.path, turned)


def _out_by_in(name: str, own: Sequence[TensorSlice], hidden: int) -> Sequence[TensorSlice]:
    ((_, tensor),) = own
    if len(tensor.shape) != 3:
        return own
    number, rows, columns = tensor.shape
    if rows == columns:
        raise UserError(
            f"{name} in {tensor.file} has the shape {list(tensor.shape)}, which does not tell whether its matrices are "
            "[out, in] or, with MindFormers' use_gmm, [in, out]; give the model with Hugging Face's names."
        )
    if hidden == (rows if name.endswith("down_proj.weight") else columns):
        return own
    shape = number, columns, rows
    return [(whole_box(shape), tensor._replace(shape=shape, values=partial(_turned, tensor)))]


def _turned(tensor: ModelTensor) -> NDArray[Any]:
    return tensor.values().swapaxes(1, 2)


def check_not_concatenated(names: Iterable[str], directory: str) -> None:
    """Raises UserError for tensors that concatenate several of Hugging Face's."""
    for name in names:
        if set(name.split(".")) & set(CONCATENATED):
            raise UserError(
                f"'{directory}' holds {name}, which is several matrices in one (MindFormers' qkv_concat); save the "
                "model with qkv_concat: False."
            )


# MindSpore's name of a dtype -> safetensors' name.
_DTYPES = {"Float32": "F32", "Float16": "F16", "BFloat16": "BF16"}
# Prefixes of optimizer state and gradient accumulators.
_NOT_WEIGHTS = ("adam_m.", "adam_v.", "moments.", "moment1.", "moment2.", "exp_avg", "accu_grads.")
# Marks the checksum, 10 bytes behind it, at the end of a file.
_CHECKSUM = b"crc_num"


def open_ckpt(directory: Path) -> ModelFiles:
    """Reads all tensors of the directory's *.ckpt files but scalars and optimizer state. Raises UserError."""
    tensors: dict[str, ModelTensor] = {}
    for name, tensor in chain.from_iterable(
        read_ckpt(file).items() for file in sorted(directory.glob("*.ckpt"))
    ):
        if name in tensors:
            raise UserError(
                f"{name} is in {tensor.file} and in {tensors[name].file}; leave one of these in the directory."
            )
        if tensor.shape and not name.startswith(_NOT_WEIGHTS):
            tensors[name] = tensor
    return ModelFiles(directory, tensors)


def read_ckpt(file: Path) -> dict[str, ModelTensor]:
    """Reads a file's tensors by name, and joins the slices in which MindSpore writes large ones. Raises UserError."""
    # MindSpore takes seconds to import, which only users of this format need to wait for.
    from google.protobuf.message import DecodeError
    from mindspore.train.checkpoint_pb2 import Checkpoint

    stored = Checkpoint()
    try:
        data = file.read_bytes()
        stored.ParseFromString(data[:-17] if data[-17:-10] == _CHECKSUM else data)
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}).") from None
    except (DecodeError, ValueError):
        raise _damaged(file, "its fields are not those of the format, or encrypted") from None
    slices: dict[tuple[str, str, tuple[int, ...]], list[bytes]] = {}
    for value in stored.value:
        shape = () if list(value.tensor.dims) == [0] else tuple(value.tensor.dims)
        key = (value.tag, value.tensor.tensor_type, shape)
        slices.setdefault(key, []).append(value.tensor.tensor_content)
    if not slices:
        raise _damaged(file, "it holds no tensors, or encrypted ones")
    if len({name for name, _, _ in slices}) < len(slices):
        raise _damaged(file, "slices of one tensor differ in type or shape")
    return {
        name: _tensor(file, name, _DTYPES.get(kind, kind), shape, b"".join(contents))
        for (name, kind, shape), contents in slices.items()
    }


def _tensor(
    file: Path, name: str, dtype: str, shape: tuple[int, ...], content: bytes
) -> ModelTensor:
    code = STORED_AS.get(dtype, "u1")
    if dtype in STORED_AS and prod(shape) * np.dtype(code).itemsize != len(content):
        raise _damaged(file, f"{name} has not the bytes that its shape {list(shape)} needs")
    return ModelTensor(file, dtype, shape, partial(np.ndarray, shape, code, content))


def _damaged(file: Path, why: str) -> UserError:
    return UserError(f"{file} is damaged or not a .ckpt file of MindSpore: {why}; copy it again.")
