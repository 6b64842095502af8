"""Turns the configuration into what vLLM is started with, and computes the memory that it takes. Needs no device."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mindgrpo.backend.dtypes import ITEM_BYTES, Dtype
from mindgrpo.config import Config, memory_bytes
from mindgrpo.errors import UserError
from mindgrpo.models.decoder_config import DecoderConfig
from mindgrpo.models.precision import compute_dtype
from mindgrpo.parallel.mesh import Mesh
from mindgrpo.rollout.embedded.kv_cache import KVCacheConfig
from mindgrpo.rollout.vllm.environment import find_python

# vLLM keeps one block to itself.
SPARE_BLOCKS = 1
# vLLM's own choice for processors, where the configuration names none; for devices it chooses smaller ones.
BLOCK_TOKENS = 128
# Its attention for processors takes blocks of so many tokens, or of a multiple.
BLOCK_MULTIPLE = 32
# Of a device, where the configuration says nothing; what vLLM itself takes.
DEVICE_SHARE = 0.9


@dataclass(frozen=True)
class VllmSettings:
    """`model` is a directory with config.json; `arguments` are vLLM's own, by name.

    An engine is lost that is not ready after `max_start_seconds`, or later sends nothing for `max_silence_seconds`.
    `images` are the token of images and the side of the patches of a feature; None for a model that sees none.
    `memory` is what an engine takes on each of its ranks, in bytes by role, for the account.
    """

    python: Path
    model: str
    dtype: Dtype
    max_model_len: int
    seed: int
    max_start_seconds: float
    max_silence_seconds: float
    arguments: Mapping[str, Any] = field(default_factory=dict)
    images: Mapping[str, int] | None = None
    memory: Mapping[str, int] = field(default_factory=dict)


def engine_dtype(config: Config) -> Dtype:
    """Returns the engine's dtype. Raises UserError, as compute_dtype does."""
    dtype = config.generate_config.vllm.dtype or compute_dtype(config)
    if config.context.fp32_lm_head and dtype != "float32":
        raise UserError(
            f"context.fp32_lm_head is true, but vLLM computes its head in the dtype of its layers, which is {dtype}; "
            "set generate_config.vllm.dtype to float32, or context.fp32_lm_head to false."
        )
    return dtype


def device_share(config: Config) -> float | None:
    """Returns the share of each device that vLLM takes; None where processors compute, or where the size of its cache
    is given."""
    generate = config.generate_config
    if config.context.target.keeps_weights_on_host or generate.vllm.kv_cache_memory is not None:
        return None
    return generate.gpu_memory_utilization or DEVICE_SHARE


def engine_bytes(
    config: Config,
    model: DecoderConfig,
    mesh: Mesh,
    cache: KVCacheConfig,
    weight_bytes: int,
    device_bytes: int | None,
) -> dict[str, int]:
    """Returns the bytes that a worker with `weight_bytes` of weights takes of its rank's memory while it is awake, by
    role.

    `device_bytes` is a device's memory, None where it is not known: then at least what its samples need.
    """
    cache_bytes, share = worker_cache_bytes(config, model, mesh, cache), device_share(config)
    if config.context.target.keeps_weights_on_host:
        return {"generator": weight_bytes, "kv_cache": cache_bytes}
    # On a device both are there as long as it is awake, also while it gets its weights.
    if share is not None and device_bytes is not None:
        return {"generator": int(share * device_bytes)}
    return {"generator": weight_bytes + cache_bytes}


def worker_cache_bytes(
    config: Config, model: DecoderConfig, mesh: Mesh, cache: KVCacheConfig
) -> int:
    """Returns the bytes of a worker's KV cache: what the configuration says, or what the largest batch needs, in blocks
    of tokens: `cache.slots` samples at a time, or one of the longest."""
    generate, tp_size = config.generate_config, mesh.tp
    if generate.vllm.kv_cache_memory is not None:
        return memory_bytes(generate.vllm.kv_cache_memory) // tp_size
    block = generate.block_size or BLOCK_TOKENS
    tokens = min(cache.max_prompt + cache.max_tokens, generate.longest)
    blocks = max(cache.slots * -(-tokens // block), -(-generate.longest // block))
    # Heads that are fewer than workers are repeated.
    heads = max(1, model.num_key_value_heads // tp_size)
    itemsize = ITEM_BYTES[engine_dtype(config)]
    per_token = 2 * model.num_hidden_layers * heads * model.head_dim * itemsize
    return (blocks + SPARE_BLOCKS) * block * per_token


def vllm_settings(
    config: Config,
    model: DecoderConfig,
    mesh: Mesh,
    cache: KVCacheConfig,
    weight_bytes: int,
    host_memory: int | None,
    device_bytes: int | None = None,
) -> VllmSettings:
    """Makes the settings of engines whose workers have `weight_bytes` of weights each. Raises UserError without vLLM.

    `host_memory` is the bytes of a host whose processors the engines share; None where each has devices of its own, of
    `device_bytes` each, None where that is not known.
    """
    generate, own = config.generate_config, config.generate_config.vllm
    memory = engine_bytes(config, model, mesh, cache, weight_bytes, device_bytes)
    cache_bytes = worker_cache_bytes(config, model, mesh, cache)
    arguments: dict[str, Any] = {
        "max_num_seqs": generate.max_num_seqs or cache.slots,
        "max_num_batched_tokens": generate.max_num_batched_tokens,
        "block_size": generate.block_size,
    }
    share = generate.gpu_memory_utilization
    if host_memory is not None:
        if share is not None:
            cache_bytes = min(cache_bytes, int(share * host_memory) // mesh.size)
            memory["kv_cache"] = cache_bytes
        arguments["kv_cache_memory_bytes"] = cache_bytes
    else:
        # Between rollouts the device is the trainer's.
        arguments["enable_sleep_mode"] = True
        arguments["gpu_memory_utilization"] = device_share(config)
        if own.kv_cache_memory is not None:
            arguments["kv_cache_memory_bytes"] = cache_bytes
    chosen = {name: value for name, value in arguments.items() if value is not None}
    return VllmSettings(
        python=find_python(own.python, os.environ),
        model=config.actor_config.load,
        dtype=engine_dtype(config),
        max_model_len=generate.longest,
        seed=config.rl_config.seed,
        max_start_seconds=own.max_start_seconds,
        max_silence_seconds=own.max_silence_seconds,
        arguments=chosen | own.parsed_arguments,
        images=None
        if model.vision is None
        else {"token": model.vision.image_token, "merge": model.vision.merge_size},
        memory=memory,
    )
