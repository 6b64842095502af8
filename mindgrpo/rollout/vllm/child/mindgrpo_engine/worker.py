"""What the engine asks of each of vLLM's workers: loading weights, the temperature's scale, memory.

vLLM mixes the class into its worker's (`worker_extension_cls`) and calls its methods by name on all workers.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import traceback
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import torch
from vllm.config import set_current_vllm_config

from mindgrpo_engine import reload
from mindgrpo_engine.process import end_with_parent
from mindgrpo_engine.weights import SharedFile, SharedTensor, check_sample

# A worker whose engine is killed ends with it; vLLM's own watch begins only after the worker has started.
end_with_parent()

Answer = tuple[Any, str | None]


def answered(method: Callable[..., Any]) -> Callable[..., Answer]:
    """The method with its result and, in place of an exception, a sentence.

    vLLM reads the workers' answers in turn and stops at the first exception: the others' would be taken for those of
    the next call.
    """

    @wraps(method)
    def call(*arguments: Any) -> Answer:
        try:
            return method(*arguments), None
        except Exception as error:
            traceback.print_exc()
            return None, str(error) or type(error).__name__

    return call


class EngineWorker:
    """Methods added to vLLM's worker; what they keep is in attributes that begin with engine_."""

    rank: int
    vllm_config: Any
    model_runner: Any
    engine_file: SharedFile
    engine_version: int | None
    engine_scale: float

    @answered
    def engine_open(self, pid: int, descriptor: int) -> int:
        """Names the shared file; the answer is the worker's process."""
        self.engine_file = SharedFile(pid, descriptor)
        self.engine_version = None
        return os.getpid()

    @answered
    def engine_begin(self) -> None:
        self.engine_version = None
        with set_current_vllm_config(self.vllm_config):
            reload.begin(self.model_runner.get_model(), self.model_runner.model_config)

    @answered
    def engine_load(self, entries: list[dict[str, Any]], skipped: list[str]) -> None:
        """Loads tensors from the shared file; afterwards nothing refers to it any more."""
        dtype = self.model_runner.model_config.dtype
        tensors = [SharedTensor.read(entry) for entry in entries]
        itemsize = dtype.itemsize
        end = max(tensor.offset + tensor.num_elements * itemsize for tensor in tensors)
        mapping = self.engine_file.mapped(end)
        if self.rank == 0:
            with memoryview(mapping) as data:
                for tensor in tensors:
                    last = tensor.offset + tensor.num_elements * itemsize
                    with data[tensor.offset : last] as part:
                        check_sample(tensor, part)
        weights = [
            (tensor.name, view_of(mapping, tensor, dtype))
            for tensor in tensors
            if tensor.name not in skipped
        ]
        with set_current_vllm_config(self.vllm_config):
            reload.load(self.model_runner.get_model(), weights)

    @answered
    def engine_finish(self, version: int) -> None:
        with set_current_vllm_config(self.vllm_config):
            reload.finish(self.model_runner.get_model(), self.model_runner.model_config)
        self.model_runner.reset_lora_state()
        self.model_runner.reset_encoder_cache()
        self.model_runner.reset_mm_cache()
        self.engine_version = version

    @answered
    def engine_held_version(self) -> int | None:
        return self.engine_version

    @answered
    def engine_set_scale(self, factor: float) -> bool:
        """Multiplies logits by the factor from here on; False where the model has nothing that would."""
        processor: Any = getattr(self.model_runner.get_model(), "logits_processor", None)
        if not isinstance(getattr(processor, "scale", None), int | float):
            return factor == 1.0
        if not hasattr(self, "engine_scale"):
            self.engine_scale = processor.scale
        processor.scale = self.engine_scale * factor
        return True

    @answered
    def engine_give_up_cache(self) -> None:
        """Gives the KV cache, which reads as zeros afterwards, and freed memory back to the system (Linux)."""
        library = ctypes.CDLL(None, use_errno=True)
        for storage in storages(self.model_runner.kv_caches):
            page = mmap.PAGESIZE
            start = -(-storage.data_ptr() // page) * page
            length = (storage.data_ptr() + storage.nbytes() - start) // page * page
            address = ctypes.c_void_p(start)
            if length > 0 and library.madvise(address, ctypes.c_size_t(length), mmap.MADV_DONTNEED):
                raise OSError(ctypes.get_errno(), "the KV cache was not given back")
        library.malloc_trim(0)

    @answered
    def engine_memory(self) -> tuple[int, int]:
        """Bytes of the weights, as a checkpoint would have this worker's, and of the KV cache."""
        caches = sum(storage.nbytes() for storage in storages(self.model_runner.kv_caches))
        return reload.weight_bytes(self.model_runner.get_model()), caches


def view_of(mapping: mmap.mmap, tensor: SharedTensor, dtype: torch.dtype) -> torch.Tensor:
    flat = torch.frombuffer(mapping, dtype=dtype, count=tensor.num_elements, offset=tensor.offset)
    if tensor.transposed:
        return flat.reshape(tensor.shape[::-1]).T
    return flat.reshape(tensor.shape)


def storages(caches: Iterable[Any]) -> list[torch.UntypedStorage]:
    """The storages of these tensors, each once; a layer's cache may be a list of tensors."""
    by_address: dict[int, torch.UntypedStorage] = {}
    for cache in caches:
        for tensor in [cache] if isinstance(cache, torch.Tensor) else cache:
            storage = tensor.untyped_storage()
            by_address[storage.data_ptr()] = storage
    return list(by_address.values())
