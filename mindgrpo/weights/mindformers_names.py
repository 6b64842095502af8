"""MindFormers' names of a decoder's tensors and Hugging Face's, both ways. The values are the same, [out, in].

Refuses tensors that MindFormers has laid side by side (qkv_concat), whose order depends on its version.
"""

from __future__ import annotations

from collections.abc import Iterable

from mindgrpo.errors import UserError

# Values of model_type whose tensors have names in MindFormers.
FAMILIES = ("qwen2", "llama", "qwen3")
# Hugging Face's -> MindFormers', as whole parts of a dotted name.
PARTS = {
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
BACK = {theirs: ours for ours, theirs in PARTS.items()}
SIDE_BY_SIDE = ("w_qkv", "w_gate_hidden")
EMBEDDING = PARTS["model.embed_tokens.weight"]


def _renamed(name: str, table: dict[str, str]) -> str:
    if name in table:
        return table[name]
    head, _, kind = name.rpartition(".")  # model.layers.3.self_attn.q_proj, weight
    parts = head.split(".")
    for length in (2, 1):
        tail = ".".join(parts[-length:])
        if tail in table and len(parts) > length:
            return ".".join((*parts[:-length], table[tail], kind))
    return name


def to_mindformers(name: str) -> str:
    return _renamed(name, PARTS)


def to_huggingface(name: str) -> str:
    return _renamed(name, BACK)


def are_mindformers(names: Iterable[str]) -> bool:
    return EMBEDDING in names


def check_apart(names: Iterable[str], where: str) -> None:
    """Raises UserError for tensors that are several of ours side by side."""
    for name in names:
        if set(name.split(".")) & set(SIDE_BY_SIDE):
            raise UserError(
                f"'{where}' holds {name}, which is several matrices in one (MindFormers' qkv_concat); save the model "
                "with qkv_concat: False."
            )
