"""The limit of the gap between generator and trainer: which one a configuration has, and what goes beyond it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from small_runs import make_inputs, trainer

from mindgrpo.backend.kernels.native.kernels import NativeKernels, _MatMul
from mindgrpo.config import Config
from mindgrpo.grpo.metrics import GapLimit, GapTooLarge, LogProbGap, check_gap, gap_limit


@pytest.mark.parametrize(
    ("use_vllm", "dtype", "own", "precision", "chosen", "limit"),
    [
        (0, "float32", "float32", "highest", "auto", GapLimit(0.01)),
        (0, "float32", "float32", "high", "auto", GapLimit(0.01)),
        (0, "float32", "float32", "medium", "auto", GapLimit(0.1, of_mean=True)),
        (1, "float32", "float32", "highest", "auto", GapLimit(0.01)),
        (1, "bfloat16", "float32", "medium", "auto", GapLimit(0.5, of_mean=True)),
        (1, "float16", "float32", "highest", "auto", GapLimit(0.05, of_mean=True)),
        (0, "float32", "bfloat16", "highest", "auto", GapLimit(0.5, of_mean=True)),
        (0, "float32", "float16", "highest", "auto", GapLimit(0.05, of_mean=True)),
        (1, "float32", "bfloat16", "highest", "auto", GapLimit(0.5, of_mean=True)),
        # The embedded generator computes in the run's own dtype whatever is said of vLLM.
        (0, "bfloat16", "float32", "highest", "auto", GapLimit(0.01)),
        (2, "bfloat16", "float32", "highest", "auto", GapLimit(0.01)),
        (1, "bfloat16", "float32", "highest", 0.3, GapLimit(0.3)),
        (1, "bfloat16", "float32", "highest", None, None),
    ],
)
def test_the_limit_is_the_users_or_that_of_the_generators_dtype(
    use_vllm: int,
    dtype: str,
    own: str,
    precision: str,
    chosen: float | str | None,
    limit: GapLimit | None,
) -> None:
    generate = {"use_vllm": use_vllm, "vllm": {"dtype": dtype}}
    sections = {"generate_config": generate, "rl_config": {"logprob_gap_limit": chosen}}
    assert gap_limit(Config.model_validate(sections), precision, own) == limit


def gap_of(mean: float, largest: float) -> LogProbGap:
    return LogProbGap(mean, largest, 1, 0, 0, -1.0, -1.0 - largest)


@pytest.mark.parametrize(
    ("mean", "largest", "limit", "words"),
    [
        (0.001, 0.02, GapLimit(0.01), "up to 0.02"),
        (0.6, 2.3, GapLimit(0.5, of_mean=True), "0.6 in the mean"),
        (math.nan, math.nan, GapLimit(0.01), "nan"),
        (math.nan, math.nan, GapLimit(0.5, of_mean=True), "nan"),
    ],
)
def test_a_gap_beyond_the_limit_is_an_error_with_the_figure(
    mean: float, largest: float, limit: GapLimit, words: str
) -> None:
    with pytest.raises(GapTooLarge, match=words):
        check_gap(gap_of(mean, largest), limit)


def test_single_tokens_do_not_count_where_the_mean_is_limited() -> None:
    check_gap(gap_of(0.03, 2.3), GapLimit(0.5, of_mean=True))
    check_gap(gap_of(0.001, 0.01), GapLimit(0.01))


def in_two_leaves(kernels: NativeKernels, transpose_b: bool = False, leaves: int = 1) -> Any:
    """The trainer's product, in another order of sums than the generator's."""
    return _MatMul(kernels.num_parts, transpose_b, 2)


@pytest.mark.parametrize(("limit", "updates"), [("1e-12", 1), ("auto", 2)])
def test_a_gap_beyond_the_limit_ends_a_run_before_its_weights_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, updates: int
) -> None:
    make_inputs(tmp_path)
    keys = {
        "logprob_gap_limit": limit,
        "updates_per_rollout": str(updates),
        "num_iterations": str(updates),
        "eval_steps": "0",
        "eval_on_start": "false",
    }
    words = [word for key, value in keys.items() for word in (f"--rl_config.{key}", value)]
    monkeypatch.setattr(NativeKernels, "matmul", in_two_leaves)
    made = trainer(tmp_path, tmp_path / "run", *words)
    policy = made.run.roles.policy
    before = {name: part.tobytes() for name, part in policy.weights.arrays.hf_views.items()}
    differs = (
        r"differ by up to .* in token \d+ of sample \d+: -[\d.]+ and -[\d.]+; \d+ tokens differ"
    )
    with pytest.raises(GapTooLarge, match=differs):
        made.train()
    after = {name: part.tobytes() for name, part in policy.weights.arrays.hf_views.items()}
    assert after == before and policy.version == policy.updates == 0
    assert not any(part.any() for part in policy.gradients.arrays.flat_buffers)
