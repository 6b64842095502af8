"""Low-rank adapters: base plus adapters equals the merged model, only adapters learn, and exports say the same.

That every layout gives the same is shown by test_distributed.py, that runs go on bit for bit and exports hold what they
published by test_resume.py. Does not prove that anything is learnt well.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from small_mixtures import MIXTURES
from test_update import CONFIG, LAYOUT, RAW, SETTINGS, batch, one_update

from mindgrpo.algorithm import losses
from mindgrpo.algorithm.packing import PackedRollout
from mindgrpo.backend.cpu.backend import CpuBackend
from mindgrpo.errors import UserError
from mindgrpo.memory.residency import Residency
from mindgrpo.models.decoder_config import DecoderConfig, decoder_config
from mindgrpo.models.lora import (
    TARGETS,
    LoraSettings,
    adapter_names,
    adapter_specs,
    fill_adapters,
    targets_of,
)
from mindgrpo.models.parameters import parameter_specs
from mindgrpo.models.pipeline import compute_log_probs
from mindgrpo.models.shard import Adapters
from mindgrpo.parallel.mesh import Mesh
from mindgrpo.parallel.sharding import Layout
from mindgrpo.run.model_export import export_adapters, export_policy
from mindgrpo.training.policy import Policy
from mindgrpo.training.stage_graphs import LossInputs
from mindgrpo.training.update import accumulate_gradients
from mindgrpo.weight_sync import stream
from mindgrpo.weight_sync.transfer import WeightSyncer
from mindgrpo.weights.local_weights import Weights
from mindgrpo.weights.model_files import SafetensorsDirectory
from mindgrpo.weights.pretrained import fill_random

# One layer with experts, of latents behind a dense one.
BEHIND_DENSE = {"deepseek_v3": {"num_hidden_layers": 2, "first_k_dense_replace": 1}}


def raw_of(family: str) -> dict[str, Any]:
    return RAW | MIXTURES[family] | {"model_type": family} | BEHIND_DENSE.get(family, {})


def policy_with(
    backend: CpuBackend,
    targets: tuple[str, ...],
    random_b: bool = True,
    config: DecoderConfig = CONFIG,
) -> Policy:
    layout = Layout.of(Mesh(1, 1), parameter_specs(config))
    policy = Policy(config, layout, backend, SETTINGS, LoraSettings(3, 6.0, targets))
    fill_random(policy.weights, seed=2, scale=0.1)
    assert policy.adapters is not None
    fill_low_rank(policy.adapters.weights, random_b)
    return policy


def fill_low_rank(adapters: Weights, random_b: bool = True) -> None:
    fill_adapters(adapters, seed=5)
    rng = np.random.default_rng(1)
    for name, part in adapters.arrays.hf_views.items():
        if "lora_B" in name and random_b:
            part[...] = rng.normal(0, 0.1, part.shape)


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


def test_adapters_weigh_alpha_over_rank_as_wherever_they_are_loaded() -> None:
    assert (
        LoraSettings(16, 8.0, TARGETS).scale == 0.5 and LoraSettings(3, 6.0, TARGETS).scale == 2.0
    )


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
    assert_chain_rule(adapted, whole)


def assert_chain_rule(adapted: Policy, whole: Policy) -> None:
    """Of matrices [out, in], and of each of [experts, out, in]."""
    assert adapted.adapters is not None
    scale = adapted.adapters.settings.scale
    parts, checked = adapted.adapters.weights.arrays.hf_views, 0
    for name, dw in whole.gradients.arrays.hf_views.items():
        a, b = adapter_names(name)
        if a not in parts:
            continue
        for found, expected in (
            (adapted.gradients.arrays.hf_views[a], scale * parts[b].swapaxes(-1, -2) @ dw),
            (adapted.gradients.arrays.hf_views[b], scale * dw @ parts[a].swapaxes(-1, -2)),
        ):
            size = np.abs(expected).max()
            assert size > 1e-5, name
            np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5 * size + 1e-8)
            checked += 1
    assert checked == len(parts)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_experts_with_adapters_are_the_merged_ones_bit_for_bit_and_have_their_gradients(
    family: str,
) -> None:
    backend = CpuBackend({})
    backend.kernels.batch_invariant = backend.kernels.has_slots
    config = decoder_config(raw_of(family), "here")
    targets = targets_of(parameter_specs(config))
    adapted = policy_with(backend, targets, config=config)
    whole = Policy(config, adapted.weights.layout, backend, SETTINGS)
    WeightSyncer(adapted.weights, adapted.adapters, whole.weights, backend).run()
    assert adapted.adapters is not None
    parts, base = adapted.adapters.weights.arrays.hf_views, adapted.weights.arrays.hf_views
    kinds = set()
    for name, merged in whole.weights.arrays.hf_views.items():
        expected, (a, b) = base[name].astype(np.float64), adapter_names(name)
        if a in parts:
            kinds.add(name.split(".")[-2])
            expected = expected + 2.0 * np.einsum("...or,...ri->...oi", parts[b], parts[a])
            assert np.abs(expected - base[name]).max() > 1e-2
        np.testing.assert_allclose(merged, expected, rtol=0, atol=1e-6, err_msg=name)
    assert kinds == set(targets)
    for one, other in zip(log_probs_of(adapted), log_probs_of(whole), strict=True):
        if backend.kernels.batch_invariant:
            np.testing.assert_array_equal(one, other)
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)
    given = replace(batch(), reference_logps=None)
    token_weights = np.full(len(given), 0.1, np.float32)
    for policy in (adapted, whole):
        policy.clear_gradients()
        packed = PackedRollout(given.rollout)
        accumulate_gradients(policy, given, packed, range(len(given)), token_weights)
    assert_chain_rule(adapted, whole)


@pytest.mark.parametrize("family", MIXTURES)
def test_files_hold_adapters_of_each_expert_and_the_model_that_they_make(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model in groups that end within a layer's experts, as large ones have."""
    backend, config = CpuBackend({}), decoder_config(raw_of(family), "here")
    (tmp_path / "config.json").write_text(json.dumps(raw_of(family)))
    layout = Layout.of(Mesh(1, 1), parameter_specs(config))
    settings = LoraSettings(3, 6.0, ("gate_proj", "down_proj"))
    base = Weights(layout, 0, backend, "policy")
    fill_random(base, seed=2, scale=0.1)
    specs = adapter_specs(layout.specs, settings)
    adapters = Adapters(Weights(replace(layout, specs=specs), 0, backend, "low"), settings)
    fill_low_rank(adapters.weights)
    source, memory = str(tmp_path), Residency()
    export_adapters(adapters, backend, source, tmp_path / "adapter", memory)
    monkeypatch.setattr(stream, "GROUP_BYTES", 3 * 4 * 24 * 32)
    export_policy(base, backend, source, tmp_path / "plain", memory)
    export_policy(base, backend, source, tmp_path / "hf", memory, adapters)
    monkeypatch.undo()
    pairs = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    described = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    modules = ["w1", "w2"] if family == "mixtral" else ["gate_proj", "down_proj"]
    assert sorted(described["target_modules"]) == sorted(modules)
    expert = "block_sparse_moe.experts.3.w1" if family == "mixtral" else "mlp.experts.3.gate_proj"
    layer = config.num_hidden_layers - 1
    assert f"base_model.model.model.layers.{layer}.{expert}.lora_A.weight" in pairs
    plain, made = (SafetensorsDirectory(tmp_path / name) for name in ("plain", "hf"))
    adapted = {name for name in plain.names if name.split(".")[-2] in modules}
    assert len(pairs) == 2 * len(adapted) >= 2 * 2 * 4
    for name in plain.names:
        expected = plain.read(name)
        if name in adapted:
            a, b = (pairs[f"base_model.model.{own}"] for own in adapter_names(name))
            expected = expected + 2.0 * b @ a
        np.testing.assert_allclose(made.read(name), expected, rtol=0, atol=1e-6, err_msg=name)


def test_the_adapter_export_holds_what_the_merged_one_adds(
    backend: CpuBackend, tmp_path: Path
) -> None:
    policy = policy_with(backend, ("q_proj", "o_proj"))
    assert policy.adapters is not None
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text(json.dumps(RAW))
    export_adapters(policy.adapters, backend, str(base), tmp_path / "adapter", Residency())
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
        assert spec.summed_over >= ({"dp"} if follows else {"dp", "tp"})
        for rank in range(2):
            box, whole = adapters.held_by(rank)[spec.name], layout.held_by(rank)[base]
            if follows:
                assert (box.start[dim], box.stop[dim]) == (whole.start[dim], whole.stop[dim])
            else:
                assert box.shape == spec.shape


def test_adapters_of_experts_are_where_the_expert_is_and_sums_over_its_parts() -> None:
    specs = parameter_specs(decoder_config(raw_of("qwen3_moe"), "here"))
    layout = Layout.of(Mesh(4, 1, ep=2, etp=2), specs)
    settings = LoraSettings(3, 3.0, ("gate_proj", "down_proj"))
    low_rank = replace(layout, specs=adapter_specs(specs, settings))
    module = "model.layers.0.mlp.experts"
    # Hidden 32, inner 24: of rank 3, the second experts and the second half of the columns.
    expected = {
        "gate_proj.lora_A": (((2, 0, 0), (4, 3, 32)), {"edp", "etp"}),
        "gate_proj.lora_B": (((2, 12, 0), (4, 24, 3)), {"edp"}),
        "down_proj.lora_A": (((2, 0, 12), (4, 3, 24)), {"edp"}),
        "down_proj.lora_B": (((2, 0, 0), (4, 32, 3)), {"edp", "etp"}),
    }
    held = low_rank.held_by(3)
    assert held.keys() == {f"{module}.{name}.weight" for name in expected}
    for name, (box, summed) in expected.items():
        own = held[f"{module}.{name}.weight"]
        assert (own.start, own.stop) == box
        assert low_rank.by_name[f"{module}.{name}.weight"].summed_over == summed


@pytest.mark.parametrize("family", ["qwen2", "deepseek_v3"])
def test_a_target_that_the_model_has_not_is_refused(family: str) -> None:
    raw = RAW if family == "qwen2" else raw_of(family)
    specs = parameter_specs(decoder_config(raw, "here"))
    wrong, first = ("c_attn", "q_proj") if family == "qwen2" else ("q_proj", "o_proj")
    with pytest.raises(UserError, match=f"'{wrong}', but must name some of {first}"):
        adapter_specs(specs, LoraSettings(3, 3.0, ("o_proj", wrong)))
