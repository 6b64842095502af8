"""The decoder as graph code: embedding, layers, head. Training, prefill and decoding differ in the attention cell only.

`x_NH` are hidden states [N tokens, H hidden size] in the compute dtype; in packed rows, N = R rows * T tokens. M are
picked positions, V is the vocabulary shard. With sequence parallelism, hidden states between attention and MLP are
[N / tp, H]. Everything except plain GEMMs comes from the backend's kernels, and differences between families come from
the model's configuration.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from mindgrpo.backend.kernels.shapes import Heads
from mindgrpo.models.attention import Attention
from mindgrpo.models.expert_plan import ExpertInputs
from mindgrpo.models.latent_attention import LatentAttention
from mindgrpo.models.log_probs import TokenLogProbs
from mindgrpo.models.moe import MixtureOfExperts, SharedExpert
from mindgrpo.models.parallel_cells import Same, UnsharedRows
from mindgrpo.models.rotary import rotary_table
from mindgrpo.models.shard import Shard
from mindgrpo.weights.model_files import SCORE


class StageInputs(NamedTuple):
    """The inputs of every stage for a micro-batch, besides x, in the order in which graphs take them.

    positions int32 [R, T] (rotary angles float32 [R, T, 2 D] if positions have several axes), spans int32 [R, T, 3],
    and columns int32 [G, R, T / G] of the G context-parallel ranks that share the rows, as in
    backend/kernels/contract.py. ExpertInputs follow if layers read a plan of experts, and the features of images
    float32 [R, T / G, H], zeros for text, in the first stage of models that see images. To add an input, add a field
    here and to the micro-batch, and read it in the cell that needs it.
    """

    positions: Any
    spans: Any
    columns: Any


OF_ALL_LAYERS = len(StageInputs._fields)
OF_EXPERTS = len(ExpertInputs._fields)


class HeadInputs(NamedTuple):
    """The inputs of the last stage's head, besides x: `labels` int32 [M], and the positions `picks` int32 [M] below N
    that predict them. A pick of -1 is padding, and yields a row of zeros.
    """

    picks: Any
    labels: Any


def tensors_of(kind: Any, arrays: Any) -> tuple[Tensor, ...]:
    """Returns the attributes of `arrays` named like the fields of NamedTuple `kind`, as tensors."""
    return tuple(Tensor(getattr(arrays, name)) for name in kind._fields)


@dataclass(frozen=True)
class Recompute:
    """Activation recomputation: `modules` ("attention", "mlp") of every `every`-th layer are recomputed in backward."""

    modules: frozenset[str] = frozenset()
    every: int = 1

    def applies_to(self, index: int) -> bool:
        """Returns whether layer `index` of the whole model, from 0, is recomputed, at least in part."""
        return bool(self.modules) and index % self.every == 0

    def whole_layer(self, index: int) -> bool:
        """Returns whether layer `index` is recomputed as a whole."""
        return self.applies_to(index) and self.modules == {"attention", "mlp"}

    def apply(self, layer: Any, index: int) -> None:
        """Marks the recomputed modules of a layer; layers recomputed as a whole are left to the gradient graphs."""
        if not self.applies_to(index) or self.whole_layer(index):
            return
        for module in sorted(self.modules):
            getattr(layer, module).recompute()


KEEP_ALL = Recompute()
WHOLE_LAYERS = Recompute(frozenset(("attention", "mlp")))


class Embedding(nn.Cell):
    """tokens int32 [N] -> x_NH; the embedding table's rows (vocabulary) are split over the tp group."""

    def __init__(self, shard: Shard) -> None:
        super().__init__()
        self.table = shard["model.embed_tokens.weight"]
        self.embed = shard.embedding()
        self.leave = shard.leave_region()
        self.is_scaled = shard.config.family.scaled_embeddings
        self.scale = float(np.float32(shard.config.hidden_size**0.5))
        # One rank of the group adds features, before the sum over the ranks.
        self.adds_features = shard.group.index == 0

    def construct(self, tokens: Any) -> Any:
        return self.rows(tokens, self.table)

    def with_features(self, tokens: Any, features: Any) -> Any:
        """Looks up tokens int32 [N], those of images negative, and adds `features` [N, H] -> x_NH."""
        x = self.embed(tokens, self.table)
        if self.adds_features:
            x = x + ops.cast(features, x.dtype)
        return self.leave(x, tokens)

    def rows(self, tokens: Any, table: Any) -> Any:
        """Looks up tokens int32 [N] in `table` [V, H] -> x_NH."""
        x = self.leave(self.embed(tokens, table), tokens)
        if self.is_scaled:
            x = x * self.scale
        return x


class Norm(nn.Cell):
    """x_NH -> x_NH: the RMS norm with weight `key` [H]."""

    def __init__(self, shard: Shard, key: str) -> None:
        super().__init__()
        self.weight = shard[key]
        self.vector = shard.vector()
        self.offset = shard.config.family.norm_offset
        self.norm = shard.cell(shard.kernels.rms_norm, shard.config.rms_norm_eps)

    def construct(self, x: Any) -> Any:
        weight = self.vector(self.weight)
        if self.offset != 0.0:
            weight = ops.cast(weight, ms.float32) + self.offset
        return self.norm(x, weight)


class AddNorm(nn.Cell):
    """(x_NH, added [N, H]) -> (x + added, Norm(x + added)), or the sum twice if `key` is None."""

    def __init__(self, shard: Shard, key: str | None) -> None:
        super().__init__()
        self.is_identity = key is None
        if key is not None:
            self.weight = shard[key]
        self.vector = shard.vector()
        self.offset = shard.config.family.norm_offset
        self.norm = shard.cell(shard.kernels.add_rms_norm, shard.config.rms_norm_eps)

    def construct(self, x: Any, added: Any) -> Any:
        if self.is_identity:
            total = x + added
            return total, total
        weight = self.vector(self.weight)
        if self.offset != 0.0:
            weight = ops.cast(weight, ms.float32) + self.offset
        return self.norm(x, added, weight)


class GatedMlp(nn.Cell):
    """x_NH -> down(activation(gate(x)) * up(x)), x_NH (arXiv:2002.05202); the inner dim is split over the tp group."""

    def __init__(self, shard: Shard, prefix: str) -> None:
        super().__init__()
        self.gate_up = shard.entering(shard.linear(prefix + "gate_up_proj.weight"))
        self.glu = shard.cell(shard.kernels.glu, shard.config.activation)
        self.down = shard.linear(prefix + "down_proj.weight", over_ranks=True)
        self.leave = shard.leave_region()

    def construct(self, x: Any) -> Any:
        gate_up = self.gate_up(x)
        return self.leave(self.down(self.glu(gate_up)), gate_up)


def feed_forward(shard: Shard, index: int, chooses: bool, reads_plan: bool) -> nn.Cell:
    """Returns the MLP or mixture of experts of layer `index`; `chooses` and `reads_plan` as in moe.MixtureOfExperts."""
    moe = shard.config.moe_of(index)
    if moe is not None:
        experts = MixtureOfExperts(shard, index, moe, chooses, reads_plan)
        if moe.shared_inner == 0:
            return experts
        return SharedExpert(shard, index, experts)
    return GatedMlp(shard, f"model.layers.{index}.mlp.")


class Layer(nn.Cell):
    """(x_NH, added [N, H], context) -> (x_NH, added [N, H]), where x + added is the residual stream.

    The addition is deferred so that it can be fused with the next norm. A stage's first layer, and all layers with
    `gets_sum`, take the residual stream as x and ignore `added`. `attend` and `context` are as in attention.py. A layer
    with experts that `reads_plan` finds its ExpertInputs at the end of the context, and one that `chooses` returns its
    choice as a third output. `is_cached`: `attend` reads or fills the KV cache of the plain decoder.
    """

    def __init__(
        self,
        shard: Shard,
        index: int,
        attend: nn.Cell,
        gets_sum: bool = False,
        chooses: bool = False,
        reads_plan: bool = False,
        is_cached: bool = False,
    ) -> None:
        super().__init__()
        prefix, norms = f"model.layers.{index}.", shard.config.family.norms

        def key(name: str | None) -> str | None:
            return name and f"{prefix}{name}.weight"

        def norm(name: str | None) -> nn.Cell:
            return shard.cell(Same) if name is None else Norm(shard, f"{prefix}{name}.weight")

        self.is_entry = gets_sum or index == shard.layers.start
        self.attention_in = (
            norm(norms.attention_in) if self.is_entry else AddNorm(shard, key(norms.attention_in))
        )
        of_attention = shard.within("attention")
        self.attention = (
            Attention(of_attention, prefix, attend)
            if shard.config.latent is None
            else LatentAttention(of_attention, prefix, attend, is_cached)
        )
        self.attention_out = norm(norms.attention_out)
        self.mlp_in = AddNorm(shard, key(norms.mlp_in))
        self.mlp = feed_forward(shard.within("mlp"), index, chooses, reads_plan)
        self.mlp_out = norm(norms.mlp_out)
        self.has_experts = shard.config.moe_of(index) is not None
        self.returns_choice = self.has_experts and chooses
        self.of_plan = OF_EXPERTS if self.has_experts and reads_plan else 0

    def construct(self, x: Any, added: Any, context: Any) -> Any:
        if self.is_entry:
            normed = self.attention_in(x)
        else:
            x, normed = self.attention_in(x, added)
        of_attention = len(context) - self.of_plan
        attended = self.attention(normed, context[:of_attention])
        x, normed = self.mlp_in(x, self.attention_out(attended))
        if not self.has_experts:
            return x, self.mlp_out(self.mlp(normed))
        y, choice = self.mlp(normed, context[of_attention:])
        if self.returns_choice:
            return x, self.mlp_out(y), choice
        return x, self.mlp_out(y)


class SummedLayer(nn.Cell):
    """(x_NH, context) -> x_NH, the residual stream, so that a recomputed layer stores only one tensor.

    Also returns the layer's choice of experts, if it has one.
    """

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.layer, self.returns_choice = layer, layer.returns_choice

    def construct(self, x: Any, context: Any) -> Any:
        if self.returns_choice:
            x, added, choice = self.layer(x, x, context)
            return x + added, choice
        x, added = self.layer(x, x, context)
        return x + added


class Rotary:
    """The rotary tables of a stage's layers, float32 [positions, 2 D] each; `of_layer` is the table of each layer.

    If positions have several axes, StageInputs hold angles, and the tables serve for tokens behind a prompt only.
    `is_cached`: for heads in the layout of the plain decoder's KV cache.
    """

    def __init__(self, shard: Shard, num_positions: int, is_cached: bool = False) -> None:
        self.shard, config = shard, shard.config
        local = [config.layers[index].is_local for index in shard.layers]
        kinds = sorted(set(local))
        nope_dim = config.latent.rank if config.latent is not None and is_cached else None
        self.tables = [
            rotary_table(config, num_positions, is_local, nope_dim) for is_local in kinds
        ]
        self.of_layer = tuple(kinds.index(is_local) for is_local in local)

    def _table(self, kind: int) -> np.ndarray | None:
        return self.tables[kind] if self.shard.config.rope_sections is None else None

    def context(self, kind: int, is_causal: bool) -> nn.Cell:
        """Returns the cell (*StageInputs) -> the context that attention with table `kind` takes."""
        group, kernels, table = self.shard.context_group, self.shard.kernels, self._table(kind)
        if group.size == 1:
            return UnsharedRows(kernels.rope_and_mask(table, is_causal))
        return kernels.context_inputs(table, group.index)

    def attention(self, heads: Heads, kind: int, is_causal: bool, gathers_again: bool) -> nn.Cell:
        """Returns the attention cell of packed rows, context-parallel if ranks share rows."""
        group, kernels, table = self.shard.context_group, self.shard.kernels, self._table(kind)
        if group.size == 1:
            return kernels.attention(heads, table, is_causal)
        gather = self.shard.gather_context()
        how = group.index, gather, gather.scatter, gathers_again
        return kernels.context_attention(heads, table, *how)


class Stage(nn.Cell):
    """A pipeline stage's layers: (tokens int32 [R, T] on the first stage, else x_NH, *inputs) -> x_NH.

    The `num_inputs` inputs are StageInputs, and ExpertInputs if it `reads_plan`; positions are below `num_positions`.
    With `is_causal`, each row is a single run, as in backend/kernels/contract.py. A stage with experts that `chooses`
    also returns the routers' choices, int32 [layers, N, K], and their margins, float32 [layers, N]. It reads no plan
    unless it `replays` one, and then computes the planned experts instead of the chosen ones.
    """

    def __init__(
        self,
        shard: Shard,
        num_positions: int,
        recompute: Recompute = KEEP_ALL,
        is_causal: bool = False,
        chooses: bool = False,
        replays: bool = False,
    ) -> None:
        super().__init__()
        heads = shard.attended_heads()
        has_experts = [shard.config.layers[index].has_experts for index in shard.layers]
        self.chooses = chooses and any(has_experts)
        self.reads_plan = (replays or not chooses) and any(has_experts)
        self.reads_features = shard.is_first and shard.config.vision is not None
        self.of_layers = OF_ALL_LAYERS + (OF_EXPERTS if self.reads_plan else 0)
        self.num_inputs = self.of_layers + self.reads_features
        # The index of each layer among those with experts; -1 for dense layers.
        self.plan_of = tuple(
            sum(has_experts[:i]) if own else -1 for i, own in enumerate(has_experts)
        )
        self.is_first = shard.is_first
        if shard.is_first:
            self.embed = Embedding(shard)
        rotary = Rotary(shard, num_positions)
        self.rotary_of = rotary.of_layer
        self.rope_and_masks = nn.CellList(
            [rotary.context(kind, is_causal) for kind in range(len(rotary.tables))]
        )
        self.recomputed = tuple(recompute.whole_layer(index) for index in shard.layers)
        # A separate forward graph then returns the layers' inputs. The last stage excludes its last layer, whose
        # activations are kept, since its backward follows at once.
        all_again = all(self.recomputed) and len(shard.layers) > 1
        self.hands_inputs_on = not shard.is_last or all_again
        self.handed_on = len(shard.layers) - 1 if shard.is_last else len(shard.layers)
        sharing = shard.sharing_cells()
        layers = []
        for index, kind in zip(shard.layers, rotary.of_layer, strict=True):
            is_last_kept = all_again and index == shard.layers[-1]
            are_kept = shard.is_last and (is_last_kept or not recompute.applies_to(index))
            of_layer = sharing.within(recompute.applies_to(index)).keeping(are_kept)
            again = are_kept and shard.context_group.size > 1
            attend = of_layer.cell(rotary.attention, heads, kind, is_causal, again)
            how = {"chooses": chooses, "reads_plan": self.reads_plan}
            layer = Layer(of_layer, index, attend, gets_sum=True, **how)
            recompute.apply(layer, index)
            layers.append(SummedLayer(layer))
        self.layers = nn.CellList(layers)

    def construct(self, x: Any, *inputs: Any) -> Any:
        return self.compute(x, inputs)

    def compute(self, x: Any, inputs: Any) -> Any:
        """Like construct, with the inputs as one tuple, for use inside gradient cells.

        MindSpore never frees a graph, or its weights, whose gradient cells pass on `*inputs`.
        """
        contexts = self.contexts(inputs)
        x = self.entered(x, inputs)
        if not self.chooses:
            return self.flows(x, contexts, len(self.layers))[-1]
        topk_ids, margins = [], []
        for i in range(len(self.layers)):
            if self.plan_of[i] >= 0:
                x, choice = self.layers[i](x, contexts[i])
                topk_ids.append(choice[0])
                margins.append(choice[1])
            else:
                x = self.layers[i](x, contexts[i])
        return x, ops.stack(topk_ids), ops.stack(margins)

    def entered(self, x: Any, inputs: Any) -> Any:
        """Returns the first layer's input x_NH: on the first stage, embeddings of the tokens x int32 [R, T]."""
        if not self.is_first:
            return x
        if self.reads_features:
            features = inputs[self.of_layers]
            return self.embed.with_features(x.reshape(-1), features.reshape(-1, features.shape[-1]))
        return self.embed(x.reshape(-1))

    def contexts(self, inputs: Any) -> Any:
        """Returns the context of each layer, made from the inputs."""
        positions, spans, columns = inputs[:OF_ALL_LAYERS]
        tables = []
        for rope_and_mask in self.rope_and_masks:
            tables.append(rope_and_mask(positions, spans, columns))
        plans = []
        if self.reads_plan:
            for planned in inputs[OF_ALL_LAYERS : self.of_layers]:
                plans.append(ops.unstack(planned))
        contexts = []
        for i in range(len(self.rotary_of)):
            context = tables[self.rotary_of[i]]
            if self.reads_plan and self.plan_of[i] >= 0:
                for planned in plans:
                    context = (*context, planned[self.plan_of[i]])
            contexts.append(context)
        return contexts

    def flows(self, x: Any, contexts: Any, count: int) -> Any:
        """Returns the inputs of the first `count` layers, x first, and the output of the last of them, x_NH each."""
        flows = [x]
        for i in range(count):
            x = self.layers[i](x, contexts[i])
            flows.append(x)
        return flows


class StageForward(nn.Cell):
    """The forward pass of a trained stage, with inputs of Stage: -> (output x_NH, *inputs of its layers, x_NH each).

    The first layer's input is returned only on the first stage, where x are token ids. The last stage leaves out its
    last layer.
    """

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.stage = stage
        self.first_kept = 0 if stage.is_first else 1

    def construct(self, x: Any, *inputs: Any) -> Any:
        stage = self.stage
        flows = stage.flows(stage.entered(x, inputs), stage.contexts(inputs), stage.handed_on)
        return (flows[-1], *flows[self.first_kept : -1])


class Head(nn.Cell):
    """x_NH -> logits float32 [N, V]: the final norm and the LM head's GEMM."""

    def __init__(self, shard: Shard) -> None:
        super().__init__()
        self.norm = Norm(shard, "model.norm.weight")
        self.copy = shard.copy_to_group()
        self.table = shard.head_table
        self.exact, self.widens = shard.exact_head(), shard.widens_head
        self.matmul = shard.kernels.matmul(transpose_b=True)
        bias = shard.padding_bias()
        self.is_padded = bias is not None
        self.bias = Tensor(bias) if bias is not None else None

    def construct(self, x: Any) -> Any:
        return self.logits(x, self.table)

    def logits(self, x: Any, table: Any) -> Any:
        """Computes logits float32 [N, V] of x_NH with the LM head `table` [V, H]."""
        x = self.copy(self.norm(x))
        if self.widens:
            x = ops.cast(x, ms.float32)
        logits = ops.cast(self.matmul(x, self.exact(table)), ms.float32)
        if self.is_padded:
            logits = logits + self.bias
        return logits


class HeadStage(nn.Cell):
    """The last stage with a head: (x, *inputs of Stage, *HeadInputs) -> two float32 [M], followed by the stage's
    choices and margins if it `chooses`."""

    def __init__(self, stage: Stage, shard: Shard) -> None:
        super().__init__()
        self.stage, self.of_stage = stage, stage.num_inputs
        self.all_tokens = shard.all_tokens()
        self.pick = shard.kernels.pick()
        self.norm = Norm(shard, "model.norm.weight")

    def construct(self, x: Any, *inputs: Any) -> Any:
        return self.compute(x, inputs)

    def compute(self, x: Any, inputs: Any) -> Any:
        """Like construct, with (*inputs of Stage, *HeadInputs) as one tuple; see Stage.compute."""
        made = self.stage.compute(x, inputs[: self.of_stage])
        if not self.stage.chooses:
            return self.head(made, inputs[self.of_stage :])
        return (*self.head(made[0], inputs[self.of_stage :]), *made[1:])

    def head(self, x: Any, inputs: Any) -> Any:
        """Computes the head: (x_NH, HeadInputs as one tuple) -> two float32 [M]."""
        raise NotImplementedError

    def picked(self, x: Any, picks: Any) -> Any:
        """Returns the normed hidden states of the predicting positions, [M, H]."""
        return self.norm(self.pick(picks, self.all_tokens(x)))


class ValueStage(HeadStage):
    """A HeadStage -> (values float32 [M] of the predicting positions, zeros float32 [M]): the scalar head."""

    def __init__(self, stage: Stage, shard: Shard) -> None:
        super().__init__(stage, shard)
        self.score = shard[SCORE]
        self.matmul = shard.kernels.float32_matmul()

    def head(self, x: Any, inputs: Any) -> Any:
        picked = ops.cast(self.picked(x, inputs[0]), ms.float32)
        values = self.matmul(picked, ops.cast(self.score, ms.float32)).reshape(-1)
        return values, ops.zeros_like(values)


class LogProbStage(HeadStage):
    """A HeadStage -> (log-probs float32 [M], entropies float32 [M]) of the labels."""

    def __init__(self, stage: Stage, shard: Shard, temperature: float, chunk_bytes: int) -> None:
        super().__init__(stage, shard)
        self.copy = shard.copy_to_group()
        self.table = shard.head_table
        self.exact, self.widens = shard.exact_head(), shard.widens_head
        self.logprobs = TokenLogProbs(
            shard.kernels,
            shard.vocabulary(temperature),
            shard.group,
            chunk_bytes,
            is_trained=shard.trains_weights,
        )

    def head(self, x: Any, inputs: Any) -> Any:
        picks, labels = inputs
        picked = self.copy(self.picked(x, picks))
        if self.widens:
            picked = ops.cast(picked, ms.float32)
        return self.logprobs(picked, self.exact(self.table), labels)
