"""The kinds of input that are fuzzed: how each is spoiled, and the command that reads it.

Refuses to know what a file means.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import hostile
import other_programs
from seeds import STEP
from words import FLAGS, REWARDS, TEMPLATES, VARIABLES, WORDS


@dataclass(frozen=True)
class Kind:
    """`spoil` changes a copy of the seeds in a folder and returns the command to run there, as words."""

    weight: int
    spoil: Callable[[Path, random.Random], list[str]]


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


def checkpoint(folder: Path, draw: random.Random) -> list[str]:
    """Manifests that are signed again, too: what is wrong in them must be found by looking."""
    from mindgrpo.checkpoint.format import _digest

    if draw.random() < 0.15:
        of_file(f"{STEP}/rank_00000.safetensors", hostile.mutated_bytes)(folder, draw)
    else:
        path = folder / STEP / "manifest.json"
        of_file(f"{STEP}/manifest.json", hostile.mutated_json)(folder, draw)
        try:
            body = json.loads(path.read_bytes())
            body["digest"] = _digest({key: body[key] for key in body if key != "digest"})
            path.write_text(json.dumps(body))
        except (ValueError, TypeError, RecursionError):
            pass
    if draw.random() < 0.3:
        return ["export", "--from", "run", "--output", "out/hf"]
    return checking("--resume_training", "run", "--rl_config.max_steps", "24")


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
            draw.choice(("--dtype", "--max_shard_bytes", "--from", "--model")),
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
    "csv": Kind(3, of_file("rows.csv", hostile.mutated_text, DATA, "rows.csv")),
    "directory": Kind(2, of_file("saved/state.json", hostile.mutated_json, DATA, "saved")),
    "mindrecord": Kind(10, mindrecord),
    "safetensors": Kind(10, of_file("model/model.safetensors", header)),
    "checkpoint": Kind(8, checkpoint),
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
    **{name: Kind(*kind) for name, kind in other_programs.KINDS.items()},
}
