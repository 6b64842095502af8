"""How much memory the KV cache of a vLLM worker needs. Pure numbers."""

from __future__ import annotations

from dataclasses import dataclass

# vLLM keeps one block to itself.
SPARE_BLOCKS = 1
# vLLM's own choice for processors, where the configuration names none; for devices it chooses smaller ones.
BLOCK_TOKENS = 128
# Its attention for processors takes blocks of so many tokens, or of a multiple.
BLOCK_MULTIPLE = 32


@dataclass(frozen=True)
class CacheNeed:
    """`samples` at a time of `tokens` each, prompt included, or one of `max_model_len`, in blocks of `block` tokens."""

    samples: int
    tokens: int
    max_model_len: int
    block: int = BLOCK_TOKENS

    def num_bytes(
        self, num_layers: int, kv_heads: int, head_dim: int, itemsize: int, tp_size: int
    ) -> int:
        """Of one of `tp_size` workers; heads that are fewer than workers are repeated."""
        blocks = max(
            self.samples * -(-self.tokens // self.block), -(-self.max_model_len // self.block)
        )
        per_token = 2 * num_layers * max(1, kv_heads // tp_size) * head_dim * itemsize
        return (blocks + SPARE_BLOCKS) * self.block * per_token
