"""Decides whether generator and trainer of a run compute a token's numbers bit for bit (`context.batch_invariant`)."""

from __future__ import annotations

from collections.abc import Iterator

from mindgrpo.backend.connect import keeps_slots
from mindgrpo.backend.targets import SHARED_MEMORY
from mindgrpo.config import Config
from mindgrpo.errors import UserError
from mindgrpo.models.decoder_config import DecoderConfig
from mindgrpo.models.shard import LEAVES, product_leaves, vocabulary_leaves
from mindgrpo.rollout.embedded.kv_cache import missing_options

INVARIANT_KEY = "context.batch_invariant"


def is_batch_invariant(config: Config, model: DecoderConfig) -> bool:
    """Resolves the key for this run and machine. Raises UserError where it is true and the run cannot be."""
    asked = config.context.batch_invariant
    if asked is False:
        return False
    obstacle = next(_obstacles(config, model), None)
    if asked is True and obstacle is not None:
        raise UserError(
            f"{INVARIANT_KEY} is true, but generator and trainer cannot compute the same bits: {obstacle}; change "
            f"that, or set {INVARIANT_KEY} to auto."
        )
    return obstacle is None


def invariance_lines(config: Config, model: DecoderConfig) -> list[str]:
    """Says whether it is so, under which layouts, or why it is not; nothing of other devices and engines."""
    if config.generate_config.uses_vllm or config.context.target != SHARED_MEMORY:
        return []
    if not is_batch_invariant(config, model):
        why = next(_obstacles(config, model), f"{INVARIANT_KEY} is false")
        return [f"not batch invariant: {why}"]
    same = "batch invariant: generator and trainer compute the same bits"
    if any_layout(model, 1):
        return [f"{same}, under any layout with model_parallel 1, 2, 4 or 8"]
    return [
        f"{same}; other layouts differ by rounding, as {LEAVES} does not divide the model's sizes"
    ]


def any_layout(model: DecoderConfig, *tp_sizes: int) -> bool:
    """Returns whether sums over ranks have the same bits under all these `model_parallel` (1, 2, 4 or 8 of them)."""
    leaves = {
        size * of(model, size) for size in tp_sizes for of in (product_leaves, vocabulary_leaves)
    }
    return leaves == {LEAVES}


def _obstacles(config: Config, model: DecoderConfig) -> Iterator[str]:
    context = config.context
    if config.generate_config.uses_vllm:
        yield "generate_config.use_vllm is 1, and vLLM has kernels of its own"
    if config.actor_config.parallel_config.expert_tensor_parallel > 1:
        yield "actor_config.parallel_config.expert_tensor_parallel cuts experts, whose sums are then rounded otherwise"
    if context.target != SHARED_MEMORY:
        yield f"the run is on {context.target}, and only processors in shared memory have such kernels"
    elif context.mode == 1:
        yield "context.mode is 1, which computes without the C kernels"
    elif not keeps_slots(context.target):
        yield "there are no C kernels: no compiler was found, or MINDGRPO_NATIVE is 0"
    if model.latent is not None:
        yield "the generator attends to latents, of which the trainer makes keys and values"
    if missing := missing_options(model):
        yield f"the decode loop in C lacks {', '.join(missing)} ({model.model_type})"
    train = config.actor_config.parallel_config.model_parallel
    infer = config.generate_config.parallel_config.model_parallel
    if train != infer and not any_layout(model, train, infer):
        yield (
            f"model_parallel is {train} in training and {infer} in generation, and sums over so many ranks differ in "
            f"their last bits unless both are 1, 2, 4 or 8 and {LEAVES} divides the model's attention width, "
            "intermediate_size and vocab_size"
        )
