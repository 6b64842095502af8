"""Tokens a second of vLLM's CPU build: the peer of generate.py.

PEERS/vllm/bin/python vllm_generate.py [--work W.json | --model DIR] [--ragged] [--dtype D] [--compiled] prints one JSON
line. One process, all cores, the sampled tokens' log-probs returned, every completion with its own limit. Refuses
detokenising, which no other engine here does.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Any

# Read when vllm is imported: one process, 1 GB of cache, threads as the system places them.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

from model_directory import model_directory  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402

BENCH = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(BENCH))
from generation import Generation, add_options, generation_of  # noqa: E402


def run(engine: Any, task: Generation, number: int) -> float:
    prompts = [{"prompt_token_ids": ids.tolist()} for ids in task.work.prompt_ids(number)]
    sampling = [
        SamplingParams(
            max_tokens=length, ignore_eos=True, logprobs=0, detokenize=False, **task.drawing
        )
        for length in task.lengths
    ]
    started = time.perf_counter()
    outputs = engine.generate(prompts, sampling, use_tqdm=False)
    seconds = time.perf_counter() - started
    task.check([len(output.outputs[0].token_ids) for output in outputs])
    assert all(len(o.outputs[0].logprobs) == len(o.outputs[0].token_ids) for o in outputs)
    return seconds


def measure(given: argparse.Namespace, task: Generation) -> dict[str, Any]:
    source = nullcontext(given.model) if given.model else model_directory(task.work.model)
    with source as directory:
        engine = LLM(
            str(directory),
            skip_tokenizer_init=True,
            dtype=given.dtype,
            enforce_eager=not given.compiled,
            max_model_len=task.work.prompt_tokens + task.work.new_tokens,
            max_num_seqs=task.work.prompts,
        )
    run(engine, task, 0)
    seconds = [run(engine, task, number) for number in range(1, given.repeats + 1)]
    return {
        "bench": "vllm_generate",
        "tokens_per_s": task.tokens / statistics.median(seconds),
        "seconds": seconds,
        "compiled": given.compiled,
        "dtype": given.dtype,
        **task.described(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--compiled", action="store_true", help="torch.compile instead of eager")
    given = parser.parse_args()
    task = generation_of(given)
    with redirect_stdout(sys.stderr):
        figures = measure(given, task)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
