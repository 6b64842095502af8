"""Inputs as other programs write them: tables, rows with several columns that could be meant, values that are missing
in one of many spellings, configurations of other trainers, other launchers' variables, and consoles.

Each of KINDS is as in inputs.py. Refuses to know what a row means.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import hostile
from words import WORDS

CHECK = ("check", "--ranks", "1", "--config", "config.yaml")
DATA = "--rl_config.dataset_file"

MISSING: tuple[Any, ...] = (
    None,
    float("nan"),
    "",
    " ",
    "nan",
    "NaN",
    "None",
    "null",
    "NA",
    [],
    {},
    [None],
    [""],
)
TURN = {"role": "user", "content": "1 + 1 = ?"}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
QUESTIONS = (
    "1 + 1 = ?",
    "2 + 2 = ?",
    [TURN],
    [{"role": "system", "content": "Add."}, TURN],
    [TURN, {"role": "assistant", "content": "2"}],
    [TURN, {"role": "assistant", "content": None, "tool_calls": [CALL]}],
    [TURN, {"role": "assistant", "content": "", "tool_calls": [CALL, None]}],
    [{"role": "user", "content": [{"type": "text", "text": "1 + 1 = ?"}]}],
    [{"from": "human", "value": "1 + 1 = ?"}],
    json.dumps([TURN]),
)
ANSWERS = (
    "2",
    "so 1 + 1 = 2 #### 2",
    2,
    2.0,
    True,
    ["2"],
    {"a": "2"},
    "\\boxed{2}",
    "2, \\ldots, n",
)
QUESTION_KEYS = ("question", "prompt", "messages", "problem", "query", "conversations")
ANSWER_KEYS = ("answer", "solution", "ground_truth", "reward_model", "target", "answers")
OTHERS = ("tools", "images", "data_source", "extra_info", "completions", "prompts", "kind", "")


def as_lines(rows: Sequence[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def drawn_row(draw: random.Random, missing: float) -> dict[str, Any]:
    def value(of: Sequence[Any]) -> Any:
        return draw.choice(MISSING if draw.random() < missing else of)

    # Mostly what could be meant; the rest only makes a sentence.
    is_likely, count = draw.random() < 0.7, draw.choice((1, 1, 1, 2, 3))
    asked, told = (
        (QUESTION_KEYS[:3], ANSWER_KEYS[:4]) if is_likely else (QUESTION_KEYS, ANSWER_KEYS)
    )
    texts = QUESTIONS[:4] if is_likely else QUESTIONS
    row = {key: value(texts) for key in draw.sample(asked, count)}
    for key in draw.sample(told, draw.choice((0, 1, 1, 1, 2, 3))):
        answer = value(ANSWERS)
        row[key] = {"ground_truth": answer} if key == "reward_model" else answer
    if draw.random() < 0.2:
        row[draw.choice(OTHERS)] = value((*ANSWERS, *QUESTIONS))
    return row


def rows(folder: Path, draw: random.Random) -> list[str]:
    """Rows with several columns that could be the prompt or the answer, and several ways to leave one out."""
    missing = draw.choice((0.0, 0.0, 0.2, 0.6))
    made = [drawn_row(draw, missing)]
    made += [made[0] if draw.random() < 0.8 else drawn_row(draw, missing) for _ in range(3)]
    (folder / "rows.jsonl").write_text(as_lines(made))
    words = [*CHECK]
    if draw.random() < 0.3:
        pairs = draw.sample(QUESTION_KEYS, 1) + draw.sample(ANSWER_KEYS, 1)
        words += ["--rl_config.dataset_map_keys", "question={},answer={}".format(*pairs)]
    if draw.random() < 0.2:
        words += ["--rl_config.dataset_type", draw.choice(("gsm8k", "openr1math", "plain"))]
    return words


def csv(folder: Path, draw: random.Random) -> list[str]:
    names = draw.sample(QUESTION_KEYS, 1) + draw.sample(ANSWER_KEYS, draw.choice((0, 1, 2)))
    cells = ["", " ", '""', "nan", "NULL", "1", "1,000", '"a\nb"', "[1]", '{"a": 1}', "#### 2"]
    lines = [
        ",".join(draw.choice(cells) for _ in names[: draw.choice((9, 9, 1))]) for _ in range(4)
    ]
    (folder / "rows.csv").write_text("\n".join([",".join(names), *lines]) + "\n")
    return [*CHECK, DATA, "rows.csv"]


def columns(draw: random.Random) -> dict[str, Any]:
    """Columns of two rows, of types that a table has and JSON has not."""
    import pyarrow as pa

    extreme = draw.choice((0, 1, -1, 10**9, 2**31, 2**53 + 1, 2**63 - 1, -(2**63)))
    moment = pa.array([extreme, None], pa.int64())
    texts = pa.array([draw.choice((b"q", b"\xff", b"", b"\x00")), b"r"], pa.binary())
    nested = [[{"x": 1, "y": None}], None]
    made = {
        "at": moment.cast(
            pa.timestamp(draw.choice(("s", "ms", "us", "ns")), draw.choice((None, "UTC")))
        ),
        "took": moment.cast(pa.duration(draw.choice(("s", "ms", "us", "ns")))),
        "day": pa.array([extreme % 2**31, None], pa.int32()).cast(pa.date32()),
        "clock": pa.array([abs(extreme) % 10**9, None], pa.int64()).cast(pa.time64("ns")),
        "amount": pa.array([None, 1], pa.decimal128(38, draw.choice((0, 37)))),
        "number": pa.array([draw.choice((1.5, float("nan"), float("inf"))), None], pa.float64()),
        "whole": pa.array([2**64 - 1, None], pa.uint64()),
        "bytes": texts,
        "text": texts.view(pa.string()),
        "wide": pa.array(["q", None], pa.large_string()),
        "kind": pa.array(["a", None]).dictionary_encode(),
        "nothing": pa.nulls(2),
        "deep": pa.array(nested, pa.list_(pa.struct({"x": pa.int8(), "y": pa.string()}))),
        "pairs": pa.array([[("a", 1)], None], pa.map_(pa.string(), pa.int64())),
        "turns": pa.array([[TURN], [TURN]]),
        "flag": pa.array([True, None]),
    }
    return {name: made[name] for name in draw.sample(sorted(made), draw.choice((1, 2, 4)))}


def parquet(folder: Path, draw: random.Random) -> list[str]:
    """A table with odd cells, some of them in the place of a prompt or an answer."""
    import pyarrow as pa
    import pyarrow.parquet

    table = {
        "question": pa.array(["q", "r"]),
        "answer": pa.array(["1", draw.choice(("2", "2", None))]),
    }
    for name, cells in columns(draw).items():
        taken = draw.choice((name, name, name, *QUESTION_KEYS[:3], *ANSWER_KEYS[:3], "tools"))
        table[taken] = cells
    path = folder / "rows.parquet"
    pa.parquet.write_table(pa.table(table), path)
    if draw.random() < 0.2:
        path.write_bytes(hostile.mutated_bytes(path.read_bytes(), draw))
    return [*CHECK, DATA, "rows.parquet"]


TRL = """\
from trl import GRPOConfig, GRPOTrainer
from peft import LoraConfig

args = GRPOConfig(
    output_dir="out", learning_rate=1e-6, num_generations=4, max_completion_length=64, beta=0.0, loss_type="dapo",
    per_device_train_batch_size=4, epsilon_high=0.28, temperature=1.0, bf16=True, logging_steps=10,
)
trainer = GRPOTrainer(
    model="Qwen/Qwen2.5-0.5B-Instruct", args=args, reward_funcs=[], train_dataset=None,
    peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"),
)
"""
VERL = """\
set -x
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo \\
    data.train_files=$HOME/data/gsm8k/train.parquet data.train_batch_size=32 data.max_prompt_length=60 \\
    actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B actor_rollout_ref.actor.use_kl_loss=True \\
    actor_rollout_ref.rollout.n=4 trainer.total_epochs=1 +data.apply_chat_template_kwargs.enable_thinking=False $@
"""
TREE = {
    "model_name_or_path": "Qwen/Qwen2.5-0.5B",
    "learning_rate": 1e-6,
    "num_generations": 4,
    "use_peft": True,
    "lora_r": 8,
    "beta": 0.04,
    "reward_funcs": ["accuracy", "format"],
    "trainer": {"n_gpus_per_node": 8, "logger": ["console"]},
    "algorithm": {"adv_estimator": "grpo"},
}


def of_other_trainers(folder: Path, draw: random.Random) -> list[str]:
    name, text = draw.choice((("my.py", TRL), ("run.sh", VERL), ("recipe.yaml", "")))
    data = text.encode() or hostile.as_json(
        *hostile.mutated_tree(TREE, draw, hostile.RAW_YAML), draw
    )
    if text:
        for _ in range(draw.choice((0, 1, 2))):
            data = draw.choice((hostile.mutated_bytes, hostile.mutated_text, with_word))(data, draw)
    (folder / name).write_bytes(data)
    return ["config", "--explain", name]


def with_word(data: bytes, draw: random.Random) -> bytes:
    """Puts a hostile word in the place of a value."""
    pieces = data.split(b"=")
    place = draw.randrange(1, len(pieces))
    tail = pieces[place][1:].lstrip(b"0123456789abcdefghijklmnopqrstuvwxyz-.")
    pieces[place] = draw.choice(WORDS).encode("utf-8", "surrogateescape") + tail
    return b"=".join(pieces)


NAMES = (
    "org/name",
    "modelscope:org/name",
    "org/name:main",
    "org/name@v1",
    "org/name:a@b",
    "hf://org/name",
)


def names(folder: Path, draw: random.Random) -> list[str]:
    name = hostile.mutated_bytes(draw.choice(NAMES).encode(), draw) if draw.random() < 0.5 else b""
    text = name.decode("utf-8", "replace").replace("\x00", "") or draw.choice(NAMES)
    return [*CHECK, draw.choice((DATA, "--actor_config.load", "--tokenizer_dir")), text]


LAUNCHERS = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE", "SLURM_PROCID"),
    *(
        "SLURM_NTASKS",
        "SLURM_STEP_NUM_TASKS",
        "RANK_ID",
        "RANK_SIZE",
        "RANK_TABLE_FILE",
        "DEVICE_ID",
    ),
    *("TORCHELASTIC_RUN_ID", "ACCELERATE_USE_DEEPSPEED", "MS_ROLE", "MS_NODE_ID", "MS_WORKER_NUM"),
)
RANK_AND_SIZE = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("RANK_ID", "RANK_SIZE"),
)
NUMBERS = ("0", "1", "2", "8", "-1", "many", "2.0", "", "1e3")


def launchers(folder: Path, draw: random.Random) -> list[str]:
    """Of other launchers and of hosts."""
    chosen = [*draw.choice(RANK_AND_SIZE), *draw.sample(LAUNCHERS, draw.choice((0, 1, 4)))]
    pairs = [f"{name}={draw.choice(NUMBERS if draw.random() < 0.8 else WORDS)}" for name in chosen]
    return ["env", *(pair.replace("\x00", "") for pair in pairs), *CHECK]


ENCODINGS = ("ascii", "latin-1", "cp437", "cp1252", "shift_jis", "utf-8")
OUTPUTS = ("file", "file", "full", "closed")
SHOWN = (
    CHECK,
    ("config", "--explain", "rl_config.beta"),
    ("config", "--reference"),
    ("plan", "--config", "config.yaml", "--ranks", "2"),
    ("score", "--reward", "accuracy_reward", "--data", "rows.jsonl"),
    ("check", "--help-keys"),
    ("check", "--ranks", "1", "--config", "模型.yaml"),
)


def consoles(folder: Path, draw: random.Random) -> list[str]:
    """Where what is shown cannot be, for its letters, for room or for want of a reader."""
    text = (folder / "config.yaml").read_text()
    (folder / "模型.yaml").write_text(text.replace("rows.jsonl", "données.jsonl", 1), "utf-8")
    (folder / "données.jsonl").write_text(as_lines([{"question": "¿1 + 1 = ２?", "answer": "②"}]))
    return ["console", draw.choice(ENCODINGS), draw.choice(OUTPUTS), *draw.choice(SHOWN)]


KINDS: dict[str, tuple[int, Callable[[Path, random.Random], list[str]]]] = {
    "rows": (8, rows),
    "csv_cells": (2, csv),
    "parquet": (8, parquet),
    "other_trainers": (6, of_other_trainers),
    "hub_names": (2, names),
    "launchers": (4, launchers),
    "consoles": (4, consoles),
}
