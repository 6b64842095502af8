"""Log-probs by transformers in float32: the oracle of the engine's tests, run in vLLM's environment.

Each line of the input is a JSON object: `model` (a folder), `temperature`, `rows` of token ids, `out`, an .npz file
that gets, for each row by its number, log-probs of the next token (positions, vocabulary). Answers each with a line.
"""

from __future__ import annotations

import json
import sys

import numpy as np
import torch
from transformers import AutoModelForCausalLM


@torch.no_grad()
def answer(job: dict) -> None:
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32).eval()
    arrays = {}
    for number, row in enumerate(job["rows"]):
        logits = model(torch.tensor([row])).logits[0].float() / job["temperature"]
        arrays[str(number)] = logits.log_softmax(-1).numpy()
    np.savez(job["out"], **arrays)


def main() -> None:
    for line in sys.stdin:
        answer(json.loads(line))
        print("written", flush=True)


if __name__ == "__main__":
    main()
