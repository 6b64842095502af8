"""Low-rank adapters (LoRA, arXiv:2106.09685): which there are and how they are cut, first values, graph code, merging.

W' = W + alpha / rank * B A, with A [rank, in] and B [out, rank]. A is cut where W's inputs are, B where its outputs
are; the other is whole on every rank of a model group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn, ops

from mindgrpo.backend.dtypes import mindspore_dtype
from mindgrpo.backend.kernels.contract import Kernels
from mindgrpo.errors import UserError
from mindgrpo.models.parallel_cells import Linear
from mindgrpo.parallel.sharding import ParameterSpec
from mindgrpo.weights.local_weights import HostTensors, Weights
from mindgrpo.weights.pretrained import generator_of

OF_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
TARGETS = (*OF_ATTENTION, "gate_proj", "up_proj", "down_proj")
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


def adapter_specs(
    base: Sequence[ParameterSpec], settings: LoraSettings
) -> tuple[ParameterSpec, ...]:
    """Returns A and B of every base matrix that is a target.

    Raises UserError for a target that the model lacks, and for those that are matrices of experts.
    """
    specs: list[ParameterSpec] = []
    seen = set()
    for spec in base:
        module, kind = spec.name.split(".")[-2:]
        if kind == "weight" and module in settings.targets:
            if len(spec.shape) > 2:
                raise UserError(
                    f"actor_config.lora.target_modules includes '{module}', matrices of experts in this model, "
                    f"and adapters of experts are not computed here; set it to {list(OF_ATTENTION)}."
                )
            seen.add(module)
            specs += _pair(spec, settings.rank)
    missing = [target for target in settings.targets if target not in seen]
    if missing:
        raise UserError(
            f"actor_config.lora.target_modules names '{missing[0]}', but must name some of {', '.join(TARGETS)}; "
            "correct it or leave it out for all of them."
        )
    return tuple(specs)


def _pair(spec: ParameterSpec, rank: int) -> tuple[ParameterSpec, ParameterSpec]:
    (a_name, b_name), (a_key, b_key) = adapter_names(spec.name), adapter_names(spec.key)
    out, inner = spec.shape

    def factor(name: str, key: str, shape: tuple[int, int], dim: int) -> ParameterSpec:
        kept = tuple(split for split in spec.splits if split.dim == dim)
        # What a rank holds whole, it sees only its own part of the gradient of.
        partial = {axis for split in spec.splits if split.dim != dim for axis in split.axes}
        summed_over = spec.summed_over | partial
        return replace(
            spec, name=name, fused_key=key, shape=shape, splits=kept, summed_over=summed_over
        )

    return factor(a_name, a_key, (rank, inner), 1), factor(b_name, b_key, (out, rank), 0)


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
                bound = np.float32(spec.shape[1] ** -0.5)
                part[...] = ((2 * values - 1) * bound)[adapters.boxes[spec.name].slices]


def merge(
    weights: Weights | HostTensors, adapters: Weights, settings: LoraSettings, kernels: Kernels
) -> None:
    """Adds scale * B A to each adapted part of `weights`, where they are; both of one layout, on one rank."""
    adapted = [name for name in weights.names if adapter_names(name)[1] in adapters.boxes]
    scale = np.float32(settings.scale)
    if isinstance(weights, HostTensors) or weights.pool.is_host_memory:
        views, low_rank = weights.arrays.hf_views, adapters.arrays.hf_views
        for name in adapted:
            a_name, b_name = adapter_names(name)
            product = kernels.float32_product(low_rank[a_name].T, low_rank[b_name].T)
            views[name][...] = views[name] + scale * product.T
        return
    merged = []
    for name in adapted:
        # Stored [in, out]: the transpose of B A.
        a, b = (adapters.part(factor) for factor in adapter_names(name))
        whole = weights.part(name).astype(ms.float32) + float(scale) * ops.matmul(a, b)
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
    a [in, adapted matrices * rank], b [rank, their widths]. With `merging`, a float32_matmul of the kernels, the value
    is that of the merged matrix, bit for bit as `merge` makes it.
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

    def construct(self, x: Any) -> Any:
        added = self.base(x) + self.added(x)
        if self.is_merged:
            # Gradients are those of base and adapters, so that no layer keeps its merged matrix for them.
            return self.value(ops.stop_gradient(self.base.product(x, self.merged(x))), added)
        return added

    def added(self, x: Any) -> Any:
        """Computes scale * (x A) B."""
        # Adapters are float32, and multiplied in x's dtype.
        a, b = self.a.astype(x.dtype), self.b.astype(x.dtype)
        low = self.matmul(x, a) * self.scale
        columns = []
        number, column = 0, 0
        for i in range(len(self.widths)):
            width = self.widths[i]
            if self.adapted[i]:
                own = low[:, number * self.rank : (number + 1) * self.rank]
                columns.append(self.matmul(own, b[:, column : column + width]))
                number += 1
                column += width
            else:
                columns.append(ops.zeros((x.shape[0], width), x.dtype))
        added = columns[0]
        if len(columns) > 1:
            added = ops.concat(columns, 1)
        return added

    def merged(self, x: Any) -> Any:
        """Computes the base's matrix [in, out] with scale * A B added, once x is there: not of all layers at once."""
        a, weight = ops.depend(self.a, x), self.base.weight
        columns = []
        number, column = 0, 0
        for i in range(len(self.widths)):
            width = self.widths[i]
            if self.adapted[i]:
                own = a[:, number * self.rank : (number + 1) * self.rank]
                columns.append(self.merging(own, self.b[:, column : column + width]))
                number += 1
                column += width
            else:
                columns.append(ops.zeros((weight.shape[0], width), ms.float32))
        low_rank = columns[0]
        if len(columns) > 1:
            low_rank = ops.concat(columns, 1)
        return (weight.astype(ms.float32) + low_rank * self.scale).astype(weight.dtype)
