"""`context`: the device and how graphs are compiled and run on it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from mindgrpo.backend.targets import Target, choose_target
from mindgrpo.config.section import (
    AFTER_SIZE,
    BEFORE_TEXT,
    BEFORE_UPPER,
    OptionalText,
    Section,
    memory_bytes,
)

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
    """optimization level of the graph compiler; null: the framework's default"""


class AscendConfig(Section):
    precision_mode: PrecisionMode | None = None
    """precision in which the accelerator may compute; null: the framework's default"""


class Context(Section):
    mode: int = Field(0, ge=0, le=1)
    """0: compile graphs; 1: run every operation separately (slow, for debugging)"""
    device_target: OptionalText = None
    """device; null: the one that is available"""
    max_device_memory: Annotated[OptionalText, AFTER_SIZE] = None
    """memory budget per device, such as 58GB; null: no budget"""
    backend: OptionalText = None
    """shared_memory: the processors of one host, whose ranks share memory; device: devices with memory of their own and
    MindSpore's communication, on one host or several (docs/devices.md); null: the device's default"""
    max_call_depth: int | None = Field(None, ge=1)
    """maximum nesting depth of calls in a graph; null: the framework's default"""
    save_graphs: bool | int = Field(False, ge=0, le=3)
    """write the compiler's graphs: true, or 1 (few) to 3 (all)"""
    save_graphs_path: Annotated[str, BEFORE_TEXT] = "./graphs"
    """folder of the graphs; with several ranks, each has a folder of its own in it"""
    float32_matmul_precision: Annotated[
        Literal["auto", "highest", "high", "medium"], BEFORE_TEXT
    ] = "auto"
    """in what products of float32 matrices are computed, as PyTorch names it; highest: float32; high: six bfloat16
    products, as accurate, or what else the device has (docs/numbers.md); medium: bfloat16 factors, float32
    sums; auto: high on processors with AMX, else highest"""
    compute_dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], BEFORE_TEXT] = (
        "auto"
    )
    """dtype of weights in graphs, of activations, of the generator's cache and of what weight sync moves; the weights
    and moments that the optimizer changes stay float32 (docs/numbers.md); auto: compute_dtype of model_config, else
    float32 on processors and bfloat16 on accelerators"""
    loss_scale: float | None = Field(None, gt=0)
    """what a loss is multiplied by before its gradient is taken, and the gradient divided by, with compute_dtype
    float16, in which gradients below 6e-8 are zero and those above 65504 infinite; null: 1024"""
    jit_config: JitConfig = JitConfig()
    memory_optimize_level: Annotated[Literal["O0", "O1"] | None, BEFORE_UPPER] = None
    """O1: reuse memory more; null: the framework's default"""
    ascend_config: AscendConfig = AscendConfig()

    @property
    def target(self) -> Target:
        """Raises UserError for a device or backend that does not exist."""
        return choose_target(self.device_target, self.backend)

    @property
    def max_device_bytes(self) -> int | None:
        """Bytes of a rank's device that the run may use; None without a limit."""
        return memory_bytes(self.max_device_memory) if self.max_device_memory else None
