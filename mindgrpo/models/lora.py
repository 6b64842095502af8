"""Low-rank adapters (LoRA, arXiv:2106.09685): their parameters and sharding, initialization, graph code and merging.

W' = W + alpha / rank * B A, with A [rank, in] and B [out, rank]. If W is split along its inputs, so is A; if along its
outputs, so is B; the other factor is replicated on the tp group. Each expert has a pair of its own, A [experts, rank,
in] and B [experts, out, rank], on the ranks that hold the expert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn, ops
from mindspore.ops.auto_generate import SplitWithSize

from mindgrpo.backend.dtypes import mindspore_dtype
from mindgrpo.backend.kernels.contract import Kernels
from mindgrpo.errors import UserError
from mindgrpo.models.parallel_cells import Linear
from mindgrpo.parallel.sharding import Box, ParameterSpec
from mindgrpo.weights.local_weights import HostTensors, Weights
from mindgrpo.weights.pretrained import generator_of

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# The targets of latent attention, in place of q_proj, k_proj and v_proj.
OF_LATENTS = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
A, B = "lora_A", "lora_B"


@dataclass(frozen=True)
class LoraSettings:
    rank: int
    alpha: float
    targets: tuple[str, ...]

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


def adapter_names(name: str) -> tuple[str, str]:
    """Returns the names of the A and B tensors of base tensor `name`."""
    stem = name.removesuffix("weight")
    return f"{stem}{A}.weight", f"{stem}{B}.weight"


def adapted_names(adapters: Iterable[str]) -> list[str]:
    """Returns the names of the base tensors of the adapter tensors named `adapters`."""
    ending = f"{A}.weight"
    return [f"{name.removesuffix(ending)}weight" for name in adapters if name.endswith(ending)]


def targets_of(base: Sequence[ParameterSpec]) -> tuple[str, ...]:
    """Returns the model's modules that can have adapters: all matrices except router, embedding table and LM head."""
    modules = {spec.name.split(".")[-2] for spec in base}
    return tuple(target for target in (*TARGETS, *OF_LATENTS) if target in modules)


def adapter_specs(
    base: Sequence[ParameterSpec], settings: LoraSettings
) -> tuple[ParameterSpec, ...]:
    """Returns the specs of A and B for every base matrix, experts included, whose module is a target.

    Raises UserError for a target that the model does not have.
    """
    specs: list[ParameterSpec] = []
    for spec in base:
        module, kind = spec.name.split(".")[-2:]
        if kind == "weight" and module in settings.targets:
            specs += _pair(spec, settings.rank)
    known = targets_of(base)
    for target in settings.targets:
        if target not in known:
            raise UserError(
                f"actor_config.lora.target_modules names '{target}', but must name some of {', '.join(known)}; "
                "correct it or leave it out for all of them."
            )
    return tuple(specs)


def _pair(spec: ParameterSpec, rank: int) -> tuple[ParameterSpec, ParameterSpec]:
    (a_name, b_name), (a_key, b_key) = adapter_names(spec.name), adapter_names(spec.key)
    *experts, out, inner = spec.shape
    of_rows, of_columns = len(experts), len(experts) + 1

    def factor(name: str, key: str, shape: tuple[int, int], without: int) -> ParameterSpec:
        kept = tuple(split for split in spec.splits if split.dim != without)
        # Each rank computes only a partial gradient of a factor that is replicated where its base matrix is split.
        partial = {axis for split in spec.splits if split.dim == without for axis in split.axes}
        whole, summed_over = (*experts, *shape), spec.summed_over | partial
        return replace(
            spec, name=name, fused_key=key, shape=whole, splits=kept, summed_over=summed_over
        )

    return (
        factor(a_name, a_key, (rank, inner), of_rows),
        factor(b_name, b_key, (out, rank), of_columns),
    )


def factor_box(box: Box, shape: Sequence[int]) -> Box:
    """Returns the box of A or B, of `shape`, for the experts in `box` of the base; without experts, all of it."""
    experts = len(shape) - 2
    return Box((*box.start[:experts], 0, 0), (*box.stop[:experts], *shape[experts:]))


def fill_adapters(adapters: Weights, seed: int) -> None:
    """Initializes A uniformly in +-1 / sqrt(in) and B with zeros, with the same values under every layout.

    The adapted model thus equals the base model at first.
    """
    with adapters.on_host(write=True) as host:
        for spec in adapters.specs():
            part = host.hf_views.get(spec.name)
            if part is None:
                continue
            part[...] = 0.0
            if f".{A}." in spec.name:
                values = generator_of(spec.name, seed).random(spec.shape, dtype=np.float32)
                bound = np.float32(spec.shape[-1] ** -0.5)
                part[...] = ((2 * values - 1) * bound)[adapters.boxes[spec.name].slices]


def add_product(
    matrix: np.ndarray,
    a: np.ndarray,
    b: np.ndarray,
    scale: np.float32,
    multiply: Callable[[np.ndarray, np.ndarray], np.ndarray],
) -> None:
    """Adds scale * B A to a matrix [out, in], or to each of [experts, out, in], in place.

    `a` is [..., rank, in], `b` [..., out, rank]; `multiply` is Kernels.float32_product.
    """
    if matrix.ndim > 2:
        for own in zip(matrix, a, b, strict=True):
            add_product(*own, scale, multiply)
    else:
        matrix[...] = matrix + scale * multiply(a.T, b.T).T


def merge(
    weights: Weights | HostTensors,
    adapters: Weights | HostTensors,
    settings: LoraSettings,
    kernels: Kernels,
) -> None:
    """Adds scale * B A to each adapted tensor of a rank's `weights`, in place, on the host or the device.

    `adapters` must have the same layout.
    """
    adapted = [name for name in weights.names if adapter_names(name)[1] in adapters.boxes]
    scale = np.float32(settings.scale)
    if (
        isinstance(weights, HostTensors)
        or isinstance(adapters, HostTensors)
        or weights.pool.is_host_memory
    ):
        views, low_rank = weights.arrays.hf_views, adapters.arrays.hf_views
        for name in adapted:
            a_name, b_name = adapter_names(name)
            add_product(
                views[name], low_rank[a_name], low_rank[b_name], scale, kernels.float32_product
            )
        return
    merged = []
    for name in adapted:
        # Stored [in, out]: the transpose of B A.
        a, b = (adapters.part(factor) for factor in adapter_names(name))
        whole = ops.cast(weights.part(name), ms.float32) + float(scale) * ops.matmul(a, b)
        merged.append((weights.region(name), whole.astype(mindspore_dtype(weights.dtype))))
    weights.set_parts(merged)


class _Value(nn.Cell):
    """(value, other) -> value, passing its gradient on to both."""

    def construct(self, value: Any, other: Any) -> Any:
        return value

    def bprop(self, value: Any, other: Any, out: Any, dout: Any) -> Any:
        return dout, dout


class LowRankLinear(nn.Cell):
    """x [N, in] -> base(x) + scale * (x A) B, [N, out], where the base may fuse several matrices along `out`.

    `widths` are the output widths of the fused matrices, and `adapted` tells which of them have adapters; `a` is
    [in, adapted matrices * rank] and `b` [rank, sum of their widths]. With experts both are [experts, ...], and the
    cell also takes the number of rows of each expert. With `merging`, a float32_matmul of the kernels, the output is
    computed with the merged matrix, bitwise equal to the result of `merge`.
    """

    def __init__(
        self,
        base: Linear,
        a: Any,
        b: Any,
        widths: Sequence[int],
        adapted: Sequence[bool],
        settings: LoraSettings,
        matmul: Any,
        merging: Any = None,
    ) -> None:
        super().__init__()
        self.base = base
        self.a, self.b = a, b
        self.widths, self.adapted = tuple(widths), tuple(adapted)
        self.rank, self.scale = settings.rank, settings.scale
        self.matmul, self.merging = matmul, merging
        self.is_merged = merging is not None
        self.value = _Value()
        own = [width for width, has_adapter in zip(widths, adapted, strict=True) if has_adapter]
        self.is_one, self.is_of_experts = len(self.widths) == 1, base.is_of_experts
        self.rank_sizes, self.own_widths = (self.rank,) * len(own), tuple(own)
        self.adapts_all = all(self.adapted)
        # HyperMap instead of a loop over a list, which MindSpore unrolls into graphs and copies at each append.
        self.split, self.concat, self.map = SplitWithSize(), ops.Concat(-1), ops.HyperMap()

    def construct(self, x: Any, rows: Any = None) -> Any:
        added = self.base(x, rows) + self.added(x, rows)
        if self.is_merged:
            # Gradients go through base and adapters, so that no layer stores its merged matrix.
            product = self.base.product(x, self.merged(x), rows)
            return self.value(ops.stop_gradient(product), added)
        return added

    def multiply(self, x: Any, matrix: Any, rows: Any) -> Any:
        if self.is_of_experts:
            return self.matmul(x, matrix, rows)
        return self.matmul(x, matrix)

    def added(self, x: Any, rows: Any) -> Any:
        """Computes scale * (x A) B, [N, out]."""
        # Adapters are float32, but multiplied in the dtype of x.
        a, b = ops.cast(self.a, x.dtype), ops.cast(self.b, x.dtype)
        low = self.multiply(x, a, rows) * self.scale
        if self.is_one:
            return self.multiply(low, b, rows)
        of_low, of_b = self.split(low, self.rank_sizes, -1), self.split(b, self.own_widths, -1)
        if self.is_of_experts:
            columns = self.map(ops.partial(_by_expert, self.matmul, rows), of_low, of_b)
        else:
            columns = self.map(self.matmul, of_low, of_b)
        return self.beside(columns, (x.shape[0],))

    def merged(self, x: Any) -> Any:
        """Computes the merged matrix [in, out], W + scale * A B, after x, so that those of all layers never coexist."""
        a, weight = ops.depend(self.a, x), self.base.weight
        if self.is_one:
            low_rank = self.merging(a, self.b)
        else:
            of_a = self.split(a, self.rank_sizes, -1)
            of_b = self.split(self.b, self.own_widths, -1)
            low_rank = self.beside(self.map(self.merging, of_a, of_b), weight.shape[:-1])
        return ops.cast(ops.cast(weight, ms.float32) + low_rank * self.scale, weight.dtype)

    def beside(self, columns: Any, rows: Any) -> Any:
        """Concatenates the adapted matrices' columns [*rows, width], with zeros for matrices without an adapter."""
        if self.adapts_all:
            return self.concat(columns)
        every, number = [], 0
        for i in range(len(self.widths)):
            if self.adapted[i]:
                every.append(columns[number])
                number += 1
            else:
                every.append(ops.zeros((*rows, self.widths[i]), columns[0].dtype))
        return self.concat(every)


def _by_expert(matmul: Any, rows: Any, x: Any, matrix: Any) -> Any:
    return matmul(x, matrix, rows)


class OfEach(nn.Cell):
    """Batched GEMM (a [E, N, K], b [E, K, M]) -> [E, N, M], with an `expert_matmul` of the kernels."""

    def __init__(self, expert_matmul: Any) -> None:
        super().__init__()
        self.matmul = expert_matmul

    def construct(self, a: Any, b: Any) -> Any:
        experts, rows, depth = a.shape
        counts = ops.zeros((experts,), ms.int32) + rows
        return self.matmul(a.reshape(-1, depth), b, counts).reshape(experts, rows, -1)
