"""Group-relative policy optimisation with MindSpore. Refuses to import more than is asked for.

A program that uses this interface and that a UserError ends prints one sentence and exits with status 2.
"""

from __future__ import annotations

import os
import warnings
from importlib import import_module
from typing import Any

from mindgrpo.errors import UserError, end_programs_without_traceback

# MindSpore 2.9 does not import after another library has loaded protobuf's C implementation, as tensorboardX does; 2.10
# does.
os.environ.setdefault("PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION", "python")
# tqdm's, which other packages import in notebooks; none of its bars is shown here.
warnings.filterwarnings("ignore", message="IProgress not found")

__version__ = "0.2.0"
__all__ = ["GRPOConfig", "GRPOTrainer", "SFTTrainer", "UserError", "__version__", "load_config"]
MODULES = {
    "GRPOTrainer": "mindgrpo.trainer",
    "GRPOConfig": "mindgrpo.run.trl_config",
    "SFTTrainer": "mindgrpo.trainer",
    "load_config": "mindgrpo.config.load",
}


def __getattr__(name: str) -> Any:
    # Lazy, because `python -m mindgrpo doctor` must work where the device library does not import.
    if name in MODULES:
        end_programs_without_traceback()
        return getattr(import_module(MODULES[name]), name)
    if name[:1].isupper():  # a class, perhaps another trainer's
        remedy = import_module("mindgrpo.config.names").aliases().remedy(name)
        if remedy is not None:
            end_programs_without_traceback()
            raise UserError(f"there is no {name}; {remedy}.")
    raise AttributeError(f"module 'mindgrpo' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
