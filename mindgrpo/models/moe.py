"""A feed-forward of experts, of which each token passes a few (arXiv:1701.06538), on a rank that has all of them."""

from __future__ import annotations

from typing import Any

from mindspore import nn

from mindgrpo.models.decoder_config import MoeConfig
from mindgrpo.models.shard import Shard, routing


class MixtureOfExperts(nn.Cell):
    """(x_NH, plan) -> (y_NH, routes int32 [N, K]): a token's results, each times its score, summed in their order.

    Where it `chooses`, by the router's scores, the plan is not read; else it has the routes and their ExpertPlan
    (expert_plan.py). Scores are always those of x now, so that the router learns by whatever experts were chosen.
    """

    def __init__(self, shard: Shard, index: int, moe: MoeConfig, chooses: bool) -> None:
        super().__init__()
        prefix, kernels, how = f"model.layers.{index}.mlp.", shard.kernels, routing(moe)
        self.gate = shard[prefix + "gate.weight"]
        self.gate_up = shard[prefix + "experts.gate_up_proj.weight"]
        self.down = shard[prefix + "experts.down_proj.weight"]
        # The router's logits are float32 in any precision: one that is rounded chooses other experts.
        self.exact_gate, self.exact = shard.vector(), shard.exact()
        self.chooses = chooses
        if chooses:
            self.choose = shard.cell(kernels.choose_experts, how)
            self.sort = shard.cell(kernels.sort_slots, how)
        self.router = shard.cell(kernels.router, how)
        self.take, self.sum = shard.cell(kernels.take_rows), shard.cell(kernels.weighted_sum)
        self.experts = shard.cell(kernels.expert_mlp, shard.config.activation)

    def construct(self, x: Any, plan: Any) -> Any:
        gate = self.exact_gate(self.gate)
        if self.chooses:
            routes = self.choose(x, gate)
            order, counts, home = self.sort(routes)
        else:
            routes, order, counts, home = plan
        rows = self.take(x, order, home)
        y = self.experts(rows, counts, self.exact(self.gate_up), self.exact(self.down))
        return self.sum(y, self.router(x, gate, routes), order, home), routes
