"""Whether all ranks start alike, whether the run goes on from an earlier one, and whether it is still the same run.

Another model, data set or algorithm than the one that was saved is an error unless the user allows it by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mindgrpo
from mindgrpo.backend.contract import Backend
from mindgrpo.backend.dtypes import DTYPE_KEY, PRECISION_KEY
from mindgrpo.backend.rank_consistency import different_ranks, digest
from mindgrpo.checkpoint import differences
from mindgrpo.checkpoint.folders import Candidate, Start, find
from mindgrpo.checkpoint.format import Identity
from mindgrpo.config import Config, values_by_key
from mindgrpo.errors import UserError
from mindgrpo.monitor.run_directory import ROOT
from mindgrpo.run.preflight import Inputs

SOURCES = (".py", ".c", ".h")
FOLDER = Path(mindgrpo.__file__).parent


def check_same_start(config: Config, backend: Backend) -> None:
    """All ranks together, before anything else is agreed. Raises UserError on all of them."""
    values = {key: repr(value) for key, value in values_by_key(config).items()}
    # What auto is on this rank's processor.
    values[PRECISION_KEY] = repr(backend.matmul_precision)
    values[DTYPE_KEY] = repr(backend.compute_dtype)
    by_rank = backend.world.gather_objects((values, code_digest()))
    check_configurations([values for values, _ in by_rank])
    others = different_ranks([code for _, code in by_rank])
    if others:
        raise UserError(
            f"rank {others[0]} runs other code than the other ranks (mindgrpo {mindgrpo.__version__} in "
            f"{FOLDER} here); install one version on every host."
        )


def check_configurations(by_rank: Sequence[Mapping[str, str]]) -> None:
    """Key -> value in words, of each rank. Raises UserError."""
    others = different_ranks([digest(sorted(values.items())) for values in by_rank])
    if not others:
        return
    usual = next(rank for rank in range(len(by_rank)) if rank not in others)
    here, there = by_rank[usual], by_rank[others[0]]
    keys = [key for key in {**here, **there} if here.get(key) != there.get(key)]
    more = f" and {len(keys) - 1} more keys differ" if len(keys) > 1 else ""
    raise UserError(
        f"rank {others[0]} starts with another configuration than rank {usual}: {keys[0]} is {there.get(keys[0])} "
        f"there and {here.get(keys[0])} here{more}; give all ranks the same file, flags and environment."
    )


def code_digest() -> str:
    files = sorted(path for path in FOLDER.rglob("*") if path.suffix in SOURCES)
    return digest([(str(path.relative_to(FOLDER)), path.read_bytes()) for path in files])


def find_start(config: Config, inputs: Inputs, name: str) -> Start | None:
    """Where the run begins, after comparing the configurations; None if it was not asked to go on. Raises UserError."""
    start = find(config.rl_config.resume_training, config.output_dir, name, ROOT)
    if start is not None and start.candidates:
        start.notes.extend(compare(start.candidates[0], config, identity_of(config, inputs)))
    return start


def compare(candidate: Candidate, config: Config, now: Identity) -> list[str]:
    changes = differences.differences(candidate.manifest.identity, now)
    if not now.unsaved:  # weights are compared when they have been read
        changes = [one for one in changes if not one.key.startswith("weights.")]
    return differences.check(changes, config.rl_config.resume_changed, str(candidate.folder))


def identity_of(
    config: Config, inputs: Inputs, unsaved: Mapping[str, str] | None = None
) -> Identity:
    plan = inputs.plan
    model = asdict(plan.model)
    del model["raw"]
    batch = plan.batch
    return Identity(
        code=mindgrpo.__version__,
        config=_as_json(values_by_key(config)),
        model=_as_json(model),
        data=inputs.prompts.fingerprint,
        batch={
            "prompts_per_step": batch.prompts_per_step,
            "updates_per_rollout": batch.updates_per_rollout,
        },
        unsaved=dict(unsaved or {}),
    )


def _as_json(values: Mapping[str, Any]) -> Any:
    return json.loads(json.dumps(values, default=str))
