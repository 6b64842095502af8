"""Keys of `rl_config` about checkpoints, resuming from them, and the end of a run before its last step."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, field_validator

from mindgrpo.config.section import BEFORE_LIST, OptionalText, Section


def _switch_or_path(value: object) -> object:
    words = {"true": True, "false": False, "": False}
    return words.get(value.lower(), value) if isinstance(value, str) else value


class CheckpointKeys(Section):
    save_ckpt_interval: int | None = Field(0, ge=0)
    """a checkpoint every so many steps and after the last, in checkpoints/ of the run's folder; 0: none"""
    save_max_ckpt_num: int | None = Field(5, ge=1)
    """so many of the newest checkpoints stay; null: all of them"""
    save_ckpt_best: OptionalText = None
    """a reward's name: the checkpoint with its highest held-out mean is kept besides the newest"""
    save_ckpt_async: bool = False
    """write checkpoints beside the next step, from a copy in the host's memory"""
    save_ckpt_format: Literal["safetensors"] = "safetensors"
    """checkpoints are safetensors and one JSON file"""
    resume_training: Annotated[bool | str, BeforeValidator(_switch_or_path)] = False
    """go on from a checkpoint: true for the latest of output_dir (or of the configuration's newest run that has one),
    or the path of a run or of a checkpoint"""
    resume_changed: Annotated[list[str], BEFORE_LIST] = []
    """settings that may differ from the run that is gone on with, as its refusal names them; or all"""
    max_seconds: float | None = Field(None, gt=0)
    """end the run after so many seconds since its launch, when the step is done and saved"""

    @field_validator("save_ckpt_format", mode="before")
    @classmethod
    def _no_ckpt(cls, value: object) -> object:
        if value == "ckpt":
            raise ValueError(
                "cannot be ckpt: such files hold no layout and no digest; checkpoints are safetensors, and "
                "actor_config.load reads a model's .ckpt"
            )
        return value

    @property
    def saves_checkpoints(self) -> bool:
        """Whether checkpoints were asked for."""
        return bool(
            self.save_ckpt_interval
            or self.save_ckpt_best
            or self.max_seconds
            or self.resume_training is not False
        )
