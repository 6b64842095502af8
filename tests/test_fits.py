"""What `plan` says of whether a run fits, docs/fits.md and the examples for NPUs, held to what is planned.

Does not prove that a device has room for what is planned: no accelerator was used. test_activations.py counts what
graphs keep, and scripts/bench/activations.py measures it.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
import small_runs

from mindgrpo.backend.device.host_cpu import HostCpuBackend
from mindgrpo.cli.plan import shapes_of
from mindgrpo.cli.verbs import main
from mindgrpo.config import load_config
from mindgrpo.models.decoder_config import decoder_config
from mindgrpo.monitor.host_memory import format_bytes
from mindgrpo.monitor.metrics import read_metrics
from mindgrpo.plan.activations import update_need
from mindgrpo.plan.fit import context_degrees, verdict
from mindgrpo.plan.memory import HostPlan, group_bytes, most_needed, phase_needs
from mindgrpo.plan.run_plan import RunPlan, plan_run
from mindgrpo.weights.checksum import DEVICE_ELEMENTS

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = sorted((ROOT / "examples" / "ascend").glob("*/grpo_config.yaml"))
TUTORIAL = ROOT / "examples" / "grpo" / "qwen_grpo_tutorial" / "grpo_config.yaml"
QWEN_32B = "./model_configs/qwen_grpo/qwen2_5_32b/finetune_qwen2_5_32b.yaml"
LARGE = ["--context.device_target", "Ascend", "--actor_config.model_config", QWEN_32B]
MIB, GB = 2**20, 2**30


@pytest.fixture(autouse=True)
def in_the_clone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def planned(*words: str, config: Path = TUTORIAL) -> RunPlan:
    loaded = load_config(config, words)
    return plan_run(loaded.config, shapes_of(loaded.config)[0], None)


def test_the_page_and_the_examples_hold_what_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import fits

    for path, text in fits.pages():
        assert path.read_text(encoding="utf-8") == text, "run python scripts/fits.py --write"


@pytest.mark.parametrize("config", EXAMPLES, ids=lambda path: path.parent.name)
def test_an_example_fits_starts_as_many_ranks_as_it_plans_and_says_what_it_is(config: Path) -> None:
    plan = planned(config=config)
    assert most_needed(plan).total < 58 * GB
    script = (config.parent / "run.sh").read_text()
    assert int(re.findall(r"--ranks (\d+)", script)[0]) == plan.world_size
    assert subprocess.run(["bash", "-n", config.parent / "run.sh"]).returncode == 0
    for name in ("README.md", "run.sh", "grpo_config.yaml"):
        assert "lanned, never run on NPUs" in (config.parent / name).read_text()


def test_what_stays_and_what_communication_keeps_are_told_beside_a_phases_own() -> None:
    """Without a limit nothing leaves a device: a phase has all roles that the step has, and what it needs itself."""
    config = EXAMPLES[1]
    words = ["--context.max_device_memory", "null"]
    plan = planned(*words, config=config)
    largest = max(phase_needs(plan), key=lambda need: need.beside_pools)
    roles = plan.bytes_by_role()
    whole = format_bytes(sum(roles.values()) + largest.beside_pools)
    stay, outside = HostPlan(plan).device_lines()
    assert f"at most {whole} in phase {largest.phase}" in stay
    # All ranks, those of a layer, and those of a stage or of a replica, which are the same.
    assert group_bytes(plan) == 3 * 400 * 2**20 and format_bytes(group_bytes(plan)) in outside
    assert HostPlan(planned("--context.device_target", "CPU")).device_lines() == []


def test_checksums_copies_are_counted_where_they_are_taken() -> None:
    config, head = EXAMPLES[1], 152064 // 4 * 3584
    one_layout = ["--actor_config.parallel_config.data_parallel", "2"]
    one_layout += ["--actor_config.parallel_config.pipeline_stage", "1"]
    plan = planned(*one_layout, config=config)
    by_phase = {need.phase: need.buffers for need in phase_needs(plan)}
    assert by_phase["reshard"] == 4 * 4 * DEVICE_ELEMENTS < 4 * 4 * head
    without = planned(*one_layout, "--rl_config.checksum_interval", "null", config=config)
    assert phase_needs(without)[0].buffers <= by_phase["reshard"]


def test_changes_that_are_proposed_make_the_run_fit_with_as_many_samples_and_updates() -> None:
    loaded = load_config(TUTORIAL, LARGE)
    before = planned(*LARGE)
    fit = verdict(loaded, before)
    assert fit.fits is False and len(fit.remedies) == 3
    for remedy in fit.remedies:
        words, sentence = remedy.lines()
        after = planned(*LARGE, *words.split())
        assert most_needed(after).total == remedy.need.total <= 58 * GB < most_needed(before).total
        assert after.batch.samples_per_step == before.batch.samples_per_step
        assert after.batch.updates_per_step == before.batch.updates_per_step
        assert all(change.cost in sentence for change in remedy.changes)
    # The cheapest leaves the learning and the devices as they are.
    assert fit.remedies[0].lines()[0] == "--actor_config.optimizer.opt_offload true"


def test_what_no_single_change_makes_fit_takes_several() -> None:
    words = [*LARGE, "--context.max_device_memory", "36GB"]
    fit = verdict(load_config(TUTORIAL, words), planned(*words))
    assert min(len(remedy.changes) for remedy in fit.remedies) >= 1
    together = [remedy for remedy in fit.remedies if len(remedy.changes) > 1]
    assert together
    for remedy in together:
        for change in remedy.changes:
            alone = [
                w for key, value in change.values.items() for w in (f"--{key}", json.dumps(value))
            ]
            assert most_needed(planned(*words, *alone)).total > 36 * GB


def test_rows_that_are_long_are_shared_out_where_that_makes_them_fit() -> None:
    """Rows of one sample of 32,768 tokens, with all else that saves memory."""
    config = EXAMPLES[1]
    lengths = ["--rl_config.pack_num", "1", "--generate_config.max_prompt_length", "4096"]
    lengths += ["--generate_config.sampling_config.max_tokens", "28672"]
    words = ["--actor_config.parallel_config.use_seq_parallel", "true"]
    words += ["--actor_config.enable_parallel_optimizer", "true"]
    words += ["--actor_config.optimizer.opt_offload", "true"]
    words += ["--context.max_device_memory", "18GB", *lengths, "--rl_config.seq_length", "32768"]
    before = planned(*words, config=config)
    fit = verdict(load_config(config, words), before)
    shared = [remedy for remedy in fit.remedies if "/CP2 instead of DP2/MP4" in remedy.lines()[1]]
    assert fit.fits is False and len(shared) == 1
    after = planned(*words, *shared[0].lines()[0].split(), config=config)
    assert after.train.mesh.cp == 2 and after.world_size == before.world_size
    assert most_needed(after).total == shared[0].need.total <= 18 * GB
    assert update_need(after).total < 0.8 * update_need(before).total
    assert context_degrees(before) == [1, 2, 4]
    # A rank would keep too few tokens of 8,192.
    assert context_degrees(planned(config=config)) == [1]


@pytest.mark.parametrize(
    ("limit", "status", "sentence"),
    [("58GB", 0, "fits: at most"), ("12GB", 1, "does not fit: "), (None, 1, "sets no limit")],
)
def test_a_script_that_asks_for_it_hears_of_the_verdict_by_the_exit_status(
    limit: str | None, status: int, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", "--config", str(EXAMPLES[0]), "--context.max_device_memory", limit or "null"]
    assert main(words) == 0
    assert sentence in capsys.readouterr().out
    if status:
        with pytest.raises(SystemExit) as ended:
            main([*words, "--must_fit"])
        assert ended.value.code == status
    else:
        assert main([*words, "--must_fit"]) == 0


@pytest.mark.parametrize("is_offloaded", [False, True])
def test_a_step_copies_what_was_planned_and_metrics_have_the_peaks_that_the_device_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_offloaded: bool
) -> None:
    counted = iter(range(1, 1000))
    monkeypatch.setattr(HostCpuBackend, "take_device_peak", lambda self: next(counted) * MIB)
    inputs = tmp_path / "inputs"
    small_runs.make_inputs(inputs)
    words = ["--context.backend", "device", "--context.device_target", "CPU"]
    words += ["--rl_config.max_steps", "2", "--rl_config.eval_steps", "0"]
    words += ["--rl_config.dynamic_sampling", "false", "--rl_config.updates_per_rollout", "1"]
    words += ["--actor_config.optimizer.opt_offload", json.dumps(is_offloaded)]

    def plan() -> RunPlan:
        model = decoder_config(small_runs.MODEL, "here")
        return plan_run(load_config(inputs / "small.yaml", words).config, model, 1)

    # Just enough for the phase that needs most.
    room = max(row.total for row in plan().memory())
    words += ["--context.max_device_memory", f"{room // 1024 + 1}KB"]
    run = small_runs.run(inputs, tmp_path / "run", *words)
    steps = read_metrics(run / "metrics.jsonl")
    assert steps[1]["host_device_bytes"] == HostPlan(plan()).step_bytes > 0
    for row in steps:
        peaks = [row[f"memory/device_peak/{phase}"] for phase in ("reshard", "rollout", "update")]
        # In the order of the phases, each by a reading of its own.
        assert peaks == sorted(peaks) and len({*peaks}) == 3
        assert all(size % MIB == 0 for size in peaks)
    peaks = [row["memory/device_peak/update"] for row in steps]
    assert peaks[1] > peaks[0]
    (update,) = (need for need in phase_needs(plan()) if need.phase == "update")
    assert steps[1]["memory/device_peak_planned/update"] >= update.total > 0
