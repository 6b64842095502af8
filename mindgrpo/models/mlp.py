"""A layer's MLP."""

from __future__ import annotations

from typing import Any

from mindspore import nn

from mindgrpo.models.parallel_cells import CopyTo, ReduceFrom
from mindgrpo.models.shard import Shard


class GatedMlp(nn.Cell):
    """down(activation(gate(x)) * up(x)), the inner dim split over the group (arXiv:2002.05202)."""

    def __init__(self, shard: Shard, prefix: str) -> None:
        super().__init__()
        self.copy = CopyTo(shard.group)
        self.gate_up = shard.linear(prefix + "mlp.gate_up_proj.weight")
        self.glu = shard.kernels.glu(shard.config.activation)
        self.down = shard.linear(prefix + "mlp.down_proj.weight")
        self.reduce = ReduceFrom(shard.group)

    def construct(self, x: Any) -> Any:
        return self.reduce(self.down(self.glu(self.gate_up(self.copy(x)))))
