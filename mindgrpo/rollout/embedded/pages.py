"""Which pages of the plain decoder's cache its slots have: the full pages of a prompt are there once for its samples.

A page has the keys and values of KVCacheConfig.page_size positions that follow one another. The page in which a prompt
ends is copied for each of its samples, as they write behind it. A sample gets all its pages when it enters, so that
none is missing later, and gives them back when it ends; its prompt's are free when the last sample has ended.

Kernels know pages of one head each: that of head `k` is `page * K + k`, of K heads. NumPy only.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mindgrpo.rollout.embedded.kv_cache import KVCacheConfig

# The page that free slots read and write; no sample has it.
SPARE = 0


class PageTable:
    def __init__(self, cache_config: KVCacheConfig, kv_heads: int) -> None:
        self._size, self._heads = cache_config.page_size, np.arange(kv_heads)
        # Each slot's pages in the order of positions, SPARE behind them.
        # The last are those of rows without a slot.
        shape = (cache_config.slots + 1, cache_config.pages_per_slot)
        self._of_slots = np.full(shape, SPARE, np.int32)
        # Of each page, the slots that have it.
        self._users = np.zeros(cache_config.pages, np.int32)
        self._users[SPARE] = 1

    def has_room(self, prompt: int, limits: Sequence[int]) -> bool:
        """Returns whether samples of a prompt of so many tokens, and of so many tokens each at most, may enter."""
        first = self._shared(prompt)
        needed = first + sum(self._last(prompt, limit) - first for limit in limits)
        return needed <= self.num_free

    def enter(self, slots: Sequence[int], prompt: int, limits: Sequence[int]) -> None:
        """Gives free slots their pages: samples of one prompt, for which there has to be room."""
        free = np.flatnonzero(self._users == 0).astype(np.int32)
        first = self._shared(prompt)
        shared, free = free[:first], free[first:]
        for slot, limit in zip(slots, limits, strict=True):
            own = self._last(prompt, limit) - first
            pages = np.concatenate([shared, free[:own]])
            free = free[own:]
            self._of_slots[slot, : len(pages)] = pages
            self._users[pages] += 1

    def leave(self, slots: Sequence[int]) -> None:
        for slot in slots:
            pages = self._of_slots[slot]
            self._users[pages[pages != SPARE]] -= 1
            self._of_slots[slot] = SPARE

    @property
    def num_free(self) -> int:
        return int((self._users == 0).sum())

    def pages(self, slots: np.ndarray, read: int) -> np.ndarray:
        """Returns the pages of the heads of `slots` [n] up to position `read`: int32 [n K, read / page_size]."""
        own = self._of_slots[slots, None, : read // self._size] * len(self._heads)
        pages = own + self._heads[:, None].astype(np.int32)
        return pages.reshape(-1, pages.shape[2])

    def cache_rows(self, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Returns the rows of the cache for `positions` [n] of `slots` [n], head by head: int32 [n K]."""
        pages = self._of_slots[slots, positions // self._size]
        rows = (pages[:, None] * len(self._heads) + self._heads) * self._size
        return (rows + (positions % self._size)[:, None]).reshape(-1).astype(np.int32)

    def prompt_copies(
        self, index: int, length: int, prompt: int, slots: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns `source` and `cache_rows` of the prompt `index`, of `prompt` tokens, among prompts of `length`.

        Its shared pages are written once, and what is behind them for each of its slots; its last token's keys and
        values are written when that is decoded.
        """
        shared = self._shared(prompt) * self._size
        behind = np.arange(shared, prompt - 1)
        positions = np.concatenate([np.arange(shared), np.tile(behind, len(slots))])
        of_slot = np.concatenate([np.full(shared, slots[0]), np.repeat(slots, len(behind))])
        tokens = index * length + positions
        source = (tokens[:, None] * len(self._heads) + self._heads).reshape(-1).astype(np.int32)
        return source, self.cache_rows(of_slot, positions)

    def _shared(self, prompt: int) -> int:
        return (prompt - 1) // self._size

    def _last(self, prompt: int, limit: int) -> int:
        """Counts the pages up to the last one in which a sample of so many tokens writes."""
        return (prompt + limit - 2) // self._size + 1
