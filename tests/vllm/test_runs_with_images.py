"""A model that sees images with real vLLM, which gets features and expanded ids: a run, and an evaluation.

Rows with and without pictures, an image that is evaluated again after updates. On one rank.
"""

from __future__ import annotations

from pathlib import Path

import picture_runs
import pytest
import small_runs
from engine_subject import needs_vllm
from evaluated_samples import evaluated

from mindgrpo.monitor.metrics import read_metrics

ROOMY = ("--generate_config.max_prompt_length=64", "--rl_config.seq_length=96")


@pytest.fixture
def inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # The least head that vLLM computes on processors.
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    rope = {"rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]}}
    for key, value in (heads | rope).items():
        monkeypatch.setitem(picture_runs.SMALL, key, value)
    picture_runs.model_fields.cache_clear()
    picture_runs.make_inputs(tmp_path)
    picture_runs.model_fields.cache_clear()
    return tmp_path


@needs_vllm
def test_a_run_has_the_trainers_log_probs_before_and_after_updates(inputs: Path) -> None:
    words = [*ROOMY, *small_runs.ONE_GRAPH, "--rl_config.dynamic_sampling=false"]
    words += ["--rl_config.max_steps=3", "--generate_config.use_vllm=1"]
    run = small_runs.run(inputs, inputs / "run", *words)
    steps = read_metrics(run / "metrics.jsonl")
    assert len(steps) == 3
    assert all(step["logprob_gap/max"] < 1e-5 and step["grad_norm"] > 0 for step in steps)


@needs_vllm
def test_an_evaluation_finds_what_the_embedded_generator_finds(inputs: Path) -> None:
    embedded, vllm = (evaluated(inputs, workers, *ROOMY) for workers in (0, 1))
    assert len(embedded) == small_runs.EVAL_SAMPLES
    assert embedded == vllm
