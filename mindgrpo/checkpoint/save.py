"""Saves a checkpoint, all ranks together: every rank its chunks, rank 0 the manifest, and the folder's name last.

In the background only the copy holds up the run: a thread then writes, and `commit` waits for it. A checkpoint that
cannot be written is taken away again and does not end the run.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mindgrpo.backend.contract import Backend
from mindgrpo.checkpoint.folders import folder_of, partial_of
from mindgrpo.checkpoint.format import MANIFEST, Manifest, StoredTensor, write_manifest
from mindgrpo.checkpoint.shards import (
    Chunk,
    Shard,
    by_rows,
    joined,
    plan_chunks,
    shard_bytes,
    write_shard,
)
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
    """One rank's part of a checkpoint, and how it went."""

    step: int
    complete: Complete
    shard: Shard | None = None
    error: str | None = None
    thread: threading.Thread | None = None

    def write(
        self, path: Path, chunks: list[Chunk], array_of: Callable[[Chunk], np.ndarray]
    ) -> None:
        try:
            self.shard = write_shard(path, chunks, array_of)
        except OSError as error:
            self.error = f"{path.name}: {error.strerror}"
        except Exception as error:  # a thread's exception would be lost
            self.error = f"{path.name}: {type(error).__name__}: {error}"


class _RoleReader:
    """Values of chunks, of one role after the other: each is brought, and kept as arrays until the next is wanted."""

    def __init__(self, roles: Mapping[str, Weights], bring: Callable[[str], None]) -> None:
        self._roles, self._bring = roles, bring
        self._open = ExitStack()
        self._role = ""

    def __enter__(self) -> _RoleReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def values(self, chunk: Chunk) -> np.ndarray:
        weights = self._roles[chunk.role]
        if chunk.role != self._role:
            self._open.close()
            self._bring(chunk.role)
            self._arrays = self._open.enter_context(weights.on_host())
            self._role = chunk.role
        box = chunk.box.within(weights.boxes[chunk.name])
        return self._arrays.hf_views[chunk.name][box.slices]


class Saver:
    """Saves one run's checkpoints: `begin` one, then `commit` it before the next. Both raise NotWritten."""

    def __init__(self, run: Path, backend: Backend) -> None:
        self._run, self._backend = run, backend
        self._plan: list[list[Chunk]] = []
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
        """Saves the values of this moment; returns the bytes of all ranks.

        `bring` brings a role into memory; one is read at a time.
        """
        assert self._work is None, "the checkpoint before was not committed"
        layouts = {role: weights.layout for role, weights in roles.items()}
        if self._planned != layouts:
            self._plan = plan_chunks(layouts, self._backend.world_size)
            self._planned = layouts
        total = sum(shard_bytes(chunks) for chunks in self._plan)
        self._agree(self._make_folder(step, total) if self._backend.rank == 0 else None)
        chunks = self._plan[self._backend.rank]
        work = self._work = _Work(step, complete)
        path = partial_of(self._run, step) / f"rank_{self._backend.rank:05d}.safetensors"
        if chunks and not background:
            with _RoleReader(roles, bring) as reader:
                work.write(path, chunks, reader.values)
        elif chunks:
            try:
                with _RoleReader(roles, bring) as reader:
                    copies = {chunk: by_rows(reader.values(chunk)) for chunk in chunks}
            except MemoryError:
                work.error = f"{path.name}: the host has no memory for a copy"
                return total
            # popped, so that memory goes back as the disk takes it
            work.thread = threading.Thread(target=work.write, args=(path, chunks, copies.pop))
            work.thread.start()
        return total

    def _make_folder(self, step: int, num_bytes: int) -> str | None:
        """Makes the partial folder, on rank 0; returns why there is none."""
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

    def commit(self) -> Path:
        """Waits for every rank's file and gives the checkpoint its name; returns its folder."""
        work, self._work = self._work, None
        assert work is not None, "there is no checkpoint to commit"
        if work.thread is not None:
            work.thread.join()
        results = self._backend.world.gather_objects((work.shard, work.error))
        error = next((f"rank {rank}: {e}" for rank, (_, e) in enumerate(results) if e), None)
        if self._backend.rank == 0:
            error = error or self._name(work, [shard for shard, _ in results])
            if error is not None:
                shutil.rmtree(partial_of(self._run, work.step), ignore_errors=True)
        self._agree(error)
        return folder_of(self._run, work.step)

    def discard(self) -> None:
        """Takes away what was begun and not committed, if anything; all ranks together."""
        work, self._work = self._work, None
        if work is None:
            return
        if work.thread is not None:
            work.thread.join()
        self._backend.world.barrier()
        if self._backend.rank == 0:
            shutil.rmtree(partial_of(self._run, work.step), ignore_errors=True)

    def _name(self, work: _Work, shards: list[Shard | None]) -> str | None:
        """Writes the manifest and gives the folder its name, on rank 0; returns why not."""
        partial, final = partial_of(self._run, work.step), folder_of(self._run, work.step)
        try:
            missing = [s for s in shards if s and not (partial / s.name).is_file()]
            if missing:
                return f"{partial / missing[0].name} is not seen by rank 0: all hosts need the same folder"
            manifest = work.complete(self._stored(shards))
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

    def _stored(self, shards: list[Shard | None]) -> dict[str, object]:
        """Returns the manifest's `files`, `tensors` and `sums` of what the ranks wrote."""
        tensors = {
            role: {
                spec.name: StoredTensor(shape=spec.shape, dtype="F32", chunks=[])
                for spec in layout.specs
            }
            for role, layout in self._planned.items()
        }
        sums = {role: dict.fromkeys(names, 0) for role, names in tensors.items()}
        for chunks, shard in zip(self._plan, shards, strict=True):
            if shard is None:
                continue
            for chunk, stored, words in zip(chunks, shard.stored, shard.sums, strict=True):
                tensors[chunk.role][chunk.name].chunks.append(stored)
                sums[chunk.role][chunk.name] = (sums[chunk.role][chunk.name] + words) % (1 << 64)
        return {
            "files": {shard.name: shard.file for shard in shards if shard is not None},
            "tensors": tensors,
            "sums": {role: joined(of_role) for role, of_role in sums.items()},
        }

    def _agree(self, error: str | None) -> None:
        """Raises NotWritten on all ranks if rank 0 has an error."""
        verdict = self._backend.world.gather_objects(error)[0]
        if verdict is not None:
            raise NotWritten(verdict)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
