"""A pool of memory that is not this process's, or only planned: the account knows its size and nothing is moved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindgrpo.backend.contract import Pool


class CountedPool(Pool):
    is_host_memory = False

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes

    def parameter(self, name: str, offset: int, shape: Sequence[int]) -> Any:
        raise ValueError("memory that is only counted has no parameters")

    def on_host(self, write: bool = False) -> Any:
        raise ValueError("memory that is only counted cannot be read")

    def offload(self) -> None: ...

    def load(self) -> None: ...

    def release(self) -> None: ...
