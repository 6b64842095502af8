"""Defines the format of a checkpoint: a folder with one safetensors file a rank and manifest.json, which it reads.

The manifest has the run's state, where each chunk of each tensor lies, and digests of everything. Reading executes
nothing; a manifest that was changed, or whose chunks overlap, leave a gap or do not lie in their file, is an error.
Unfinished completions of partial rollouts are in it with their arrays as base64, little-endian, but for remote ones,
which have files (remote_files.py). What changes here changes VERSION.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from itertools import combinations, groupby, pairwise
from math import prod
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from mindgrpo.algorithm.sample import PartialGroup, Sample
from mindgrpo.algorithm.token_arrays import TOKEN_ARRAYS, RemoteArray, TokenArray
from mindgrpo.errors import UserError
from mindgrpo.parallel.sharding import Box
from mindgrpo.strict_files import read_object

Count = Annotated[int, Field(ge=0)]


class ManifestModel(BaseModel):
    """Refuses unknown keys, other types and numbers that are not finite, in every part of a manifest."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, populate_by_name=True
    )


RemoteDtype = Literal["uint8", "uint16"]
RemoteShape = tuple[Count, Count, Count]
# Without the bytes, which version 1 has here.
Remote = tuple[RemoteDtype, RemoteShape] | tuple[RemoteDtype, RemoteShape, str]
# (value, number of tokens that have it).
Stretch = tuple[Count, Count]
TOKENS = TokenArray("the tokens", np.int32)


class StoredSample(ManifestModel):
    """`tokens` are int32, as many as `versions` count; `logps` and further `arrays` are as TOKEN_ARRAYS declares them.

    Without a finish reason the sample is unfinished. Of a conversation, `turns` are stretches (1 where the policy
    wrote, number of tokens) and `messages` a JSON text. `routes`, a remote array, is that of an ended sample, which no
    engine computes again.
    """

    tokens: str
    logps: str
    arrays: dict[str, str] = {}
    versions: list[Stretch]
    finish_reason: str | None
    turns: list[Stretch] = []
    messages: str = "[]"
    routes: Remote | None = None

    @property
    def remote(self) -> dict[str, Remote]:
        """Returns dtypes and shapes of remote arrays by their names."""
        return {} if self.routes is None else {"routes": self.routes}

    @property
    def inline_arrays(self) -> dict[str, np.ndarray]:
        """Returns the remote arrays of version 1. Raises ValueError where one does not have its shape."""
        arrays = {}
        for name, (dtype, shape, *texts) in self.remote.items():
            for text in texts:
                declared = TokenArray(name, np.uint8 if dtype == "uint8" else np.uint16)
                arrays[name] = _array(name, text, declared, prod(shape)).reshape(shape)
        return arrays

    @property
    def count(self) -> int:
        """Returns the number of its tokens."""
        return sum(number for _, number in self.versions)

    @property
    def token_arrays(self) -> dict[str, np.ndarray]:
        """Returns the declared arrays by name. Raises ValueError where one does not have an entry for each token."""
        stored = {"logps": self.logps, **self.arrays}
        arrays = {
            n: _array(n, stored[n], a, self.count) for n, a in TOKEN_ARRAYS.items() if n in stored
        }
        return {**arrays, "versions": _repeated(self.versions)}

    @model_validator(mode="after")
    def _fits(self) -> StoredSample:
        _array("tokens", self.tokens, TOKENS, self.count)
        _ = self.token_arrays, self.inline_arrays
        written = sum(number for _, number in self.turns)
        if self.turns and written != self.count:
            raise ValueError(f"turns are of {written} tokens, but the versions are of {self.count}")
        if not isinstance(json.loads(self.messages), list):
            raise ValueError("messages are not a list")
        return self


class StoredGroup(ManifestModel):
    """Samples of the prompt that is number `position` in the run's order, begun in step number `step`, from 0."""

    position: Count
    step: Count
    samples: list[StoredSample] = Field(min_length=1)


def version_runs(versions: np.ndarray) -> list[tuple[int, int]]:
    """Returns (version, number of tokens) for each run of equal versions in int32 [n]."""
    return [(version, len(list(run))) for version, run in groupby(versions.tolist())]


def stored_groups(groups: Sequence[PartialGroup]) -> list[StoredGroup]:
    return [
        StoredGroup(
            position=group.position,
            step=group.step,
            samples=[_stored(sample) for sample in group.samples],
        )
        for group in groups
    ]


def _stored(sample: Sample) -> StoredSample:
    texts: dict[str, str] = {}
    remote: dict[str, Any] = {}
    for name, values in sample.arrays.items():
        if not isinstance(values, RemoteArray):
            texts[name] = _text(values)
        elif sample.finish_reason is not None and values.segments:
            remote[name] = values.dtype.name, values.shape
    texts.pop("versions")
    return StoredSample(
        tokens=_text(sample.tokens),
        logps=texts.pop("logps"),
        arrays=texts,
        versions=version_runs(sample.versions),
        finish_reason=sample.finish_reason,
        turns=version_runs(sample.action_mask.astype(np.int32)),
        messages=json.dumps(sample.messages),
        **remote,
    )


def restored_groups(
    stored: Sequence[StoredGroup],
    prompts: Sequence[np.ndarray],
    files: Mapping[tuple[int, int], dict[str, np.ndarray]] | None = None,
) -> tuple[PartialGroup, ...]:
    """Restores partial groups; `prompts` int32 [n] each are those at the groups' positions.

    `files` are the remote arrays of the checkpoint's files by the numbers of group and sample, and by name.
    """
    return tuple(
        PartialGroup(
            group.position,
            group.step,
            tuple(
                _sample(i, own, prompt, own.inline_arrays | (files or {}).get((number, i), {}))
                for i, own in enumerate(group.samples)
            ),
        )
        for number, (group, prompt) in enumerate(zip(stored, prompts, strict=True))
    )


def _sample(
    number: int, stored: StoredSample, prompt: np.ndarray, remote: Mapping[str, np.ndarray]
) -> Sample:
    turns = _repeated(stored.turns).astype(bool)
    whole = {name: TOKEN_ARRAYS[name].of(values, len(values)) for name, values in remote.items()}
    return Sample(
        number,
        np.asarray(prompt, np.int32),
        _array("tokens", stored.tokens, TOKENS, stored.count),
        turns if stored.turns else np.ones(stored.count, bool),
        stored.token_arrays | whole,
        stored.finish_reason,
        tuple(json.loads(stored.messages)),
    )


def _repeated(stretches: Sequence[Stretch]) -> np.ndarray:
    values = [np.full(count, value, np.int32) for value, count in stretches]
    return np.concatenate([np.zeros(0, np.int32), *values])


def _text(values: np.ndarray) -> str:
    narrow = values.astype(values.dtype.newbyteorder("<"))
    return base64.b64encode(narrow.tobytes()).decode("ascii")


def _array(name: str, text: str, declared: TokenArray, count: int) -> np.ndarray:
    try:
        read = base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(f"{name} are not base64: {error}") from None
    expected = declared.num_bytes(count)
    if len(read) != expected:
        raise ValueError(f"{name} have {len(read)} bytes, but the versions are of {expected}")
    values = np.frombuffer(read, np.dtype(declared.dtype).newbyteorder("<"))
    return declared.of(values, count).astype(declared.dtype)


MANIFEST = "manifest.json"
FORMAT = "mindgrpo checkpoint"
# Older programs refuse what they do not know: whatever adds to a manifest, or means something else by an entry, raises
# this number. Every one of them is read for ever, and tests/data/checkpoints has a checkpoint of each.
VERSION: Final = 2
READ_VERSIONS = (1, VERSION)
MAX_BYTES = 1 << 30
# Every tensor is float32 in a file, which holds any dtype's values.
FLOAT_BYTES = 4

FILE_NAME = r"^[A-Za-z0-9_-][A-Za-z0-9_.-]{0,120}\.safetensors$"
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Means = dict[str, float | None]


class DamagedCheckpoint(UserError):
    """Raised for a checkpoint that cannot be used as it is; an earlier one may do."""


class Best(ManifestModel):
    """Names the step whose evaluation gave the best mean of `reward`, the one that the user chose.

    Version 1 does not say which it was.
    """

    step: Count
    score: float
    reward: str | None = None


class StoredShapes(ManifestModel):
    """Holds a choice of micro-batches' shapes (algorithm/row_shapes.py): the next ones follow from these."""

    in_use: list[tuple[Count, Count]]
    excess: Count


class RunState(ManifestModel):
    """Describes a run at the end of `step` (counted from 1), besides its weights.

    Sampling noise, data order and learning rates are functions of these numbers. `prompts` were taken from the data
    over all epochs; `updates` and `weights_version` are the optimizer's and the policy's counts; `seconds` is the time
    that the run has taken over all its sessions. `output_paths` are folders of the run outside of its own. `open_row`
    has the metrics of `step` where its evaluation is still to be made, and None where the step is finished.
    `unfinished` are groups of partial rollouts that continue in the next step, the oldest first, and `baselines` those
    of rae by role. `solved` are the numbers of rows that are not drawn again. `shapes` are those of micro-batches, by
    phase. `critic_updates` counts the critic's optimizer steps; without a critic, files have no such entry.
    """

    step: Count
    prompts: Count
    updates: Count
    weights_version: Count
    evaluations: list[Means] = []
    best: Best | None = None
    seconds: float = Field(0.0, ge=0)
    first_step_seconds: float | None = Field(None, ge=0)
    compiles: Count = 0
    output_paths: dict[str, str] = Field({}, alias="places")
    open_row: dict[str, Any] | None = None
    unfinished: list[StoredGroup] = []
    baselines: dict[str, float] = {}
    solved: list[Count] = []
    shapes: dict[str, StoredShapes] = {}
    critic_updates: Count | None = None


class StoredChunk(ManifestModel):
    """Says where a chunk lies: `offset` counts from the first byte of data; `digest` is the SHA-256 of its bytes."""

    start: tuple[Count, ...]
    stop: tuple[Count, ...]
    file: str
    offset: Count
    digest: Digest

    @property
    def box(self) -> Box:
        return Box(self.start, self.stop)

    @property
    def end(self) -> int:
        return self.offset + self.box.size * FLOAT_BYTES


class StoredTensor(ManifestModel):
    shape: tuple[Count, ...]
    dtype: Literal["F32"]
    chunks: list[StoredChunk] = Field(alias="pieces")


class StoredFile(ManifestModel):
    """Describes a file: `header` is the SHA-256 of its first `header_bytes`, before the data.

    `data` is that of all data where no chunks say it.
    """

    bytes: Count
    header_bytes: Count
    header: Digest
    data: Digest | None = None


class StoredTokenizer(ManifestModel):
    """Describes the tokenizer in `directory`: the text of its chat template and the ids that end a completion.

    `is_chosen`: the template is that of rl_config.chat_template, and `turn_end` the token that ends its turns.
    """

    directory: str
    template: str | None
    is_chosen: bool
    turn_end: str | None
    stop_ids: list[Count]


class Identity(ManifestModel):
    """Describes what has to be the same where the run is resumed.

    `config` is every setting by its dotted key; `model` the model's dimensions; `data` and `held_out` are digests of
    the prompts, `held_out` empty without any; `batch` is the arithmetic of a step; `unsaved` has digests of weights
    that the run only reads, by role; `rewards` has the weights of functions that are given in code, by name. Version 1
    has none of `held_out`, `tokenizer` and `rewards`.
    """

    code: str
    config: dict[str, Any]
    model: dict[str, Any]
    data: str
    batch: dict[str, int]
    unsaved: dict[str, str]
    held_out: str | None = None
    tokenizer: StoredTokenizer | None = None
    rewards: dict[str, float] | None = None


class StoredAdapters(ManifestModel):
    """Describes a policy's LoRA adapters: their scale is alpha / rank; `targets` are the matrices that have them."""

    rank: int = Field(ge=1)
    alpha: float = Field(gt=0)
    targets: list[str]


class Manifest(ManifestModel):
    """`tensors` by role and global name; `sums` a digest of each role's values, however they were cut."""

    format: Literal["mindgrpo checkpoint"] = "mindgrpo checkpoint"
    version: Literal[1, 2] = VERSION
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
    """Returns the file's content, with a digest of itself."""
    body = manifest.model_dump(mode="json", by_alias=True)
    if body["state"]["critic_updates"] is None:
        del body["state"]["critic_updates"]
    return json.dumps({**body, "digest": _digest(body)}, indent=1).encode() + b"\n"


def _digest(body: Any) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def read_manifest(folder: Path) -> Manifest:
    """Reads the manifest in `folder` and checks all that can be checked without weights. Raises DamagedCheckpoint."""
    path, manifest = folder / MANIFEST, parse_manifest(folder)
    for name, file in manifest.files.items():
        _check_file(folder, name, file)
    chunks: dict[str, list[StoredChunk]] = {name: [] for name in manifest.files}
    for role, tensors in manifest.tensors.items():
        for name, tensor in tensors.items():
            reason = _wrong_chunks(tensor, manifest.files)
            if reason:
                raise _damaged(path, f"the chunks of {role} {name} {reason}")
            for chunk in tensor.chunks:
                chunks[chunk.file].append(chunk)
    for name, of_file in chunks.items():
        of_file.sort(key=lambda chunk: chunk.offset)
        if any(one.end > after.offset for one, after in pairwise(of_file)):
            raise _damaged(path, f"two chunks have the same bytes of {name}")
    return manifest


def parse_manifest(folder: Path) -> Manifest:
    """Reads the manifest in `folder` by itself, without a look at the files that it names. Raises DamagedCheckpoint."""
    path = folder / MANIFEST
    return _parsed(path, _json_object(path))


def _json_object(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise DamagedCheckpoint(
            f"'{path.parent}' has no {MANIFEST}, so it is no checkpoint of mindgrpo; name a folder such as "
            "RUN/checkpoints/step_000010, or the run's own."
        )
    try:
        return read_object(path, "The manifest", "use an earlier checkpoint.", MAX_BYTES)
    except UserError as error:
        raise DamagedCheckpoint(str(error)) from None


def _parsed(path: Path, body: dict[str, Any]) -> Manifest:
    kind, version = body.get("format"), body.get("version")
    if kind != FORMAT:
        raise _damaged(path, f"its format is {kind!r:.60}, not {FORMAT!r}")
    if version not in READ_VERSIONS:
        known = " and ".join(map(str, READ_VERSIONS))
        raise DamagedCheckpoint(
            f"{path} has version {version!r:.60} of the format, and this mindgrpo reads versions {known}; use the "
            "mindgrpo that wrote it."
        )
    digest = body.pop("digest", None)
    try:
        # Of what was written: its version may lack entries of today's.
        written = _digest(body)
        # As JSON, where a list may be a tuple.
        manifest = Manifest.model_validate_json(json.dumps(body, allow_nan=False))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise _damaged(path, f"{key:.200}: {first['msg']}") from None
    except (ValueError, RecursionError) as error:
        raise _damaged(path, str(error)) from None
    if digest != written:
        raise _damaged(path, "it was changed after it was written")
    return manifest


def _check_file(folder: Path, name: str, file: StoredFile) -> None:
    path = folder / name
    if not re.fullmatch(FILE_NAME, name):
        raise _damaged(folder / MANIFEST, f"it names the file {name!r:.120}, which is no name here")
    # A link could lead out of the folder.
    if os.path.islink(path) or not os.path.isfile(path):
        raise DamagedCheckpoint(
            f"{path} is missing; the checkpoint is not whole, use an earlier one."
        )
    size = path.stat().st_size
    if size != file.bytes:
        raise _damaged(path, f"it has {size} bytes, but was written with {file.bytes}")


def _wrong_chunks(tensor: StoredTensor, files: dict[str, StoredFile]) -> str | None:
    """Returns why the chunks are not the tensor, each element once."""
    total = 0
    for chunk in tensor.chunks:
        if len(chunk.start) != len(tensor.shape) or len(chunk.stop) != len(tensor.shape):
            return "have another number of dims than its shape"
        edges = zip(chunk.start, chunk.stop, tensor.shape, strict=True)
        if any(not start < stop <= length for start, stop, length in edges):
            return f"do not lie within its shape {list(tensor.shape)}"
        if chunk.file not in files:
            return f"are said to be in {chunk.file!r:.120}, which is not among the files"
        if files[chunk.file].header_bytes + chunk.end > files[chunk.file].bytes:
            return f"reach beyond the end of {chunk.file}"
        total += chunk.box.size
    if total != prod(tensor.shape):
        return f"have {total} elements together, but its shape {list(tensor.shape)} has {prod(tensor.shape)}"
    boxes = [chunk.box for chunk in tensor.chunks]
    return "overlap" if any(a.intersect(b) for a, b in combinations(boxes, 2)) else None


def _damaged(path: Path, why: str) -> DamagedCheckpoint:
    return DamagedCheckpoint(
        f"{path} is damaged or not a checkpoint's: {why}; use an earlier checkpoint."
    )
