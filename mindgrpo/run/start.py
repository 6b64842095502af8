"""Whether a run goes on from an earlier one, and whether it is still the same run; before any device is touched.

Another model, data set or algorithm than the one that was saved is an error unless the user allows it by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import mindgrpo
from mindgrpo.checkpoint import differences
from mindgrpo.checkpoint.folders import Candidate, Start, find
from mindgrpo.checkpoint.format import Identity
from mindgrpo.config import Config, values_by_key
from mindgrpo.monitor.run_directory import ROOT
from mindgrpo.run.preflight import Inputs


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
