"""Low-rank adapters (LoRA, arXiv:2106.09685): which there are and how they are cut, first values, graph code, merging.

W' = W + alpha / rank * B A, with A [rank, in] and B [out, rank]. A is cut where W's inputs are, B where its outputs
are; the other is whole on every rank of a model group. Experts have a pair each, [experts, rank, in] and
[experts, out, rank], which is where the expert is.
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
# Of attention with latents, in place of the first three.
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
    """Returns the names of A and B of base tensor `name`."""
    stem = name.removesuffix("weight")
    return f"{stem}{A}.weight", f"{stem}{B}.weight"


def adapted_names(adapters: Iterable[str]) -> list[str]:
    """Returns the names of the base tensors that A and B of these names are of."""
    ending = f"{A}.weight"
    return [f"{name.removesuffix(ending)}weight" for name in adapters if name.endswith(ending)]


def targets_of(base: Sequence[ParameterSpec]) -> tuple[str, ...]:
    """Returns the modules that may be targets, of those that the model has: all matrices but router, table and head."""
    modules = {spec.name.split(".")[-2] for spec in base}
    return tuple(target for target in (*TARGETS, *OF_LATENTS) if target in modules)


def adapter_specs(
    base: Sequence[ParameterSpec], settings: LoraSettings
) -> tuple[ParameterSpec, ...]:
    """Returns A and B of every base matrix, and of every layer's experts, that is a target.

    Raises UserError for a target that the model lacks.
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
        # What a rank holds whole, it sees only its own part of the gradient of.
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
    """Returns the part of A or B, of `shape`, that belongs to the experts in part `box` of their base: all without."""
    experts = len(shape) - 2
    return Box((*box.start[:experts], 0, 0), (*box.stop[:experts], *shape[experts:]))


def fill_adapters(adapters: Weights, seed: int) -> None:
    """Draws A uniformly in +-1 / sqrt(in), B is zero: the model is the base at first, under every layout the same."""
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
    """Adds scale * B A to a matrix [out, in], or to each of [experts, out, in], in place; `multiply` is float32's."""
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
    """Adds scale * B A to each adapted part of `weights`, where they are; both of one layout, on one rank."""
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
    """(value, other) -> value, with the gradient of both."""

    def construct(self, value: Any, other: Any) -> Any:
        return value

    def bprop(self, value: Any, other: Any, out: Any, dout: Any) -> Any:
        return dout, dout


class LowRankLinear(nn.Cell):
    """x [N, in] -> base(x) + scale * (x A) B, each by itself where the base's matrix is several side by side.

    `widths` are the matrices' shares of the outputs and `adapted` says which of them have adapters;
    a [in, adapted matrices * rank], b [rank, their widths]. Experts have one of each in turn, [experts, ...], and take
    the rows of each beside x. With `merging`, a float32_matmul of the kernels, the value is that of the merged matrix,
    bit for bit as `merge` makes it.
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
        # Not a loop that fills a list, which MindSpore expands into graphs for each turn and copies at each append.
        self.split, self.concat, self.map = SplitWithSize(), ops.Concat(-1), ops.HyperMap()

    def construct(self, x: Any, rows: Any = None) -> Any:
        added = self.base(x, rows) + self.added(x, rows)
        if self.is_merged:
            # Gradients are those of base and adapters, so that no layer keeps its merged matrix for them.
            product = self.base.product(x, self.merged(x), rows)
            return self.value(ops.stop_gradient(product), added)
        return added

    def multiply(self, x: Any, matrix: Any, rows: Any) -> Any:
        if self.is_of_experts:
            return self.matmul(x, matrix, rows)
        return self.matmul(x, matrix)

    def added(self, x: Any, rows: Any) -> Any:
        """Computes scale * (x A) B."""
        # Adapters are float32, and multiplied in x's dtype.
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
        """Computes the base's matrix [in, out] with scale * A B added, once x is there: not of all layers at once."""
        a, weight = ops.depend(self.a, x), self.base.weight
        if self.is_one:
            low_rank = self.merging(a, self.b)
        else:
            of_a = self.split(a, self.rank_sizes, -1)
            of_b = self.split(self.b, self.own_widths, -1)
            low_rank = self.beside(self.map(self.merging, of_a, of_b), weight.shape[:-1])
        return ops.cast(ops.cast(weight, ms.float32) + low_rank * self.scale, weight.dtype)

    def beside(self, columns: Any, rows: Any) -> Any:
        """Returns the adapted matrices' columns with zeros [*rows, width] for the others, side by side."""
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
    """(a [E, N, K], b [E, K, M]) -> a b [E, N, M], by an `expert_matmul` of the kernels."""

    def __init__(self, expert_matmul: Any) -> None:
        super().__init__()
        self.matmul = expert_matmul

    def construct(self, a: Any, b: Any) -> Any:
        experts, rows, depth = a.shape
        counts = ops.zeros((experts,), ms.int32) + rows
        return self.matmul(a.reshape(-1, depth), b, counts).reshape(experts, rows, -1)
