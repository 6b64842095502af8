"""A digest of a role's values that is the same under every layout, made by all ranks together.

Refuses to prove where in a tensor a value lies: that is what the digests of pieces are for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from mindgrpo.backend.contract import Backend
from mindgrpo.checkpoint.plan import plan_pieces
from mindgrpo.checkpoint.shard import SUM_MODULUS, word_sum
from mindgrpo.weights.local_weights import Weights


def joined(sums: Mapping[str, int]) -> str:
    """One digest of the tensors' sums of words."""
    text = "".join(f"{name} {sums[name]}\n" for name in sorted(sums))
    return hashlib.sha256(text.encode()).hexdigest()


def values_digest(weights: Weights, backend: Backend) -> str:
    """Each element once, whatever ranks hold it; `weights` must be at hand."""
    role = "values"
    own: dict[str, int] = {}
    plan = plan_pieces({role: weights.layout}, backend.world_size)
    for piece in plan[backend.rank]:
        part = weights.parts[piece.name][piece.box.within(weights.boxes[piece.name]).slices]
        own[piece.name] = (own.get(piece.name, 0) + word_sum(part)) % SUM_MODULUS
    total: dict[str, int] = {}
    for sums in backend.world.gather_objects(own):
        for name, words in sums.items():
            total[name] = (total.get(name, 0) + words) % SUM_MODULUS
    return joined(total)
