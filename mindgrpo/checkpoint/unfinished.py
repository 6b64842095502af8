"""Unfinished completions of partial rollouts as a checkpoint's manifest has them: arrays as base64, little-endian."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Sequence
from itertools import groupby

import numpy as np
from pydantic import Field, model_validator

from mindgrpo.algorithm.sample import TOKEN_ARRAYS, Sample, TokenArray
from mindgrpo.checkpoint.model import Count, ManifestModel
from mindgrpo.rollout.partial import PartialGroup

# (value, number of tokens that have it).
Stretch = tuple[Count, Count]
TOKENS = TokenArray("the tokens", np.int32)


class StoredSample(ManifestModel):
    """`tokens` are int32, as many as `versions` count; `logps` and further `arrays` are as TOKEN_ARRAYS declares them.

    Without a finish reason the sample is unfinished. Of a conversation, `turns` are stretches (1 where the policy
    wrote, number of tokens) and `messages` a JSON text.
    """

    tokens: str
    logps: str
    arrays: dict[str, str] = {}
    versions: list[Stretch]
    finish_reason: str | None
    turns: list[Stretch] = []
    messages: str = "[]"

    @property
    def count(self) -> int:
        """The number of its tokens."""
        return sum(number for _, number in self.versions)

    @property
    def token_arrays(self) -> dict[str, np.ndarray]:
        """Those that are declared, by name. Raises ValueError where one is not of its tokens."""
        stored = {"logps": self.logps, **self.arrays}
        arrays = {
            n: _array(n, stored[n], a, self.count) for n, a in TOKEN_ARRAYS.items() if n in stored
        }
        return {**arrays, "versions": _repeated(self.versions)}

    @model_validator(mode="after")
    def _fits(self) -> StoredSample:
        _array("tokens", self.tokens, TOKENS, self.count)
        _ = self.token_arrays
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
    """(version, number of tokens), one for each stretch of int32 [n]."""
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
    texts = {name: _text(values) for name, values in sample.arrays.items() if name != "versions"}
    return StoredSample(
        tokens=_text(sample.tokens),
        logps=texts.pop("logps"),
        arrays=texts,
        versions=version_runs(sample.versions),
        finish_reason=sample.finish_reason,
        turns=version_runs(sample.action_mask.astype(np.int32)),
        messages=json.dumps(sample.messages),
    )


def restored_groups(
    stored: Sequence[StoredGroup], prompts: Sequence[np.ndarray]
) -> tuple[PartialGroup, ...]:
    """`prompts` int32 [n] are those at the groups' positions."""
    return tuple(
        PartialGroup(
            group.position,
            group.step,
            tuple(_sample(i, s, prompt) for i, s in enumerate(group.samples)),
        )
        for group, prompt in zip(stored, prompts, strict=True)
    )


def _sample(number: int, stored: StoredSample, prompt: np.ndarray) -> Sample:
    turns = _repeated(stored.turns).astype(bool)
    return Sample(
        number,
        np.asarray(prompt, np.int32),
        _array("tokens", stored.tokens, TOKENS, stored.count),
        turns if stored.turns else np.ones(stored.count, bool),
        stored.token_arrays,
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
