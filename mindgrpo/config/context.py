"""`context`: the device and how graphs are compiled and run on it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from mindgrpo.backend.targets import FUSED_KERNELS, Target, choose_target
from mindgrpo.settings.section import (
    AFTER_SIZE,
    BEFORE_LIST,
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
    kernel_launch_capture: bool = False
    """launch all kernels of the decoding graph at once, as MindSpore captures them in its first call
    (mindspore.runtime.set_kernel_launch_capture). Has not been run on an accelerator"""


class RooflineConfig(Section):
    device: OptionalText = None
    """device whose published or fitted figures are the defaults of the keys below (910A, 910B2, 910B3 or host); null:
    910B2 on accelerators, host elsewhere"""
    prompt_tokens: int | None = Field(None, ge=1)
    """number of tokens per prompt; null: a tenth of max_prompt_length"""
    completion_tokens: int | None = Field(None, ge=1)
    """mean number of tokens per completion, the longest having max_tokens; null: 60 % of max_tokens"""
    accepted_drafts: float = Field(0.0, ge=0)
    """mean number of drafted tokens that are accepted with each token that is not (generate_config.draft_rows)"""
    matmul_tflops: float | None = Field(None, gt=0)
    """peak of matrix products in 16 bits, in TFLOP/s"""
    float32_tflops: float | None = Field(None, gt=0)
    """peak of matrix products in float32, in TFLOP/s"""
    matmul_share: float | None = Field(None, gt=0, le=1)
    """fraction of the peak that large matrix products reach"""
    memory_GB_per_s: float | None = Field(None, gt=0)
    """bandwidth of the device's memory"""
    memory_share: float | None = Field(None, gt=0, le=1)
    """fraction of memory_GB_per_s that kernels reach"""
    link_GB_per_s: float | None = Field(None, gt=0)
    """bandwidth between two devices of a host, in each direction"""
    host_link_GB_per_s: float | None = Field(None, gt=0)
    """bandwidth from a device to other hosts, in each direction"""
    link_share: float | None = Field(None, gt=0, le=1)
    """fraction of a link's bandwidth that large messages reach"""
    host_copy_GB_per_s: float | None = Field(None, gt=0)
    """bandwidth between a device and its host's memory"""
    launch_us: float | None = Field(None, ge=0)
    """launch overhead of a kernel in a graph, in microseconds: the minimum time per kernel"""
    call_us: float | None = Field(None, ge=0)
    """overhead of an operation outside of graphs, in microseconds"""
    collective_us: float | None = Field(None, ge=0)
    """latency of a sum over ranks, in microseconds"""
    sync_us: float | None = Field(None, ge=0)
    """time that the host waits for a result of the device, in microseconds"""
    slow_ns: float | None = Field(None, ge=0)
    """time per element of operations that the device's fast units do not support, in nanoseconds"""
    compile_ms: float | None = Field(None, ge=0)
    """compilation time per kernel of a graph, in milliseconds"""
    devices_per_host: int | None = Field(None, ge=1)
    """number of devices in a host"""
    cores: int | None = Field(None, ge=0)
    """cores that all ranks of a host share; 0: each rank has a device of its own"""


class Context(Section):
    mode: int = Field(0, ge=0, le=1)
    """execution mode. 0: compiled graphs; 1: one operation at a time (slow, for debugging, on one
    rank; models that would train wrongly in this mode are refused)"""
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
    highest"""
    compute_dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], BEFORE_TEXT] = (
        "auto"
    )
    """dtype of weights in graphs, of activations, of the KV cache and of weight transfers; the optimizer's master
    weights and moments stay float32 (docs/numbers.md); auto: compute_dtype of model_config, else float32 on processors
    and bfloat16 on accelerators"""
    fp32_lm_head: bool = False
    """compute logits in float32 where compute_dtype or float32_matmul_precision is lower: of the policy, the reference
    and the embedded generator (MiniMax-M1, ScaleRL)"""
    reduce_dtype: Annotated[Literal["auto", "float32"], BEFORE_TEXT] = "auto"
    """dtype in which activations and their gradients are summed over the ranks of a layer (model_parallel). float32:
    more accurate where compute_dtype is narrower, but twice the traffic; auto: the dtype of the activations. Sums of
    the weights' gradients are always float32"""
    batch_invariant: bool | Literal["auto"] = "auto"
    """compute each token's numbers in the generator and in training with the same bits, whatever the batch, the packing
    and model_parallel (1, 2, 4 or 8). true: refuse what cannot; auto: where possible (docs/numbers.md)"""
    loss_scale: float | None = Field(None, gt=0)
    """loss scale for compute_dtype float16 (gradients are divided by it again), because gradients below 6e-8 underflow
    in float16 and those above 65504 overflow; null: 1024"""
    jit_config: JitConfig = JitConfig()
    memory_optimize_level: Annotated[Literal["O0", "O1"] | None, BEFORE_UPPER] = None
    """memory optimization level of the framework. O1: reuse more memory; null: MindSpore's default"""
    ascend_config: AscendConfig = AscendConfig()
    plain_kernels: Annotated[list[str], BEFORE_LIST] = Field(
        [],
        description=f"fused kernels of the device to do without: {', '.join(FUSED_KERNELS)}; MindSpore's plain "
        "operations compute the same. `doctor --device` lists those that fail (docs/first_run_on_npus.md)",
    )
    roofline: RooflineConfig = RooflineConfig()

    @field_validator("plain_kernels")
    @classmethod
    def _are_fused(cls, value: list[str]) -> list[str]:
        if not {*value} <= {*FUSED_KERNELS}:
            raise ValueError(f"must hold only {', '.join(FUSED_KERNELS)}")
        return value

    @property
    def target(self) -> Target:
        """Returns the device and backend. Raises UserError for those that do not exist."""
        return choose_target(self.device_target, self.backend)

    @property
    def max_device_bytes(self) -> int | None:
        """Returns the bytes of each device that the run may use; None without a limit."""
        return memory_bytes(self.max_device_memory) if self.max_device_memory else None
