"""Word problems of one and two steps in GSM8K's JSONL form, with worked answers.

    python make_problems.py        # writes train.jsonl and heldout.jsonl beside this file

They are far easier than GSM8K's own problems, and no problem is in both splits.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
NUM_TRAIN, NUM_HELDOUT = 800, 96
NAMES = ("Mia", "Omar", "Lena", "Tom", "Ana", "Raj", "Wei", "Ivy", "Noah", "Zoe")
THINGS = ("apples", "stickers", "marbles", "books", "shells", "coins", "pencils", "cards")
Row = dict[str, str]


def row(question: str, steps: list[tuple[str, int]]) -> Row:
    """`steps` are (expression, value), each worked out on a line of its own, as GSM8K does."""
    worked = "\n".join(f"{text} = <<{text}={value}>>{value}" for text, value in steps)
    return {"question": question, "answer": f"{worked}\n#### {steps[-1][1]}"}


def gets_more(rng: random.Random, name: str, things: str) -> Row:
    a, b = rng.randint(2, 20), rng.randint(2, 20)
    return row(
        f"{name} has {a} {things} and gets {b} more. How many {things} does {name} have now?",
        [(f"{a}+{b}", a + b)],
    )


def gives_away(rng: random.Random, name: str, things: str) -> Row:
    a = rng.randint(8, 30)
    b = rng.randint(2, a - 1)
    return row(
        f"{name} has {a} {things} and gives away {b}. How many {things} are left?",
        [(f"{a}-{b}", a - b)],
    )


def boxes(rng: random.Random, name: str, things: str) -> Row:
    a, b = rng.randint(2, 9), rng.randint(2, 9)
    return row(
        f"{name} has {a} boxes with {b} {things} in each. How many {things} is that in all?",
        [(f"{a}*{b}", a * b)],
    )


def boxes_and_more(rng: random.Random, name: str, things: str) -> Row:
    a, b, c = rng.randint(2, 6), rng.randint(2, 9), rng.randint(2, 12)
    return row(
        f"{name} has {a} boxes with {b} {things} in each and finds {c} more. How many {things} does {name} have?",
        [(f"{a}*{b}", a * b), (f"{a * b}+{c}", a * b + c)],
    )


KINDS: tuple[Callable[[random.Random, str, str], Row], ...] = (
    gets_more,
    gives_away,
    boxes,
    boxes_and_more,
)


def make_splits(seed: int) -> tuple[list[Row], list[Row]]:
    """All kinds equally often in both."""
    rng = random.Random(seed)
    rows: dict[str, Row] = {}
    while len(rows) < NUM_TRAIN + NUM_HELDOUT:
        made = KINDS[len(rows) % len(KINDS)](rng, rng.choice(NAMES), rng.choice(THINGS))
        rows.setdefault(made["question"], made)
    every = list(rows.values())
    return every[NUM_HELDOUT:], every[:NUM_HELDOUT]


def write_rows(path: Path, rows: list[Row]) -> None:
    text = "".join(json.dumps(one) + "\n" for one in rows)
    path.write_text(text, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    train, heldout = make_splits(seed=0)
    write_rows(HERE / "train.jsonl", train)
    write_rows(HERE / "heldout.jsonl", heldout)
    print(f"{len(train)} training and {len(heldout)} held-out rows in {HERE}")
