"""Tokens a second of transformers' generate on CPU: the peer of generate.py.

PEERS/trl/bin/python hf_generate.py [--work W.json | --model DIR] [--ragged] prints one JSON line. One padded batch of
all prompts, float32, all cores. generate has one length limit a batch, so a ragged batch runs to its longest, and only
the wanted tokens count. `tokens_per_s` includes the sampled tokens' log-probs, `tokens_per_s_without_logps` does not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from model_directory import model_directory
from transformers import AutoModelForCausalLM

BENCH = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(BENCH))
from generation import Generation, add_options, generation_of  # noqa: E402


def run(model: Any, task: Generation, number: int, with_logps: bool) -> float:
    ids = torch.from_numpy(task.work.prompt_ids(number).astype("int64"))
    started = time.perf_counter()
    out = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        max_new_tokens=max(task.lengths),
        eos_token_id=None,
        pad_token_id=0,
        output_logits=with_logps,
        return_dict_in_generate=True,
        **task.drawing,
    )
    completions = out.sequences[:, ids.shape[1] :]
    if with_logps:
        # generate's own call for this: the log-probs of the sampled tokens, before top-k and top-p.
        logps = model.compute_transition_scores(out.sequences, out.logits, normalize_logits=True)
        assert logps.shape == completions.shape
    kept = [row[:length] for row, length in zip(completions, task.lengths, strict=True)]
    seconds = time.perf_counter() - started
    task.check([len(row) for row in kept])
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser)
    given = parser.parse_args()
    task = generation_of(given)
    source = nullcontext(given.model) if given.model else model_directory(task.work.model)
    with source as directory:
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    run(model, task, 0, True)
    runs = range(1, given.repeats + 1)
    pairs = [(run(model, task, i, True), run(model, task, i, False)) for i in runs]
    seconds, without = ([pair[which] for pair in pairs] for which in (0, 1))
    figures = {
        "bench": "hf_generate",
        "tokens_per_s": task.tokens / statistics.median(seconds),
        "tokens_per_s_without_logps": task.tokens / statistics.median(without),
        "seconds": seconds,
        **task.described(),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
