"""Checks the environment's variables that a run reads, before anything uses them."""

from __future__ import annotations

import os
from collections.abc import Mapping

COUNTS = ("OMP_NUM_THREADS", "MINDGRPO_STOP_SECONDS", "MALLOC_MMAP_THRESHOLD_", "MS_NODE_TIMEOUT")
SWITCHES = ("MINDGRPO_FORK", "MINDGRPO_NATIVE")


def wrong_variables(environment: Mapping[str, str]) -> list[str]:
    """Says of each variable that cannot be used what is wrong; empty ones count as not set."""
    wrong = []
    for name in COUNTS:
        value = environment.get(name, "")
        # OpenMP takes a list of counts, one a level.
        counts = value.split(",") if name == "OMP_NUM_THREADS" else [value]
        if value and not all(count.strip().isdecimal() and int(count[:12]) > 0 for count in counts):
            wrong.append(f"{name} is {value!r}, but must be a whole number above 0")
    for name in SWITCHES:
        value = environment.get(name, "")
        if value not in ("", "0", "1"):
            wrong.append(f"{name} is {value!r}, but must be 0 or 1")
    folder = environment.get("TMPDIR", "")
    if folder and not (os.path.isdir(folder) and os.access(folder, os.W_OK)):
        wrong.append(f"TMPDIR is {folder!r}, but must be a folder that can be written")
    return wrong
