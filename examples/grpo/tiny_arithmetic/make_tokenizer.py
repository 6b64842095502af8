"""The tokenizer of the word problems, with its chat template.

    python make_tokenizer.py       # writes model/tokenizer.json and the files beside it

Writes no weights and no config.json: the warm start does.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from make_data import HERE, careful, guessed, make_splits, unformatted  # noqa: E402
from small_tokenizer import VOCAB_SIZE, train_tokenizer, write_company  # noqa: E402


def training_text(seed: int) -> Iterator[str]:
    """Questions and completions of the training split, and the words of the chat template."""
    train, _ = make_splits(seed)
    rng = random.Random(seed)
    for problem in train:
        yield problem.question
        for completion in (careful, guessed, unformatted):
            yield completion(problem, rng)
        for role in ("system", "user", "assistant"):
            yield f"{role}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seed", type=int, default=0, help="the seed make_data.py was given")
    parser.add_argument("--output_dir", type=Path, default=HERE / "model")
    arguments = parser.parse_args()
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(training_text(arguments.seed))
    tokenizer.save(str(arguments.output_dir / "tokenizer.json"))
    write_company(arguments.output_dir, tokenizer)
    print(f"{VOCAB_SIZE} entries in {arguments.output_dir}")


if __name__ == "__main__":
    main()
