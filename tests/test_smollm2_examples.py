"""The examples of SmolLM2: the script that reads a gguf file, on a small one made here, and the data."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from mindgrpo.data.tokenizer import load_tokenizer

EXAMPLES = Path(__file__).resolve().parents[1] / "examples" / "grpo"
HIDDEN, INNER, LAYERS, HEADS, KV_HEADS = 32, 48, 2, 4, 2
HEAD_DIM = HIDDEN // HEADS
# Bytes as GPT-2 writes them: printable ones are themselves, a blank is Ġ.
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *"0123456789abc+", "Ġ", "ab"]
MERGES = ["a b"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"


def script(example: str, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / example / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def side_by_side(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of a projection's rows: row 2 i of a head is its row i, row 2 i + 1 its row i + dim / 2."""
    made = np.empty_like(weight)
    dim = len(weight) // heads
    for head in range(heads):
        for i in range(dim // 2):
            made[head * dim + 2 * i] = weight[head * dim + i]
            made[head * dim + 2 * i + 1] = weight[head * dim + dim // 2 + i]
    return made


def weights() -> dict[str, np.ndarray]:
    """By Hugging Face's names."""
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (len(TOKENS), HIDDEN)}
    shapes["model.norm"] = (HIDDEN,)
    for layer in range(LAYERS):
        name = f"model.layers.{layer}."
        shapes |= {
            f"{name}input_layernorm": (HIDDEN,),
            f"{name}post_attention_layernorm": (HIDDEN,),
        }
        shapes |= {f"{name}self_attn.{p}_proj": (HIDDEN, HIDDEN) for p in "qo"}
        shapes |= {f"{name}self_attn.{p}_proj": (KV_HEADS * HEAD_DIM, HIDDEN) for p in "kv"}
        shapes |= {f"{name}mlp.{p}_proj": (INNER, HIDDEN) for p in ("gate", "up")}
        shapes[f"{name}mlp.down_proj"] = (HIDDEN, INNER)
    return {f"{k}.weight": rng.normal(size=s).astype(np.float32) for k, s in shapes.items()}


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import gguf

    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    writer: Any = gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(len(TOKENS))
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}
    own = script("smollm2_sums", "make_model").LAYER_TENSORS
    for layer in range(LAYERS):
        names |= {f"model.layers.{layer}.{hf}": f"blk.{layer}.{name}" for name, hf in own.items()}
    for key, values in weights().items():
        name = key.removesuffix(".weight")
        heads = HEADS if "q_proj" in key else KV_HEADS if "k_proj" in key else 0
        values = side_by_side(values, heads) if heads else values
        if "mlp" in key or "embed" in key:  # 8 bits an element, in blocks of 32 of a row
            kind = gguf.GGMLQuantizationType.Q8_0
            if values.shape[1] % 32 == 0:
                writer.add_tensor(
                    f"{names[name]}.weight", gguf.quantize(values, kind), raw_dtype=kind
                )
                continue
        writer.add_tensor(f"{names[name]}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def directory(gguf_file: Path) -> Path:
    made = gguf_file.parent / "model"
    script("smollm2_sums", "make_model").write_directory(gguf_file, made)
    return made


def test_the_weights_are_those_of_the_file_in_hugging_faces_order(directory: Path) -> None:
    made, expected = load_file(directory / "model.safetensors"), weights()
    assert set(made) == set(expected)
    for key, values in expected.items():
        assert made[key].dtype == np.float32
        # 8 bits: half of 1/127 of the largest of 32 elements.
        loose = np.abs(values).max() / 127 if "mlp" in key or "embed" in key else 0.0
        np.testing.assert_allclose(made[key], values, rtol=0, atol=loose, err_msg=key)


def test_the_tokenizer_and_the_template_are_those_of_the_file(directory: Path) -> None:
    tokenizer = load_tokenizer(directory)
    ids = tokenizer.encode("12 ab")
    assert [TOKENS[i] for i in ids] == ["1", "2", "Ġ", "ab"]
    assert tokenizer.decode(ids) == "12 ab"
    config = json.loads((directory / "config.json").read_text())
    assert (config["num_hidden_layers"], config["num_key_value_heads"]) == (LAYERS, KV_HEADS)
    assert (
        json.loads((directory / "tokenizer_config.json").read_text())["chat_template"] == TEMPLATE
    )


@pytest.mark.parametrize(
    "example, name", [("smollm2_sums", "make_sums"), ("gsm8k_smollm2", "make_problems")]
)
def test_the_data_are_what_their_script_writes_and_no_row_is_in_both_splits(
    example: str, name: str, tmp_path: Path
) -> None:
    module, folder = script(example, name), EXAMPLES / example
    for split, made in zip(("train", "heldout"), module.make_splits(seed=0), strict=True):
        module.write_rows(tmp_path / split, made)
        assert (tmp_path / split).read_bytes() == (folder / f"{split}.jsonl").read_bytes()
    train, heldout = rows(folder / "train.jsonl"), rows(folder / "heldout.jsonl")
    assert len(heldout) == 96
    assert not {row["question"] for row in train} & {row["question"] for row in heldout}


def test_answers_of_word_problems_are_worked_out_rightly() -> None:
    folder = EXAMPLES / "gsm8k_smollm2"
    for row in rows(folder / "train.jsonl") + rows(folder / "heldout.jsonl"):
        *steps, last = row["answer"].split("\n")
        for step in steps:
            text, value = re.fullmatch(r"(.*) = <<.*>>(\d+)", step).groups()  # type: ignore[union-attr]
            left, operator, right = re.fullmatch(r"(\d+)([-+*])(\d+)", text).groups()  # type: ignore[union-attr]
            results = {"+": int(left) + int(right), "-": int(left) - int(right)}
            assert int(value) == results.get(operator, int(left) * int(right))
        assert last == f"#### {value}" and right in row["question"]


def test_the_form_s_reward_takes_a_number_on_the_last_line_alone() -> None:
    reward = script("gsm8k_smollm2", "form_reward").form_reward
    assert reward(["2+2 = 4\n#### 4", "#### 4 apples", "#### 4\nso 4", "4"]) == [0.2, 0.0, 0.0, 0.0]
