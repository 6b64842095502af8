"""Whole small runs of families that differ most, or that the decode loop in C does not compute: notice, memory, gaps,
files.

Does not prove that the block is the family's (test_golden_models.py does), nor several ranks (test_distributed.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import small_runs
from small_generators import WITH_AVX512, WITH_C
from small_mixtures import MIXTURES
from test_memory_account import plan_of

from mindgrpo.cli.verbs import main
from mindgrpo.grpo.roles import Roles
from mindgrpo.models.decoder_config import read_config
from mindgrpo.monitor.metrics import read_metrics
from mindgrpo.rollout.embedded.kv_cache import missing_options
from mindgrpo.weights.model_files import SafetensorsDirectory

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "golden"
CONFIG = ROOT / "examples" / "grpo" / "tiny_arithmetic" / "grpo_config.yaml"
SENTENCE = "The decode loop in C lacks "
FAMILIES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "olmo2": ({}, ["--actor_config.recompute_config.recompute", "true"]),
    "gemma3_text": (
        {"head_dim": 8, "query_pre_attn_scalar": 16, "sliding_window": 46},
        ["--actor_config.lora.rank", "2"],
    ),
    "deepseek_v3": (
        MIXTURES["deepseek_v3"],
        ["--rl_config.moe_router_bias_update_rate", "0.05"],
    ),
    "mixtral": (MIXTURES["mixtral"], ["--actor_config.lora.rank", "2"]),
    "qwen3_moe": (
        MIXTURES["qwen3_moe"],
        [
            *("--actor_config.recompute_config.select_recompute", "[mlp]"),
            *("--rl_config.num_iterations", "2"),
            *("--rl_config.router_aux_loss_coef", "0.01"),
        ],
    ),
}


@WITH_C
@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_says_once_what_the_loop_lacks_of_the_block_and_does_all_the_rest(
    family: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    options, words = FAMILIES[family][0], [*small_runs.ONE_GRAPH, *FAMILIES[family][1]]
    for key, value in {"model_type": family, **options}.items():
        monkeypatch.setitem(small_runs.MODEL, key, value)
    small_runs.make_inputs(tmp_path)
    made: list[Roles] = []
    make = Roles.__init__

    def making(self: Roles, *given: Any, **named: Any) -> None:
        make(self, *given, **named)
        made.append(self)

    monkeypatch.setattr(Roles, "__init__", making)
    run = small_runs.run(tmp_path, tmp_path / "run", "--rl_config.max_steps", "2", *words)
    in_loop = not missing_options(read_config(tmp_path / "model"))
    assert capsys.readouterr().out.count(SENTENCE) == (not in_loop)
    steps = read_metrics(run / "metrics.jsonl")
    assert len(steps) == 2
    gaps = [step["logprob_gap/max"] for step in steps]
    # The trainer makes keys and values of the latents that the generator attends to.
    has_same_bits = in_loop and family != "deepseek_v3"
    assert all((gap == 0.0) == has_same_bits and gap < 1e-4 for gap in gaps)
    assert all(step["grad_norm"] > 0 for step in steps)
    has_experts = family in ("mixtral", "qwen3_moe", "deepseek_v3")
    assert all(("moe/load_max" in step) == has_experts for step in steps)
    # Of 4 experts a token has 2: one has all tokens at most.
    assert all(1.0 < step["moe/load_max"] <= 2.0 for step in steps if has_experts)
    assert all(step.get("moe/routes_replayed") == (1.0 if has_experts else None) for step in steps)
    assert all(step.get("moe/routes_changed", 0.0) == 0.0 for step in steps)
    assert [row.by_role for row in made[0].residency.table()] == [
        row.by_role for row in plan_of(tmp_path, words).memory()
    ]
    before, after = SafetensorsDirectory(tmp_path / "model"), SafetensorsDirectory(run / "hf")
    assert sorted(after.names) == sorted(before.names)
    changed = {n for n in before.names if (before.read(n) != after.read(n)).any()}
    adapted = {name for name in before.names if "_proj." in name}
    assert changed == (adapted if "--actor_config.lora.rank" in words else set(before.names))


@WITH_AVX512
@pytest.mark.parametrize("family", ["olmo2", "deepseek_v3"])
def test_a_family_that_the_loop_lacks_trains_in_two_bytes(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its table is embedding and head, which the graph of a token reads before and behind what it writes."""
    for key, value in {"model_type": family, **FAMILIES[family][0]}.items():
        monkeypatch.setitem(small_runs.MODEL, key, value)
    small_runs.make_inputs(tmp_path)
    words = [*small_runs.ONE_GRAPH, "--rl_config.max_steps", "1"]
    run = small_runs.run(tmp_path, tmp_path / "run", *words, "--context.compute_dtype", "bfloat16")
    (step,) = read_metrics(run / "metrics.jsonl")
    assert step["grad_norm"] > 0 and 0 < step["logprob_gap/mean"] < 0.01


@WITH_C
def test_the_plan_says_it_too_and_refuses_sequences_beyond_the_window(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    words = ["plan", "--config", str(CONFIG), "--actor_config.load", str(GOLDEN / "gemma3_text")]
    words += ["--actor_config.parallel_config.model_parallel", "2"]
    words += ["--generate_config.parallel_config.model_parallel", "2"]
    prompt = "--generate_config.max_prompt_length"
    # The window is 64, and max_tokens 40.
    assert main([*words, prompt, "24"]) == 0
    assert capsys.readouterr().out.count(SENTENCE) == 1
    assert main([*words, prompt, "25"]) == 2
    said = capsys.readouterr().err
    assert "local layers see 64 tokens" in said and "max_tokens is 65" in said
    qwen = [word.replace("gemma3_text", "qwen2") for word in words]
    assert main([*qwen, prompt, "25"]) == 0
    assert SENTENCE not in capsys.readouterr().out
