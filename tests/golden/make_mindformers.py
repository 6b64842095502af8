"""Makes tests/golden/qwen2/mindformers.npz: what MindFormers computes with the weights of tests/golden/qwen2/.

Run by hand, in an environment with mindgrpo's extra `mindformers`, when make_models.py has made new weights:
`PYTHONPATH=tests python tests/golden/make_mindformers.py`. That environment has MindSpore 2.9, which MindFormers 1.9.0
asks for; 2.0.0, for MindSpore 2.10, requires hyper-parallel, which PyPI does not have.
"""

from __future__ import annotations

import mindspore as ms
import numpy as np
from golden_models import FOLDER, Golden, read_golden
from mindformers.models import llama
from mindspore import Tensor
from test_mindformers_oracle import mindformers_name

from mindgrpo.weights.model_files import SafetensorsDirectory


def mindformers_model(golden: Golden, seq_length: int) -> llama.LlamaForCausalLM:
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


def main() -> None:
    golden = read_golden("qwen2")
    ids = golden.values["input_ids"]
    # In training MindFormers takes the last token for a label only.
    length = ids.shape[1] - 1
    model = mindformers_model(golden, length)
    model.set_train(False)
    logits = model(Tensor(ids[:, :-1]))[0].asnumpy().reshape(len(ids), length, -1)
    model.set_train(True)
    parameters = model.trainable_params()
    loss, gradients = ms.value_and_grad(model, None, ms.ParameterTuple(parameters))(Tensor(ids))
    values = {f"gradient/{p.name}": g.asnumpy() for p, g in zip(parameters, gradients, strict=True)}
    np.savez_compressed(
        FOLDER / "qwen2" / "mindformers.npz", logits=logits, loss=loss.asnumpy(), **values
    )


if __name__ == "__main__":
    main()
