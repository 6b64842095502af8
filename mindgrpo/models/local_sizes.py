"""A rank's share of a decoder in numbers. Pure: what plans count is what cells are made with."""

from __future__ import annotations

from mindgrpo.backend.kernels.shapes import Heads
from mindgrpo.models.decoder_config import DecoderConfig

# The largest [rows, vocabulary] tensor of a head; longer ones go in chunks.
LOGITS_BYTES = 64 << 20


def local_vocabulary(config: DecoderConfig, tp_size: int) -> int:
    """With the padding of the last rank."""
    return -(-config.vocab_size // tp_size)


def local_heads(config: DecoderConfig, tp_size: int) -> Heads:
    """As attention's kernels take them: a norm over the whole projection, and its bias, are none of theirs."""
    return Heads(
        config.num_attention_heads // tp_size,
        max(1, config.num_key_value_heads // tp_size),
        config.head_dim,
        config.qkv_bias and config.family.qk_norm != "projection",
        config.rms_norm_eps if config.family.qk_norm == "head" else None,
        config.query_scale,
    )
