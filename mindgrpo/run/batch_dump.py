"""Dumps a batch with a non-finite number to a folder, with everything needed to replay its update.

The folder has batch.json, batch.safetensors, config_resolved.yaml and, if asked for, the weights as hf/. It is written
atomically and never overwrites another.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from mindgrpo.algorithm.sample import Rollout, Sample, TrainBatch
from mindgrpo.algorithm.token_arrays import TOKEN_ARRAYS
from mindgrpo.errors import UserError

FORMAT = "mindgrpo dump 4"
BATCH, ARRAYS, CONFIG, MODEL = "batch.json", "batch.safetensors", "config_resolved.yaml", "hf"
BATCH_BY_TOKEN = ("reference_logps", "old_logps", "token_advantages", "rollout_is_weights")
BATCH_BY_SAMPLE = ("advantages", "sample_mask")


class About(BaseModel):
    """Identifies an update: `step` counts from 1, `update` within the step from 0; `members` are its sample indices.

    `updates` is the number of earlier updates of the run, which seeds the update's random numbers.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    format: str = FORMAT
    cause: str
    step: int
    update: int
    members: list[int]
    lr: float
    weights_version: int
    updates: int
    finish_reasons: list[str]
    groups: list[int]
    texts: list[str] = []


@dataclass(frozen=True)
class Dump:
    """A dumped batch; `rewards` are float32 [samples] by function, and under "total"."""

    about: About
    batch: TrainBatch
    rewards: dict[str, np.ndarray] = field(default_factory=dict)


def with_arrays(dump: Dump, arrays: Mapping[str, Sequence[Any]]) -> Dump:
    """Returns the dump with the samples' remote arrays filled in."""
    rollout = dump.batch.rollout.with_arrays(arrays)
    return replace(dump, batch=replace(dump.batch, rollout=rollout))


def write(target: Path, dump: Dump, config: Path, weights: Path | None) -> None:
    """Writes a dump's folder, on one rank, and moves the folder `weights` into it. Raises OSError."""
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    (partial / BATCH).write_text(dump.about.model_dump_json(indent=2) + "\n", encoding="utf-8")
    (partial / ARRAYS).write_bytes(save(_arrays(dump)))
    shutil.copyfile(config, partial / CONFIG)
    if weights is not None:
        os.rename(weights, partial / MODEL)
    os.rename(partial, target)


def _arrays(dump: Dump) -> dict[str, np.ndarray]:
    batch = dump.batch
    arrays = {f"rewards.{name}": np.asarray(values) for name, values in dump.rewards.items()}
    arrays |= {name: getattr(batch, name) for name in BATCH_BY_SAMPLE}
    rollout = batch.rollout
    by_token = {
        "prompt_ids": rollout.prompt_ids,
        "completion_ids": rollout.completion_ids,
        "action_mask": rollout.action_mask,
        **{TOKEN_ARRAYS[n].dump_name or n: rows for n, rows in rollout.token_arrays.items()},
        **{name: getattr(batch, name) for name in BATCH_BY_TOKEN},
    }
    for name, rows in by_token.items():
        if rows is not None:
            arrays[name] = np.concatenate(rows)
            arrays[f"{name}.lengths"] = np.array([len(row) for row in rows], np.int64)
    return {name: np.ascontiguousarray(v) for name, v in arrays.items() if v is not None}


def read(folder: Path) -> Dump:
    """Reads a folder that `write` has made. Raises UserError."""
    missing = [name for name in (BATCH, ARRAYS, CONFIG) if not (folder / name).is_file()]
    if missing:
        raise UserError(
            f"'{folder}' is not a dump of a batch: {missing[0]} is not there; name one of a run's dumps/step_* folders."
        )
    try:
        about = About.model_validate(json.loads((folder / BATCH).read_text("utf-8")))
    except (ValueError, ValidationError) as error:
        first = str(error).splitlines()[0]
        raise UserError(f"{folder / BATCH} cannot be read ({first}); name another dump.") from None
    if about.format != FORMAT:
        raise UserError(
            f"{folder / BATCH} is of the form '{about.format}', not '{FORMAT}'; replay it with the version that "
            "wrote it."
        )
    try:
        arrays = load_file(folder / ARRAYS)
        return _dump_of(about, arrays)
    except (SafetensorError, KeyError, ValueError, OSError) as error:
        raise UserError(f"{folder / ARRAYS} cannot be read ({error}); name another dump.") from None


def _dump_of(about: About, arrays: dict[str, np.ndarray]) -> Dump:
    count = len(about.groups)

    def by_token(names: Sequence[str]) -> dict[str, Any]:
        rows = {}
        for name in (name for name in names if name in arrays):
            lengths = arrays[f"{name}.lengths"]
            if lengths.size != count or lengths.sum() != len(arrays[name]):
                raise ValueError(f"{name} has not the lengths of {count} samples")
            rows[name] = np.split(arrays[name], np.cumsum(lengths)[:-1])
        return rows

    tokens = by_token(("prompt_ids", "completion_ids", "action_mask"))
    names = {array.dump_name or name: name for name, array in TOKEN_ARRAYS.items()}
    declared = {names[own]: rows for own, rows in by_token(list(names)).items()}
    samples = (
        Sample(
            i,
            tokens["prompt_ids"][i],
            tokens["completion_ids"][i],
            tokens["action_mask"][i],
            {n: TOKEN_ARRAYS[n].of(rows[i], len(rows[i])) for n, rows in declared.items()},
            reason,
        )
        for i, reason in enumerate(about.finish_reasons)
    )
    rollout = Rollout(tuple(samples), tuple(about.groups))
    by_sample: dict[str, Any] = {n: arrays[n] for n in BATCH_BY_SAMPLE if n in arrays}
    batch = TrainBatch(rollout, **by_sample, **by_token(BATCH_BY_TOKEN))
    if about.members and not 0 <= min(about.members) <= max(about.members) < count:
        raise ValueError(f"members are not among {count} samples")
    prefix = "rewards."
    rewards = {n.removeprefix(prefix): v for n, v in arrays.items() if n.startswith(prefix)}
    return Dump(about, batch, rewards)
