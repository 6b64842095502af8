"""What a vLLM engine is started with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mindgrpo.backend.dtypes import Dtype


@dataclass(frozen=True)
class VllmSettings:
    """`model` is a directory with config.json; `arguments` are vLLM's own, by name.

    `memory` is what an engine takes on each of its ranks, in bytes by role, for the account.
    """

    python: Path
    model: str
    dtype: Dtype
    max_model_len: int
    seed: int
    max_start_seconds: float
    max_silence_seconds: float
    arguments: Mapping[str, Any] = field(default_factory=dict)
    memory: Mapping[str, int] = field(default_factory=dict)
