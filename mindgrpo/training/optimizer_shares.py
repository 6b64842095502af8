"""What each of the ranks that train the same parameters has to update: rows of every stored tensor (ZeRO-1).

Which rows follows from two layouts (pure): the parameters' own, and that of the optimizer's state, which is cut once
more. Gradients arrive at the rows' owners as sums; updated rows go from these to all.
"""

from __future__ import annotations

from mindgrpo.backend.arithmetic.contract import RowBlock, ShardedTensor
from mindgrpo.parallel.sharding import Layout
from mindgrpo.weights.local_weights import arrange


def sharded_tensors(layout: Layout, rank: int) -> tuple[ShardedTensor, ...]:
    """Returns the stored tensors of `rank`, and what it owns of them in `layout.split_over_data()`."""
    boxes = layout.held_by(rank)
    tensors = []
    pairs = zip(arrange(layout, rank), arrange(layout.split_over_data(), rank), strict=True)
    for whole, share in pairs:
        ranks = layout.mesh.group(rank, whole.data_axes)
        blocks = []
        for (spec, start, _), (_, at, _) in zip(whole.columns(), share.columns(), strict=True):
            if spec.name not in boxes:
                continue
            rows, *others = spec.as_stored(boxes[spec.name].shape)
            # Vectors that are kept one after another are apart; matrices side by side have the same rows.
            places = (0, 0) if others else (start, at)
            blocks.append(RowBlock(places[0], rows, -(-rows // len(ranks)), places[1]))
        distinct = tuple(dict.fromkeys(blocks))
        tensors.append(ShardedTensor(whole, share, ranks, ranks.index(rank), distinct))
    return tuple(tensors)
