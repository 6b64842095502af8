"""What vLLM is started with as a run's configuration says, and how much memory it then takes. No device is needed."""

from __future__ import annotations

import os
from typing import Any

from mindgrpo.backend.dtypes import ITEM_BYTES
from mindgrpo.config import Config, memory_bytes
from mindgrpo.models.decoder_config import DecoderConfig
from mindgrpo.parallel.mesh import Grid
from mindgrpo.rollout.embedded.kv_cache import KVCacheConfig
from mindgrpo.rollout.vllm.cache_size import BLOCK_TOKENS, CacheNeed
from mindgrpo.rollout.vllm.environment import find_python
from mindgrpo.rollout.vllm.settings import VllmSettings


def worker_cache_bytes(
    config: Config, model: DecoderConfig, grid: Grid, cache: KVCacheConfig
) -> int:
    """Of a worker's KV cache: as large as the configuration says, or as the largest batch needs."""
    generate, tp_size = config.generate_config, grid.model_parallel
    if generate.vllm.kv_cache_memory is not None:
        return memory_bytes(generate.vllm.kv_cache_memory) // tp_size
    need = CacheNeed(
        cache.slots,
        min(cache.max_prompt + cache.max_tokens, generate.longest),
        generate.longest,
        generate.block_size or BLOCK_TOKENS,
    )
    itemsize = ITEM_BYTES[generate.vllm.dtype]
    heads = model.num_key_value_heads, model.head_dim
    return need.num_bytes(model.num_hidden_layers, *heads, itemsize, tp_size)


def vllm_settings(
    config: Config,
    model: DecoderConfig,
    grid: Grid,
    cache: KVCacheConfig,
    weight_bytes: int,
    host_memory: int | None,
) -> VllmSettings:
    """Of an engine whose workers have `weight_bytes` of weights each. Raises UserError where there is no vLLM.

    `host_memory` is the bytes of a host whose processors the engines share; None where each has devices of its own.
    """
    generate, own = config.generate_config, config.generate_config.vllm
    cache_bytes = worker_cache_bytes(config, model, grid, cache)
    arguments: dict[str, Any] = {
        "max_num_seqs": generate.max_num_seqs or cache.slots,
        "max_num_batched_tokens": generate.max_num_batched_tokens,
        "block_size": generate.block_size,
    }
    share = generate.gpu_memory_utilization
    if host_memory is not None:
        if share is not None:
            cache_bytes = min(cache_bytes, int(share * host_memory) // grid.size)
        arguments["kv_cache_memory_bytes"] = cache_bytes
    elif own.kv_cache_memory is not None:
        arguments["kv_cache_memory_bytes"] = cache_bytes
    else:
        arguments["gpu_memory_utilization"] = share
    chosen = {name: value for name, value in arguments.items() if value is not None}
    return VllmSettings(
        python=find_python(own.python, os.environ),
        model=config.actor_config.load,
        dtype=own.dtype,
        max_model_len=generate.longest,
        seed=config.rl_config.seed,
        max_start_seconds=own.max_start_seconds,
        max_silence_seconds=own.max_silence_seconds,
        arguments=chosen | own.parsed_arguments,
        memory={"generator": weight_bytes, "kv_cache": cache_bytes},
    )
