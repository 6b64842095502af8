"""vLLM's layerwise reload in three steps, so that the weights may come in chunks and a publish may be given up.

vLLM keeps weights packed for its kernels; the reload packs each layer as soon as all its tensors have come.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

# Older versions and vllm-mindspore have no such module: the model's own loader is left to them. Not run here.
LAYERWISE = importlib.util.find_spec("vllm.model_executor.model_loader.reload") is not None
if LAYERWISE:
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

Weights = list[tuple[str, torch.Tensor]]


def begin(model: torch.nn.Module, model_config: Any) -> None:
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


@torch.no_grad()
def load(model: Any, weights: Weights) -> None:
    model.load_weights(weights)
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
def finish(model: Any, model_config: Any) -> None:
    """Ends the reload. A head that is tied to the embedding has been passed over by it, and packs anew."""
    if not LAYERWISE:
        return
    finalize_layerwise_reload(model, model_config)
    head = getattr(model, "lm_head", None)
    if isinstance(head, torch.nn.Module) and is_tied(model):
        embedding = model.model.embed_tokens
        head.weight = embedding.weight
        head.quant_method.process_weights_after_loading(head)


def is_tied(model: Any) -> bool:
    return bool(model.config.tie_word_embeddings)


def weight_bytes(model: torch.nn.Module) -> int:
    """Bytes of the parameters in the form in which they are loaded; 0 where vLLM does not know."""
    if not LAYERWISE:
        return 0
    total = 0
    for layer in model.modules():
        parameters, _ = get_layerwise_info(layer).restore_metadata
        total += sum(tensor.nbytes for tensor in parameters.values())
    return total
