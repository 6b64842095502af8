"""Low-rank adapters at work: first values, graph code, and their sum with the base's weights.

Which there are and how they are cut is in lora_specs.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn, ops

from mindgrpo.backend.dtypes import mindspore_dtype
from mindgrpo.models.lora_specs import A, LoraSettings, adapter_names
from mindgrpo.weights.host_tensors import HostTensors
from mindgrpo.weights.local_weights import Weights
from mindgrpo.weights.pretrained import generator_of


def fill_adapters(adapters: Weights, seed: int) -> None:
    """A uniform in +-1 / sqrt(in), B zero: the model is the base at first, under every layout the same."""
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


def merge(weights: Weights | HostTensors, adapters: Weights, settings: LoraSettings) -> None:
    """Adds scale * B A to each adapted part of `weights`, where they are; both of one layout, on one rank."""
    adapted = [name for name in weights.names if adapter_names(name)[1] in adapters.boxes]
    scale = np.float32(settings.scale)
    if isinstance(weights, HostTensors) or weights.pool.is_host_memory:
        views, low_rank = weights.arrays.hf_views, adapters.arrays.hf_views
        for name in adapted:
            a_name, b_name = adapter_names(name)
            views[name][...] = views[name] + scale * (low_rank[b_name] @ low_rank[a_name])
        return
    merged = []
    for name in adapted:
        # Stored [in, out]: the transpose of B A.
        a, b = (adapters.part(factor) for factor in adapter_names(name))
        whole = weights.part(name).astype(ms.float32) + float(scale) * ops.matmul(a, b)
        merged.append((weights.region(name), whole.astype(mindspore_dtype(weights.dtype))))
    weights.set_parts(merged)


class LowRankLinear(nn.Cell):
    """x [N, in] -> base(x) + scale * (x A) B, each by itself where the base's matrix is several side by side.

    `widths` are the matrices' shares of the outputs and `adapted` says which of them have adapters;
    a [in, adapted matrices * rank], b [rank, their widths].
    """

    def __init__(
        self,
        base: nn.Cell,
        a: Any,
        b: Any,
        widths: Sequence[int],
        adapted: Sequence[bool],
        settings: LoraSettings,
        matmul: Any,
    ) -> None:
        super().__init__()
        self.base = base
        self.a, self.b = a, b
        self.widths, self.adapted = tuple(widths), tuple(adapted)
        self.rank, self.scale = settings.rank, settings.scale
        self.matmul = matmul

    def construct(self, x: Any) -> Any:
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
        return self.base(x) + added
