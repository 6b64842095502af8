"""Memory of vLLM's CPU build by the number of calls, without mindgrpo: batches of ever new sizes.

PYTHON_WITH_VLLM vllm_memory.py MODEL_DIRECTORY [--steps 300] prints a JSON line every 50 calls of generate: resident
memory in MB after malloc_trim. The KV cache, which fills up at first, is written before. With and without
ONEDNN_PRIMITIVE_CACHE_CAPACITY it shows what oneDNN keeps: a product of each size, 1,024 by default.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
from pathlib import Path

# Read when vllm is imported: one process, 1 GB of cache, threads as the system places them.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

from vllm import LLM, SamplingParams  # noqa: E402

SAMPLES, PROMPT_TOKENS, NEW_TOKENS = 64, (5, 30), (1, 12)
EVERY = 50


def resident() -> int:
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def generate(engine: LLM, chance: random.Random, number: int) -> None:
    prompts, limits = [], []
    for _ in range(number):
        tokens = [chance.randrange(3, 250) for _ in range(chance.randint(*PROMPT_TOKENS))]
        prompts.append({"prompt_token_ids": tokens})
        limits.append(SamplingParams(max_tokens=chance.randint(*NEW_TOKENS), ignore_eos=True))
    engine.generate(prompts, limits, use_tqdm=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--steps", type=int, default=300)
    given = parser.parse_args()
    engine = LLM(
        str(given.model),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        enable_prefix_caching=False,
        max_model_len=128,
        max_num_seqs=SAMPLES,
    )
    full = [{"prompt_token_ids": [5] * 100} for _ in range(2000)]
    engine.generate(full, SamplingParams(max_tokens=1, ignore_eos=True), use_tqdm=False)
    chance = random.Random(0)
    for step in range(given.steps + 1):
        if step % EVERY == 0:
            print(json.dumps({"calls": step, "rss_MB": round(resident() / 1e6, 1)}), flush=True)
        generate(engine, chance, chance.randint(1, SAMPLES))


if __name__ == "__main__":
    main()
