"""Unfinished completions of partial rollouts as a checkpoint's manifest has them: arrays as base64, little-endian."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Sequence
from itertools import groupby

import numpy as np
from pydantic import Field, model_validator

from mindgrpo.checkpoint.model import Count, ManifestModel
from mindgrpo.rollout.partial import PartialGroup
from mindgrpo.rollout.sample import Sample

# (version, number of tokens that weights of it wrote).
Run = tuple[Count, Count]


class StoredSample(ManifestModel):
    """`tokens` are int32 and `logps` float32, as many as `versions` count; no reason: unfinished.

    Of a conversation, `turns` are stretches (1 where the policy wrote, number of tokens) and `messages` a JSON text.
    """

    tokens: str
    logps: str
    versions: list[Run]
    finish_reason: str | None
    turns: list[Run] = []
    messages: str = "[]"

    @model_validator(mode="after")
    def _fits(self) -> StoredSample:
        count = 4 * sum(number for _, number in self.versions)
        for name in ("tokens", "logps"):
            try:
                size = len(base64.b64decode(getattr(self, name), validate=True))
            except binascii.Error as error:
                raise ValueError(f"{name} are not base64: {error}") from None
            if size != count:
                raise ValueError(f"{name} have {size} bytes, but the versions are of {count}")
        written = 4 * sum(number for _, number in self.turns)
        if self.turns and written != count:
            raise ValueError(f"turns are of {written} bytes, but the versions are of {count}")
        if not isinstance(json.loads(self.messages), list):
            raise ValueError("messages are no list")
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
    return StoredSample(
        tokens=_text(sample.tokens.astype("<i4")),
        logps=_text(sample.logps.astype("<f4")),
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
        PartialGroup(group.position, group.step, tuple(_sample(s, prompt) for s in group.samples))
        for group, prompt in zip(stored, prompts, strict=True)
    )


def _sample(stored: StoredSample, prompt: np.ndarray) -> Sample:
    versions = _repeated(stored.versions)
    return Sample(
        np.asarray(prompt, np.int32),
        _array(stored.tokens, "<i4").astype(np.int32),
        _array(stored.logps, "<f4").astype(np.float32),
        versions,
        _repeated(stored.turns).astype(bool) if stored.turns else np.ones(len(versions), bool),
        tuple(json.loads(stored.messages)),
        stored.finish_reason,
    )


def _repeated(runs: Sequence[Run]) -> np.ndarray:
    stretches = [np.full(count, value, np.int32) for value, count in runs]
    return np.concatenate([np.zeros(0, np.int32), *stretches])


def _text(values: np.ndarray) -> str:
    return base64.b64encode(values.tobytes()).decode("ascii")


def _array(text: str, dtype: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), dtype)
