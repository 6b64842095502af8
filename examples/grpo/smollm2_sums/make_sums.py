"""Sums of two numbers up to 30 in GSM8K's JSONL form.

    python make_sums.py            # writes train.jsonl and heldout.jsonl beside this file

No pair of numbers stands in both splits, in either order.
"""

from __future__ import annotations

import json
import random
from itertools import combinations_with_replacement
from pathlib import Path

HERE = Path(__file__).resolve().parent
LARGEST, NUM_HELDOUT = 30, 96
Pair = tuple[int, int]


def make_splits(seed: int) -> tuple[list[Pair], list[Pair]]:
    """Training pairs in both orders; a held-out pair in one."""
    rng = random.Random(seed)
    pairs = list(combinations_with_replacement(range(1, LARGEST + 1), 2))
    rng.shuffle(pairs)
    heldout, train = pairs[:NUM_HELDOUT], pairs[NUM_HELDOUT:]
    both = sorted({order for a, b in train for order in ((a, b), (b, a))})
    return rng.sample(both, len(both)), [rng.choice([(a, b), (b, a)]) for a, b in heldout]


def write_rows(path: Path, pairs: list[Pair]) -> None:
    rows = [{"question": f"What is {a} + {b}?", "answer": f"#### {a + b}"} for a, b in pairs]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_text(text, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    train, heldout = make_splits(seed=0)
    write_rows(HERE / "train.jsonl", train)
    write_rows(HERE / "heldout.jsonl", heldout)
    print(f"{len(train)} training and {len(heldout)} held-out rows in {HERE}")
