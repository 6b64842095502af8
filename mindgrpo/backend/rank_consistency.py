"""Checks that ranks agree on values that must be identical, and runs work on one rank with the result shared by all.

The error names the ranks that differ from the majority, without claiming that the majority is right.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from mindgrpo.errors import UserError

if TYPE_CHECKING:
    # Avoids importing MindSpore, which takes two seconds and is not needed to read data or reports.
    from mindgrpo.backend.contract import Backend

T = TypeVar("T")


class RanksDisagree(RuntimeError):
    """Raised when ranks hold different values of something that must be identical on all of them."""


def digest(*values: object) -> str:
    """Returns a hash of numbers, strings, arrays (by shape, dtype and bits), and lists or tuples of these."""
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
    """Returns the ranks whose value differs from the most common one.

    Among equally common values, that of rank 0 counts, else the one of the lowest rank.
    """
    common = Counter(values).most_common(1)[0][0]
    if values.count(values[0]) == values.count(common):
        common = values[0]
    return [rank for rank, value in enumerate(values) if value != common]


def check_alike(by_rank: Sequence[Mapping[str, str]], when: str, remedy: str) -> None:
    """Compares digests, `by_rank[rank][name]`. Raises RanksDisagree if they differ between ranks."""
    for name in by_rank[0]:
        ranks = different_ranks([digests.get(name, "") for digests in by_rank])
        if ranks:
            word = "rank" if len(ranks) == 1 else "ranks"
            names = ", ".join(map(str, ranks))
            raise RanksDisagree(
                f"{word} {names} of {len(by_rank)} differ in {name} {when}; {remedy}"
            )


def agree(backend: Backend, digests: Mapping[str, str], when: str, remedy: str) -> None:
    """Collective call: compares the ranks' digests. Raises RanksDisagree on all ranks if any differ."""
    check_alike(backend.world.gather_objects(dict(digests)), when, remedy)


def on_first_rank(backend: Backend, work: Callable[[], T]) -> T:
    """Collective call: runs `work` on rank 0 and returns its result on all ranks; see `on_one_rank`."""
    return on_one_rank(backend.world.gather_objects, backend.rank == 0, work)


def on_one_rank(
    gather: Callable[[Any], list[Any]], runs_here: bool, work: Callable[[], T], failed: str = ""
) -> T:
    """Collective call: runs `work` on the rank with `runs_here` and returns its result on all ranks.

    If several ranks run it, the result of the first is returned. `gather` is an all-gather of objects. If `work` raises
    a UserError, all ranks raise it; for any other exception all raise a RuntimeError with its description after
    `failed`, so that no rank keeps waiting for the failed one.
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
