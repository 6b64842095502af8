"""Splits a row's columns over the cp ranks, equally many for each, and balances their attention costs. Pure."""

from __future__ import annotations

import numpy as np

# The largest block of consecutive columns (attention tiles queries), and the least number of blocks per rank.
BLOCK, BLOCKS_A_RANK = 32, 8
# A rank's number of columns per row is a multiple of it, which keeps blocks from being tiny.
COLUMNS_A_RANK = 16


def deal_columns(spans: np.ndarray, num_ranks: int) -> np.ndarray:
    """Returns int32 [num_ranks, T / num_ranks], the columns of each rank in ascending order.

    `spans` int32 [T, 3] (backend/kernels/contract.py) determine how many keys each column attends to. Blocks of columns
    are assigned in rounds of one per rank, most expensive blocks first, and within a round the least loaded rank first.
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
