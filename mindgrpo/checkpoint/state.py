"""What a run is besides its weights, as numbers and words. Refuses whatever is not one of these.

Sampling noise, data order and learning rates are functions of these numbers, so no generator's inner state is kept.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0)]
Means = dict[str, float | None]


class Entry(BaseModel):
    """A part of a manifest: nothing unknown, nothing converted, nothing that is not finite."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=()
    )


class Best(Entry):
    """The step whose evaluation gave the highest mean of the reward that the user chose."""

    step: Count
    score: float


class RunState(Entry):
    """A run at the end of `step` (counted from 1).

    `prompts` were taken from the data over all epochs; `updates` and `weights_version` are the optimizer's and the
    policy's counts; `seconds` is the time that the run has taken over all its sessions. `open_row` has the figures of
    `step` where its evaluation is still to be made, and None where the step is finished.
    """

    step: Count
    prompts: Count
    updates: Count
    weights_version: Count
    evaluations: list[Means] = []
    best: Best | None = None
    seconds: Seconds = 0.0
    first_step_seconds: Seconds | None = None
    compiles: Count = 0
    places: dict[str, str] = {}
    open_row: dict[str, Any] | None = None
