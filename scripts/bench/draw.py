"""Microseconds that drawing a token takes a row, from the final norm to the next token's embedding, on one rank.

draw.py [--vocabularies 2048,152064] [--rows 32] [--tokens 64] [--repeats 15] prints one JSON line: `us` has the median
by vocabulary, logits and rules. The generator is a run's but for its layers, of which there are none, and its
hidden size, which is 1. Logits are normal, with a deviation of 1 (flat) or 6 (peaked).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from typing import Any

import launching
import numpy as np

DEVIATIONS = {"flat": 1.0, "peaked": 6.0}
RULES: dict[str, dict[str, Any]] = {
    "free": {},
    "top_k": {"top_k": 50},
    "top_p": {"top_p": 0.95},
    "min_p": {"min_p": 0.05},
    "top_k_top_p": {"top_k": 50, "top_p": 0.95},
}


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocabularies", type=launching.degrees, default=(2048, 152064))
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64, help="of every row")
    parser.add_argument("--repeats", type=int, default=15)
    return parser.parse_args()


def measure(given: argparse.Namespace) -> None:
    import assembly
    from drawing import Drawing

    backend = assembly.join_ranks()
    assert backend is not None, "one process has no scheduler"
    figures: dict[str, Any] = {}
    for vocab in given.vocabularies:
        for rules in RULES:
            drawing = Drawing(backend, vocab, given.rows, given.tokens, **RULES[rules])
            for name, deviation in DEVIATIONS.items():
                logits = np.random.default_rng(0).normal(0, deviation, vocab)
                seconds = [drawing.seconds(logits, number) for number in range(given.repeats + 1)]
                per_row = statistics.median(seconds[1:]) / (given.rows * given.tokens)
                figures.setdefault(str(vocab), {}).setdefault(name, {})[rules] = 1e6 * per_row
    launching.give_figures({"bench": "draw", "us": figures, "rows": given.rows})
    backend.close()


def main() -> None:
    given = options()
    if launching.is_rank():
        measure(given)
        return
    print(json.dumps(launching.run_on_ranks(__file__, sys.argv[1:], 1)))


if __name__ == "__main__":
    main()
