"""Answers what the engine asks of each of vLLM's workers: loading weights, the temperature's scale, memory.

vLLM mixes `EngineWorker` into its worker's class (`worker_extension_cls`) and calls its methods by name on all workers.
It keeps weights packed for its kernels. Its layerwise reload, which packs each layer as soon as all its tensors have
come, is done in three steps here, so that the weights may arrive in chunks and a publish may be abandoned.
"""

from __future__ import annotations

import ctypes
import importlib.util
import mmap
import os
import traceback
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.platforms import current_platform

from mindgrpo_engine.process import end_with_parent
from mindgrpo_engine.weights import SharedFile, SharedTensor, check_sample, in_checkpoint

# Older versions and vllm-mindspore have no such module: the model's own loader is left to them. Not run here.
LAYERWISE = importlib.util.find_spec("vllm.model_executor.model_loader.reload") is not None
if LAYERWISE:
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

Weights = list[tuple[str, torch.Tensor]]


def begin_reload(model: torch.nn.Module, model_config: Any) -> None:
    """Readies the model for weights; those of a publish that was not finished are dropped."""
    if not LAYERWISE:
        return
    infos = [get_layerwise_info(layer) for layer in model.modules()]
    if any(info.can_load() for info in infos):
        for info in infos:
            info.loaded_weights.clear()
            info.load_numel = 0
        finalize_layerwise_reload(model, model_config)
    initialize_layerwise_reload(model)
    if current_platform.is_cpu():
        drop_expert_kernels(model)


def drop_expert_kernels(model: torch.nn.Module) -> None:
    """Has experts get new kernels as they load: vLLM (0.32) packs their weights for processors only as it makes these,
    and older kernels would read what is not packed."""
    for layer in model.modules():
        method: Any = getattr(layer, "quant_method", None)
        if hasattr(method, "moe_kernel"):
            method.moe_kernel = None


@torch.no_grad()
def load_weights(model: Any, weights: Weights) -> None:
    model.load_weights(in_checkpoint(weights, model.config.model_type))
    if LAYERWISE:
        own_what_is_kept(model, {tensor.untyped_storage().data_ptr() for _, tensor in weights})


def own_what_is_kept(model: torch.nn.Module, addresses: set[int]) -> None:
    """Copies tensors that the reload keeps: of layers that are incomplete, as a padded vocabulary's always is."""
    for layer in model.modules():
        for _, bound in get_layerwise_info(layer).loaded_weights:
            for key, value in bound.arguments.items():
                if (
                    isinstance(value, torch.Tensor)
                    and not value.is_meta
                    and value.untyped_storage().data_ptr() in addresses
                ):
                    bound.arguments[key] = value.clone()


@torch.no_grad()
def finish_reload(model: Any, model_config: Any) -> None:
    """Ends the reload. A head that is tied to the embedding has been passed over by it, and packs anew."""
    if not LAYERWISE:
        return
    finalize_layerwise_reload(model, model_config)
    language = language_model(model)
    head = getattr(language, "lm_head", None)
    if isinstance(head, torch.nn.Module) and is_tied(model):
        embedding = language.model.embed_tokens
        head.weight = embedding.weight
        head.quant_method.process_weights_after_loading(head)


def language_model(model: Any) -> Any:
    """Returns the part of a model that sees images which reads its features; another model itself."""
    return getattr(model, "language_model", model)


def is_tied(model: Any) -> bool:
    return bool(model.config.tie_word_embeddings)


def weight_bytes(model: torch.nn.Module) -> int:
    """Returns the bytes of the parameters in the form in which they are loaded; 0 where vLLM does not know."""
    if not LAYERWISE:
        return 0
    total = 0
    for layer in model.modules():
        parameters, _ = get_layerwise_info(layer).restore_metadata
        total += sum(tensor.nbytes for tensor in parameters.values())
    return total


# A worker whose engine is killed ends with it; vLLM's own watch begins only after the worker has started.
end_with_parent()

Answer = tuple[Any, str | None]


def answered(method: Callable[..., Any]) -> Callable[..., Answer]:
    """Returns the method with its result and, in place of an exception, a sentence.

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
        if current_platform.is_cpu():
            # vLLM's attention (0.32) does not ask Linux for AMX itself: SIGILL where oneDNN has not done so before.
            torch.cpu._init_amx()
        return os.getpid()

    @answered
    def engine_begin(self) -> None:
        self.engine_version = None
        with set_current_vllm_config(self.vllm_config):
            begin_reload(self.model_runner.get_model(), self.model_runner.model_config)

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
            load_weights(self.model_runner.get_model(), weights)

    @answered
    def engine_finish(self, version: int) -> None:
        with set_current_vllm_config(self.vllm_config):
            finish_reload(self.model_runner.get_model(), self.model_runner.model_config)
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
        model = language_model(self.model_runner.get_model())
        processor: Any = getattr(model, "logits_processor", None)
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
        """Returns the bytes of the weights, as a checkpoint would have this worker's, and of the KV cache."""
        caches = sum(storage.nbytes() for storage in storages(self.model_runner.kv_caches))
        return weight_bytes(self.model_runner.get_model()), caches


def view_of(mapping: mmap.mmap, tensor: SharedTensor, dtype: torch.dtype) -> torch.Tensor:
    flat = torch.frombuffer(mapping, dtype=dtype, count=tensor.num_elements, offset=tensor.offset)
    if not tensor.transposed:
        return flat.reshape(tensor.shape)
    *outer, rows, columns = tensor.shape
    return flat.reshape(*outer, columns, rows).transpose(-1, -2)


def storages(caches: Iterable[Any]) -> list[torch.UntypedStorage]:
    """Returns the storages of these tensors, each once; a layer's cache may be a list of tensors."""
    by_address: dict[int, torch.UntypedStorage] = {}
    for cache in caches:
        for tensor in [cache] if isinstance(cache, torch.Tensor) else cache:
            storage = tensor.untyped_storage()
            by_address[storage.data_ptr()] = storage
    return list(by_address.values())
