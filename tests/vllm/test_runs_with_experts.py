"""Models with experts: the names by which vLLM gets their weights, a whole run and an evaluation with real vLLM.

On one rank, of Mixtral the names only. Does not prove anything of several workers of an engine, which cut each expert.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_runs
from engine_subject import needs_vllm
from evaluated_samples import evaluated
from mindgrpo_engine.weights import in_checkpoint

from mindgrpo.models.decoder_config import decoder_config
from mindgrpo.models.parameters import parameter_specs
from mindgrpo.monitor.metrics import read_metrics
from mindgrpo.weights.expert_files import ExpertNames, file_tensors

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 8,
        # vLLM pads it to 64, and makes others of it where it packs weights for processors.
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "mixtral": {"num_local_experts": 8, "sliding_window": None},
}
# The least that vLLM computes on processors.
SIZES = {"hidden_size": 64, "head_dim": 32, "num_experts_per_tok": 2}


def fields(family: str) -> dict[str, Any]:
    return small_runs.MODEL | {"model_type": family} | SIZES | FAMILIES[family]


@pytest.mark.parametrize(("family", "kind"), [("qwen3_moe", "per_expert"), ("mixtral", "mixtral")])
def test_vllm_gets_weights_by_the_names_of_the_models_files(family: str, kind: ExpertNames) -> None:
    draw = np.random.default_rng(0)
    specs = parameter_specs(decoder_config(fields(family), "here"))
    tensors = {spec.name: draw.standard_normal(spec.shape, np.float32) for spec in specs}
    named = list(in_checkpoint(tensors.items(), family))
    files = file_tensors({spec.name: spec.shape for spec in specs}, kind)
    assert sorted(name for name, _ in named) == sorted(tensor.name for tensor in files)
    by_name = dict(named)
    for tensor in files:
        values = tensor.rows.made_of(lambda name, box: tensors[name][box.slices])
        np.testing.assert_array_equal(by_name[tensor.name], values, err_msg=tensor.name)


@needs_vllm
def test_a_run_has_the_trainers_log_probs_before_and_after_updates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, value in fields("qwen3_moe").items():
        monkeypatch.setitem(small_runs.MODEL, key, value)
    small_runs.make_inputs(tmp_path)
    words = [*small_runs.ONE_GRAPH, "--rl_config.max_steps=2", "--generate_config.use_vllm=1"]
    words += ["--rl_config.eval_on_start=false", "--rl_config.router_replay=false"]
    run = small_runs.run(tmp_path, tmp_path / "run", *words)
    steps = read_metrics(run / "metrics.jsonl")
    assert len(steps) == 2
    assert all(step["logprob_gap/max"] < 1e-5 and step["grad_norm"] > 0 for step in steps)
    assert all(step["moe/routes_replayed"] == 0.0 for step in steps)


@needs_vllm
def test_an_evaluation_finds_what_the_embedded_generator_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with rl_config.router_replay, its default, which is nothing to an evaluation."""
    for key, value in fields("qwen3_moe").items():
        monkeypatch.setitem(small_runs.MODEL, key, value)
    small_runs.make_inputs(tmp_path)
    embedded, vllm = (evaluated(tmp_path, workers) for workers in (0, 1))
    assert len(embedded) == small_runs.EVAL_SAMPLES
    assert embedded == vllm
