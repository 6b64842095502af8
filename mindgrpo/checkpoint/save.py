"""Saves a checkpoint, all ranks together: every rank its chunks, rank 0 the manifest, and the folder's name last.

Each rank writes one safetensors file with digests; the layout that saves leaves no trace in it. In the background only
the copy holds up the run: a thread then writes, and `commit` waits for it. A checkpoint that cannot be written is taken
away again and does not end the run.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

import numpy as np

from mindgrpo.backend.contract import Backend
from mindgrpo.backend.rank_consistency import on_first_rank
from mindgrpo.checkpoint import remote_files
from mindgrpo.checkpoint.folders import folder_of, partial_of
from mindgrpo.checkpoint.format import (
    FLOAT_BYTES,
    MANIFEST,
    DamagedCheckpoint,
    Manifest,
    StoredChunk,
    StoredFile,
    StoredTensor,
    parse_manifest,
    write_manifest,
)
from mindgrpo.errors import UserError
from mindgrpo.parallel.sharding import Box, Layout, Ranks
from mindgrpo.weights.checksum import total_sums
from mindgrpo.weights.local_weights import Weights
from mindgrpo.weights.model_files import by_rows, header_of

# Left free on the disk, for metrics and completions.
SPARE_BYTES = 16 << 20
# A reader verifies a complete chunk to take a part of it, and holds one at a time.
CHUNK_BYTES = 32 << 20

# From what was stored (files, tensors, sums) to the complete manifest.
Complete = Callable[[dict[str, object]], Manifest]


class NotWritten(UserError):
    """Says why there is no checkpoint, the same on all ranks."""


@dataclass(frozen=True)
class Chunk:
    """Names the slice `box` of the tensor `name` among those of `role`."""

    role: str
    name: str
    box: Box

    @property
    def num_bytes(self) -> int:
        return self.box.size * FLOAT_BYTES

    @property
    def key(self) -> str:
        """Returns its name in its file."""
        edges = zip(self.box.start, self.box.stop, strict=True)
        return f"{self.role}/{self.name}[{','.join(f'{a}:{b}' for a, b in edges)}]"


def plan_chunks(
    layouts: Mapping[str, Layout], num_ranks: int, chunk_bytes: int = CHUNK_BYTES
) -> list[list[Chunk]]:
    """Plans which rank writes which chunk of each tensor: every element once, replicas shared out evenly.

    Returns each rank's chunks, in the order of roles and tensors. `layouts` by role, all within `num_ranks`.

    Chunks that one rank alone holds are dealt first, then the largest: those with a choice even the loads out.
    """
    chunks: list[tuple[Chunk, Ranks]] = []
    for role, layout in layouts.items():
        for spec in layout.specs:
            for box, ranks in layout.ranks_by_box(spec.name).items():
                chunks += [(Chunk(role, spec.name, part), ranks) for part in cut(box, chunk_bytes)]
    loads = [0] * num_ranks
    by_rank: list[list[tuple[int, Chunk]]] = [[] for _ in range(num_ranks)]
    order = sorted(enumerate(chunks), key=lambda one: (len(one[1][1]), -one[1][0].num_bytes))
    for index, (chunk, ranks) in order:
        owner = min(ranks, key=lambda rank: (loads[rank], rank))
        loads[owner] += chunk.num_bytes
        by_rank[owner].append((index, chunk))
    return [[chunk for _, chunk in sorted(own, key=lambda one: one[0])] for own in by_rank]


def cut(box: Box, chunk_bytes: int) -> Iterator[Box]:
    """Cuts `box` along its first dim into boxes of at most `chunk_bytes`, or of one row where that is more.

    An expert that is more is cut along its own first dim.
    """
    rows = box.shape[0] if box.shape else 1
    row_bytes = box.size // max(rows, 1) * FLOAT_BYTES
    step = max(1, chunk_bytes // max(row_bytes, 1))
    if rows <= step and (row_bytes <= chunk_bytes or len(box.shape) < 3):
        yield box
        return
    for start in range(box.start[0], box.stop[0], step):
        stop = min(start + step, box.stop[0])
        if row_bytes <= chunk_bytes or len(box.shape) < 3:
            yield Box((start, *box.start[1:]), (stop, *box.stop[1:]))
            continue
        for inner in cut(Box(box.start[1:], box.stop[1:]), chunk_bytes):
            yield Box((start, *inner.start), (stop, *inner.stop))


@dataclass(frozen=True)
class SavedShard:
    """Describes a file that was written: `stored[i]` is where chunk i lies; `sums[i]` is the sum of its words."""

    name: str
    file: StoredFile
    stored: list[StoredChunk]
    sums: list[int]


def write_shard(path: Path, chunks: Sequence[Chunk], arrays: Iterable[np.ndarray]) -> SavedShard:
    """Writes and syncs a file of each chunk's float32 values, `arrays`. Raises OSError."""
    shapes = {chunk.key: chunk.box.shape for chunk in chunks}
    header, offsets = header_of(shapes, metadata="mindgrpo")
    stored, sums = [], []
    with path.open("xb") as stream:
        stream.write(header)
        for chunk, offset, array in zip(chunks, offsets, arrays, strict=True):
            if not array.flags.c_contiguous or array.dtype != "<f4":
                array = by_rows(array)
            digest = hashlib.sha256(array.data).hexdigest()
            stream.write(array.data)
            edges = {"start": chunk.box.start, "stop": chunk.box.stop}
            stored.append(StoredChunk(**edges, file=path.name, offset=offset, digest=digest))
            sums.append(word_sum(array))
        stream.flush()
        os.fsync(stream.fileno())
        size = stream.tell()
    digest = hashlib.sha256(header).hexdigest()
    file = StoredFile(bytes=size, header_bytes=len(header), header=digest)
    return SavedShard(path.name, file, stored, sums)


def shard_bytes(chunks: Iterable[Chunk]) -> int:
    """Estimates the size of a file: its header is a few hundred bytes a chunk."""
    return sum(chunk.num_bytes + 300 for chunk in chunks)


def word_sum(array: np.ndarray) -> int:
    """Sums float32 values' bits: equal values have equal sums, however they were cut."""
    return int(array.view(np.uint32).sum(dtype=np.uint64))


def joined(sums: Mapping[str, int]) -> str:
    """Returns one digest of the tensors' sums of words."""
    text = "".join(f"{name} {sums[name]}\n" for name in sorted(sums))
    return hashlib.sha256(text.encode()).hexdigest()


def values_digest(weights: Weights, backend: Backend) -> str:
    """Digests a role's values, the same under every layout; all ranks together. `weights` must be in memory."""
    with weights.on_host() as host:
        views = host.hf_views.items()
        own = {name: word_sum(view.astype(np.float32, copy=False)) for name, view in views}
    return joined(total_sums(weights.layout, backend.world.gather_objects(own))[0])


@dataclass
class _Work:
    """Writes one rank's part of a checkpoint, and keeps how that went."""

    step: int
    complete: Complete
    remote: Mapping[str, StoredFile] = field(default_factory=dict)
    shard: SavedShard | None = None
    error: str | None = None
    thread: threading.Thread | None = None

    def write(self, path: Path, chunks: list[Chunk], arrays: Iterable[np.ndarray]) -> None:
        try:
            self.shard = write_shard(path, chunks, arrays)
        except OSError as error:
            self.error = f"{path.name}: {error.strerror}"
        except Exception as error:  # a thread's exception would be lost
            self.error = f"{path.name}: {type(error).__name__}: {error}"

    def wait(self) -> None:
        if self.thread is not None:
            self.thread.join()


def _values(
    roles: Mapping[str, Weights], chunks: Sequence[Chunk], bring: Callable[[str], None]
) -> Generator[np.ndarray, None, None]:
    """Yields a view of each chunk's values; of one role after the other, which is brought into memory for it."""
    for role, of_role in groupby(chunks, lambda chunk: chunk.role):
        bring(role)
        boxes = roles[role].boxes
        with roles[role].on_host() as host:
            for chunk in of_role:
                yield host.hf_views[chunk.name][chunk.box.within(boxes[chunk.name]).slices]


@contextmanager
def _reasons(path: Path) -> Iterator[None]:
    """Raises NotWritten for an OSError inside."""
    try:
        yield
    except OSError as error:
        raise NotWritten(f"{error.filename or path}: {error.strerror}") from None


class Saver:
    """Saves one run's checkpoints: `begin` one, then `commit` it before the next. Both raise NotWritten."""

    def __init__(self, run: Path, backend: Backend) -> None:
        self._run, self._backend = run, backend
        self._plan: list[list[Chunk]] = []
        self._planned: dict[str, Layout] = {}
        self._work: _Work | None = None

    @property
    def pending(self) -> int | None:
        """Returns the step whose checkpoint waits for `commit`."""
        return None if self._work is None else self._work.step

    @property
    def is_written(self) -> bool:
        """Returns whether `commit` would not wait for this rank."""
        work = self._work
        return work is not None and (work.thread is None or not work.thread.is_alive())

    def begin(
        self,
        step: int,
        roles: Mapping[str, Weights],
        complete: Complete,
        background: bool,
        bring: Callable[[str], None] = lambda role: None,
        files: remote_files.Files | None = None,
        arrays: Mapping[str, Iterable[np.ndarray]] | None = None,
    ) -> int:
        """Saves the values of this moment; returns the bytes of all ranks.

        `bring` brings a role into memory; one is read at a time. `arrays` are the remote arrays that `files`
        describe, by name: all ranks go through them together, and those of the first rank are written at once.
        """
        assert self._work is None, "the checkpoint before was not committed"
        layouts = {role: weights.layout for role, weights in roles.items()}
        if self._planned != layouts:
            self._plan = plan_chunks(layouts, self._backend.world_size)
            self._planned = layouts
        total = sum(map(shard_bytes, self._plan)) + remote_files.num_bytes(files or {})
        on_first_rank(self._backend, lambda: self._make_folder(step, total))
        chunks = self._plan[self._backend.rank]
        remote = self._write_remote(step, files, arrays) if files and arrays else {}
        work = self._work = _Work(step, complete, remote)
        path = partial_of(self._run, step) / f"rank_{self._backend.rank:05d}.safetensors"
        if not chunks:
            return total
        with closing(_values(roles, chunks, bring)) as values:
            if not background:
                work.write(path, chunks, values)
                return total
            try:
                copies = deque(map(by_rows, values))
            except MemoryError:
                work.error = f"{path.name}: the host has no memory for a copy"
                return total
        # taken out one by one, so that memory goes back as the disk takes it
        taken = (copies.popleft() for _ in chunks)
        work.thread = threading.Thread(target=work.write, args=(path, chunks, taken))
        work.thread.start()
        return total

    def _make_folder(self, step: int, num_bytes: int) -> None:
        """Makes the partial folder, on rank 0."""
        partial = partial_of(self._run, step)
        with _reasons(partial):
            partial.parent.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(partial.parent).free
            if num_bytes + SPARE_BYTES > free:
                raise NotWritten(
                    f"it takes {num_bytes / 2**20:.1f} MiB, but {partial.parent} has {free / 2**20:.1f} MiB free "
                    f"({SPARE_BYTES >> 20} stay so)"
                )
            if partial.exists():
                shutil.rmtree(partial)
            partial.mkdir()

    def _write_remote(
        self, step: int, files: remote_files.Files, arrays: Mapping[str, Iterable[np.ndarray]]
    ) -> dict[str, StoredFile]:
        """Writes the files on rank 0 and describes them there; all ranks together. Raises NotWritten."""
        partial, written, error = partial_of(self._run, step), dict[str, StoredFile](), None
        for name, tensors in files.items():
            file, left = remote_files.file_of(name), iter(arrays[name])
            if self._backend.rank == 0 and error is None:
                try:
                    written[file] = remote_files.write_file(partial / file, tensors, left)
                except OSError as failed:
                    error = f"{file}: {failed.strerror}"
            # The other ranks pass on theirs to the end.
            deque(left, maxlen=0)

        def check() -> None:
            if error is not None:
                shutil.rmtree(partial, ignore_errors=True)
                raise NotWritten(error)

        on_first_rank(self._backend, check)
        return written

    def commit(self) -> Path:
        """Waits for every rank's file and gives the checkpoint its name; returns its folder."""
        work, self._work = self._work, None
        assert work is not None, "there is no checkpoint to commit"
        work.wait()
        results = self._backend.world.gather_objects((work.shard, work.error))
        on_first_rank(self._backend, lambda: self._finish(work, results))
        return folder_of(self._run, work.step)

    def discard(self) -> None:
        """Takes away what was begun and not committed, if anything; all ranks together."""
        work, self._work = self._work, None
        if work is None:
            return
        work.wait()
        self._backend.world.barrier()
        if self._backend.rank == 0:
            shutil.rmtree(partial_of(self._run, work.step), ignore_errors=True)

    def _finish(self, work: _Work, results: list[tuple[SavedShard | None, str | None]]) -> None:
        """Writes the manifest and gives the folder its name, on rank 0; takes it away if that cannot be done."""
        partial, final = partial_of(self._run, work.step), folder_of(self._run, work.step)
        try:
            for rank, (shard, error) in enumerate(results):
                if error is not None:
                    raise NotWritten(f"rank {rank}: {error}")
                if shard is not None and not (partial / shard.name).is_file():
                    raise NotWritten(
                        f"{partial / shard.name} is not seen by rank 0: all hosts need the same folder"
                    )
            stored = self._stored([shard for shard, _ in results], work.remote)
            manifest = work.complete(stored)
            with _reasons(partial):
                _write_manifest(partial, manifest)
                _sync_folder(partial)
                partial.rename(final)
                _sync_folder(final.parent)
        except NotWritten:
            shutil.rmtree(partial, ignore_errors=True)
            raise

    def _stored(
        self, shards: list[SavedShard | None], remote: Mapping[str, StoredFile]
    ) -> dict[str, object]:
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
        files = {shard.name: shard.file for shard in shards if shard is not None}
        return {
            "files": {**files, **remote},
            "tensors": tensors,
            "sums": {role: joined(of_role) for role, of_role in sums.items()},
        }


def _write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes the manifest and reads it again: what cannot be read must not take an earlier checkpoint's place.

    Raises NotWritten and OSError.
    """
    try:
        content = write_manifest(manifest)
    except ValueError as error:
        raise NotWritten(f"its state has no form in {MANIFEST}: {error}") from None
    with (folder / MANIFEST).open("xb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    try:
        parse_manifest(folder)
    except DamagedCheckpoint as error:
        why = str(error).removesuffix("; use an earlier checkpoint.")
        raise NotWritten(f"it could not be read again: {why}") from None


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
