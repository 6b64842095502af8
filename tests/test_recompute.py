"""What the backward pass computes again, counted in the graph that the compiler ends with.

Does not prove that memory falls: a processor's graphs do not say what they hold. test_update.py shows that the
gradients stay the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from algorithms import loss_of
from mindspore import Tensor, nn, ops
from small_generators import WITH_AVX512

from mindgrpo.backend.cpu.backend import CpuBackend
from mindgrpo.config.roles import RecomputeConfig
from mindgrpo.models.decoder import (
    WHOLE_LAYERS,
    LogProbStage,
    Recompute,
    Stage,
    StageForward,
)
from mindgrpo.models.decoder_config import decoder_config
from mindgrpo.models.parameters import parameter_specs
from mindgrpo.models.shard import LOGITS_BYTES, Shard
from mindgrpo.parallel.mesh import Mesh
from mindgrpo.parallel.sharding import Layout
from mindgrpo.training.stage_graphs import (
    LayersBackward,
    LossStep,
    PolicyLoss,
    StageBackward,
    Trained,
)
from mindgrpo.weights.local_weights import Weights
from mindgrpo.weights.pretrained import fill_random

NUM_LAYERS, TOKENS = 2, 8
RAW = {
    "model_type": "qwen2",
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
# What of a layer is needed again: the matrix products whose results a gradient asks for.
QKV, GATE_UP = f"({TOKENS}, 64)", f"({TOKENS}, 80)"


class Backward(nn.Cell):
    """What LossStep does between the embedding and the head."""

    def __init__(self, stage: Stage, trained: Trained) -> None:
        super().__init__()
        self.stage = stage
        self.backward = LayersBackward(stage, range(NUM_LAYERS), trained, stage.recomputed)

    def construct(self, x: Any, dy: Any, positions: Any, spans: Any) -> Any:
        inputs = (positions, spans, ops.expand_dims(positions, 0))
        contexts = self.stage.contexts(inputs)
        flows = self.stage.flows(self.stage.entered(x, inputs), contexts, NUM_LAYERS)
        return flows[-1], self.backward(x, flows, contexts, dy)


def shard_of(
    num_stages: int = 1, stage: int = 0, num_parts: int | None = None
) -> tuple[Shard, Trained]:
    config = decoder_config(RAW | {"num_hidden_layers": NUM_LAYERS * num_stages}, "here")
    layout = Layout.of(Mesh(1, 1, num_stages), parameter_specs(config))
    backend = CpuBackend({}, num_parts=num_parts)
    weights, gradients = (Weights(layout, stage, backend, name) for name in ("weights", "gradient"))
    fill_random(weights, seed=1)
    trained = Trained(weights.parameters, gradients.parameters)
    return Shard(config, weights, backend), trained


TOKEN_IDS = Tensor(np.arange(TOKENS, dtype=np.int32)[None])
SPANS = Tensor(np.zeros((1, TOKENS, 3), np.int32))
COLUMNS = Tensor(np.arange(TOKENS, dtype=np.int32)[None, None])
STAGE_INPUTS = (TOKEN_IDS, SPANS, COLUMNS)
DY = Tensor(np.ones((TOKENS, 32), np.float32))


def products(
    cell: nn.Cell, folder: Path, *inputs: Tensor, num_parts: int | None = None
) -> dict[str, int]:
    """How often the compiled graph makes a product of each shape."""
    ms.set_context(save_graphs=1, save_graphs_path=str(folder))
    try:
        cell(*inputs)
    finally:
        ms.set_context(save_graphs=0)
    (last,) = folder.glob("*_validate_*.ir")
    lines = last.read_text().splitlines()
    product = "MatMul(" if num_parts is None else 'product"'
    made = [lines[i + 1] for i, line in enumerate(lines[:-1]) if product in line]
    shapes = [re.findall(r"\(\d+, \d+\)", line)[-1] for line in made]
    return {shape: shapes.count(shape) for shape in (QKV, GATE_UP)}


def of_a_backward_pass(recompute: Recompute, folder: Path, num_parts: int | None) -> dict[str, int]:
    shard, trained = shard_of(num_parts=num_parts)
    cell = Backward(Stage(shard, TOKENS, recompute), trained)
    return products(cell, folder, TOKEN_IDS, DY, TOKEN_IDS, SPANS, num_parts=num_parts)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int | None], dict[str, int]]:
    def of(num_parts: int | None) -> dict[str, int]:
        return of_a_backward_pass(Recompute(), tmp_path_factory.mktemp("kept"), num_parts)

    return cache(of)


# Products in float32, and of bfloat16 factors, whose kernels differ in what cells compute again: parts of layers.
@pytest.mark.parametrize(
    ("settings", "again", "num_parts"),
    [
        ({"recompute": True}, (2, 2), None),
        ({"select_recompute": True}, (2, 0), None),
        ({"select_recompute": ["mlp"]}, (0, 2), None),
        ({"select_recompute": 2}, (1, 1), None),
        pytest.param({"select_recompute": True}, (2, 0), 1, marks=WITH_AVX512),
        pytest.param({"select_recompute": ["mlp"]}, (0, 2), 1, marks=WITH_AVX512),
    ],
    ids=["all", "attention", "mlp", "every second layer", "attention, bfloat16", "mlp, bfloat16"],
)
def test_what_was_asked_for_and_nothing_else_is_computed_again(
    kept: Callable[[int | None], dict[str, int]],
    tmp_path: Path,
    settings: dict[str, object],
    again: tuple[int, int],
    num_parts: int | None,
) -> None:
    config = RecomputeConfig.model_validate(settings)
    found = of_a_backward_pass(Recompute(config.modules, config.every), tmp_path, num_parts)
    before = kept(num_parts)
    assert before == {QKV: NUM_LAYERS, GATE_UP: NUM_LAYERS}
    assert (found[QKV] - before[QKV], found[GATE_UP] - before[GATE_UP]) == again


def test_a_stage_that_hands_its_layers_inputs_to_its_backward_pass_computes_them_once_more(
    tmp_path: Path,
) -> None:
    shard, trained = shard_of(num_stages=2)
    stage = Stage(shard, TOKENS)
    forward = StageForward(stage)
    once = products(forward, tmp_path / "forward", TOKEN_IDS, *STAGE_INPUTS)
    assert once == {QKV: NUM_LAYERS, GATE_UP: NUM_LAYERS}
    _, *flows = forward(TOKEN_IDS, *STAGE_INPUTS)
    assert len(flows) == NUM_LAYERS
    backward = StageBackward(stage, range(NUM_LAYERS), trained)
    again = products(backward, tmp_path / "backward", TOKEN_IDS, DY, *STAGE_INPUTS, *flows)
    assert again == once


@pytest.mark.parametrize("num_stages", [1, 2])
def test_the_last_stage_computes_all_layers_but_its_last_once_more_with_the_same_result(
    num_stages: int, tmp_path: Path
) -> None:
    shard, trained = shard_of(num_stages, num_stages - 1)
    hidden = np.random.default_rng(0).normal(size=(TOKENS, 32)).astype(np.float32)
    x = TOKEN_IDS if num_stages == 1 else Tensor(hidden)
    picks, numbers = Tensor(np.arange(TOKENS, dtype=np.int32)), Tensor(np.ones(TOKENS, np.float32))
    inputs = (*STAGE_INPUTS, picks, picks, *[numbers] * 5, picks, numbers, numbers)

    def step_of(stage: Stage) -> LossStep:
        net = LogProbStage(stage, shard, 1.0, LOGITS_BYTES)
        loss = PolicyLoss(loss_of(), has_old=False)
        return LossStep(net, shard.layers, shard.head_key, loss, trained)

    def results(step: LossStep, *flows: Tensor) -> list[bytes]:
        for accumulator in trained.accumulators.values():
            accumulator.asnumpy()[...] = 0.0
        made = [output.asnumpy() for output in step(x, *inputs, *flows)[: 2 + num_stages]]
        made += [accumulator.asnumpy() for accumulator in trained.accumulators.values()]
        assert all(array.any() for array in made[3:])
        return [array.tobytes() for array in made]

    again = Stage(shard, TOKENS, WHOLE_LAYERS)
    forward = StageForward(again)
    ahead = products(forward, tmp_path / "forward", x, *STAGE_INPUTS)
    assert ahead == {QKV: NUM_LAYERS - 1, GATE_UP: NUM_LAYERS - 1}
    y, *flows = forward(x, *STAGE_INPUTS)
    step = step_of(again)
    made = products(step, tmp_path / "step", x, *inputs, *flows, y)
    assert made == {QKV: NUM_LAYERS, GATE_UP: NUM_LAYERS}
    assert results(step, *flows, y) == results(step_of(Stage(shard, TOKENS)))


@pytest.mark.parametrize(
    ("settings", "num_parts", "every"),
    [
        ({}, set(), 1),
        ({"recompute": True}, {"attention", "mlp"}, 1),
        ({"select_recompute": 1}, {"attention", "mlp"}, 1),
        ({"select_recompute": 3}, {"attention", "mlp"}, 3),
        ({"select_recompute": ["attention", "mlp"]}, {"attention", "mlp"}, 1),
    ],
)
def test_settings_as_parts_and_layers(
    settings: dict[str, object], num_parts: set[str], every: int
) -> None:
    config = RecomputeConfig.model_validate(settings)
    assert (config.modules, config.every) == (num_parts, every)
