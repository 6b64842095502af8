"""Translates a decoder's tensor names between MindFormers and Hugging Face. The values are the same, [out, in].

Tensors that MindFormers has concatenated (qkv_concat) are an error: their order depends on its version.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from mindgrpo.errors import UserError

# Values of model_type whose tensors have names in MindFormers.
FAMILIES = ("qwen2", "llama", "qwen3")
# Hugging Face's -> MindFormers': whole names, or the modules before the last word of one.
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
}
HUGGINGFACE = {theirs: ours for ours, theirs in MINDFORMERS.items()}
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


def check_not_concatenated(names: Iterable[str], directory: str) -> None:
    """Raises UserError for tensors that are several of Hugging Face's in one."""
    for name in names:
        if set(name.split(".")) & set(CONCATENATED):
            raise UserError(
                f"'{directory}' holds {name}, which is several matrices in one (MindFormers' qkv_concat); save the "
                "model with qkv_concat: False."
            )
