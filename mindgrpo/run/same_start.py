"""Checks that all ranks start from one configuration and one code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import mindgrpo
from mindgrpo.backend.contract import Backend
from mindgrpo.config import Config, values_by_key
from mindgrpo.errors import UserError
from mindgrpo.grpo.rank_consistency import different_ranks, digest

SOURCES = (".py", ".c", ".h")
FOLDER = Path(mindgrpo.__file__).parent


def check_same_start(config: Config, backend: Backend) -> None:
    """All ranks together, before anything else is agreed. Raises UserError on all of them."""
    values = {key: repr(value) for key, value in values_by_key(config).items()}
    by_rank = backend.world.gather_objects((values, code_digest()))
    check_configurations([values for values, _ in by_rank])
    others = different_ranks([code for _, code in by_rank])
    if others:
        raise UserError(
            f"rank {others[0]} runs other code than the other ranks (mindgrpo {mindgrpo.__version__} in "
            f"{FOLDER} here); install one version on every host."
        )


def check_configurations(by_rank: Sequence[Mapping[str, str]]) -> None:
    """Key -> value in words, of each rank. Raises UserError."""
    others = different_ranks([digest(sorted(values.items())) for values in by_rank])
    if not others:
        return
    usual = next(rank for rank in range(len(by_rank)) if rank not in others)
    here, there = by_rank[usual], by_rank[others[0]]
    keys = [key for key in {**here, **there} if here.get(key) != there.get(key)]
    more = f" and {len(keys) - 1} more keys differ" if len(keys) > 1 else ""
    raise UserError(
        f"rank {others[0]} starts with another configuration than rank {usual}: {keys[0]} is {there.get(keys[0])} "
        f"there and {here.get(keys[0])} here{more}; give all ranks the same file, flags and environment."
    )


def code_digest() -> str:
    files = sorted(path for path in FOLDER.rglob("*") if path.suffix in SOURCES)
    return digest([(str(path.relative_to(FOLDER)), path.read_bytes()) for path in files])
