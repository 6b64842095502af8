"""What each graph of a run on devices launches: nothing on the NPU's AI CPU, and so many kernels a decoded token.

Graphs of the real cells with AscendKernels, as graph_census.py reads them; a group's sums are another operation here.
Does not prove what an NPU launches, nor how long it takes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from algorithms import loss_of
from graph_census import Census, aclnn_primitives, aicpu_primitives, by_primitive, census_of
from mindspore import Tensor, nn, ops

from mindgrpo.algorithm.estimators import AlgorithmConfig
from mindgrpo.backend.arithmetic.contract import ShardedTensor
from mindgrpo.backend.arithmetic.device import AdamWCell, RoundCell
from mindgrpo.backend.arithmetic.device_rows import GatherOfShares, OwnRows, SumOfShares
from mindgrpo.backend.connect import connect
from mindgrpo.backend.contract import AloneGroup, Backend, Group
from mindgrpo.backend.dtypes import Dtype
from mindgrpo.backend.group_cells import ScatterBySum
from mindgrpo.backend.kernels.ascend import AscendKernels
from mindgrpo.backend.kernels.shapes import AdamWSettings, SamplingParams
from mindgrpo.backend.targets import choose_target
from mindgrpo.models.decoder import (
    KEEP_ALL,
    WHOLE_LAYERS,
    LogProbStage,
    Recompute,
    Stage,
    StageForward,
)
from mindgrpo.models.decoder_config import decoder_config
from mindgrpo.models.parameters import parameter_specs
from mindgrpo.models.shard import LOGITS_BYTES, Shard
from mindgrpo.models.vision_config import vision_layout
from mindgrpo.models.vision_tower import VisionTower
from mindgrpo.parallel.mesh import Mesh
from mindgrpo.parallel.sharding import Layout
from mindgrpo.plan.seconds import FUSED
from mindgrpo.rollout.embedded.plain import Decode, MarkSeen, Prefill
from mindgrpo.training.gradient_sync import GradientSync
from mindgrpo.training.optimizer_shares import sharded_tensors
from mindgrpo.training.stage_graphs import LossStep, PolicyLoss, StageBackward, Trained
from mindgrpo.weights.checksum import _SumsOfColumns
from mindgrpo.weights.local_weights import Weights

IMAGES = {
    "model_type": "qwen2_5_vl",
    "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
    # A layer with windows, and one that sees the whole image.
    "vision_config": {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_heads": 4,
        "out_hidden_size": 448,
        "fullatt_block_indexes": [1],
    },
}
TOKENS, PICKS, SLOTS, READ, PAGE, DIM = 256, 64, 4, 320, 16, 16
SAMPLING = SamplingParams(0.8, 20, 0.8, 0.05, 1.05, 2, 64, (1, 2))


class _Sum(nn.Cell):
    """Stands for a sum over ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.call = ops.Neg()

    def construct(self, x: Any) -> Any:
        return self.call(x)


class _Gather(nn.Cell):
    """Stands for a gather over ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.tile, self.expand = ops.Tile(), ops.ExpandDims()

    def construct(self, x: Any) -> Any:
        return self.tile(self.expand(x, 0), (4,) + (1,) * len(x.shape))


class _Exchange(nn.Cell):
    """Stands for an exchange between ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.call = ops.Neg()

    def construct(self, x: Any) -> Any:
        return self.call(x)


class _Four(Group):
    ranks, index = (0, 1, 2, 3), 0

    def sum_cell(self) -> nn.Cell:
        return _Sum()

    def gather_cell(self) -> nn.Cell:
        return _Gather()

    def scatter_sum_cell(self) -> nn.Cell:
        return ScatterBySum(_Sum(), 0)

    def exchange_cell(self) -> nn.Cell:
        return _Exchange()

    def sum_array(self, array: np.ndarray) -> np.ndarray:
        return array

    def gather_objects(self, value: Any) -> list[Any]:
        return [value] * 4

    def barrier(self) -> None:
        pass


@pytest.fixture(scope="module")
def device() -> Backend:
    made = connect(choose_target("CPU", "device"), {})
    made.kernels = AscendKernels(attention_dtype="bfloat16")
    made.compute_dtype = "bfloat16"
    made.group = lambda ranks: _Four() if len(ranks) > 1 else AloneGroup(0)  # type: ignore[method-assign]
    return made


def zeros(*shape: int, dtype: Any = np.int32) -> Tensor:
    return Tensor(np.zeros(shape, dtype))


class Model:
    """Qwen2 with `layers` layers a stage, each over four ranks, and one rank's share of it.

    `context` ranks, one or four, share rows of TOKENS.
    """

    def __init__(
        self,
        device: Backend,
        layers: int,
        stages: int = 1,
        rank: int = 0,
        is_trained: bool = True,
        splits_tokens: bool = False,
        data: int = 1,
        context: int = 1,
        sees_images: bool = False,
    ) -> None:
        config = decoder_config(
            {
                "model_type": "qwen2",
                "vocab_size": 4096,
                "hidden_size": 28 * DIM,
                "intermediate_size": 512,
                "num_hidden_layers": layers * stages,
                "num_attention_heads": 28,
                "num_key_value_heads": 4,
                "max_position_embeddings": 4096,
                "tie_word_embeddings": False,
                **(IMAGES if sees_images else {}),
            },
            "here",
        )
        self.device, self.layers, self.rank = device, layers, rank
        mesh, specs = Mesh(data, 4, stages, context), parameter_specs(config, splits_tokens)
        self.layout = Layout.of(mesh, specs, splits_tokens=splits_tokens)
        self.weights = self.role("weights", device.compute_dtype)
        self.shard = Shard(config, self.weights, device, is_trained=is_trained)

    def role(self, name: str, dtype: Dtype = "float32", is_sharded: bool = False) -> Weights:
        layout = self.layout.split_over_data() if is_sharded else self.layout
        made = Weights(layout, self.rank, self.device, name, dtype=dtype)
        made.pool.load()
        return made

    @property
    def sharded(self) -> tuple[ShardedTensor, ...]:
        return sharded_tensors(self.layout, self.rank)

    def shared(self) -> tuple[list[ShardedTensor], Group]:
        """Tensors of which there is a share, and the ranks that have one."""
        tensors = [tensor for tensor in self.sharded if tensor.blocks]
        return tensors, self.device.group(tensors[0].ranks)

    def trained(self) -> Trained:
        return Trained(self.weights.parameters, self.role("gradients").parameters)

    def caches(self) -> list[tuple[Any, Any]]:
        size, shape = SLOTS * READ * DIM, (SLOTS * READ, DIM)
        pool = self.device.pool(2 * self.layers * size, dtype=self.device.compute_dtype)
        buffers = [pool.parameter(f"c{i}", i * size, shape) for i in range(2 * self.layers)]
        pool.load()
        return list(zip(buffers[::2], buffers[1::2], strict=True))

    def seen(self) -> Any:
        pool = self.device.pool(SLOTS * self.shard.local_vocab)
        made = pool.parameter("seen", 0, (SLOTS, self.shard.local_vocab))
        pool.load()
        return made

    @property
    def tokens(self) -> int:
        return TOKENS // self.layout.mesh.cp

    def hidden(self) -> Tensor:
        tokens = self.tokens // self.layout.token_shares
        x = zeros(tokens, self.shard.config.hidden_size, dtype=np.float32)
        return x.astype(ms.bfloat16 if self.device.compute_dtype == "bfloat16" else ms.float16)

    def inputs(self) -> tuple[Tensor, ...]:
        """Of a stage."""
        columns = zeros(self.layout.mesh.cp, 1, self.tokens)
        if self.shard.config.vision is None:
            return zeros(1, TOKENS), zeros(1, TOKENS, 3), columns
        angles = zeros(1, TOKENS, 2 * DIM, dtype=np.float32)
        features = zeros(1, self.tokens, self.shard.config.hidden_size, dtype=np.float32)
        return angles, zeros(1, TOKENS, 3), columns, features


HEAD_INPUTS = (zeros(PICKS), zeros(PICKS))


def decode(device: Backend, layers: int, sampling: SamplingParams = SAMPLING) -> Any:
    model = Model(device, layers, is_trained=False)
    seen = model.seen() if sampling.repetition_penalty != 1.0 else None
    cell = Decode(model.shard, model.caches(), READ, sampling, seen)
    slots, pages = [zeros(SLOTS)] * 3, zeros(SLOTS, READ // PAGE)
    return cell(*slots, pages, zeros(SLOTS, 2), zeros(SLOTS, dtype=np.float32))


def decode_freely(device: Backend, layers: int) -> Any:
    return decode(device, layers, SamplingParams())


def decode_top_p(device: Backend, layers: int) -> Any:
    return decode(device, layers, SamplingParams(top_p=0.9))


def decode_greedily(device: Backend, layers: int) -> Any:
    return decode(device, layers, SamplingParams(0.0))


def prefill(device: Backend, layers: int) -> Any:
    model = Model(device, layers, is_trained=False)
    cell = Prefill(model.shard, model.caches(), TOKENS)
    return cell(zeros(1, TOKENS), zeros(TOKENS), zeros(TOKENS))


def mark_seen(device: Backend, layers: int) -> Any:
    model = Model(device, layers)
    marks = zeros(SLOTS, model.shard.local_vocab, dtype=np.float32)
    return MarkSeen(model.seen())(marks, zeros(SLOTS, 1, dtype=np.float32))


def forward(device: Backend, layers: int) -> Any:
    model = Model(device, layers, stages=2)
    return StageForward(Stage(model.shard, TOKENS))(zeros(1, TOKENS), *model.inputs())


def log_probs(device: Backend, layers: int) -> Any:
    model = Model(device, layers, stages=2, rank=4)
    stage = Stage(model.shard, TOKENS, WHOLE_LAYERS)
    net = LogProbStage(stage, model.shard, 0.8, LOGITS_BYTES)
    return net(model.hidden(), *model.inputs(), *HEAD_INPUTS)


def stage_backward(device: Backend, layers: int, **split: Any) -> Any:
    model = Model(device, layers, stages=2, **split)
    stage = Stage(model.shard, TOKENS)
    cell = StageBackward(stage, model.shard.layers, model.trained())
    flows = [model.hidden() for _ in range(layers)]
    return cell(zeros(1, model.tokens), model.hidden(), *model.inputs(), *flows)


def loss_step(
    device: Backend,
    layers: int,
    recompute: Recompute = WHOLE_LAYERS,
    loss_config: AlgorithmConfig | None = None,
    **split: Any,
) -> Any:
    model = Model(device, layers, stages=2, rank=4 * split.get("context", 1), **split)
    stage = Stage(model.shard, TOKENS, recompute)
    # Sixteen rows of logits at a time.
    net = LogProbStage(stage, model.shard, 0.8, 4 * model.shard.local_vocab * 16)
    numbers = [zeros(PICKS, dtype=np.float32) for _ in range(8)]
    numbers[5] = zeros(PICKS)
    loss = PolicyLoss(loss_config or loss_of(), True, model.shard.context_group)
    cell = LossStep(net, model.shard.layers, model.shard.head_key, loss, model.trained())
    flows = [model.hidden() for _ in range(layers - 1)]
    return cell(model.hidden(), *model.inputs(), *HEAD_INPUTS, *numbers, *flows)


def stage_backward_of_shares(device: Backend, layers: int) -> Any:
    """Of tokens that ranks of a layer share out, of rows that other ranks share."""
    return stage_backward(device, layers, splits_tokens=True, context=4)


def loss_step_of_shares(device: Backend, layers: int) -> Any:
    """As before, and samples that ranks share."""
    by_sample = loss_of(importance_sampling_level="sequence")
    return loss_step(device, layers, KEEP_ALL, by_sample, splits_tokens=True, context=4)


def optimizer(device: Backend, layers: int) -> Any:
    model = Model(device, layers)
    roles = [model.role(name) for name in ("masters", "gradients", "first", "second")]
    tensors = [
        (*(role.parameters[entry.key] for role in roles), entry.decay) for entry in roles[0].fused
    ]
    settings = AdamWSettings(0.9, 0.95, 1e-8, 0.01)
    inputs = device.kernels.adamw_inputs(settings.at(1, 1e-3, 0.5))
    cell = AdamWCell(tensors, settings, device.kernels)
    return cell(Tensor(0.5, ms.float32), *inputs)


def optimizer_of_shares(device: Backend, layers: int) -> Any:
    model = Model(device, layers, data=4)
    names = "masters", "first", "second"
    masters, first, second = (model.role(name, is_sharded=True) for name in names)
    roles = masters, model.role("gradients"), first, second
    tensors = [
        (*(role.parameters[entry.key] for role in roles), entry.decay) for entry in masters.fused
    ]
    settings = AdamWSettings(0.9, 0.95, 1e-8, 0.01)
    inputs = device.kernels.adamw_inputs(settings.at(1, 1e-3, 0.5))
    cell = AdamWCell(tensors, settings, device.kernels, OwnRows(model.sharded))
    return cell(Tensor(0.5, ms.float32), *inputs)


def sum_of_shares(device: Backend, layers: int) -> Any:
    model = Model(device, layers, data=4)
    tensors, group = model.shared()
    gradients = model.role("gradients").stored
    return SumOfShares(tensors, gradients, group)(zeros(1, dtype=np.float32))


def norm_of_shares(device: Backend, layers: int) -> Any:
    model = Model(device, layers, data=4)
    return GradientSync(model.role("gradients"), device, model.sharded)._norm()


def weights_of_shares(device: Backend, layers: int) -> Any:
    model = Model(device, layers, data=4)
    masters = model.role("masters", is_sharded=True)
    tensors, group = model.shared()
    cell = GatherOfShares(tensors, masters.stored, model.weights.stored, group)
    return cell(zeros(1, dtype=np.float32))


def gradient_norm(device: Backend, layers: int) -> Any:
    return GradientSync(Model(device, layers).role("gradients"), device).sum()


def rounded_weights(device: Backend, layers: int) -> Any:
    model = Model(device, layers)
    roles = model.role("masters"), model.weights
    pairs = [[role.parameters[entry.key] for entry in role.fused] for role in roles]
    return RoundCell(*pairs)(Tensor(0.5, ms.float32))


def checksum(device: Backend, layers: int) -> Any:
    bits = zeros(TOKENS, DIM), zeros(TOKENS, DIM, dtype=np.int16)
    return _SumsOfColumns()(*bits, zeros(TOKENS, 1), zeros(TOKENS, 1))


def vision_tower(device: Backend, layers: int) -> Any:
    vision = Model(device, 1, sees_images=True).shard.config.vision
    assert vision is not None
    vision = replace(vision, depth=2 * layers)
    weights = Weights(vision_layout(vision, 1), 0, device, "vision", dtype=device.compute_dtype)
    weights.pool.load()
    patches = zeros(TOKENS, vision.patch_values, dtype=np.float32)
    spans, angles = zeros(1, TOKENS, 3), zeros(1, TOKENS, 2 * vision.head_dim, dtype=np.float32)
    return VisionTower(vision, weights, device.kernels)(patches, angles, spans, spans)


def stage_backward_with_features(device: Backend, layers: int) -> Any:
    return stage_backward(device, layers, splits_tokens=True, context=4, sees_images=True)


GRAPHS = (
    vision_tower,
    stage_backward_with_features,
    checksum,
    decode,
    decode_freely,
    decode_top_p,
    decode_greedily,
    prefill,
    mark_seen,
    forward,
    log_probs,
    stage_backward,
    loss_step,
    gradient_norm,
    optimizer,
    rounded_weights,
    stage_backward_of_shares,
    loss_step_of_shares,
    sum_of_shares,
    norm_of_shares,
    optimizer_of_shares,
    weights_of_shares,
)
# Registered for the AI CPU as well as for the AI Core, by CANN's own kernels, which the package does not list:
# AddN has one of the package's own (ops/_op_impl/akg/ascend), and FillV2 becomes CANN's Fill.
OF_AI_CORE = {
    "StridedSlice",
    "StridedSliceGrad",
    "UnsortedSegmentSum",
    "Argmax",
    "Gather",
    "CumSum",
    "AddN",
    "FillV2",
}


def on_aicpu(census: Census) -> set[str]:
    return {
        f"{name} {dtypes}"
        for name, dtypes in census
        if name in aicpu_primitives() - aclnn_primitives() - OF_AI_CORE
    }


@pytest.mark.parametrize("graph", GRAPHS, ids=lambda graph: graph.__name__)
def test_no_graph_has_an_operation_of_the_ai_cpu(
    graph: Callable[[Backend, int], Any], device: Backend, tmp_path: Path
) -> None:
    census = census_of(lambda: graph(device, 1), tmp_path)
    assert by_primitive(census)
    assert on_aicpu(census) == set()


@pytest.mark.parametrize(("graph", "limit"), [(decode, 448), (decode_freely, 503)])
def test_a_token_of_28_layers_is_so_many_kernels_at_most(
    graph: Callable[[Backend, int], Any], limit: int, device: Backend, tmp_path: Path
) -> None:
    """With all that sampling can ask for, and with noise for every token."""
    one, two = (census_of(partial(graph, device, n), tmp_path / str(n)).total() for n in (2, 3))
    assert one + 26 * (two - one) <= limit


def test_an_optimizer_step_is_as_many_kernels_as_the_plan_counts(
    device: Backend, tmp_path: Path
) -> None:
    graphs = gradient_norm, optimizer, rounded_weights

    def launched(layers: int) -> int:
        runs = [partial(graph, device, layers) for graph in graphs]
        made = [census_of(run, tmp_path / f"{i}-{layers}") for i, run in enumerate(runs)]
        return sum(census.total() for census in made)

    two, three = launched(2), launched(3)
    assert FUSED["optimizer"] == (three - two, 3 * two - 2 * three)


def test_an_operation_of_the_ai_cpu_is_found(device: Backend, tmp_path: Path) -> None:
    class Shift(nn.Cell):
        def construct(self, x: Any) -> Any:
            return ops.bitwise_right_shift(x, 3)

    census = census_of(lambda: Shift()(zeros(4)), tmp_path)
    assert on_aicpu(census) == {"RightShift Int32,Int32 -> Int32"}
