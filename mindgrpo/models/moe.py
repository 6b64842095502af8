"""A feed-forward of experts, of which each token passes a few (arXiv:1701.06538), spread over the ranks of its groups.

Along `ep` ranks have other experts, along `etp` other columns of the same ones. A token's results come back to the rank
that has the token, which adds them in the order of its slots: dealing experts to ranks changes no bit of the sum.
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
    """(x_NH, plan) -> (y_NH, choice): a token's results, each times its score, summed in their order.

    Where it `chooses`, by the router's scores, it returns its choice, topk_ids int32 [N, K] and their margins float32
    [N]. With `reads_plan` the experts are those of the plan, a layer's ExpertInputs (expert_plan.py); without, they are
    its choice. Scores are always those of x now, so that the router learns by whatever experts were chosen.
    """

    def __init__(
        self, shard: Shard, index: int, moe: MoeConfig, chooses: bool, reads_plan: bool
    ) -> None:
        super().__init__()
        prefix, kernels, how = f"model.layers.{index}.mlp.", shard.kernels, routing(moe)
        self.gate = shard[prefix + "gate.weight"]
        # The router's logits are float32 in any precision: one that is rounded chooses other experts.
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
        """Returns the router's choice, as the kernels' choose_experts."""
        bias = ops.cast(self.bias, ms.float32)
        if self.has_bias:
            first, second, third = ops.unstack(bias)
            bias = first + second + third
        return self.choose(x, gate, bias)


class Balance(nn.Cell):
    """(scores float32 [N, K], x_NH, the router's weight [H, E], b float32 [N + E]) -> the scores.

    x and the weight get the gradient of sum_ne b_n p_ne b_(N + e), where p [N, E] is the softmax of the router's
    logits: of a loss that balances experts (arXiv:2101.03961, equations 4 to 6), in which the load is a constant
    (expert_routes.balance).
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
    """A rank's experts of a layer: (rows [S, H], counts int32 [E], ...) -> [S, H], as the kernels' expert_mlp."""

    def __init__(self, shard: Shard, prefix: str) -> None:
        super().__init__()
        self.gate_up = shard[prefix + "experts.gate_up_proj.weight"]
        self.down = shard[prefix + "experts.down_proj.weight"]
        self.exact = shard.exact()
        self.mlp = shard.cell(shard.kernels.expert_mlp, shard.config.activation)

    def construct(self, rows: Any, counts: Any, by_expert: Any, as_arrived: Any) -> Any:
        return self.mlp(rows, counts, self.exact(self.gate_up), self.exact(self.down))


class ExpertsInProducts(nn.Cell):
    """As Experts, whose matrices have no gradients, but may have adapters."""

    def __init__(self, shard: Shard, prefix: str) -> None:
        super().__init__()
        self.gate_up = shard.linear_of_experts(prefix + "experts.gate_up_proj.weight")
        self.glu = shard.cell(shard.kernels.glu, shard.config.activation)
        self.down = shard.linear_of_experts(prefix + "experts.down_proj.weight")

    def construct(self, rows: Any, counts: Any, by_expert: Any, as_arrived: Any) -> Any:
        return self.down(self.glu(self.gate_up(rows, counts)), counts)


class SpreadExperts(nn.Cell):
    """(rows [ep C, H] to send, plan) -> their results, which the experts of other ranks computed."""

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
    """(x_NH, topk_ids [N, K]) -> (results by slot [N K, H], order [N K], home [N, K]); not for gradients.

    Each rank computes its experts for the tokens of all, as nobody knows beforehand how many they will be.
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
        # A generator's ranks compute the same tokens.
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
            # In one order on all ranks; float32 has all numbers of experts.
            topk_ids = self.gather(ops.depend(ops.cast(topk_ids, ms.float32), x))
            topk_ids = ops.cast(topk_ids.reshape(-1, self.slots), ms.int32)
        order, counts, home = self.sort(self.own(topk_ids))
        y = self.experts(self.take(x, order, home), counts, order, home)
        y = self.take(y, home.reshape(-1), ops.expand_dims(order, 1))
        y = self.total(y) if self.is_shared else self.by_rank(y)
        slots = ops.arange(0, count * self.slots, 1, dtype=ms.int32)
        return y, slots, slots.reshape(count, self.slots)

    def by_rank(self, y: Any) -> Any:
        """Sums what all ranks have of this one's tokens."""
        return self.scatter(y.reshape(self.size, -1, y.shape[1]))

    def own(self, topk_ids: Any) -> Any:
        """Numbers this rank's experts from 0; others are -1."""
        local = topk_ids - self.first
        is_own = ops.cast(ops.logical_and(local >= 0, local < self.count), ms.int32)
        return (local + 1) * is_own - 1


class SharedExpert(nn.Cell):
    """As MixtureOfExperts: the sum of what a token's experts make of it and what one makes that all tokens pass.

    Every rank has the shared one whole and computes its own tokens, so that nothing is summed over ranks beside the
    exchanges of the others, whose order in a backward pass would be open.
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
