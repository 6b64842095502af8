"""Products of two numbers in GSM8K's JSONL form, and the conversations that a warm start learns from.

    python make_products.py            # writes train.jsonl and heldout.jsonl beside this file

Factors have two digits. No pair of them is in both splits, in either order, and `sample_product` refuses pairs that it
is told to keep out, so that a warm start on fresh products cannot see the held-out ones.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
SMALLEST, LARGEST = 11, 99
QUESTIONS = ("What is {a} * {b}?", "Compute {a} times {b}.", "How much is {a} times {b}?")
Key = tuple[int, ...]
# What the policy writes, and what a tool answers to it (None after the last turn).
Turn = tuple[str, str | None]


@dataclass(frozen=True)
class Product:
    question: str
    factors: tuple[int, int]

    @property
    def key(self) -> Key:
        """The factors without their order: what must not be shared between splits."""
        return tuple(sorted(self.factors))

    @property
    def result(self) -> int:
        return self.factors[0] * self.factors[1]

    def row(self) -> dict[str, str]:
        return {"question": self.question, "answer": f"#### {self.result}"}


def sample_product(rng: random.Random, keep_out: Collection[Key] = ()) -> Product:
    while True:
        a, b = rng.randint(SMALLEST, LARGEST), rng.randint(SMALLEST, LARGEST)
        product = Product(rng.choice(QUESTIONS).format(a=a, b=b), (a, b))
        if product.key not in keep_out:
            return product


def make_splits(
    seed: int = 0, num_train: int = 1000, num_heldout: int = 200
) -> tuple[list[Product], list[Product]]:
    rng = random.Random(seed)
    heldout: dict[Key, Product] = {}
    while len(heldout) < num_heldout:
        product = sample_product(rng, heldout.keys())
        heldout[product.key] = product
    train: dict[Key, Product] = {}
    while len(train) < num_train:
        product = sample_product(rng, heldout.keys())
        train[product.key] = product
    return list(train.values()), list(heldout.values())


def call(expression: str) -> str:
    """As the parser hermes reads it."""
    order = {"name": "calculator", "arguments": {"expression": expression}}
    return f"<tool_call>{json.dumps(order)}</tool_call>"


def called(product: Product, _rng: random.Random) -> list[Turn]:
    a, b = product.factors
    return [(call(f"{a}*{b}"), str(product.result)), (str(product.result), None)]


def miscalled(product: Product, rng: random.Random) -> list[Turn]:
    """A sum in place of the product, or a factor that is not the question's."""
    a, b = product.factors
    if rng.random() < 0.5:
        return [(call(f"{a}+{b}"), str(a + b)), (str(a + b), None)]
    other = rng.choice([n for n in range(SMALLEST, LARGEST + 1) if n != b])
    return [(call(f"{a}*{other}"), str(a * other)), (str(a * other), None)]


def guessed(product: Product, rng: random.Random) -> list[Turn]:
    """As many digits as the product has, and not it."""
    digits = len(str(product.result))
    while True:
        number = rng.randint(10 ** (digits - 1), 10**digits - 1)
        if number != product.result:
            return [(f"I guess {number}", None)]


def write_rows(path: Path, products: Sequence[Product]) -> None:
    lines = [json.dumps(product.row()) + "\n" for product in products]
    path.write_text("".join(lines), encoding="utf-8", newline="\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output_dir", type=Path, default=HERE)
    arguments = parser.parse_args()
    train, heldout = make_splits(arguments.seed)
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    write_rows(arguments.output_dir / "train.jsonl", train)
    write_rows(arguments.output_dir / "heldout.jsonl", heldout)
    print(f"{len(train)} training and {len(heldout)} held-out rows in {arguments.output_dir}")


if __name__ == "__main__":
    main()
