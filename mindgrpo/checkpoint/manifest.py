"""The one file that makes a folder a checkpoint: its state, its tensors' pieces, and a digest of everything.

Reading executes nothing. Refuses what it does not know, paths that leave the folder, pieces that overlap, leave a gap
or do not lie in their file, and a manifest that was changed; every refusal names the file.
"""

from __future__ import annotations

import hashlib
import json
import re
from math import prod
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from mindgrpo.checkpoint.plan import FLOAT_BYTES
from mindgrpo.checkpoint.state import Count, Entry, RunState
from mindgrpo.errors import UserError
from mindgrpo.parallel.sharding import Box
from mindgrpo.strict_files import NotJson, parse_json, read_bytes

MANIFEST = "manifest.json"
FORMAT, VERSION = "mindgrpo checkpoint", 1
MAX_BYTES = 1 << 30

FILE_NAME = r"^[A-Za-z0-9_-][A-Za-z0-9_.-]{0,120}\.safetensors$"
DIGEST = r"^[0-9a-f]{64}$"


class DamagedCheckpoint(UserError):
    """A checkpoint that cannot be used as it stands; an earlier one may do."""


class StoredPiece(Entry):
    """`offset` is from the first byte of the file's data; `digest` is the SHA-256 of the piece's bytes."""

    start: tuple[Count, ...]
    stop: tuple[Count, ...]
    file: str
    offset: Count
    digest: str = Field(pattern=DIGEST)

    @property
    def box(self) -> Box:
        return Box(self.start, self.stop)


class StoredTensor(Entry):
    shape: tuple[Count, ...]
    dtype: Literal["F32"]
    pieces: list[StoredPiece]


class StoredFile(Entry):
    """`header` is the SHA-256 of its first `header_bytes`, before the data."""

    bytes: Count
    header_bytes: Count
    header: str = Field(pattern=DIGEST)


class Identity(Entry):
    """What has to be the same where the run goes on.

    `config` is every setting by its dotted key; `model` the model's dimensions; `data` a digest of the prompts;
    `batch` the arithmetic of a step; `unsaved` digests of weights that the run only reads, by role.
    """

    code: str
    config: dict[str, Any]
    model: dict[str, Any]
    data: str
    batch: dict[str, int]
    unsaved: dict[str, str]


class StoredAdapters(Entry):
    """What a policy's adapters count, alpha / rank times, and the matrices that have them."""

    rank: int = Field(ge=1)
    alpha: float = Field(gt=0)
    targets: list[str]


class Manifest(Entry):
    """`tensors` by role and global name; `sums` a digest of each role's values, whatever the pieces."""

    format: Literal["mindgrpo checkpoint"] = "mindgrpo checkpoint"
    version: Literal[1] = 1
    layout: str
    state: RunState
    identity: Identity
    files: dict[str, StoredFile]
    tensors: dict[str, dict[str, StoredTensor]]
    sums: dict[str, str]
    lora: StoredAdapters | None = None

    @property
    def num_bytes(self) -> int:
        return sum(file.bytes for file in self.files.values())


def write_manifest(manifest: Manifest) -> bytes:
    """The file's content, with a digest of itself."""
    body = manifest.model_dump(mode="json")
    return json.dumps({**body, "digest": _digest(body)}, indent=1).encode() + b"\n"


def _digest(body: Any) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def read_manifest(folder: Path) -> Manifest:
    """The manifest of the checkpoint in `folder`, after all that can be checked without its weights."""
    path = folder / MANIFEST
    manifest = _parse(path, _json_object(path))
    for name in manifest.files:
        _check_file(folder, name, manifest.files[name])
    spans: dict[str, list[tuple[int, int]]] = {}
    for role, tensors in manifest.tensors.items():
        for name, tensor in tensors.items():
            reason = _wrong_pieces(tensor, manifest.files)
            if reason:
                raise _damaged(path, f"the pieces of {role} {name} {reason}")
            for piece in tensor.pieces:
                end = piece.offset + piece.box.size * FLOAT_BYTES
                spans.setdefault(piece.file, []).append((piece.offset, end))
    for name, ends in spans.items():
        ends.sort()
        if any(a[1] > b[0] for a, b in zip(ends, ends[1:], strict=False)):
            raise _damaged(path, f"two pieces lie at the same place of {name}")
    return manifest


def _json_object(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise DamagedCheckpoint(
            f"'{path.parent}' has no {MANIFEST}, so it is no checkpoint of mindgrpo; name a folder such as "
            "RUN/checkpoints/step_000010, or the run's own."
        )
    try:
        body = parse_json(read_bytes(path, "The manifest", "use an earlier checkpoint.", MAX_BYTES))
    except NotJson as error:
        raise _damaged(path, f"it is no JSON ({error})") from None
    except UserError as error:
        raise DamagedCheckpoint(str(error)) from None
    if not isinstance(body, dict):
        raise _damaged(path, "it holds no JSON object")
    return body


def _parse(path: Path, body: dict[str, Any]) -> Manifest:
    told, version = body.get("format"), body.get("version")
    if told != FORMAT:
        raise _damaged(path, f"its format is {told!r:.60}, not {FORMAT!r}")
    if version != VERSION:
        raise DamagedCheckpoint(
            f"{path} has version {version!r:.60} of the format, and this mindgrpo reads version {VERSION}; use the "
            "mindgrpo that wrote it."
        )
    digest = body.pop("digest", None)
    try:
        # As JSON, where a list may be a tuple.
        manifest = Manifest.model_validate_json(json.dumps(body, allow_nan=False))
        written = _digest(manifest.model_dump(mode="json"))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise _damaged(path, f"{place:.200}: {first['msg']}") from None
    except (ValueError, RecursionError) as error:
        raise _damaged(path, str(error)) from None
    if digest != written:
        raise _damaged(path, "it was changed after it was written")
    return manifest


def _check_file(folder: Path, name: str, told: StoredFile) -> None:
    path = folder / name
    if not re.fullmatch(FILE_NAME, name):
        raise _damaged(folder / MANIFEST, f"it names the file {name!r:.120}, which is no name here")
    try:
        if path.is_symlink() or not path.is_file():
            raise DamagedCheckpoint(
                f"{path} is missing; the checkpoint is not whole, use an earlier one."
            )
        size = path.stat().st_size
    except OSError as error:
        raise DamagedCheckpoint(f"{path} cannot be read ({error.strerror}).") from None
    if size != told.bytes:
        raise _damaged(path, f"it has {size} bytes, but was written with {told.bytes}")


def _wrong_pieces(tensor: StoredTensor, files: dict[str, StoredFile]) -> str | None:
    """Why the pieces are not the tensor, each element once."""
    total = 0
    for piece in tensor.pieces:
        if len(piece.start) != len(tensor.shape) or len(piece.stop) != len(tensor.shape):
            return "have another number of dims than its shape"
        edges = zip(piece.start, piece.stop, tensor.shape, strict=True)
        if any(not start < stop <= length for start, stop, length in edges):
            return f"do not lie within its shape {list(tensor.shape)}"
        if piece.file not in files:
            return f"are said to be in {piece.file!r:.120}, which is not among the files"
        file = files[piece.file]
        if file.header_bytes + piece.offset + piece.box.size * FLOAT_BYTES > file.bytes:
            return f"reach beyond the end of {piece.file}"
        total += piece.box.size
    if total != prod(tensor.shape):
        return f"have {total} elements together, but its shape {list(tensor.shape)} has {prod(tensor.shape)}"
    return "overlap" if _overlap([piece.box for piece in tensor.pieces]) else None


def _overlap(boxes: list[Box]) -> bool:
    ordered = sorted(boxes, key=lambda box: box.start)
    for index, box in enumerate(ordered):
        for other in ordered[index + 1 :]:
            if box.start and other.start[0] >= box.stop[0]:
                break
            if box.intersect(other) is not None:
                return True
    return False


def _damaged(path: Path, why: str) -> DamagedCheckpoint:
    return DamagedCheckpoint(
        f"{path} is damaged or not a checkpoint's: {why}; use an earlier checkpoint."
    )
