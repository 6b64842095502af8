"""Mixture-of-experts layers (arXiv:1701.06538), with expert parallelism.

Ranks along `ep` hold different experts, ranks along `etp` different columns of the same experts. The experts' outputs
return to the rank of the token, which adds them in the order of the token's slots, so that the sum is bitwise the same
under any sharding of experts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mindspore as ms
from mindspore import Tensor, nn, ops

from mindgrpo.models.decoder_config import MoeConfig
from mindgrpo.models.parallel_cells import ExchangeRows, GatherTokens, ScatterTokens
from mindgrpo.models.shard import Shard, routing
from mindgrpo.weights.expert_files import BIAS


class MixtureOfExperts(nn.Cell):
    """(x_NH, plan) -> (y_NH, choice): the sum of a token's expert outputs, weighted by scores.

    If it `chooses`, the choice is the router's own, topk_ids int32 [N, K] and margins float32 [N]. With `reads_plan`,
    tokens are routed by the plan, a layer's ExpertInputs (expert_plan.py), otherwise by the choice. Scores are always
    computed from the current x, so that the router is trained whoever chose the experts.
    """

    def __init__(
        self, shard: Shard, index: int, moe: MoeConfig, chooses: bool, reads_plan: bool
    ) -> None:
        super().__init__()
        prefix, kernels, how = f"model.layers.{index}.mlp.", shard.kernels, routing(moe)
        self.gate = shard[prefix + "gate.weight"]
        # The router's logits are float32 at any precision: rounded logits would choose other experts.
        self.exact_gate = shard.vector()
        self.chooses, self.reads_plan, self.has_bias = chooses, reads_plan, moe.has_bias
        self.bias = shard[prefix + BIAS] if moe.has_bias else Tensor([0.0], ms.float32)
        if chooses:
            self.choose = shard.cell(kernels.choose_experts, how)
        self.router, self.sum = shard.cell(kernels.router, how), shard.cell(kernels.weighted_sum)
        experts = (Experts if shard.trains_weights else ExpertsInProducts)(shard, prefix)
        self.experts: nn.Cell = experts
        if not reads_plan:
            self.experts = ChosenExperts(shard, experts, moe)
        elif shard.expert_groups["ep", "etp"].size > 1:
            self.experts = SpreadExperts(shard, experts)
        self.take = shard.cell(kernels.take_rows)
        self.balances = reads_plan and not chooses and moe.balance_coef > 0
        self.balance = shard.cell(Balance)

    def construct(self, x: Any, plan: Any) -> Any:
        gate = self.exact_gate(self.gate)
        if self.reads_plan:
            topk_ids, order, counts, home, by_expert, as_arrived, balance = plan
            choice = topk_ids
            y = self.experts(self.take(x, order, home), counts, by_expert, as_arrived)
        else:
            choice = self.chosen(x, gate)
            topk_ids = choice[0]
            y, order, home = self.experts(x, topk_ids)
        scores = self.router(x, gate, topk_ids)
        if self.balances:
            scores = self.balance(scores, x, gate, balance)
        out = self.sum(y, scores, order, home)
        if self.chooses and self.reads_plan:
            return out, self.chosen(x, gate)
        return out, choice

    def chosen(self, x: Any, gate: Any) -> Any:
        """Returns the router's choice: (topk_ids int32 [N, K], margins float32 [N]), as Kernels.choose_experts."""
        bias = ops.cast(self.bias, ms.float32)
        if self.has_bias:
            first, second, third = ops.unstack(bias)
            bias = first + second + third
        return self.choose(x, gate, bias)


class Balance(nn.Cell):
    """Load-balancing loss: (scores float32 [N, K], x_NH, router weight [H, E], b float32 [N + E]) -> scores, unchanged.

    In the backward, x and the router weight get the gradient of sum_ne b_n p_ne b_(N + e), where p [N, E] is the
    softmax of the router's logits and b is expert_routes.balance. This is the loss of arXiv:2101.03961, equations 4
    to 6, with the experts' load as a constant.
    """

    def __init__(self) -> None:
        super().__init__()
        self.softmax, self.matmul = ops.Softmax(), ops.MatMul()
        self.to_weight, self.to_x = ops.MatMul(transpose_a=True), ops.MatMul(transpose_b=True)
        self.cast, self.slice, self.reshape = ops.Cast(), ops.StridedSlice(), ops.Reshape()
        self.mul, self.sub, self.add, self.sum = (
            ops.Mul(),
            ops.Sub(),
            ops.Add(),
            ops.ReduceSum(True),
        )
        self.zeros = ops.ZerosLike()

    def construct(self, scores: Any, x: Any, weight: Any, balance: Any) -> Any:
        # Outputs of its own: see docs/extending.md, "A cell with a gradient of its own".
        return self.add(scores, self.zeros(scores))

    def bprop(self, scores: Any, x: Any, weight: Any, balance: Any, out: Any, dout: Any) -> Any:
        (count, _), (_, experts) = x.shape, weight.shape
        exact, of_experts = self.cast(x, ms.float32), self.cast(weight, ms.float32)
        p = self.softmax(self.matmul(exact, of_experts))
        repeats = self.reshape(self.slice(balance, (0,), (count,), (1,)), (count, 1))
        factors = self.slice(balance, (count,), (count + experts,), (1,))
        dp = self.mul(repeats, self.reshape(factors, (1, experts)))
        dlogits = self.mul(p, self.sub(dp, self.sum(self.mul(p, dp), 1)))
        dx = self.cast(self.to_x(dlogits, of_experts), x.dtype)
        dweight = self.cast(self.to_weight(exact, dlogits), weight.dtype)
        return dout, dx, dweight, self.zeros(balance)


class Experts(nn.Cell):
    """A rank's E experts of a layer: (rows [S, H], counts int32 [E], ...) -> [S, H], as Kernels.expert_mlp."""

    def __init__(self, shard: Shard, prefix: str) -> None:
        super().__init__()
        self.gate_up = shard[prefix + "experts.gate_up_proj.weight"]
        self.down = shard[prefix + "experts.down_proj.weight"]
        self.exact = shard.exact()
        self.mlp = shard.cell(shard.kernels.expert_mlp, shard.config.activation)

    def construct(self, rows: Any, counts: Any, by_expert: Any, as_arrived: Any) -> Any:
        return self.mlp(rows, counts, self.exact(self.gate_up), self.exact(self.down))


class ExpertsInProducts(nn.Cell):
    """Like Experts, for frozen matrices that may have adapters."""

    def __init__(self, shard: Shard, prefix: str) -> None:
        super().__init__()
        self.gate_up = shard.linear_of_experts(prefix + "experts.gate_up_proj.weight")
        self.glu = shard.cell(shard.kernels.glu, shard.config.activation)
        self.down = shard.linear_of_experts(prefix + "experts.down_proj.weight")

    def construct(self, rows: Any, counts: Any, by_expert: Any, as_arrived: Any) -> Any:
        return self.down(self.glu(self.gate_up(rows, counts)), counts)


class SpreadExperts(nn.Cell):
    """Expert parallelism: (rows to send [ep C, H], *plan) -> [ep C, H], the outputs of the experts on other ranks."""

    def __init__(self, shard: Shard, experts: nn.Cell) -> None:
        super().__init__()
        self.experts = experts
        self.exchange = shard.cell(ExchangeRows, shard.expert_groups["ep",])
        self.take = shard.cell(shard.kernels.take_rows)
        columns, in_float32 = shard.expert_groups["etp",], shard.backend.sums_in_float32
        self.is_cut = columns.size > 1
        if self.is_cut:
            self.gather = shard.cell(GatherTokens, columns, in_float32)
            self.scatter = shard.cell(ScatterTokens, columns, in_float32)

    def construct(self, rows: Any, counts: Any, by_expert: Any, as_arrived: Any) -> Any:
        arrived = self.exchange(rows)
        if self.is_cut:
            arrived = self.gather(arrived)
        sorted_rows = self.take(arrived, by_expert, ops.expand_dims(as_arrived, 1))
        y = self.experts(sorted_rows, counts, by_expert, as_arrived)
        y = self.take(y, as_arrived, ops.expand_dims(by_expert, 1))
        if self.is_cut:
            y = self.scatter(y, ops.stop_gradient(sorted_rows))
        return self.exchange(y)


class ChosenExperts(nn.Cell):
    """(x_NH, topk_ids int32 [N, K]) -> (outputs by slot [N K, H], order [N K], home [N, K]); not differentiable.

    Without a plan, row counts are unknown, so each rank computes its experts for the tokens of all ranks of the group.
    """

    def __init__(self, shard: Shard, experts: nn.Cell, moe: MoeConfig) -> None:
        super().__init__()
        kernels, own = shard.kernels, shard.experts()
        assert own is not None
        group = shard.expert_groups["ep", "etp"]
        self.experts, self.size, self.index = experts, group.size, group.index
        self.first, self.count, self.slots = own.first, own.count, moe.per_token
        self.sort = shard.cell(kernels.sort_slots, replace(routing(moe), num_experts=own.count))
        self.take = shard.cell(kernels.take_rows)
        # The generator's ranks all compute the same tokens.
        self.is_shared = group.size > 1 and shard.token_shares == 1 and shard.group.size > 1
        if group.size > 1:
            self.gather, self.total = group.gather_cell(), group.sum_cell()
            self.scatter = group.scatter_sum_cell()

    def construct(self, x: Any, topk_ids: Any) -> Any:
        count = x.shape[0]
        if self.size == 1:
            order, counts, home = self.sort(topk_ids)
            rows = self.take(x, order, home)
            return self.experts(rows, counts, order, home), order, home
        if not self.is_shared:
            x = self.gather(x).reshape(-1, x.shape[1])
            # `depend` fixes the order of collectives on all ranks; float32 represents all expert ids exactly.
            topk_ids = self.gather(ops.depend(ops.cast(topk_ids, ms.float32), x))
            topk_ids = ops.cast(topk_ids.reshape(-1, self.slots), ms.int32)
        order, counts, home = self.sort(self.own(topk_ids))
        y = self.experts(self.take(x, order, home), counts, order, home)
        y = self.take(y, home.reshape(-1), ops.expand_dims(order, 1))
        y = self.total(y) if self.is_shared else self.by_rank(y)
        slots = ops.arange(0, count * self.slots, 1, dtype=ms.int32)
        return y, slots, slots.reshape(count, self.slots)

    def by_rank(self, y: Any) -> Any:
        """Reduce-scatters y [size * n, H]: returns the sum over ranks for this rank's rows, [n, H]."""
        return self.scatter(y.reshape(self.size, -1, y.shape[1]))

    def own(self, topk_ids: Any) -> Any:
        """Maps expert ids [N, K] to local ids, from 0 for this rank's experts, and -1 for all others."""
        local = topk_ids - self.first
        is_own = ops.cast(ops.logical_and(local >= 0, local < self.count), ms.int32)
        return (local + 1) * is_own - 1


class SharedExpert(nn.Cell):
    """Like MixtureOfExperts, plus the output of a shared expert that processes all tokens.

    The shared expert is replicated, and each rank computes its own tokens. This avoids an all-reduce next to the other
    experts' exchanges, since the order of the two in a backward pass would be undefined.
    """

    def __init__(self, shard: Shard, index: int, experts: MixtureOfExperts) -> None:
        super().__init__()
        prefix = f"model.layers.{index}.mlp.shared_experts."
        self.experts = experts
        self.gate_up = shard.linear(prefix + "gate_up_proj.weight")
        self.glu = shard.cell(shard.kernels.glu, shard.config.activation)
        self.down = shard.linear(prefix + "down_proj.weight")

    def construct(self, x: Any, plan: Any) -> Any:
        y, choice = self.experts(x, plan)
        return y + self.down(self.glu(self.gate_up(x))), choice
