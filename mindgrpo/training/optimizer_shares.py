"""Shards the optimizer over the ranks that train the same parameters, by rows of every stored tensor (ZeRO-1).

The owned rows follow from two layouts (pure): the parameters' own, and the optimizer state's, which is additionally
split over the data axes. Gradients are reduce-scattered to the rows' owners; updated rows are all-gathered.
"""

from __future__ import annotations

from mindgrpo.backend.arithmetic.contract import RowBlock, ShardedTensor
from mindgrpo.parallel.sharding import Layout
from mindgrpo.weights.local_weights import arrange


def sharded_tensors(layout: Layout, rank: int) -> tuple[ShardedTensor, ...]:
    """Returns each stored tensor of `rank` with the row blocks that it owns in `layout.split_over_data()`."""
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
            # Fused vectors follow each other, so each is a block of its own; fused matrices share their rows.
            places = (0, 0) if others else (start, at)
            blocks.append(RowBlock(places[0], rows, -(-rows // len(ranks)), places[1]))
        distinct = tuple(dict.fromkeys(blocks))
        tensors.append(ShardedTensor(whole, share, ranks, ranks.index(rank), distinct))
    return tuple(tensors)
