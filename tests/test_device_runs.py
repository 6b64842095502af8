"""Whole runs on the backend for devices, on CPU in one process, against the same runs in shared memory.

With a reference that follows, old log-probs, groups that are replaced, adapters, checkpoints, and so little room on the
device that roles take turns. What several ranks do is in test_distributed.py, a run that goes on in
test_compute_dtype.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ascend_doubles import fused
from small_runs import completions, make_inputs, rows, run

from mindgrpo.backend.kernels.ascend import AscendKernels, AscendOps
from mindgrpo.backend.targets import FUSED_KERNELS
from mindgrpo.monitor.metrics import read_metrics

DEVICE = ("--context.backend", "device")
STEPS = ("--rl_config.max_steps", "3")
LORA = ("--actor_config.lora.rank", "4", "--actor_config.lora.alpha", "8")
# The roles that need most in one phase take 250 KiB, and all of them more than 300 KB.
TIGHT = ("--context.max_device_memory", "300KB", "--rl_config.save_ckpt_interval", "2")
Made = Callable[..., Path]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Runs by their words, each made once."""
    folder = tmp_path_factory.mktemp("device")
    make_inputs(folder)
    known: dict[tuple[str, ...], Path] = {}

    def make(*words: str) -> Path:
        if words not in known:
            known[words] = run(folder, folder / f"run{len(known)}", *words)
        return known[words]

    return make


def assert_same(found: Path, expected: Path) -> None:
    """Figures to rounding, whatever was copied on the way; completions with their numbers to 1e-4."""
    for one, other in zip(rows(found), rows(expected), strict=True):
        assert one.keys() == other.keys()
        for key in one.keys() - {"host_device_bytes", "rollout/wasted_fraction"}:
            if not key.startswith(("logprob_gap", "rollout/")):
                _close(key, one[key], other[key])
    for line, expected_line in zip(completions(found), completions(expected), strict=True):
        mine, theirs = json.loads(line), json.loads(expected_line)
        assert mine["token_ids"] == theirs["token_ids"]
        assert mine["rewards"] == theirs["rewards"]


def _close(key: str, one: Any, other: Any) -> None:
    if isinstance(one, int | float) and isinstance(other, int | float):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-5, err_msg=key)
    else:
        assert one == other, key


def copied(run: Path) -> list[int]:
    return [row["host_device_bytes"] for row in read_metrics(run / "metrics.jsonl")]


def test_with_and_without_its_fused_kernels_a_device_has_the_figures_and_completions_of_shared_memory(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Doubles in the place of an NPU's operations; heads are of 8, which no fused attention takes but they do."""

    def refused(*args: Any, **kwargs: Any) -> Any:
        raise TypeError("a fused kernel was called")

    def without() -> AscendKernels:
        kernels = fused()
        kernels._ops = AscendOps(*[refused] * len(fields(AscendOps)))
        return kernels

    monkeypatch.setattr("mindgrpo.backend.kernels.ascend.DIM_STEP", 8)
    monkeypatch.setattr("mindgrpo.backend.device.host_cpu.Kernels", without)
    names = ("--context.plain_kernels", ",".join(FUSED_KERNELS))
    plain = made(*STEPS, *DEVICE, *names)
    assert copied(plain) == [0, 0, 0], "a step that offloads nothing copies weights or gradients"
    assert_same(plain, made(*STEPS))
    one_step = ("--rl_config.max_steps", "1", "--output_dir", str(tmp_path / "run"), *DEVICE)
    with pytest.raises(Exception, match="a fused kernel was called"):
        made(*one_step)
    monkeypatch.setattr("mindgrpo.backend.device.host_cpu.Kernels", fused)
    assert_same(made(*STEPS, *DEVICE), made(*STEPS))


def test_what_can_be_left_is_what_an_npu_has() -> None:
    own = {name for name, value in vars(AscendKernels).items() if callable(value)}
    inputs = {"rope_and_mask", "context_inputs", "cached_angles", "adamw_inputs"}
    assert own - {"__init__", *inputs} == {*FUSED_KERNELS}


def test_with_adapters_roles_take_turns_on_a_small_device_with_the_same_result(made: Made) -> None:
    tight = made(*STEPS, *LORA, *DEVICE, *TIGHT)
    assert min(copied(tight)) > 0
    assert_same(tight, made(*STEPS, *LORA))
