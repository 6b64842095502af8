"""`context`: the device and how graphs are compiled and run on it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from mindgrpo.config.section import AFTER_SIZE, BEFORE_TEXT, BEFORE_UPPER, OptionalText, Section

PrecisionMode = Literal[
    "must_keep_origin_dtype",
    "force_fp16",
    "force_fp32",
    "allow_fp32_to_fp16",
    "allow_fp32_to_bf16",
    "allow_mix_precision",
    "allow_mix_precision_fp16",
    "allow_mix_precision_bf16",
]
OptLevel = Annotated[Literal["O0", "O1", "O2"] | None, BEFORE_UPPER]


class JitConfig(Section):
    jit_level: OptLevel = None
    """how far graphs are optimised at compile time; null: the framework's own"""


class AscendConfig(Section):
    precision_mode: PrecisionMode | None = None
    """what the accelerator may compute in; null: the framework's own"""


class Context(Section):
    mode: int = Field(0, ge=0, le=1)
    """0 compiles graphs; 1 runs every operation by itself, slowly, for debugging"""
    device_target: OptionalText = None
    """null: the device that is found"""
    max_device_memory: Annotated[OptionalText, AFTER_SIZE] = None
    """budget a device, such as 58GB; null: no budget"""
    transport: OptionalText = None
    """null: the device's own choice"""
    max_call_depth: int | None = Field(None, ge=1)
    """deepest nesting of calls in a graph; null: the framework's own"""
    save_graphs: bool | int = Field(False, ge=0, le=3)
    """write the compiler's graphs: true, or 1 (few) to 3 (all)"""
    save_graphs_path: Annotated[str, BEFORE_TEXT] = "./graphs"
    """where they go, where there are several ranks a folder each"""
    jit_config: JitConfig = JitConfig()
    memory_optimize_level: Annotated[Literal["O0", "O1"] | None, BEFORE_UPPER] = None
    """O1 reuses memory more; null: the framework's own"""
    ascend_config: AscendConfig = AscendConfig()
