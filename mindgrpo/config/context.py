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
    """optimization level of the graph compiler; null: MindSpore's default"""


class AscendConfig(Section):
    precision_mode: PrecisionMode | None = None
    """precision mode of the accelerator's operators; null: MindSpore's default"""


class Context(Section):
    mode: int = Field(0, ge=0, le=1)
    """execution mode. 0: compiled graphs; 1: one operation at a time (slow, for debugging)"""
    device_target: OptionalText = None
    """device type; null: the one that is available"""
    max_device_memory: Annotated[OptionalText, AFTER_SIZE] = None
    """maximum memory to use on each device, such as 58GB; null: no limit"""
    backend: OptionalText = None
    """how ranks exchange data. shared_memory: through the memory of one host; device: through MindSpore's
    communication, on one host or several (docs/devices.md); null: the default of the device"""
    max_call_depth: int | None = Field(None, ge=1)
    """maximum depth of nested calls in a graph; null: MindSpore's default"""
    save_graphs: bool | int = Field(False, ge=0, le=3)
    """dump the compiler's graphs: true, or a level from 1 (few) to 3 (all)"""
    save_graphs_path: Annotated[str, BEFORE_TEXT] = "./graphs"
    """folder for the dumped graphs; with several ranks, one subfolder per rank"""
    float32_matmul_precision: Annotated[
        Literal["auto", "highest", "high", "medium"], BEFORE_TEXT
    ] = "auto"
    """precision of float32 matrix products, in PyTorch's terms. highest: float32; high: six bfloat16 products (same
    accuracy) or the device's equivalent (docs/numbers.md); medium: bfloat16 inputs with float32 accumulation; auto:
    high on processors with AMX, else highest"""
    compute_dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], BEFORE_TEXT] = (
        "auto"
    )
    """dtype of weights in graphs, of activations, of the KV cache and of weight transfers; the optimizer's master
    weights and moments stay float32 (docs/numbers.md); auto: compute_dtype of model_config, else float32 on processors
    and bfloat16 on accelerators"""
    loss_scale: float | None = Field(None, gt=0)
    """loss scale for compute_dtype float16 (gradients are divided by it again), because gradients below 6e-8 underflow
    in float16 and those above 65504 overflow; null: 1024"""
    jit_config: JitConfig = JitConfig()
    memory_optimize_level: Annotated[Literal["O0", "O1"] | None, BEFORE_UPPER] = None
    """memory optimization level of the framework. O1: reuse more memory; null: MindSpore's default"""
    ascend_config: AscendConfig = AscendConfig()

    @property
    def target(self) -> Target:
        """Returns the device and backend. Raises UserError for those that do not exist."""
        return choose_target(self.device_target, self.backend)

    @property
    def max_device_bytes(self) -> int | None:
        """Returns the bytes of each device that the run may use; None without a limit."""
        return memory_bytes(self.max_device_memory) if self.max_device_memory else None
