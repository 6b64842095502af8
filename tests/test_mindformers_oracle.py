"""MindFormers' LlamaForCausalLM, run on the same Qwen2 weights, against one rank: logits, loss and every gradient.

A third implementation beside transformers', on the same device as ours. Does not prove anything about MindFormers'
other models, its fused kernels or its parallel layouts, all of which are off here.
"""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
import pytest
from golden_models import Golden, each_in_its_row, logits_of, read_golden, train
from mindspore import Tensor

from mindgrpo.backend.connect import connect
from mindgrpo.weights.model_files import SafetensorsDirectory

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


def mindformers_model(golden: Golden, seq_length: int) -> Any:
    llama = pytest.importorskip(
        "mindformers.models.llama",
        reason="mindformers is not installed; `pip install -e .[mindformers]` brings it",
    )
    config = golden.config
    model = llama.LlamaForCausalLM(
        llama.LlamaConfig(
            batch_size=2,
            seq_length=seq_length,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_layers=config.num_hidden_layers,
            num_heads=config.num_attention_heads,
            n_kv_heads=config.num_key_value_heads,
            max_position_embedding=config.max_position_embeddings,
            rms_norm_eps=config.rms_norm_eps,
            theta=config.rope_theta,
            tie_word_embeddings=config.tie_word_embeddings,
            qkv_has_bias=True,
            pad_token_id=config.vocab_size,
            use_flash_attention=False,
            use_rope_slice=True,
            fused_rms_norm=False,
            compute_dtype="float32",
            param_init_type="float32",
            layernorm_compute_type="float32",
            softmax_compute_type="float32",
            rotary_dtype="float32",
        )
    )
    files = SafetensorsDirectory(golden.directory)
    parameters = {p.name: p for p in model.trainable_params()}
    assert sorted(parameters) == sorted(mindformers_name(name) for name in files.names)
    for name in files.names:
        parameters[mindformers_name(name)].set_data(Tensor(files.read(name)))
    return model


def test_mindformers_computes_the_same_logits_loss_and_gradients() -> None:
    golden = read_golden("qwen2")
    ids = golden.values["input_ids"]
    # In training MindFormers takes the last token for a label only.
    length = ids.shape[1] - 1
    backend = connect("CPU", None, {})
    model = mindformers_model(golden, length)

    model.set_train(False)
    logits = model(Tensor(ids[:, :-1]))[0].asnumpy().reshape(len(ids), length, -1)
    assert np.abs(logits - logits_of(golden, backend)[:, :-1]).max() < LOGITS

    model.set_train(True)
    parameters = model.trainable_params()
    mean_loss, gradients = ms.value_and_grad(model, None, ms.ParameterTuple(parameters))(
        Tensor(ids)
    )
    by_name = {p.name: g.asnumpy() for p, g in zip(parameters, gradients, strict=True)}
    policy, logps = train(golden, backend, each_in_its_row(golden.rollout))
    count = sum(len(part) for part in logps)
    assert abs(float(mean_loss) + np.concatenate(logps).mean()) < LOGPS
    for name, ours in policy.gradients.hf_views.items():
        theirs = -count * by_name[mindformers_name(name)]
        assert np.abs(ours - theirs).max() < GRADIENTS * np.abs(theirs).max(), name
