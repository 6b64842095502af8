"""Weights, cache and weight sync in bfloat16 on processors and in float16 on the backend for devices, in one process.

What several ranks do with them is in test_distributed.py. Does not prove speed, nor anything of Ascend.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from small_generators import (
    WITH_AVX512,
    by_sample,
    generator_with,
    random_weights,
    requests_of,
)
from small_generators import run as generate
from small_runs import completions, make_inputs, model_bits, rows, run
from test_update import CONFIG, LAYOUT, RAW, SETTINGS, batch

from mindgrpo.algorithm.packing import PackedRollout
from mindgrpo.backend.connect import RuntimeSettings, connect
from mindgrpo.backend.contract import AloneGroup
from mindgrpo.backend.cpu.backend import CpuBackend
from mindgrpo.backend.dtypes import NUM_PARTS, Dtype, bits_of, numpy_dtype, resolve_compute_dtype
from mindgrpo.backend.kernels.native.kernels import NativeKernels
from mindgrpo.backend.kernels.native.library import call_kernel
from mindgrpo.backend.targets import SHARED_MEMORY, Target
from mindgrpo.checkpoint.folders import folder_of
from mindgrpo.config import Config, load_config
from mindgrpo.errors import UserError
from mindgrpo.models.decoder import KEEP_ALL, WHOLE_LAYERS, Recompute
from mindgrpo.models.decoder_config import decoder_config, read_config
from mindgrpo.models.parallel_cells import CopyTo, ReduceFrom
from mindgrpo.models.parameters import parameter_specs
from mindgrpo.models.precision import loss_scale, matmul_precision, plain_kernels
from mindgrpo.monitor.metrics import read_metrics
from mindgrpo.parallel.mesh import Mesh
from mindgrpo.parallel.sharding import Layout
from mindgrpo.plan.run_plan import plan_run
from mindgrpo.rollout.vllm.settings import engine_dtype
from mindgrpo.training.policy import Policy
from mindgrpo.training.update import UpdateReport, update
from mindgrpo.weights.pretrained import fill_random

NARROW = numpy_dtype("bfloat16")
ON_DEVICE = Target("CPU", "device")
ASCEND = Target("Ascend", "device")


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


@WITH_AVX512
@pytest.mark.parametrize("form", ["product", "product_turned"])
@pytest.mark.parametrize("m, k, n", [(37, 100, 300), (16, 33, 257), (1, 64, 5)])
def test_a_product_with_bfloat16_weights_is_that_of_their_values(
    form: str, m: int, k: int, n: int
) -> None:
    x, w = random(m, k), random(k, n).astype(NARROW)
    w = np.ascontiguousarray(w.T) if form.endswith("turned") else w
    found, expected = np.zeros((m, n), np.float32), np.zeros((m, n), np.float32)
    summation = np.array([1, 1], np.int32)
    call_kernel(form, x, w, summation, found)
    call_kernel(form, x, w.astype(np.float32), summation, expected)
    assert expected.any() and found.tobytes() == expected.tobytes()


def test_embeddings_are_the_bfloat16_rows_and_their_gradients_are_float32() -> None:
    table, tokens = random(9, 20).astype(NARROW), np.array([3, 8, 12, 3, 2], np.int32)
    first, rows_of, gradient = np.array([2], np.int32), np.zeros((5, 20), np.float32), random(5, 20)
    call_kernel("embed", tokens, table, first, rows_of)
    local = table.astype(np.float32)
    np.testing.assert_array_equal(rows_of[[0, 1, 3, 4]], local[[1, 6, 1, 0]])
    assert not rows_of[2].any()
    summed = np.full((9, 20), 7, np.float32)
    call_kernel("embed_grad", tokens, gradient, table, first, summed)
    np.testing.assert_array_equal(summed[1], gradient[0] + gradient[3])


# -- the policy ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def backends() -> dict[Dtype, CpuBackend]:
    made: dict[Dtype, CpuBackend] = {
        "float32": CpuBackend({}),
        "bfloat16": CpuBackend({}, num_parts=NUM_PARTS["medium"]),
    }
    made["bfloat16"].compute_dtype = "bfloat16"
    return made


def policy_in(dtype: Dtype, backends: dict[Dtype, CpuBackend]) -> Policy:
    made = Policy(CONFIG, LAYOUT, backends[dtype], SETTINGS)
    fill_random(made.masters, seed=2, scale=0.1)
    made.masters_changed()
    return made


def updated(policy: Policy, lr: float) -> UpdateReport:
    given = batch()
    return update(policy, given, PackedRollout(given.rollout), range(len(given)), lr)


@WITH_AVX512
def test_the_optimizer_changes_float32_weights_of_which_the_graphs_are_the_nearest_bfloat16(
    backends: dict[Dtype, CpuBackend],
) -> None:
    narrow, exact = policy_in("bfloat16", backends), policy_in("float32", backends)
    assert narrow.has_masters and not exact.has_masters
    before = [run.copy() for run in narrow.masters.arrays.flat_buffers]
    reports = [updated(policy, 1e-2) for policy in (narrow, exact)]
    assert reports[0].grad_norm == pytest.approx(reports[1].grad_norm, rel=0.02)
    for i in range(2):
        master, weight = (w.arrays.flat_buffers[i] for w in (narrow.masters, narrow.weights))
        assert weight.dtype == NARROW
        assert bits_of(master.astype(NARROW)).tobytes() == bits_of(weight).tobytes()
        moves = master - before[i], exact.masters.arrays.flat_buffers[i] - before[i]
        error = np.linalg.norm(moves[0] - moves[1]) / np.linalg.norm(moves[1])
        assert 0 < error < 0.05


@WITH_AVX512
def test_updates_too_small_for_bfloat16_add_up_in_the_optimizers_weights(
    backends: dict[Dtype, CpuBackend],
) -> None:
    policy = policy_in("bfloat16", backends)
    (first, _), (kept, _) = policy.weights.arrays.flat_buffers, policy.masters.arrays.flat_buffers
    weights, masters = bits_of(first).copy(), kept.copy()
    for _ in range(3):
        updated(policy, 1e-6)
    moved = (kept != masters).mean()
    assert moved > 0.9 and (bits_of(first) != weights).mean() < 0.1 * moved


def test_recomputing_layers_on_a_device_changes_no_bit() -> None:
    def trained_with(recompute: Recompute) -> tuple[UpdateReport, dict[str, bytes]]:
        backend = connect(ON_DEVICE, {}, RuntimeSettings(compute_dtype="float16"))
        settings = replace(SETTINGS, recompute=recompute, loss_scale=1024.0)
        policy = Policy(CONFIG, LAYOUT, backend, settings)
        fill_random(policy.masters, seed=2, scale=0.1)
        for pool in backend.live_pools:
            pool.load()
        policy.masters_changed()
        report = updated(policy, 1e-2)
        with policy.masters.on_host() as host:
            return report, {name: part.tobytes() for name, part in host.hf_views.items()}

    (kept, expected), (again, found) = map(trained_with, (KEEP_ALL, WHOLE_LAYERS))
    assert kept.grad_norm > 0 and (again.loss, again.grad_norm) == (kept.loss, kept.grad_norm)
    assert found == expected


@pytest.mark.parametrize(
    ("target", "dtype"),
    [pytest.param(SHARED_MEMORY, "bfloat16", marks=WITH_AVX512), (ON_DEVICE, "float16")],
)
def test_a_float32_head_has_float32s_log_probs_and_gradient_of_what_narrow_layers_made(
    target: Target, dtype: Dtype
) -> None:
    config = decoder_config(RAW | {"tie_word_embeddings": False}, "here")
    layout = Layout.of(Mesh(1, 1), parameter_specs(config))

    def trained_in(dtype_of: Dtype, fp32_lm_head: bool) -> UpdateReport:
        own = RuntimeSettings(compute_dtype=dtype_of, fp32_lm_head=fp32_lm_head)
        policy = Policy(config, layout, connect(target, {}, own), SETTINGS)
        for pool in policy.backend.live_pools:
            pool.load()
        fill_random(policy.masters, seed=2, scale=0.5)
        with policy.masters.on_host(write=True) as host:
            for name, part in host.hf_views.items():
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    part[...] = 0.0  # layers add nothing then, in any dtype
                elif name == "model.embed_tokens.weight" and target == ON_DEVICE:
                    part[...] = np.sign(part)  # where activations are narrow, what the head gets
                elif not name.endswith("norm.weight"):
                    part[...] = part.astype(numpy_dtype(dtype))
        policy.masters_changed()
        return updated(policy, 1e-2)

    exact, head, narrow = (
        trained_in(*of) for of in (("float32", False), (dtype, True), (dtype, False))
    )

    def gap(report: UpdateReport) -> float:
        return max(
            float(np.abs(own - exact.logps[i]).max(initial=0)) for i, own in report.logps.items()
        )

    assert gap(head) < 2e-5 and gap(narrow) > 1e-3
    assert head.grad_norm == pytest.approx(exact.grad_norm, rel=1e-3)


@WITH_AVX512
def test_the_generator_keeps_half_of_the_bytes_and_draws_nearly_the_same(
    backends: dict[Dtype, CpuBackend],
) -> None:
    weights = random_weights(backends["float32"])
    for run_of in weights.arrays.flat_buffers:
        run_of[...] = run_of.astype(NARROW)
    made = {
        dtype: generator_with(weights, backend, NativeKernels(1))
        for dtype, backend in backends.items()
    }
    narrow, exact = (made[dtype] for dtype in ("bfloat16", "float32"))
    assert narrow.weights.num_bytes * 2 == exact.weights.num_bytes
    caches = [one.pools["kv_cache"][0].num_bytes for one in (narrow, exact)]
    assert caches[0] * 2 == caches[1]
    found, expected = (by_sample(generate(one, requests_of())) for one in (narrow, exact))
    # With the same weights and products only keys and values are rounded: a few samples go another way.
    same = [i for i, one in found.items() if np.array_equal(one.tokens, expected[i].tokens)]
    assert len(same) > 0.6 * len(found)
    gaps = [np.abs(found[i].logps - expected[i].logps).max() for i in same]
    assert 0 < max(gaps) < 0.5


class TwoRanks(AloneGroup):
    """Two members that have the same: their sum shows in which dtype it is made, of odd integers near 2048."""

    ranks: tuple[int, ...] = (0, 1)

    def __init__(self) -> None:
        self.index = 0

    def sum_cell(self) -> nn.Cell:
        return NearlyTwice()


class NearlyTwice(nn.Cell):
    def construct(self, x: Any) -> Any:
        return (x + 2048.0) - 2048.0 + x


class There(nn.Cell):
    """The sum of x and of its gradient."""

    def __init__(self, in_float32: bool) -> None:
        super().__init__()
        self.copy = CopyTo(TwoRanks(), in_float32)
        self.reduce = ReduceFrom(TwoRanks(), True, in_float32)
        self.gradient = ops.GradOperation(sens_param=True)

    def construct(self, x: Any) -> Any:
        return self.reduce(x), self.gradient(self.copy)(x, x)


@pytest.mark.parametrize("in_float32", [False, True])
def test_ranks_of_a_layer_sum_in_the_activations_dtype_or_in_float32(in_float32: bool) -> None:
    one = np.ones(3, np.float16)
    for dtype, expected in ((np.float16, 2.0 if in_float32 else 1.0), (np.float32, 2.0)):
        for total in There(in_float32)(Tensor(one.astype(dtype))):
            assert total.asnumpy().dtype == dtype
            np.testing.assert_array_equal(total.asnumpy(), expected)


# -- runs --------------------------------------------------------------------------------------------------------------

Made = Callable[..., Path]
STEPS = ("--rl_config.max_steps", "3", "--rl_config.save_ckpt_interval", "2")
BFLOAT16 = ("--context.compute_dtype", "bfloat16")
DEVICE = ("--context.backend", "device")
# So little room that roles leave the device for others; the moments lie on the host.
LITTLE_ROOM = (
    *("--context.max_device_memory", "400KB"),
    *("--actor_config.optimizer.opt_offload", "true"),
)
FLOAT16 = (*DEVICE, "--context.compute_dtype", "float16", *LITTLE_ROOM)
LORA = ("--actor_config.lora.rank", "4")
FP32_HEAD = ("--context.fp32_lm_head", "true")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Runs by their words, each made once."""
    folder = tmp_path_factory.mktemp("narrow")
    make_inputs(folder)
    known: dict[tuple[str, ...], Path] = {}

    def make(*words: str) -> Path:
        if words not in known:
            known[words] = run(folder, folder / f"run{len(known)}", *words)
        return known[words]

    return make


@pytest.mark.parametrize(
    "words",
    [pytest.param((*BFLOAT16, *FP32_HEAD, *LORA), marks=WITH_AVX512), FLOAT16],
    ids=["bfloat16", "float16"],
)
def test_a_run_goes_on_from_its_checkpoint_as_if_it_had_not_stopped(
    made: Made, words: tuple[str, ...]
) -> None:
    whole = made(*STEPS, *words)
    resumed = made(*STEPS, *words, "--resume_training", str(folder_of(whole, 2)))
    # What is drafted from, and so in how many steps, is in no checkpoint.
    ignored = {"host_device_bytes", "rollout/drafted", "rollout/accepted"}
    ignored |= {"rollout/decode_steps", "rollout/wasted_fraction"}
    for one, other in zip(rows(resumed), rows(whole), strict=True):
        pairs = [{k: v for k, v in row.items() if k not in ignored} for row in (one, other)]
        assert pairs[0] == pairs[1]
    assert completions(resumed) == completions(whole)
    assert model_bits(resumed) == model_bits(whole)
    if words != FLOAT16:
        # The generator's head and the trainer's have the same bits.
        assert max(row["logprob_gap/max"] for row in rows(whole)) == 0.0


@WITH_AVX512
def test_a_run_takes_the_memory_that_is_planned_and_says_its_dtype(made: Made) -> None:
    folder = made(*STEPS, *BFLOAT16)
    config = load_config(folder / "config_resolved.yaml", []).config
    plan = plan_run(config, read_config(config.actor_config.load), 1)
    row = read_metrics(folder / "metrics.jsonl")[-1]
    for phase in plan.memory():
        if phase.total and f"memory/device_peak/{phase.phase}" in row:
            assert row[f"memory/device_peak/{phase.phase}"] == phase.total, phase
    assert json.loads((folder / "summary.json").read_text())["compute_dtype"] == "bfloat16"


@pytest.mark.parametrize(
    "narrow, wide",
    [
        pytest.param(BFLOAT16, (), marks=WITH_AVX512),
        (FLOAT16, ()),
    ],
    ids=["bfloat16", "float16"],
)
def test_the_first_update_is_that_of_float32_but_for_rounding(
    made: Made, narrow: tuple[str, ...], wide: tuple[str, ...]
) -> None:
    (expected,) = rows(made("--rl_config.max_steps", "1", *wide))
    found = rows(made(*STEPS, *narrow))[0]
    assert found["reward/mean"] == pytest.approx(expected["reward/mean"], abs=0.1)
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.1)
    assert found["logprob_gap/mean"] < (0.01 if narrow == FLOAT16 else 1e-30)


# -- who may ask for it ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "asked, target, precision, expected",
    [
        ("auto", SHARED_MEMORY, "auto", "float32"),
        ("auto", ON_DEVICE, "auto", "float32"),
        ("auto", ASCEND, "auto", "bfloat16"),
        ("auto", ASCEND, "high", "float32"),
        ("float32", ASCEND, "auto", "float32"),
        ("bfloat16", SHARED_MEMORY, "auto", "bfloat16"),
        ("float16", ON_DEVICE, "auto", "float16"),
        ("float16", ASCEND, "auto", "float16"),
    ],
)
def test_what_a_word_means_on_a_device(
    asked: str, target: Target, precision: str, expected: str
) -> None:
    assert resolve_compute_dtype(asked, target, True, True, precision) == expected


@pytest.mark.parametrize(
    "asked, target, has_kernels, precision, words",
    [
        ("float16", SHARED_MEMORY, True, "auto", "processors compute in float32 or bfloat16"),
        ("bfloat16", SHARED_MEMORY, False, "auto", "install gcc"),
        ("bfloat16", ON_DEVICE, True, "auto", "take float16"),
        ("bfloat16", SHARED_MEMORY, True, "high", "float32_matmul_precision is 'high'"),
    ],
)
def test_what_a_device_does_not_have_is_refused(
    asked: str, target: Target, has_kernels: bool, precision: str, words: str
) -> None:
    with pytest.raises(UserError, match=words):
        resolve_compute_dtype(asked, target, True, has_kernels, precision)


def test_without_compiled_graphs_a_run_computes_in_float32() -> None:
    assert resolve_compute_dtype("auto", ASCEND, False, False, "auto") == "float32"
    with pytest.raises(UserError, match="set context.mode to 0"):
        resolve_compute_dtype("float16", ON_DEVICE, False, False, "auto")


def test_plain_kernels_are_those_of_a_device() -> None:
    def names(*given: str, **context: str) -> list[str]:
        own = {"device_target": "CPU", "plain_kernels": [*given], **context}
        return plain_kernels(Config.model_validate({"context": own}))

    assert names("attention", backend="device") == ["attention"] and names() == []
    with pytest.raises(UserError, match="set MINDGRPO_NATIVE=0"):
        names("attention")
    with pytest.raises(ValueError, match="must hold only rms_norm, .*cached_attention"):
        names("softmax", backend="device")


def test_a_float32_head_is_refused_where_the_product_is_another_programs_or_of_all_products() -> (
    None
):
    head = {"fp32_lm_head": True}
    ascend: dict[str, Any] = head | {"device_target": "Ascend", "float32_matmul_precision": "high"}
    with pytest.raises(UserError, match="high is of all products on Ascend"):
        matmul_precision(Config.model_validate({"context": ascend}))
    engine = {"use_vllm": 1, "vllm": {"dtype": "bfloat16"}}
    config = Config.model_validate({"context": head, "generate_config": engine})
    with pytest.raises(UserError, match="which is bfloat16; set generate_config.vllm.dtype"):
        engine_dtype(config)


def test_a_loss_scale_is_for_float16_alone() -> None:
    def scale(**context: object) -> float:
        return loss_scale(Config.model_validate({"context": {"device_target": "CPU", **context}}))

    narrow = {"backend": "device", "compute_dtype": "float16"}
    assert scale() == 1.0 and scale(**narrow) == 1024.0
    assert scale(**narrow, loss_scale=8.0) == 8.0
    with pytest.raises(UserError, match="loss_scale is 8, but only"):
        scale(loss_scale=8.0)
