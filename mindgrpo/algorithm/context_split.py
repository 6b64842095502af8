"""Deals a row's columns out to the ranks of context parallelism: to all as many, which attend to as much. Pure."""

from __future__ import annotations

import numpy as np

# Columns that stay together at most, as attention takes several queries at a time, and blocks of each rank at least.
BLOCK, BLOCKS_A_RANK = 32, 8
# A rank's columns of a row are multiples of it, so that blocks are of a useful size.
COLUMNS_A_RANK = 16


def deal_columns(spans: np.ndarray, num_ranks: int) -> np.ndarray:
    """Returns int32 [num_ranks, T / num_ranks], the columns of each rank in ascending order.

    `spans` [T, 3] are a row's (backend/kernels/contract.py), and say how many keys each column sees. Blocks of columns
    are dealt in rounds of one for each rank, from the costliest on, the first of a round to whoever has least so far.
    """
    length = len(spans)
    block = _block_size(length // num_ranks)
    seen = spans[:, 1] + np.arange(length) - spans[:, 2] + 1
    costs = seen.reshape(-1, block).sum(1)
    owners, loads = np.empty(len(costs), np.int64), np.zeros(num_ranks, np.int64)
    for blocks in np.argsort(-costs, kind="stable").reshape(-1, num_ranks):
        ranks = np.argsort(loads, kind="stable")
        owners[blocks] = ranks
        loads[ranks] += costs[blocks]
    by_owner = np.argsort(owners, kind="stable").reshape(num_ranks, -1, 1)
    columns = by_owner * block + np.arange(block)
    return columns.reshape(num_ranks, -1).astype(np.int32)


def _block_size(columns_a_rank: int) -> int:
    size = BLOCK
    while size > 1 and (columns_a_rank % size or columns_a_rank // size < BLOCKS_A_RANK):
        size //= 2
    return size
