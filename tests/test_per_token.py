"""per_token.jsonl: what its arrays hold, and that its figures are those of metrics.jsonl where samples are left out.

Does not prove anything of several ranks (test_distributed.py and test_resume_on_ranks.py do).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_runs import completions, decoded, make_inputs, run, token_rows

from mindgrpo.algorithm.sample import Rollout, TrainBatch
from mindgrpo.grpo.metrics import encoded
from mindgrpo.grpo.metrics import token_rows as rows_of
from mindgrpo.monitor.metrics import read_metrics
from mindgrpo.training.update import UpdateReport


def test_an_array_comes_back_in_half_precision_with_what_is_beyond_its_range_clipped() -> None:
    values = np.array([-0.1, 0.0, 6e-8, 1e6, -1e6, 65519.0, np.inf, -np.inf, np.nan], np.float32)
    row = decoded({"length": len(values), "gap": encoded(values)})
    np.testing.assert_array_equal(row["gap"][:3], values[:3].astype(np.float16))
    largest = 65504.0
    assert row["gap"][3:8].tolist() == [largest, -largest, largest, largest, -largest]
    assert np.isnan(row["gap"][8])
    assert encoded(np.zeros(0, np.float32)) == ""
    assert encoded(np.array([1.0])) == "ADw=", "0x3c00, its low byte first"


def report(logps: dict[int, list[float]], entropy: float) -> UpdateReport:
    arrays = {i: np.array(values, np.float32) for i, values in logps.items()}
    entropies = {i: np.full_like(values, entropy) for i, values in arrays.items()}
    return UpdateReport(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, arrays, entropies, 0.0)


def batch(**more: Any) -> TrainBatch:
    ids, logps = [np.zeros(2, np.int32)] * 3, [np.full(2, -1.0, np.float32)] * 3
    rollout = Rollout.single_turn(ids, ids, ["stop"] * 3, logps, [0, 0, 0])
    return TrainBatch(rollout, np.zeros(3, np.float32), **more)


def test_each_sample_has_its_last_update_and_what_was_not_computed_is_left_out() -> None:
    old = [np.full(2, -1.5, np.float32)] * 3
    reports = [report({0: [-2.0, -2.0], 1: [-2.0, -1.0]}, 0.25), report({0: [-1.25, -1.5]}, 0.5)]
    found = [decoded(row) for row in rows_of(batch(old_logps=old), reports, "k1")]
    assert [row["sample"] for row in found] == [0, 1, 2]
    assert [row["gap"].tolist() for row in found] == [[-0.5, -0.5]] * 3
    assert [row["log_ratio"].tolist() for row in found[:2]] == [[0.25, 0.0], [-0.5, 0.5]]
    assert [row["entropy"].tolist() for row in found[:2]] == [[0.5, 0.5], [0.25, 0.25]]
    # No update was made of sample 2; there is no reference.
    assert found[2].keys() == {"sample", "length", "logprob", "gap"}
    assert "kl" not in found[0]


def test_without_old_log_probs_the_gap_is_of_the_first_update() -> None:
    reference = [np.full(2, -2.5, np.float32)] * 3
    reports = [report({0: [-2.0, -2.0]}, 0.0), report({1: [-3.0, -2.0]}, 0.0)]
    first, second, third = (
        decoded(row) for row in rows_of(batch(reference_logps=reference), reports, "k1")
    )
    assert first["gap"].tolist() == [-1.0, -1.0] and "gap" not in second
    assert first["log_ratio"].tolist() == second["log_ratio"].tolist() == [0.0, 0.0]
    assert second["kl"].tolist() == [-0.5, 0.5]
    assert third.keys() == {"sample", "length", "logprob"}


def test_tokens_that_the_policy_did_not_write_are_no_numbers() -> None:
    given = batch()
    masks = (np.array([True, False]), *given.rollout.action_mask[1:])
    object.__setattr__(given.rollout, "action_mask", masks)
    (row, *_) = (decoded(row) for row in rows_of(given, [report({0: [-1.0, -1.0]}, 0.5)], "k3"))
    for name, value in {"logprob": -1.0, "gap": 0.0, "log_ratio": 0.0, "entropy": 0.5}.items():
        np.testing.assert_array_equal(row[name], [value, np.nan])


@pytest.fixture(scope="module")
def clipping(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two updates a step over all samples, some of them masked; every second step is kept."""
    folder = tmp_path_factory.mktemp("clipping")
    make_inputs(folder)
    keys = {
        "rl_config.max_steps": 3,
        # Of 384, so that some completions stop and some are truncated.
        "generate_config.sampling_config.eos_token_id": [*range(80)],
        "rl_config.updates_per_rollout": 1,
        "rl_config.mask_truncated_completions": "true",
        "rl_config.dynamic_sampling": "false",
        "rl_config.beta": 0,
        "rl_config.eval_steps": 0,
        "rl_config.eval_on_start": "false",
        "monitor_config.per_token": 2,
        "actor_config.lr_schedule.warmup_step": 0,
    }
    words = [str(word) for key, value in keys.items() for word in (f"--{key}", value)]
    return run(folder, folder / "run", *words)


def test_the_ratios_that_were_clipped_are_those_of_the_metrics(clipping: Path) -> None:
    samples = [json.loads(line) for line in completions(clipping)]
    rows, clipped = token_rows(clipping), 0.0
    assert {row["step"] for row in rows} == {1, 3}
    for step in (step for step in read_metrics(clipping / "metrics.jsonl") if step["step"] != 2):
        own = [row for row in rows if row["step"] == step["step"]]
        theirs = [sample for sample in samples if sample["step"] == step["step"]]
        assert len(own) == len(theirs)
        low, high = 0.0, 0.0
        for row, sample in zip(own, theirs, strict=True):
            assert row["length"] == len(sample["token_ids"]) and "kl" not in row
            assert ("log_ratio" in row) == (sample["finish_reason"] != "length")
            ratio = np.exp(row.get("log_ratio", np.zeros(0)).astype(float))
            low += np.count_nonzero((ratio < 0.8) & (sample["advantage"] < 0))
            high += np.count_nonzero((ratio > 1.2) & (sample["advantage"] > 0))
        tokens = sum(row["length"] for row in own if "entropy" in row)
        # The mean of two updates, of which the first begins where all ratios are 1.
        assert step["clip_fraction/low"] == pytest.approx(low / tokens / 2)
        assert step["clip_fraction/high"] == pytest.approx(high / tokens / 2)
        gaps = np.abs(np.concatenate([row["gap"] for row in own], dtype=float))
        assert gaps.max() == pytest.approx(step["logprob_gap/max"], rel=1e-3, abs=1e-7)
        clipped += low + high
    assert clipped > 0
