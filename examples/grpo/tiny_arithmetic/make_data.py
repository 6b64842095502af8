"""Small word problems in GSM8K's JSONL form, and the completions a warm start learns from.

    python make_data.py            # writes train.jsonl and heldout.jsonl beside this file

Additions, subtractions and two-step sums whose every intermediate result lies in 0..29. No set of
numbers stands in both splits, whatever the operation or the wording, and `sample_problem` refuses
numbers that it is told to keep out, so a warm start on fresh problems cannot see the held-out ones.

A careless completion never carries the whole think/answer format: only the careful path earns the
format reward, so training cannot trade accuracy for it.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
LARGEST = 29
NAMES = ("Tom", "Mia", "Ben", "Zoe", "Ann", "Sam")
THINGS = ("apples", "books", "coins", "eggs", "cards", "pens")
TEMPLATES = {
    "+": (
        "{name} has {a} {thing} and gets {b} more. How many now?",
        "{name} has {a} {thing}. {other} has {b}. How many in all?",
    ),
    "-": (
        "{name} has {a} {thing} and gives away {b}. How many are left?",
        "There are {a} {thing}. {name} takes {b}. How many are left?",
    ),
    "++": (
        "{name} has {a} {thing}, gets {b} and then {c} more. How many now?",
        "There are {a} {thing}. {name} brings {b}, {other} brings {c}. How many in all?",
    ),
    "+-": (
        "{name} has {a} {thing}, gets {b} and gives away {c}. How many are left?",
        "There are {a} {thing}. {name} brings {b}, {other} takes {c}. How many are left?",
    ),
}
Key = tuple[int, ...]


@dataclass(frozen=True)
class Problem:
    """E.g. numbers (12, 30, 5) and operators "+-" for 12+30-5."""

    question: str
    numbers: tuple[int, ...]
    operators: str

    @property
    def key(self) -> Key:
        """The numbers without their order: what must not be shared between splits."""
        return tuple(sorted(self.numbers))

    @property
    def results(self) -> list[int]:
        totals = [self.numbers[0]]
        for operator, number in zip(self.operators, self.numbers[1:], strict=True):
            totals.append(totals[-1] + (number if operator == "+" else -number))
        return totals[1:]

    @property
    def result(self) -> int:
        return self.results[-1]

    @property
    def steps(self) -> list[str]:
        """E.g. ["12+30=42", "42-5=37"]."""
        before = (self.numbers[0], *self.results)
        return [
            f"{left}{operator}{number}={total}"
            for left, operator, number, total in zip(
                before[:-1], self.operators, self.numbers[1:], self.results, strict=True
            )
        ]

    def row(self) -> dict[str, str]:
        worked = "\n".join(self.steps)
        return {"question": self.question, "answer": f"{worked}\n#### {self.result}"}


def sample_problem(rng: random.Random, keep_out: Collection[Key] = ()) -> Problem:
    operators = rng.choice(sorted(TEMPLATES))
    while True:
        numbers = tuple(rng.randint(1, LARGEST - 1) for _ in range(len(operators) + 1))
        name, other = rng.sample(NAMES, 2)
        problem = Problem(
            rng.choice(TEMPLATES[operators]).format(
                name=name,
                other=other,
                thing=rng.choice(THINGS),
                **dict(zip("abc", numbers, strict=False)),
            ),
            numbers,
            operators,
        )
        in_range = all(0 <= result <= LARGEST for result in problem.results)
        if in_range and problem.key not in keep_out:
            return problem


def make_splits(
    seed: int = 0, num_train: int = 2000, num_heldout: int = 200
) -> tuple[list[Problem], list[Problem]]:
    """Held-out problems are drawn first and each has numbers of its own."""
    rng = random.Random(seed)
    heldout: dict[Key, Problem] = {}
    while len(heldout) < num_heldout:
        problem = sample_problem(rng, heldout.keys())
        heldout[problem.key] = problem
    train: dict[str, Problem] = {}
    while len(train) < num_train:
        problem = sample_problem(rng, heldout.keys())
        train[problem.question] = problem
    return list(train.values()), list(heldout.values())


def careful(problem: Problem, _rng: random.Random) -> str:
    """The path that earns both rewards. Nothing in it is drawn; it is called like `careless`."""
    return f"<think>{', '.join(problem.steps)}</think><answer>{problem.result}</answer>"


def careless(problem: Problem, rng: random.Random) -> str:
    """A guess (neither reward) or right work without answer tags (accuracy only), half each."""
    return rng.choice((guessed, unformatted))(problem, rng)


def guessed(problem: Problem, rng: random.Random) -> str:
    """A near miss, never the gold number."""
    misses = [problem.result + off for off in (-10, -2, -1, 1, 2, 10)]
    return f"I guess {rng.choice([miss for miss in misses if 0 <= miss <= LARGEST])}"


def unformatted(problem: Problem, _rng: random.Random) -> str:
    """Goes astray only where the careful path would open its answer: a choice that can be compared."""
    return f"<think>{', '.join(problem.steps)}</think>{problem.result}"


def write_rows(path: Path, problems: Sequence[Problem]) -> None:
    lines = [json.dumps(problem.row(), ensure_ascii=False) + "\n" for problem in problems]
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
