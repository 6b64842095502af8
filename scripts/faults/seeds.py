"""A tiny, valid specimen of everything that a user hands over. Refuses to be large: a case copies it."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from words import REWARDS

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "examples" / "grpo" / "tiny_arithmetic" / "model"
EXAMPLE = MODEL.parent
STEP = "run/checkpoints/step_000003"
RAW = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 384,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "rope_scaling": None,
}


def make_seeds(folder: Path) -> None:
    """A tiny, valid specimen of everything."""
    make_models(folder)
    make_pair(folder)
    make_data(folder)
    make_texts(folder)
    make_checkpoint(folder)


def make_models(folder: Path) -> None:
    """A model in one file and in shards."""
    from mindgrpo.models.decoder_config import decoder_config
    from mindgrpo.models.parameters import parameter_specs
    from mindgrpo.weights.model_files import SafetensorsWriter

    for name, most in (("model", 1 << 30), ("sharded", 4000)):
        model = folder / name
        model.mkdir(parents=True)
        (model / "config.json").write_text(json.dumps(RAW))
        shapes = {s.name: s.shape for s in parameter_specs(decoder_config(RAW, "here"))}
        with SafetensorsWriter(model, shapes, most) as writer:
            for tensor, shape in shapes.items():
                writer.add(tensor, np.zeros(shape, np.float32))
        for path in MODEL.iterdir():
            if path.name not in ("config.json", "model.safetensors"):
                shutil.copy(path, model / path.name)


def make_pair(folder: Path) -> None:
    """A tokenizer as vocab.json and merges.txt."""
    codec = json.loads((MODEL / "tokenizer.json").read_text())
    pair = folder / "pair"
    shutil.copytree(folder / "model", pair, ignore=shutil.ignore_patterns("tokenizer.json"))
    vocabulary = bytes_in_words()
    (pair / "vocab.json").write_text(json.dumps({word: at for at, word in enumerate(vocabulary)}))
    (pair / "merges.txt").write_text("#version: 0.2\n1 2\n")
    added = {
        str(len(vocabulary) + at): {
            "content": token["content"],
            "special": True,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "single_word": False,
        }
        for at, token in enumerate(codec["added_tokens"])
    }
    settings = json.loads((MODEL / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "Qwen2Tokenizer", "added_tokens_decoder": added}
    (pair / "tokenizer_config.json").write_text(json.dumps(settings))


def make_data(folder: Path) -> None:
    """Four rows as data sets of several kinds."""
    from mindgrpo.data.examples import single_turn
    from mindgrpo.data.mindrecord import write_mindrecord

    rows: list[dict[str, Any]] = [
        {"question": f"{n} + 1 = ?", "answer": str(n + 1), "kind": {"a": [n]}} for n in range(4)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rows.json").write_text(json.dumps({"data": rows}))
    lines = [f'"{row["question"]}",{row["answer"]},"a, ""b"""\n' for row in rows]
    (folder / "rows.csv").write_text("question,answer,kind\n" + "".join(lines))
    chats = [
        {"messages": [{"role": "user", "content": row["question"]}], "answer": "1"} for row in rows
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chats))
    write_mindrecord(
        folder / "rows.mindrecord",
        [single_turn(r["question"], r["answer"], {"k": 1}) for r in rows],
        "",
    )
    saved = folder / "saved"
    (saved / "data").mkdir(parents=True)
    shutil.copy(folder / "rows.jsonl", saved / "data" / "train-00000-of-00001.jsonl")
    (saved / "state.json").write_text(
        json.dumps(
            {"_split": "train", "_data_files": [{"filename": "data/train-00000-of-00001.jsonl"}]}
        )
    )


def make_texts(folder: Path) -> None:
    """What is written by hand."""
    (folder / "templates.json").write_text(
        json.dumps(
            [
                {
                    "name": "t",
                    "stop_words": ["<|im_end|>"],
                    "default_system": "be",
                    "format_user": {
                        "slots": ["U {{content}}", {"token": "<|im_end|>"}, ["bos_token"]]
                    },
                }
            ]
        )
    )
    (folder / "shape.yaml").write_text(
        yaml.safe_dump(
            {
                "model": {
                    "model_config": {
                        "hidden_size": 8,
                        "num_layers": 1,
                        "num_heads": 4,
                        "n_kv_heads": 2,
                        "vocab_size": 384,
                        "intermediate_size": 12,
                        "qkv_has_bias": True,
                        "theta": 1e6,
                        "extend_method": "None",
                    }
                }
            }
        )
    )
    (folder / "chat.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    (folder / "reward.py").write_text(REWARDS[0])
    (folder / "config.yaml").write_text(yaml.safe_dump(configuration()))


def make_checkpoint(folder: Path) -> None:
    """As a run of the configuration would have written it, from the folder that it works in."""
    from mindgrpo.checkpoint.format import Manifest, RunState, StoredTensor, write_manifest
    from mindgrpo.checkpoint.save import Chunk, write_shard
    from mindgrpo.config import load_config
    from mindgrpo.models.parameters import parameter_specs
    from mindgrpo.parallel.sharding import Box
    from mindgrpo.run.preflight import prepare
    from mindgrpo.run.start import identity_of

    here = os.getcwd()
    os.chdir(folder)
    try:
        config = load_config("config.yaml").config
        inputs = prepare(config, 1, scores=False)
        identity = identity_of(config, inputs)
    finally:
        os.chdir(here)
    specs = parameter_specs(inputs.plan.model)
    chunks = [Chunk("policy", spec.name, Box((0,) * len(spec.shape), spec.shape)) for spec in specs]
    (folder / STEP).mkdir(parents=True)
    shard = write_shard(
        folder / STEP / "rank_00000.safetensors",
        chunks,
        (np.zeros(chunk.box.shape, "<f4") for chunk in chunks),
    )
    tensors = {
        chunk.name: StoredTensor(shape=chunk.box.shape, dtype="F32", chunks=[stored])
        for chunk, stored in zip(chunks, shard.stored, strict=True)
    }
    manifest = Manifest(
        layout="one",
        state=RunState(step=3, prompts=12, updates=3, weights_version=3),
        identity=identity,
        files={shard.name: shard.file},
        tensors={"policy": tensors},
        sums={"policy": "0" * 16},
    )
    (folder / STEP / "manifest.json").write_bytes(write_manifest(manifest))


def bytes_in_words() -> list[str]:
    """The 256 letters that GPT-2's family writes bytes as."""
    from tokenizers.pre_tokenizers import ByteLevel

    return [*sorted(ByteLevel.alphabet()), "12"]


def configuration() -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((EXAMPLE / "grpo_config.yaml").read_text())
    one = {"data_parallel": 1, "model_parallel": 1}
    document["rl_config"] |= {"dataset_file": "rows.jsonl", "eval_dataset_file": "rows.jsonl"}
    document["actor_config"] |= {"load": "model", "parallel_config": {**one, "pipeline_stage": 1}}
    document["generate_config"]["parallel_config"] = one
    document["generate_config"]["max_prompt_length"] = 60
    return document
