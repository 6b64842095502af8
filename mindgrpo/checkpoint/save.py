"""Writes a checkpoint: every rank its pieces, rank 0 the manifest, and the name last. All ranks together.

In the background only the copy holds up the run; a thread then writes, and `commit` waits for it. Refuses to end a
run over a checkpoint: what cannot be written is taken away again and told in one sentence.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mindgrpo.backend.contract import Backend
from mindgrpo.checkpoint import tiles
from mindgrpo.checkpoint.folders import folder_of, partial_of
from mindgrpo.checkpoint.manifest import MANIFEST, Manifest, StoredTensor, write_manifest
from mindgrpo.checkpoint.plan import Piece, plan_pieces
from mindgrpo.checkpoint.shard import SUM_MODULUS, Shard, shard_bytes, write_shard
from mindgrpo.checkpoint.sums import joined
from mindgrpo.parallel.sharding import Layout
from mindgrpo.weights.local_weights import Weights

# Left free on the disk: metrics and completions go on.
SPARE_BYTES = 16 << 20

# From what was stored (files, tensors, sums) to the whole manifest.
Complete = Callable[[dict[str, object]], Manifest]


class NotWritten(Exception):
    """Why there is no checkpoint, the same on all ranks."""


@dataclass
class _Work:
    """What one rank writes, and how it went."""

    step: int
    complete: Complete
    shard: Shard | None = None
    error: str | None = None
    thread: threading.Thread | None = None


class Saver:
    """Of one run's folder. `begin` a checkpoint, then `commit` it before the next; NotWritten comes from either."""

    def __init__(self, run: Path, backend: Backend) -> None:
        self._run, self._backend = run, backend
        self._plan: list[list[Piece]] = []
        self._planned: dict[str, Layout] = {}
        self._work: _Work | None = None

    @property
    def pending(self) -> int | None:
        """The step whose checkpoint waits for `commit`."""
        return None if self._work is None else self._work.step

    @property
    def is_written(self) -> bool:
        """Whether `commit` would not wait for this rank."""
        work = self._work
        return work is not None and (work.thread is None or not work.thread.is_alive())

    def begin(
        self,
        step: int,
        roles: Mapping[str, Weights],
        complete: Complete,
        background: bool,
        bring: Callable[[str], None] = lambda role: None,
    ) -> int:
        """Saves what is now; the bytes of all ranks. `bring` puts a role at hand; one is read at a time."""
        if self._work is not None:
            raise RuntimeError(f"the checkpoint of step {self._work.step} was not committed")
        self._make_plan(roles)
        total = sum(shard_bytes(pieces) for pieces in self._plan)
        self._agree(self._make_room(step, total) if self._backend.rank == 0 else None)
        pieces = self._plan[self._backend.rank]
        work = self._work = _Work(step, complete)
        path = partial_of(self._run, step) / f"rank_{self._backend.rank:05d}.safetensors"

        at_hand = ""

        def live(piece: Piece) -> np.ndarray:
            nonlocal at_hand
            if piece.role != at_hand:
                bring(piece.role)
                at_hand = piece.role
            weights = roles[piece.role]
            return weights.parts[piece.name][piece.box.within(weights.boxes[piece.name]).slices]

        if not pieces:
            return total
        if not background:
            self._write(work, path, pieces, live)
            return total
        try:
            copies = {piece: tiles.by_rows(live(piece)) for piece in pieces}
        except MemoryError:
            work.error = f"{path.name}: the host has no memory for a copy"
            return total
        # popped, so that memory goes back as the disk takes it
        arguments = (work, path, pieces, copies.pop)
        work.thread = threading.Thread(target=self._write, args=arguments, name="checkpoint")
        work.thread.start()
        return total

    def _make_plan(self, roles: Mapping[str, Weights]) -> None:
        layouts = {role: weights.layout for role, weights in roles.items()}
        if self._planned != layouts:
            self._plan = plan_pieces(layouts, self._backend.world_size)
            self._planned = layouts

    def _make_room(self, step: int, num_bytes: int) -> str | None:
        """The partial folder, on rank 0; why there is none."""
        partial = partial_of(self._run, step)
        try:
            partial.parent.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(partial.parent).free
            if num_bytes + SPARE_BYTES > free:
                return (
                    f"it takes {num_bytes / 2**20:.1f} MiB, but {partial.parent} has {free / 2**20:.1f} MiB free "
                    f"({SPARE_BYTES >> 20} stay so)"
                )
            if partial.exists():
                shutil.rmtree(partial)
            partial.mkdir()
        except OSError as error:
            return f"{error.filename or partial}: {error.strerror}"
        return None

    @staticmethod
    def _write(
        work: _Work, path: Path, pieces: list[Piece], array_of: Callable[[Piece], np.ndarray]
    ) -> None:
        try:
            work.shard = write_shard(path, pieces, array_of)
        except OSError as error:
            work.error = f"{path.name}: {error.strerror}"
        except Exception as error:  # a thread's exception would be lost
            work.error = f"{path.name}: {type(error).__name__}: {error}"

    def commit(self) -> Path:
        """Waits for every rank's file and gives the checkpoint its name; its folder."""
        work = self._work
        if work is None:
            raise RuntimeError("there is no checkpoint to commit")
        if work.thread is not None:
            work.thread.join()
        self._work = None
        told = self._backend.world.gather_objects((work.shard, work.error))
        error = next((f"rank {r}: {e}" for r, (_, e) in enumerate(told) if e), None)
        if self._backend.rank == 0:
            if error is None:
                error = self._name(work, [shard for shard, _ in told])
            if error is not None:
                shutil.rmtree(partial_of(self._run, work.step), ignore_errors=True)
        self._agree(error)
        return folder_of(self._run, work.step)

    def _name(self, work: _Work, shards: list[Shard | None]) -> str | None:
        """Manifest and final name, on rank 0; why not."""
        partial, final = partial_of(self._run, work.step), folder_of(self._run, work.step)
        try:
            missing = [s for s in shards if s and not (partial / s.name).is_file()]
            if missing:
                return f"{partial / missing[0].name} is not seen by rank 0: all hosts need the same folder"
            manifest = work.complete(stored_in(self._plan, shards))
            with (partial / MANIFEST).open("xb") as stream:
                stream.write(write_manifest(manifest))
                stream.flush()
                os.fsync(stream.fileno())
            _sync_folder(partial)
            partial.rename(final)
            _sync_folder(final.parent)
        except OSError as error:
            return f"{error.filename or partial}: {error.strerror}"
        return None

    def _agree(self, error: str | None) -> None:
        """Rank 0's verdict, on all. Raises NotWritten."""
        verdict = self._backend.world.gather_objects(error)[0]
        if verdict is not None:
            raise NotWritten(verdict)


def stored_in(plan: list[list[Piece]], shards: list[Shard | None]) -> dict[str, object]:
    """The manifest's `files`, `tensors` and `sums` of what the ranks wrote."""
    tensors: dict[str, dict[str, StoredTensor]] = {}
    sums: dict[str, dict[str, int]] = {}
    for pieces, shard in zip(plan, shards, strict=True):
        if shard is None:
            continue
        for piece, stored, words in zip(pieces, shard.stored, shard.sums, strict=True):
            role = tensors.setdefault(piece.role, {})
            tensor = role.setdefault(
                piece.name, StoredTensor(shape=piece.box.stop, dtype="F32", pieces=[])
            )
            tensor.pieces.append(stored)
            of_role = sums.setdefault(piece.role, {})
            of_role[piece.name] = (of_role.get(piece.name, 0) + words) % SUM_MODULUS
    for role in tensors.values():
        for name, tensor in role.items():
            stops = zip(*(piece.stop for piece in tensor.pieces), strict=True)
            shape = tuple(max(extents) for extents in stops)
            role[name] = tensor.model_copy(update={"shape": shape})
    return {
        "files": {shard.name: shard.file for shard in shards if shard is not None},
        "tensors": tensors,
        "sums": {role: joined(of_role) for role, of_role in sums.items()},
    }


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
