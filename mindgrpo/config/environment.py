"""The variables of the environment that a run reads, checked before anything uses them.

Names the variable, its value and what would do. Refuses to set any.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from mindgrpo.errors import UserError

COUNTS = ("OMP_NUM_THREADS", "MINDGRPO_STOP_SECONDS", "MALLOC_MMAP_THRESHOLD_", "MS_NODE_TIMEOUT")
SWITCHES = ("MINDGRPO_FORK", "MINDGRPO_NATIVE")


def wrong_variables(environment: Mapping[str, str]) -> list[str]:
    """A sentence's part for each that cannot be used; empty ones count as not set."""
    wrong = []
    for name in COUNTS:
        value = environment.get(name, "")
        # OpenMP takes a list of counts, one a level.
        parts = value.split(",") if name == "OMP_NUM_THREADS" else [value]
        if value and not all(part.strip().isdecimal() and int(part[:12]) > 0 for part in parts):
            wrong.append(f"{name} is {value!r}, but must be a whole number above 0")
    for name in SWITCHES:
        value = environment.get(name, "")
        if value not in ("", "0", "1"):
            wrong.append(f"{name} is {value!r}, but must be 0 or 1")
    folder = environment.get("TMPDIR", "")
    if folder and not (os.path.isdir(folder) and os.access(folder, os.W_OK)):
        wrong.append(f"TMPDIR is {folder!r}, but must be a folder that can be written")
    return wrong


def check_environment(environment: Mapping[str, str]) -> None:
    wrong = wrong_variables(environment)
    if wrong:
        raise UserError(f"{wrong[0]}; correct or unset it in the environment.")
