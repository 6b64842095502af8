"""Cells with a gradient of their own, in models of four layers: computed again, or without graphs, numbers stay.

One process: a second rank, where there is one, has what this one has. Does not prove that ranks exchange anything
(test_distributed.py does), nor that a gradient is right (test_golden_models.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from mindspore import nn, ops
from small_generators import WITH_AVX512, WITH_C
from small_mixtures import MIXTURES
from test_lora import fill_low_rank
from test_update import RAW, SETTINGS, batch

from mindgrpo.algorithm.packing import MicroShape, PackedRollout
from mindgrpo.backend.contract import AloneGroup, Group
from mindgrpo.backend.cpu.backend import CpuBackend
from mindgrpo.backend.dtypes import NUM_PARTS, Dtype
from mindgrpo.models.decoder import KEEP_ALL, WHOLE_LAYERS, Recompute
from mindgrpo.models.decoder_config import decoder_config
from mindgrpo.models.lora import TARGETS, LoraSettings
from mindgrpo.models.parameters import parameter_specs
from mindgrpo.parallel.mesh import Mesh
from mindgrpo.parallel.sharding import Layout
from mindgrpo.training.policy import Policy
from mindgrpo.training.update import accumulate_gradients
from mindgrpo.weights.pretrained import fill_random

LAYERS, COEF = 4, 0.3
DENSE = RAW | {"num_hidden_layers": LAYERS}
MIXTURE = DENSE | {"model_type": "qwen3_moe", **MIXTURES["qwen3_moe"]}


class Twice(nn.Cell):
    def construct(self, x: Any) -> Any:
        return x + x


class Both(nn.Cell):
    def construct(self, x: Any) -> Any:
        return ops.concat((ops.expand_dims(x, 0), ops.expand_dims(x, 0)), 0)


class FirstTwice(nn.Cell):
    def construct(self, x: Any) -> Any:
        return x[0] + x[0]


class Twin(AloneGroup):
    """This rank and one that has the same."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks, self.index = ranks, 0

    def sum_cell(self) -> nn.Cell:
        return Twice()

    def gather_cell(self) -> nn.Cell:
        return Both()

    def scatter_sum_cell(self) -> nn.Cell:
        return FirstTwice()

    def sum_array(self, array: np.ndarray) -> np.ndarray:
        array *= 2
        return array

    def gather_objects(self, value: Any) -> list[Any]:
        return [value, value]


class WithTwin(CpuBackend):
    def _make_group(self, ranks: tuple[int, ...]) -> Group:
        return Twin(ranks)


@dataclass(frozen=True)
class Variant:
    """A model whose cells are to be compared; `balance_coef` of its experts, `rank` of its adapters."""

    raw: dict[str, Any]
    mesh: Mesh = Mesh(1, 1)
    splits_tokens: bool = False
    balance_coef: float = 0.0
    rank: int = 0
    dtype: Dtype = "float32"
    # Of one micro-batch's logits; None: all at a time.
    head_rows: int | None = None


VARIANTS = {
    "balanced experts": Variant(MIXTURE, balance_coef=COEF),
    # The value of merged matrices with the gradients of base and adapters, between sums over ranks.
    "adapters, heads split": Variant(DENSE, Mesh(1, 2), rank=3),
    "tokens split": Variant(DENSE, Mesh(1, 2), splits_tokens=True),
    "rows shared, in two bytes": Variant(DENSE, Mesh(1, 1, 1, 2), dtype="bfloat16"),
}
MARKS = {"adapters, heads split": WITH_C, "rows shared, in two bytes": WITH_AVX512}


@cache
def computed(
    name: str, recompute: Recompute = KEEP_ALL, compiled: bool = True
) -> dict[str, np.ndarray]:
    """Every parameter's gradient, and the log-probs of each sample, of a batch in packed rows."""
    variant = VARIANTS[name]
    config = decoder_config(variant.raw, "here").balanced(variant.balance_coef)
    is_narrow = variant.dtype == "bfloat16"
    backend = WithTwin({}, compiled, NUM_PARTS["medium"] if is_narrow else None, is_narrow)
    backend.compute_dtype = variant.dtype
    backend.kernels.batch_invariant = variant.rank > 0 and backend.kernels.has_slots
    specs = parameter_specs(config, variant.splits_tokens)
    layout = Layout.of(variant.mesh, specs, 0, variant.splits_tokens)
    settings = replace(
        SETTINGS,
        shape=MicroShape(2, 32, context_ranks=variant.mesh.cp),
        num_positions=32,
        recompute=recompute,
        loss_config=replace(SETTINGS.loss_config, beta=0.0),
    )
    lora = LoraSettings(variant.rank, 6.0, TARGETS) if variant.rank else None
    policy = Policy(config, layout, backend, settings, lora)
    if policy.adapters is not None:
        fill_low_rank(policy.adapters.weights)
    base = policy.weights if policy.adapters is not None else policy.masters
    fill_random(base, seed=2, scale=0.2)
    policy.masters_changed()
    given = replace(batch(), reference_logps=None)
    weights = np.full(len(given), 0.1, np.float32)
    packed = PackedRollout(given.rollout)
    logps, _ = accumulate_gradients(policy, given, packed, range(len(given)), weights)
    found = {name: own.copy() for name, own in policy.gradients.arrays.hf_views.items()}
    backend.close()
    return found | {f"log-probs {i}": own for i, (own, _) in logps.items()}


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    largest = max(np.abs(own).max(initial=0.0) for own in expected.values())
    assert largest > 0.1
    for name, own in expected.items():
        limit = 2e-6 + 1e-5 * np.abs(own).max(initial=0.0)
        np.testing.assert_allclose(found[name], own, rtol=0, atol=limit, err_msg=name)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=MARKS.get(name, ())) for name in VARIANTS]
)
def test_computing_all_layers_again_changes_nothing(name: str) -> None:
    assert_same(computed(name, WHOLE_LAYERS), computed(name))
