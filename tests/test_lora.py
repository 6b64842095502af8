"""Low-rank adapters: base plus adapters equals the merged model, only adapters learn, and exports say the same.

That every layout gives the same is shown by test_distributed.py. Does not prove that anything is learnt well.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from test_update import CONFIG, LAYOUT, SETTINGS, batch, one_update

from mindgrpo.algorithm import losses
from mindgrpo.algorithm.packing import PackedRollout
from mindgrpo.backend.cpu.backend import CpuBackend
from mindgrpo.errors import UserError
from mindgrpo.memory.residency import Residency
from mindgrpo.models.lora import (
    TARGETS,
    LoraSettings,
    adapter_names,
    adapter_specs,
    fill_adapters,
)
from mindgrpo.models.parameters import parameter_specs
from mindgrpo.models.pipeline import compute_log_probs
from mindgrpo.parallel.mesh import Mesh
from mindgrpo.parallel.sharding import Layout
from mindgrpo.run.model_export import export_adapters
from mindgrpo.training.policy import Policy
from mindgrpo.training.stage_graphs import LossInputs
from mindgrpo.weight_sync.transfer import WeightSyncer
from mindgrpo.weights.pretrained import fill_random


def policy_with(backend: CpuBackend, targets: tuple[str, ...], random_b: bool = True) -> Policy:
    policy = Policy(CONFIG, LAYOUT, backend, SETTINGS, LoraSettings(3, 6.0, targets))
    fill_random(policy.weights, seed=2, scale=0.1)
    assert policy.adapters is not None
    fill_adapters(policy.adapters.weights, seed=5)
    if random_b:
        rng = np.random.default_rng(1)
        for name, part in policy.adapters.weights.arrays.hf_views.items():
            if "lora_B" in name:
                part[...] = rng.normal(0, 0.1, part.shape)
    return policy


def log_probs_of(policy: Policy) -> list[np.ndarray]:
    packed = PackedRollout(batch().rollout)
    return compute_log_probs(policy.pipeline, LAYOUT.mesh, policy.backend, packed)


@pytest.fixture(scope="module")
def backend() -> CpuBackend:
    return CpuBackend({})


@pytest.mark.parametrize("targets", [TARGETS, ("v_proj", "q_proj", "down_proj"), ("up_proj",)])
def test_the_merged_model_computes_what_base_and_adapters_do(
    backend: CpuBackend, targets: tuple[str, ...]
) -> None:
    adapted = policy_with(backend, targets)
    merged = Policy(CONFIG, LAYOUT, backend, SETTINGS)
    WeightSyncer(adapted.weights, adapted.adapters, merged.weights, backend).run()
    changed = {
        n
        for n, p in merged.weights.arrays.hf_views.items()
        if (p != adapted.weights.arrays.hf_views[n]).any()
    }
    assert changed == {
        name
        for name in merged.weights.arrays.hf_views
        if name.split(".")[-2] in targets and name.endswith("weight")
    }
    ours = log_probs_of(adapted)
    whole = log_probs_of(merged)
    for one, other in zip(ours, whole, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)


def test_fresh_adapters_change_nothing_and_an_update_changes_only_them(backend: CpuBackend) -> None:
    policy = policy_with(backend, TARGETS, random_b=False)
    base = Policy(CONFIG, LAYOUT, backend, SETTINGS)
    fill_random(base.weights, seed=2, scale=0.1)
    ours = log_probs_of(policy)
    plain = log_probs_of(base)
    for one, other in zip(ours, plain, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)
    before = {name: part.copy() for name, part in policy.weights.arrays.hf_views.items()}
    assert policy.adapters is not None
    start = {name: part.copy() for name, part in policy.adapters.weights.arrays.hf_views.items()}
    for _ in range(2):  # the first moves only B, for B is zero
        one_update(policy, batch())
    for name, part in policy.weights.arrays.hf_views.items():
        np.testing.assert_array_equal(part, before[name])
    for name, part in policy.adapters.weights.arrays.hf_views.items():
        assert np.abs(part - start[name]).max() > 1e-4, name


def test_gradients_are_the_chain_rules_of_the_whole_matrices(backend: CpuBackend) -> None:
    """dA = scale B^T dW and dB = scale dW A^T, with dW the gradient of the merged model's own matrices."""
    adapted = policy_with(backend, TARGETS)
    whole = Policy(CONFIG, LAYOUT, backend, SETTINGS)
    WeightSyncer(adapted.weights, adapted.adapters, whole.weights, backend).run()
    given = batch()
    batches = PackedRollout(given.rollout).micro_batches(SETTINGS.shape, 1, 0)
    weights = losses.token_weights(given.rollout.action_lengths, SETTINGS.loss_config)
    for policy in (adapted, whole):
        policy.clear_gradients()
        extras = []
        for micro in batches:
            zeros = np.zeros(micro.picks.size, np.float32)
            used = (given.reference_logps or [], given.advantages, weights)
            unread = (zeros, zeros.astype(np.int32), zeros, zeros)
            spread = (micro.spread(values) for values in used)
            extras.append(LossInputs(zeros, *spread, *unread))
        policy.accumulate(batches, extras, False)
    assert adapted.adapters is not None
    scale = adapted.adapters.settings.scale
    parts = adapted.adapters.weights.arrays.hf_views
    for name, dw in whole.gradients.arrays.hf_views.items():
        a, b = adapter_names(name)
        if a not in parts:
            continue
        for found, expected in (
            (adapted.gradients.arrays.hf_views[a], scale * parts[b].T @ dw),
            (adapted.gradients.arrays.hf_views[b], scale * dw @ parts[a].T),
        ):
            size = np.abs(expected).max()
            np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5 * size + 1e-8)


def test_the_adapter_export_holds_what_the_merged_one_adds(
    backend: CpuBackend, tmp_path: Path
) -> None:
    policy = policy_with(backend, ("q_proj", "o_proj"))
    assert policy.adapters is not None
    export_adapters(policy.adapters, backend, "base", tmp_path / "adapter", Residency())
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    merged = Policy(CONFIG, LAYOUT, backend, SETTINGS).weights
    WeightSyncer(policy.weights, policy.adapters, merged, backend).run()
    pairs = [n for n in merged.arrays.hf_views if n.endswith(("q_proj.weight", "o_proj.weight"))]
    assert len(tensors) == 2 * len(pairs) == 4 * CONFIG.num_hidden_layers
    for name in pairs:
        a, b = (tensors[f"base_model.model.{n}"] for n in adapter_names(name))
        expected = policy.weights.arrays.hf_views[name] + 2.0 * b @ a
        np.testing.assert_allclose(merged.arrays.hf_views[name], expected, rtol=0, atol=1e-6)


def test_adapters_are_cut_where_their_matrix_is() -> None:
    specs = parameter_specs(CONFIG)
    layout = Layout.of(Mesh(1, 2), specs)
    adapters = replace(layout, specs=adapter_specs(specs, LoraSettings(3, 3.0, TARGETS)))
    for spec in adapters.specs:
        base = spec.name.replace(".lora_A", "").replace(".lora_B", "")
        (split,) = layout.by_name[base].splits
        dim = split.dim
        follows = dim == (1 if "lora_A" in spec.name else 0)
        assert spec.summed_over >= ({"dp"} if follows else {"dp", "mp"})
        for rank in range(2):
            box, whole = adapters.held_by(rank)[spec.name], layout.held_by(rank)[base]
            if follows:
                assert (box.start[dim], box.stop[dim]) == (whole.start[dim], whole.stop[dim])
            else:
                assert box.shape == spec.shape


def test_a_target_that_the_model_has_not_is_refused() -> None:
    with pytest.raises(UserError, match="'c_attn', but must name some of q_proj"):
        adapter_specs(parameter_specs(CONFIG), LoraSettings(3, 3.0, ("q_proj", "c_attn")))
