"""How much memory the generator's slots and prompts take, how a batch shares it out, and which models have slots.

Pure numbers: nothing is compiled or loaded. Prompts are kept once for all samples of their group, so `prefix_blocks`
are fewer than slots; a batch of other shapes (single samples, longer prompts) shares out the same memory otherwise.
The slots in C have it in regions, the plain decoder in pages (pages.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mindgrpo.backend.dtypes import ITEM_BYTES, Dtype
from mindgrpo.backend.kernels.rollout import KVCacheLayout, LocalModelShape
from mindgrpo.backend.kernels.shapes import Heads
from mindgrpo.models.decoder_config import DecoderConfig
from mindgrpo.rollout.embedded.drafts import FREE_ROWS

# Positions are counted in full vectors of the kernels.
LANES = 16
# Prompt tokens that one call takes.
PROMPT_ROWS = 512
# And one of the plain decoder's, which takes prompts whole.
PREFILL_TOKENS = 1024
# The plain decoder's graphs read caches to a quarter, to a half, or all of them, where that is so much at least.
READS, LEAST_READ = (4, 2), 256
# Positions of a page of the plain decoder's cache, where a slot may have more than LONG: what is recommended for fused
# attention, which takes multiples of 16.
LONG_PAGE, LONG = 128, 1024
# With fewer slots than samples, prompts of the next samples are brought in while the last ones of others still run.
PREFIXES_AHEAD = 3


def padded(count: int) -> int:
    return -(-count // LANES) * LANES


def page_size(length: int) -> int:
    """Returns the positions of a page of the plain decoder's cache, where a slot may have `length`."""
    return LONG_PAGE if length > LONG else LANES


def read_lengths(length: int) -> tuple[int, ...]:
    """Lists how far the plain decoder's graphs read slots of `length` positions, rising; the last reads all."""
    page = page_size(length)
    shorter = (-(-length // (share * page)) * page for share in READS)
    return (*(own for own in shorter if LEAST_READ <= own < length), length)


def read_length(length: int, position: int) -> int:
    """Returns the least of read_lengths that has `position`."""
    return next(own for own in read_lengths(length) if own > position)


@dataclass(frozen=True)
class KVCacheConfig:
    """For `slots` samples at a time of `group` a prompt, `prompts` of them in a rollout (None: no limit).

    With `goes_on` a sample that has ended may continue from its keys, after tokens that others wrote. `draft_rows` of a
    decode step beyond its slots check drafts, as rows of ended samples do; "auto": as many as cost nothing; 0: no
    drafts. What is drafted is also found in at most `draft_history` bytes of earlier completions.
    """

    slots: int
    group: int
    prompts: int | None
    max_prompt: int
    max_tokens: int
    goes_on: bool = False
    draft_rows: int | Literal["auto"] = 0
    draft_history: int = 0

    @property
    def rows(self) -> int:
        """Counts the most rows of a decode step."""
        if self.draft_rows == "auto":
            return max(self.slots, FREE_ROWS)
        return self.slots + self.draft_rows

    @property
    def prefix_blocks(self) -> int:
        groups = -(-self.slots // self.group)
        return min(PREFIXES_AHEAD * groups, max(groups, self.prompts or self.slots))

    @property
    def max_prefix_blocks(self) -> int:
        """Returns the most prefix blocks of any batch's layout."""
        return max(self.prefix_blocks, 2 * self.slots)

    @property
    def positions(self) -> int:
        """Counts positions of keys and values in each layer; a prompt's last token has none."""
        return self.slots * padded(self.max_tokens) + self.prefix_blocks * padded(
            self.max_prompt - 1
        )

    @property
    def page_size(self) -> int:
        return page_size(self.max_prompt + self.max_tokens - 1)

    @property
    def pages_per_slot(self) -> int:
        """Counts the pages of the longest prompt and completion, whose last token has no keys and values."""
        return -(-(self.max_prompt + self.max_tokens - 1) // self.page_size)

    @property
    def longest(self) -> int:
        """Counts the positions that a slot of the plain decoder may read."""
        return self.pages_per_slot * self.page_size

    @property
    def shared_pages(self) -> int:
        """Counts the full pages of the longest prompt, which its samples share; its last token is each sample's own."""
        return (self.max_prompt - 1) // self.page_size

    @property
    def prompt_tail(self) -> int:
        """Counts the most positions of a prompt behind its shared pages, which each sample has for itself."""
        return min(self.max_prompt, self.page_size) - 1

    @property
    def own_pages(self) -> int:
        return -(-(self.prompt_tail + self.max_tokens) // self.page_size)

    @property
    def pages(self) -> int:
        """Counts the pages of the plain decoder's cache; free slots write to the first one."""
        return 1 + self.slots * self.own_pages + self.prefix_blocks * self.shared_pages

    @property
    def prompt_copies(self) -> int:
        """Counts positions of prompts that one call of the plain decoder's prompt graph writes."""
        of_prompt = self.shared_pages * self.page_size + self.group * self.prompt_tail
        return self.prompts_at_once * max(1, of_prompt)

    @property
    def prompt_rows(self) -> int:
        return min(PROMPT_ROWS, padded(self.prefix_blocks * self.max_prompt))

    @property
    def prompts_at_once(self) -> int:
        """Counts prompts of one call of the plain decoder's prompt graph."""
        return max(1, min(self.slots // self.group, PREFILL_TOKENS // self.max_prompt))

    def partition(
        self, prompt_lengths: Sequence[int], groups: Sequence[int], longest: int
    ) -> KVCacheLayout:
        """Shares out the memory for prompts of these lengths, so many samples each: slots first, then prefix blocks."""
        slot_size, prefix_block_size = padded(longest), padded(max(prompt_lengths) - 1)
        num_prompts, most = len(prompt_lengths), max(groups)
        for slots in range(min(self.slots, sum(groups)), 0, -1):
            prefix_blocks = min(num_prompts, self.max_prefix_blocks)
            if prefix_block_size:
                prefix_blocks = min(
                    prefix_blocks, (self.positions - slots * slot_size) // prefix_block_size
                )
            if prefix_blocks >= min(num_prompts, -(-slots // most)):
                return KVCacheLayout(slots, slot_size, prefix_blocks, prefix_block_size)
        raise ValueError(
            f"a prompt of {max(prompt_lengths)} and a completion of {longest} tokens do not fit "
            f"{self.positions} positions"
        )


@dataclass(frozen=True)
class KVCacheSizes:
    """Elements of the generator's pools, for one rank's share of a model; `cache` are keys and values, in the compute
    dtype, and the others float32."""

    cache: int
    scratch: int
    inputs: int
    starts: int
    seen: int
    parked: int = 0

    @classmethod
    def of(
        cls, cache_config: KVCacheConfig, shape: LocalModelShape, penalised: bool
    ) -> KVCacheSizes:
        """Computes the sizes for the slots in C; `penalised` where tokens that were seen have a penalty."""
        heads, hidden, vocabulary = shape.heads, shape.hidden, shape.vocabulary.width
        slots, decoded = cache_config.slots, cache_config.rows
        rows = padded(max(decoded, cache_config.prompt_rows))
        attention = heads.width + max(heads.queries * heads.dim, hidden)
        if latents := shape.latents:
            queries = heads.queries
            attention += latents.query_width(queries) + latents.down_width(queries)
        layers_need = rows * (3 * hidden + max(attention, 2 * shape.inner))
        if experts := shape.experts:
            total, a_slot = experts.routing.num_experts, 4 + 2 * hidden + 2 * experts.inner
            of_experts = rows * (total + experts.routing.per_token * a_slot) + total
            shared = rows * (2 * experts.shared_inner + hidden)
            layers_need = max(layers_need, 3 * rows * hidden + max(of_experts, shared))
        return cls(
            cache=2 * shape.layers * heads.kv * heads.dim * cache_config.positions,
            scratch=max(layers_need, decoded * (3 * hidden + vocabulary)),
            inputs=decoded * hidden,
            starts=cache_config.max_prefix_blocks * hidden,
            seen=-(-slots * vocabulary // ITEM_BYTES["float32"]) if penalised else 0,
            parked=slots * hidden if cache_config.goes_on else 0,
        )

    @classmethod
    def plain(cls, cache_config: KVCacheConfig, layers: int, heads: Heads) -> KVCacheSizes:
        """Computes the sizes for the plain decoder."""
        positions = cache_config.pages * cache_config.page_size
        return cls(2 * layers * heads.kv * heads.dim * positions, 0, 0, 0, 0)

    @property
    def beside_cache(self) -> tuple[int, ...]:
        return self.scratch, self.inputs, self.starts, self.seen, self.parked

    def num_bytes(self, dtype: Dtype) -> int:
        return self.cache * ITEM_BYTES[dtype] + sum(self.beside_cache) * ITEM_BYTES["float32"]


def missing_options(config: DecoderConfig) -> list[str]:
    """Names what the model's block has and the decode loop in C lacks; empty where the loop computes the model.

    The loop is written apart from models/decoder.py. For what it lacks, generation runs plain.py, the decoder's own.
    """
    family = config.family
    norms = family.norms
    options = {
        "no norm before attention or MLP": norms.attention_in is None or norms.mlp_in is None,
        "norms behind attention or MLP": bool(norms.attention_out or norms.mlp_out),
        "norms over whole projections": family.qk_norm == "projection",
        f"norms that multiply by {family.norm_offset:g} + weight": family.norm_offset != 0.0,
        f"the activation {config.activation}": config.activation != "silu",
        "scaled embeddings": family.scaled_embeddings,
        "a scale of its own on queries": config.latent is None
        and config.query_scale != config.head_dim**-0.5,
        "local layers": any(layer.is_local for layer in config.layers),
    }
    return [option for option, is_there in options.items() if is_there]


def notices(config: DecoderConfig) -> list[str]:
    """Returns at most one sentence for the user, on why generation is slow."""
    missing = missing_options(config)
    if not missing:
        return []
    return [
        f"The decode loop in C lacks {', '.join(missing)} ({config.model_type}): completions are generated by the "
        "model's block in MindSpore's operations, which is slower."
    ]
