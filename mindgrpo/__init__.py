"""Group-relative policy optimisation with MindSpore. Refuses to import more than is asked for."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

# MindSpore 2.9.0 does not import after another library has loaded protobuf's C implementation, as tensorboardX does.
os.environ.setdefault("PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION", "python")

__version__ = "0.1.0"
__all__ = ["GRPOTrainer", "__version__", "load_config"]


def __getattr__(name: str) -> Any:
    # Lazy, because `python -m mindgrpo doctor` must work where the device library does not import.
    if name == "GRPOTrainer":
        return import_module("mindgrpo.trainer").GRPOTrainer
    if name == "load_config":
        return import_module("mindgrpo.config.load").load_config
    raise AttributeError(f"module 'mindgrpo' has no attribute {name!r}")
