"""Cells with a gradient of their own, in models of four layers: computing all layers again changes no number.

One process. Does not prove that a gradient is right (test_golden_models.py does), nor anything of several ranks
(test_distributed.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from algorithms import replace
from small_mixtures import MIXTURES
from test_update import RAW, SETTINGS, batch

from mindgrpo.algorithm.packing import MicroShape, PackedRollout
from mindgrpo.backend.cpu.backend import CpuBackend
from mindgrpo.models.decoder import KEEP_ALL, WHOLE_LAYERS, Recompute
from mindgrpo.models.decoder_config import decoder_config
from mindgrpo.models.parameters import parameter_specs
from mindgrpo.parallel.mesh import Mesh
from mindgrpo.parallel.sharding import Layout
from mindgrpo.training.policy import Policy
from mindgrpo.training.update import accumulate_gradients
from mindgrpo.weights.pretrained import fill_random

LAYERS = 4
DENSE = RAW | {"num_hidden_layers": LAYERS}
MIXTURE = DENSE | {"model_type": "qwen3_moe", **MIXTURES["qwen3_moe"]}


@dataclass(frozen=True)
class Variant:
    """A model whose cells are to be compared; `balance_coef` is of its experts."""

    raw: dict[str, Any]
    balance_coef: float = 0.0


VARIANTS = {"balanced experts": Variant(MIXTURE, balance_coef=0.3)}


def computed(variant: Variant, recompute: Recompute) -> dict[str, np.ndarray]:
    """Every parameter's gradient, and the log-probs of each sample, of a batch in packed rows."""
    config = decoder_config(variant.raw, "here").balanced(variant.balance_coef)
    layout = Layout.of(Mesh(1, 1), parameter_specs(config))
    settings = replace(
        SETTINGS,
        shape=MicroShape(2, 32),
        num_positions=32,
        recompute=recompute,
        loss_config=replace(SETTINGS.loss_config, beta=0.0),
    )
    policy = Policy(config, layout, CpuBackend({}), settings)
    fill_random(policy.weights, seed=2, scale=0.2)
    given = replace(batch(), reference_logps=None)
    weights = np.full(len(given), 0.1, np.float32)
    packed = PackedRollout(given.rollout)
    logps, *_ = accumulate_gradients(policy, given, packed, range(len(given)), weights)
    found = {name: own.copy() for name, own in policy.gradients.arrays.hf_views.items()}
    return found | {f"log-probs {i}": own for i, (own, _) in logps.items()}


@pytest.mark.parametrize("name", VARIANTS)
def test_computing_all_layers_again_changes_nothing(name: str) -> None:
    """Then a graph without a gradient makes what layers get, as it does on all pipeline stages but the last."""
    again, kept = (computed(VARIANTS[name], how) for how in (WHOLE_LAYERS, KEEP_ALL))
    assert again.keys() == kept.keys()
    assert max(np.abs(own).max(initial=0.0) for own in kept.values()) > 0.1
    for key, own in kept.items():
        limit = 2e-6 + 1e-5 * np.abs(own).max(initial=0.0)
        np.testing.assert_allclose(again[key], own, rtol=0, atol=limit, err_msg=key)
