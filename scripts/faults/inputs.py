"""The kinds of input that are fuzzed: valid seeds, how each is spoiled, and the command that reads it.

Refuses large seeds: a case copies them.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hostile
import numpy as np
import yaml

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "examples" / "grpo" / "tiny_arithmetic" / "model"
EXAMPLE = MODEL.parent
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
TEMPLATES = (
    "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
    "{{ 10 ** 10 ** 10 }}",
    "{{ 'a' * 10 ** 10 }}",
    "{{ [0] * 10 ** 9 }}",
    "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x %}{{ n.x }}{{ n.x }}{% endset %}{% endfor %}",
    "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.system('touch hacked') }}",
    "{{ self._TemplateReference__context }}",
    "{{ 'a'.ljust(10 ** 10) }}{{ 'a'|center(10000000000) }}",
    "{{ '%10000000000d' % 1 }}{{ '%10000000000d'|format(1) }}",
    "{{ '{:>10000000000}'.format(1) }}",
    "{{ 'aaaaaaaaaaaaaaaa'|replace('a', 'b' * 9999999)|length }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% include 'x' %}",
    "{% import '/etc/passwd' as x %}",
    "{% extends x %}",
    "{{ lipsum(100000000) }}",
    "{{ messages[99].content }}",
    "{{ messages.x.y.z }}",
    "{{ 1 / 0 }}",
    "{{ raise_exception('no\nno') }}",
    "{{ strftime_now('%Y' * 1000000) }}",
    "{{ (" * 300,
    "{{ " + "(" * 3000 + ")" * 3000 + " }}",
    "{{ " + "-" * 5000 + "1 }}",
    "{{ " + "1+" * 20000 + "1 }}",
    "{% if a %}" * 2000,
    "{{ messages|tojson(indent=999999999) }}",
    "{% for m in messages recursive %}{{ loop([m]) }}{% endfor %}",
    "{{ [1]|batch(999999999)|list }}",
    "{{ 2|round(999999999) }}",
    "{{ 9 ** 9 ** 9 }}",
    "{% set x = 7 ** 99999999 %}",
    "{{ messages|map('upper')|list }}",
    "{{ range(10**18)|list }}",
    "{{ 'x' * messages }}",
    "{{ messages * messages }}",
    "",
    "\x00",
    "{{ '\\ud800' }}",
)
REWARDS = (
    "def reward(completions, **k):\n    return [0.0] * len(completions)\n",
    "def reward(completions, **k)\n    return 1\n",
    "import sys; sys.exit(3)\n",
    "import sys; sys.exit('no\\nmore')\n",
    "import os; os._exit(0)\n",
    "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)\n",
    "raise SystemExit\n",
    "raise KeyboardInterrupt\n",
    "raise Exception('a\\nb\\x00c\\ud800')\n",
    "print('x' * 100000)\ndef reward(completions):\n    print('hm')\n    return [1.0 for _ in completions]\n",
    "def reward(completions):\n    return 'x'\n",
    "def reward(completions):\n    return [float('nan')] * len(completions)\n",
    "def reward(completions):\n    return []\n",
    "def reward(a, b, c):\n    return [1.0]\n",
    "reward = 3\n",
    "class reward:\n    def __init__(self, x): pass\n",
    "def reward(completions):\n    raise BaseException('out')\n",
    "def reward(completions):\n    import os; os.fork(); return [1.0] * len(completions)\n",
    "import subprocess\nsubprocess.Popen(['sleep', '1000'])\ndef reward(completions): return [1.0] * len(completions)\n",
    "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,)).start()\ndef reward(completions): return [1.0] * len(completions)\n",
    "x = 'a' * 10 ** 11\n",
    "\x00",
    "",
    "\ud800",
    "def reward(completions):\n    return [10 ** 400 for _ in completions]\n",
    "def reward(completions):\n    return [2 ** 5000 * 1.0 for _ in completions]\n",
    "def f(): f()\nf()\n",
    "def other(completions): return [1.0] * len(completions)\n",
    "def reward(completions):\n    return (1.0 for _ in completions)\n",
)
FLAGS = (
    *(
        "--config",
        "--rl_config",
        "--rl_config.beta",
        "--rl_config.",
        "--.",
        "--",
        "-",
        "--ranks",
        "--output_dir",
    ),
    *(
        "--actor_config.parallel_config.model_parallel",
        "--reward_config.verifier_function",
        "--verifier_weight",
    ),
    *(
        "--rl_config.dataset_file",
        "--tokenizer_dir",
        "--generate_config.sampling_config.max_tokens",
        "--no_such",
    ),
    *(
        "--rl_config.num_generations",
        "--rl_config.seq_length",
        "--context.max_device_memory",
        "--actor_config",
    ),
    *(
        "--generate_config.sampling_config",
        "--model_name",
        "--rl_config.chat_template",
        "--resume_training",
    ),
)
WORDS = (
    *(
        "",
        " ",
        "0",
        "-1",
        "1e400",
        "nan",
        "[",
        "{",
        "}",
        "[1,[2",
        "null",
        "'",
        '"',
        "\n",
        "\\",
        "*",
        "&a *a",
        "!!int x",
    ),
    *(
        "!!python/name:os.system",
        "9" * 5000,
        "x" * 100_000,
        "[" * 5000,
        "--",
        "é",
        "\udcff",
        "/dev/zero",
        "/proc/self/mem",
    ),
    *(
        "..",
        ".",
        "/",
        "~",
        "1,2,3",
        "[nan]",
        "2024-01-01",
        "0x" + "f" * 500,
        "a=b",
        "true",
        "{a: 1, a: 2}",
        "1\x07",
    ),
)
VARIABLES = (
    *(
        "MINDGRPO_PORT",
        "MINDGRPO_LOG_DIR",
        "MINDGRPO_NATIVE",
        "MINDGRPO_FORK",
        "OMP_NUM_THREADS",
        "TMPDIR",
        "HOME",
    ),
    *(
        "MALLOC_MMAP_THRESHOLD_",
        "XDG_CACHE_HOME",
        "CC",
        "PATH",
        "LANG",
        "PYTHONIOENCODING",
        "RANK_ID",
        "MS_ROLE",
    ),
    *(
        "MS_WORKER_NUM",
        "GLOG_v",
        "CUDA_VISIBLE_DEVICES",
        "HF_HUB_OFFLINE",
        "TOKENIZERS_PARALLELISM",
        "COLUMNS",
    ),
    *("MINDGRPO_LAUNCHED_AT", "MINDGRPO_STOP_SECONDS", "MS_SCHED_PORT", "TZ"),
)


@dataclass(frozen=True)
class Kind:
    """`spoil` changes a copy of the seeds in a folder and returns the command to run there, as words."""

    weight: int
    spoil: Callable[[Path, random.Random], list[str]]


def make_seeds(folder: Path) -> None:
    """A tiny, valid specimen of everything."""
    from mindgrpo.data.mindrecord import write_mindrecord
    from mindgrpo.data.records import asked
    from mindgrpo.model.checkpoint_files import SafetensorsWriter
    from mindgrpo.model.families import decoder_config, parameter_specs

    for name, most in (("model", 1 << 30), ("sharded", 4000)):
        model = folder / name
        model.mkdir(parents=True)
        (model / "config.json").write_text(json.dumps(RAW))
        with SafetensorsWriter(model, most) as writer:
            for spec in parameter_specs(decoder_config(RAW, "here")):
                writer.add(spec.name, np.zeros(spec.shape, np.float32))
        for path in MODEL.iterdir():
            if path.name not in ("config.json", "model.safetensors"):
                shutil.copy(path, model / path.name)
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
    rows = [
        {"question": f"{n} + 1 = ?", "answer": str(n + 1), "kind": {"a": [n]}} for n in range(4)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rows.json").write_text(json.dumps({"data": rows}))
    chats = [
        {"messages": [{"role": "user", "content": row["question"]}], "answer": "1"} for row in rows
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chats))
    write_mindrecord(
        folder / "rows.mindrecord", [asked(r["question"], r["answer"], {"k": 1}) for r in rows], ""
    )
    saved = folder / "saved"
    (saved / "data").mkdir(parents=True)
    shutil.copy(folder / "rows.jsonl", saved / "data" / "train-00000-of-00001.jsonl")
    (saved / "state.json").write_text(
        json.dumps(
            {"_split": "train", "_data_files": [{"filename": "data/train-00000-of-00001.jsonl"}]}
        )
    )
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


def checking(*more: str) -> list[str]:
    return ["check", "--ranks", "1", "--config", "config.yaml", *more]


def of_file(
    name: str, change: hostile.Mutation, *more: str, command: tuple[str, ...] = ()
) -> Callable[..., list[str]]:
    def spoil(folder: Path, draw: random.Random) -> list[str]:
        path = folder / name
        path.write_bytes(change(path.read_bytes(), draw))
        return list(command) or checking(*more)

    return spoil


def any_of(*spoilers: Callable[..., list[str]]) -> Callable[..., list[str]]:
    return lambda folder, draw: draw.choice(spoilers)(folder, draw)


def replaced(name: str, words: tuple[str, ...], *more: str) -> Callable[..., list[str]]:
    def change(data: bytes, draw: random.Random) -> bytes:
        if draw.random() < 0.2:
            return draw.choice((hostile.mutated_bytes, hostile.mutated_text))(data, draw)
        return draw.choice(words).encode("utf-8", "surrogatepass")

    return of_file(name, change, *more)


def header(data: bytes, draw: random.Random) -> bytes:
    """The JSON in front of the tensors of a safetensors file, and the eight bytes in front of that."""
    if draw.random() < 0.3:
        return hostile.mutated_bytes(data, draw)
    length = int.from_bytes(data[:8], "little")
    tree, marks = hostile.mutated_tree(json.loads(data[8 : 8 + length]), draw, hostile.RAW)
    described = hostile.as_json(tree, marks, draw)
    said = (
        len(described)
        if draw.random() < 0.8
        else draw.choice((0, 1, 2**20, 2**63, 2**64 - 1, len(described) - 1))
    )
    return said.to_bytes(8, "little") + described + data[8 + length :]


def mindrecord(folder: Path, draw: random.Random) -> list[str]:
    """Its pages lie 16 and 32 MiB apart; what is between them is empty, and stays a hole."""
    path = folder / draw.choice(
        ("rows.mindrecord", "rows.mindrecord", "rows.mindrecord", "rows.mindrecord.db")
    )
    command = checking("--rl_config.dataset_file", "rows.mindrecord")
    size = path.stat().st_size
    if draw.random() < 0.1:
        with path.open("r+b") as file:
            file.truncate(draw.choice((0, 8, 100, size // 2, size - 1, size - 450)))
        return command
    start = draw.choice((0, 0, 16 << 20, 48 << 20)) if size > 1 << 20 else 0
    with path.open("r+b") as file:
        file.seek(start)
        part = file.read(1400 if start == 0 else 500)
        if start == 0 and draw.random() < 0.5 and size > 1 << 20:
            length = int.from_bytes(part[:8], "little")
            tree, marks = hostile.mutated_tree(json.loads(part[8 : 8 + length]), draw, hostile.RAW)
            described = hostile.as_json(tree, marks, draw)
            part = len(described).to_bytes(8, "little") + described
        else:
            part = hostile.mutated_bytes(part, draw)[: len(part)]
        file.seek(start)
        file.write(part)
    return command


def flags(folder: Path, draw: random.Random) -> list[str]:
    words = checking() if draw.random() < 0.8 else []
    verbs = ("check", "export", "score", "config", "plan", "", "--help", "chek", "\x00")
    words = words or [draw.choice(verbs)]
    for _ in range(draw.choice((1, 1, 2, 3))):
        flag = draw.choice(FLAGS)
        word = draw.choice(WORDS)
        words += (
            [f"{flag}={word}"]
            if draw.random() < 0.3
            else [flag, word]
            if draw.random() < 0.9
            else [flag]
        )
    return words


def environment(folder: Path, draw: random.Random) -> list[str]:
    pairs = [f"{draw.choice(VARIABLES)}={draw.choice(WORDS)}" for _ in range(draw.choice((1, 2)))]
    return ["env", *(pair.replace("\x00", "") for pair in pairs), *checking()]


def score(folder: Path, draw: random.Random) -> list[str]:
    if draw.random() < 0.5:
        of_file("rows.jsonl", hostile.mutated_lines)(folder, draw)
        return ["score", "--reward", "accuracy_reward", "--data", "rows.jsonl"]
    words = ["score", "--reward", "accuracy_reward", "--data", "rows.jsonl"]
    flag = draw.choice(
        ("--reward", "--data", "--limit", "--deadline", "--memory", "--completion-column", "--nope")
    )
    return [*words, flag, draw.choice(WORDS)]


CONVERT = (
    "convert",
    "--tokenizer_dir",
    "model",
    "--output_path",
    "out/new.mindrecord",
    "--file_path",
)


def convert(folder: Path, draw: random.Random) -> list[str]:
    if draw.random() < 0.6:
        return of_file("rows.jsonl", hostile.mutated_lines, command=(*CONVERT, "rows.jsonl"))(
            folder, draw
        )
    flag = draw.choice(
        (
            "--max_prompt_length",
            "--map-keys",
            "--columns",
            "--split",
            "--chat_template",
            "--vocab_path",
        )
    )
    return [*CONVERT, "rows.jsonl", flag, draw.choice(WORDS)]


EXPORT = ("export", "--from", "sharded", "--output", "out/hf")


def export(folder: Path, draw: random.Random) -> list[str]:
    shard = draw.choice(sorted(path.name for path in (folder / "sharded").glob("*.safetensors")))
    name, change = draw.choice(
        (
            (shard, header),
            ("config.json", hostile.mutated_json),
            ("model.safetensors.index.json", hostile.mutated_json),
        )
    )
    if draw.random() < 0.2:
        return [
            *EXPORT,
            draw.choice(("--dtype", "--max_shard_bytes", "--from", "--output")),
            draw.choice(WORDS),
        ]
    return of_file(f"sharded/{name}", change, command=EXPORT)(folder, draw)


SHARDED, PAIR = ("--actor_config.load", "sharded"), ("--actor_config.load", "pair")
DATA = "--rl_config.dataset_file"
USE_REWARD = ("--reward_config.verifier_function", "reward.py:reward", "--verifier_weight", "1.0")
USE_TEMPLATE = ("--rl_config.chat_template", "chat.jinja")
USE_TEMPLATES = ("--rl_config.chat_template", "templates.json:t")

KINDS: dict[str, Kind] = {
    "config": Kind(18, of_file("config.yaml", hostile.mutated_yaml)),
    "flags": Kind(6, flags),
    "environment": Kind(3, environment),
    "jsonl": Kind(
        10,
        any_of(
            of_file("rows.jsonl", hostile.mutated_lines),
            of_file("chats.jsonl", hostile.mutated_lines, DATA, "chats.jsonl"),
        ),
    ),
    "json": Kind(3, of_file("rows.json", hostile.mutated_json, DATA, "rows.json")),
    "directory": Kind(2, of_file("saved/state.json", hostile.mutated_json, DATA, "saved")),
    "mindrecord": Kind(10, mindrecord),
    "safetensors": Kind(10, of_file("model/model.safetensors", header)),
    "index": Kind(
        5, of_file("sharded/model.safetensors.index.json", hostile.mutated_json, *SHARDED)
    ),
    "model_config": Kind(6, of_file("model/config.json", hostile.mutated_json)),
    "model_yaml": Kind(
        3, of_file("shape.yaml", hostile.mutated_yaml, "--actor_config.model_config", "shape.yaml")
    ),
    "tokenizer": Kind(10, of_file("model/tokenizer.json", hostile.mutated_json)),
    "tokenizer_settings": Kind(
        6,
        any_of(
            *(
                of_file(f"{folder}/{name}", hostile.mutated_json, "--actor_config.load", folder)
                for folder in ("model", "pair")
                for name in (
                    "tokenizer_config.json",
                    "generation_config.json",
                    "special_tokens_map.json",
                )
            )
        ),
    ),
    "vocabulary": Kind(
        4,
        any_of(
            of_file("pair/vocab.json", hostile.mutated_json, *PAIR),
            of_file("pair/merges.txt", hostile.mutated_text, *PAIR),
        ),
    ),
    "template": Kind(4, replaced("chat.jinja", TEMPLATES, *USE_TEMPLATE)),
    "templates_file": Kind(2, of_file("templates.json", hostile.mutated_json, *USE_TEMPLATES)),
    "reward": Kind(1, replaced("reward.py", REWARDS, *USE_REWARD)),
    "score": Kind(2, score),
    "convert": Kind(2, convert),
    "export": Kind(3, export),
}
