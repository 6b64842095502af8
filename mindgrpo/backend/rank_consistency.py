"""Checks that all ranks hold the same of what must be the same on each, and shares what only the first one does.

The rank that differs from most is named; who is right is not decided.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from mindgrpo.errors import UserError

if TYPE_CHECKING:
    # Imports MindSpore, which takes two seconds: what reads data or reports needs none of it.
    from mindgrpo.backend.contract import Backend

T = TypeVar("T")


class RanksDisagree(RuntimeError):
    """Ranks hold different values of what is the same on each; going on would train on nonsense."""


def digest(*values: object) -> str:
    """Hashes numbers, words, and arrays by their shape, dtype and bits; of a list, of its members in order."""
    state = hashlib.blake2b(digest_size=8)
    _add(state, values)
    return state.hexdigest()


def _add(state: hashlib.blake2b, value: object) -> None:
    if isinstance(value, (list, tuple)):
        state.update(f"[{len(value)}".encode())
        for one in value:
            _add(state, one)
    elif isinstance(value, np.ndarray):
        state.update(f"{value.dtype.str}{value.shape}".encode())
        state.update(value.tobytes())
    else:
        state.update(f"{value!r};".encode())


def different_ranks(values: Sequence[T]) -> list[int]:
    """Returns the ranks whose value is not the commonest; of equally common ones rank 0's is taken, or the first's."""
    common = Counter(values).most_common(1)[0][0]
    if values.count(values[0]) == values.count(common):
        common = values[0]
    return [rank for rank, value in enumerate(values) if value != common]


def check_alike(by_rank: Sequence[Mapping[str, str]], when: str, remedy: str) -> None:
    """Compares digests: `by_rank[i]` are rank i's digests by name. Raises RanksDisagree."""
    for name in by_rank[0]:
        ranks = different_ranks([digests.get(name, "") for digests in by_rank])
        if ranks:
            word = "rank" if len(ranks) == 1 else "ranks"
            names = ", ".join(map(str, ranks))
            raise RanksDisagree(
                f"{word} {names} of {len(by_rank)} differ in {name} {when}; {remedy}"
            )


def agree(backend: Backend, digests: Mapping[str, str], when: str, remedy: str) -> None:
    """Compares digests, all ranks together. Raises RanksDisagree on all of them."""
    check_alike(backend.world.gather_objects(dict(digests)), when, remedy)


def on_first_rank(backend: Backend, work: Callable[[], T]) -> T:
    """Returns what `work` returns on rank 0 on all ranks, which call this together; see `on_one_rank`."""
    return on_one_rank(backend.world.gather_objects, backend.rank == 0, work)


def on_one_rank(
    gather: Callable[[Any], list[Any]], runs_here: bool, work: Callable[[], T], failed: str = ""
) -> T:
    """Runs `work` on the first rank that it `runs_here`, and returns its result on all, which call this together.

    `gather` gives every rank everyone's value. Where `work` raises a UserError, all ranks raise it; for any other
    exception they raise RuntimeError with its description behind `failed`, so that none waits for the one that failed.
    """
    outcome: tuple[T | None, Exception | None] | None = None
    cause: Exception | None = None
    if runs_here:
        try:
            outcome = work(), None
        except UserError as error:
            outcome = None, error
        except Exception as error:
            outcome = None, RuntimeError(f"{failed}{type(error).__name__}: {error}")
            cause = error
    result, refusal = next(shared for shared in gather(outcome) if shared is not None)
    if refusal is not None:
        raise refusal from cause
    shared_result: T = result
    return shared_result
