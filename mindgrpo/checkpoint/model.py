"""What every part of a checkpoint's manifest shares: it is strict and frozen."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=0)]


class ManifestModel(BaseModel):
    """A part of a manifest: nothing unknown, nothing converted, nothing that is not finite."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, populate_by_name=True
    )
