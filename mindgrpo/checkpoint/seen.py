"""Whether every rank of a run sees the folder that its checkpoints are written to, asked before anything is computed.

Refuses to guess from the names of hosts: a file is put there and looked for.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from pathlib import Path

from mindgrpo.backend.contract import Backend
from mindgrpo.errors import UserError

# A network's file system may show a new file late.
PATIENCE_SECONDS = 5.0
NAP_SECONDS = 0.05


def check_seen(run: Path, backend: Backend) -> None:
    """All ranks together. Raises UserError on all alike."""
    probe = run.absolute() / f".seen-{secrets.token_hex(8)}"
    if backend.rank == 0:
        # Where it cannot be written, the checkpoint itself says so.
        with contextlib.suppress(OSError):
            probe.touch()
    probe, is_there = backend.world.gather_objects((probe, probe.exists()))[0]
    seen = backend.world.gather_objects(not is_there or _appears(probe))
    if backend.rank == 0:
        with contextlib.suppress(OSError):
            os.unlink(probe)
    blind = [rank for rank, found in enumerate(seen) if not found]
    if blind:
        raise UserError(
            f"rank {blind[0]}{f' and {len(blind) - 1} more' if blind[1:] else ''} cannot see {probe.parent}, where "
            "all ranks write checkpoints; give --output_dir a folder that all hosts share at the same path, or leave "
            "rl_config.save_ckpt_interval out."
        )


def _appears(path: Path) -> bool:
    until = time.monotonic() + PATIENCE_SECONDS
    while not path.exists():
        if time.monotonic() > until:
            return False
        time.sleep(NAP_SECONDS)
    return True
