"""Whether all ranks hold the same of what must be the same on each, and whose differs.

One exchange of digests, no arrays. Refuses to decide who is right: the rank that differs from most is named.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np

from mindgrpo.algorithm.types import Samples
from mindgrpo.backend.contract import Backend

T = TypeVar("T")


class RanksDisagree(RuntimeError):
    """Ranks hold different values of what is the same on each; going on would train on nonsense."""


def digest(*parts: object) -> str:
    """Of numbers, words, and arrays by their shape, dtype and bits; of a list, of its members in order."""
    state = hashlib.blake2b(digest_size=8)
    for part in parts:
        if isinstance(part, (list, tuple)):
            state.update(f"[{len(part)}".encode() + "".join(map(digest, part)).encode())
        elif isinstance(part, np.ndarray):
            state.update(
                f"{part.dtype}{part.shape}".encode() + np.ascontiguousarray(part).tobytes()
            )
        else:
            state.update(repr(part).encode())
    return state.hexdigest()


def step_digests(samples: Samples, rewards: np.ndarray) -> dict[str, str]:
    """Of a step's samples before the update, by what a user calls each."""
    return {
        "prompts": digest(samples.prompts),
        "completions": digest(samples.completions, samples.finish_reasons),
        "the generator's log-probs": digest(samples.generator_logps),
        "rewards": digest(rewards),
        "the reference's log-probs": digest(samples.reference_logps),
        "the policy's log-probs": digest(samples.old_logps),
        "advantages": digest(samples.advantages, samples.token_advantages, samples.factors),
        "samples that count": digest(samples.counted),
    }


def different_ranks(values: Sequence[T]) -> list[int]:
    """Those whose value is not the commonest; of equally common ones rank 0's is taken, or the first's."""
    common = Counter(values).most_common(1)[0][0]
    if values.count(values[0]) == values.count(common):
        common = values[0]
    return [rank for rank, value in enumerate(values) if value != common]


def check_alike(by_rank: Sequence[Mapping[str, str]], when: str, remedy: str) -> None:
    """`by_rank[i]` are rank i's digests by name. Raises RanksDisagree."""
    for name in by_rank[0]:
        ranks = different_ranks([digests.get(name, "") for digests in by_rank])
        if ranks:
            word = "rank" if len(ranks) == 1 else "ranks"
            told = ", ".join(map(str, ranks))
            raise RanksDisagree(
                f"{word} {told} of {len(by_rank)} differ in {name} {when}; {remedy}"
            )


def agree(backend: Backend, digests: Mapping[str, str], when: str, remedy: str) -> None:
    """All ranks together. Raises RanksDisagree on all of them."""
    check_alike(backend.world.gather_objects(dict(digests)), when, remedy)


def first_told(backend: Backend, own: T | None) -> tuple[int, T] | None:
    """(rank, what it tells) of the lowest rank that has something to tell; all ranks together."""
    told = backend.world.gather_objects(own)
    return next(((rank, words) for rank, words in enumerate(told) if words is not None), None)
