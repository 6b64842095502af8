"""What MindFormers' LlamaForCausalLM computed with the same Qwen2 weights, against one rank: logits, loss and every
gradient. tests/golden/make_mindformers.py wrote it down.

A third implementation beside transformers', on the same device as ours. Does not prove anything about MindFormers'
other models, its fused kernels or its parallel layouts, all of which are off here.
"""

from __future__ import annotations

import numpy as np
from golden_models import FOLDER, each_in_its_row, logits_of, read_golden, train

from mindgrpo.backend.connect import connect
from mindgrpo.backend.targets import SHARED_MEMORY

LOGITS, LOGPS = 1e-4, 1e-5
# Of a tensor's largest gradient.
GRADIENTS = 1e-5
# What transformers calls it -> what MindFormers calls it, after the layer's number.
LAYER_NAMES = {
    "input_layernorm.weight": "attention_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
}
OTHER_NAMES = {
    "model.embed_tokens.weight": "model.tok_embeddings.embedding_weight",
    "model.norm.weight": "model.norm_out.weight",
}


def mindformers_name(name: str) -> str:
    if name in OTHER_NAMES:
        return OTHER_NAMES[name]
    for ours, theirs in LAYER_NAMES.items():
        name = name.replace(ours, theirs)
    return name


def test_mindformers_computes_the_same_logits_loss_and_gradients() -> None:
    golden = read_golden("qwen2")
    with np.load(FOLDER / "qwen2" / "mindformers.npz") as values:
        theirs = dict(values)
    backend = connect(SHARED_MEMORY, {})
    assert np.abs(theirs["logits"] - logits_of(golden, backend)[:, :-1]).max() < LOGITS

    policy, logps = train(golden, backend, each_in_its_row(golden.rollout))
    count = sum(len(part) for part in logps.values())
    assert abs(theirs["loss"].item() + np.concatenate(list(logps.values())).mean()) < LOGPS
    assert len(policy.gradients.arrays.hf_views) == sum(
        name.startswith("gradient/") for name in theirs
    )
    for name, ours in policy.gradients.arrays.hf_views.items():
        expected = -count * theirs[f"gradient/{mindformers_name(name)}"]
        assert np.abs(ours - expected).max() < GRADIENTS * np.abs(expected).max(), name
