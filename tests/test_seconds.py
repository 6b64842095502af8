"""The roofline of `plan`: its counts against figures worked out by hand, its ranking of layouts, its keys.

Does not prove that a device keeps to an estimate: scripts/bench/roofline.py compares them with measured steps.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from small_runs import MODEL
from tables import each_row

from mindgrpo.algorithm.packing import MicroShape, PackedRollout, num_micro_batches, pack
from mindgrpo.algorithm.row_shapes import ShapeChoice
from mindgrpo.algorithm.sample import Rollout
from mindgrpo.backend.speeds import SPEEDS, Speeds
from mindgrpo.cli.plan import shapes_of
from mindgrpo.cli.verbs import main
from mindgrpo.config import Config, load_config
from mindgrpo.config.context import RooflineConfig
from mindgrpo.errors import UserError
from mindgrpo.models.decoder_config import decoder_config
from mindgrpo.plan import layouts
from mindgrpo.plan.fit import words_of
from mindgrpo.plan.memory import most_needed
from mindgrpo.plan.run_plan import RunPlan, plan_run
from mindgrpo.plan.seconds import (
    PhaseSeconds,
    RankShare,
    Rates,
    Roofline,
    SampleCounts,
    paced,
    speeds_of,
)
from mindgrpo.rollout.embedded.kv_cache import read_length, read_lengths

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "examples" / "ascend" / "qwen2_5_7b_8npu" / "grpo_config.yaml"
BF16 = 2
# DP1/MP4/PP2 and DP2/MP4 of rows that hold one sample.
TWO_STAGES = [
    *("--actor_config.parallel_config.data_parallel", "1"),
    *("--actor_config.parallel_config.pipeline_stage", "2"),
    *("--rl_config.pack_num", "1"),
]


@pytest.fixture(autouse=True)
def in_the_clone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def planned(*words: str) -> RunPlan:
    loaded = load_config(CONFIG, words)
    return plan_run(loaded.config, shapes_of(loaded.config)[0], None)


def test_a_layers_counts_are_those_worked_out_by_hand() -> None:
    """Qwen2.5-7B over four ranks: 7 query heads and one of keys of 128, 3,584 wide, an MLP of 4,736."""
    plan = planned(*TWO_STAGES)
    layer = RankShare(plan, plan.train, BF16)
    matrices = 3584 * (7 + 2) * 128 + 7 * 128 * 3584 + 3 * 3584 * 4736
    # A quarter of biases and norms, and of the model's last norm a layer's part.
    size = matrices + (7 + 2) * 128 + (2 + 1 / 28) * 3584 / 4
    assert layer.size == pytest.approx(size)
    work = layer.forward(8192, 8192 * 8192, 1)
    products, attention = 2 * 8192 * size, 4 * 8192 * 8192 * 7 * 128
    assert products == pytest.approx(0.955e12, rel=0.01)
    assert attention == pytest.approx(0.24e12, rel=0.01)
    assert work.flops == pytest.approx(products + attention)
    assert (work.sums, work.summed) == (2, 2 * 8192 * 3584 * BF16)
    wide = planned(*TWO_STAGES, "--context.reduce_dtype", "float32")
    in_float32 = RankShare(wide, wide.train, BF16).forward(8192, 0, 1)
    assert in_float32.summed == 2 * work.summed


def test_tokens_compute_their_experts_and_read_those_that_any_of_them_chose() -> None:
    """Qwen3-30B-A3B: 32 query heads and 4 of keys of 128, 2,048 wide, 8 of 128 experts of 768."""
    raw = {**MODEL, "model_type": "qwen3_moe", "vocab_size": 1024, "hidden_size": 2048}
    raw |= {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}
    raw |= {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    raw |= {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}
    raw |= {"num_hidden_layers": 4, "intermediate_size": 6144}
    sizes = {}
    for mixed in (False, True):
        model = decoder_config(raw | {"mlp_only_layers": [1, 3] * mixed}, "here")
        lengths = {"max_prompt_length": 32, "sampling_config": {"max_tokens": 32}}
        config = Config.model_validate({"generate_config": lengths})
        plan = plan_run(config, model, 1)
        sizes[mixed] = RankShare(plan, plan.train, BF16)
    layer, attention = sizes[False], 2048 * (2 * 32 + 2 * 4) * 128
    expert, router, norms = 3 * 2048 * 768, 2048 * 128, 2 * 2048 + 2 * 128
    assert layer.size == pytest.approx(attention + 8 * expert + router + norms + 2048 / 4)
    many = layer.forward(8192, 0, 1)
    assert many.flops == 2 * 8192 * layer.size
    # All experts are read; of two tokens, eight each that may be the same.
    whole = attention + router + norms
    assert many.weights == pytest.approx(BF16 * (whole + 128 * expert))
    two = layer.forward(2, 0, 1)
    used = 128 * (1 - (120 / 128) ** 2)
    assert two.weights == pytest.approx(BF16 * (whole + used * expert))
    dense_size = attention + norms + 3 * 2048 * 6144 + 2048 / 4
    assert sizes[True].size == pytest.approx((layer.size + dense_size) / 2)


def test_a_layer_is_computed_forward_and_once_more_in_any_stage_that_recomputes_all() -> None:
    for recomputes, last in (("false", 3), ("true", 4)):
        words = ("--actor_config.recompute_config.recompute", recomputes)
        roofline = Roofline(planned(*TWO_STAGES, *words))
        share = RankShare(roofline.plan, roofline.plan.train, BF16)
        micro_batch = 8192, 8192.0 * 8192, 0.0
        (first_layers,), (last_layers,) = share.layout.stage_layers
        for own, passes in ((first_layers, 4), (last_layers, last)):
            forward = roofline._chunk(share, micro_batch, own, False)
            assert roofline._chunk(share, micro_batch, own, True).flops == passes * forward.flops


@pytest.mark.parametrize("dp, tp, pp", [(8, 1, 1), (2, 4, 1), (1, 4, 2), (1, 1, 4), (2, 2, 2)])
def test_all_ranks_together_have_the_models_products_in_any_layout(
    dp: int, tp: int, pp: int
) -> None:
    words = [
        word
        for axis, size in (("data_parallel", dp), ("model_parallel", tp), ("pipeline_stage", pp))
        for word in (f"--actor_config.parallel_config.{axis}", str(size))
    ]
    plan = planned(*words)
    layer = RankShare(plan, plan.train, BF16)
    tokens = 64 / dp
    counted = sum(
        layer.forward(tokens, 0, sum(map(len, chunks))).flops for chunks in plan.train.stage_layers
    )
    matrices = 3584 * (28 + 2 * 4) * 128 + 28 * 128 * 3584 + 3 * 3584 * 18944
    whole = 28 * (matrices + (28 + 2 * 4) * 128 + 2 * 3584) + 3584
    assert counted * tp * dp == pytest.approx(2 * 64 * whole)


def test_stages_wait_for_one_another_as_long_as_the_schedule_says() -> None:
    """Equal stages of two with two micro-batches: one of three parts is idle."""
    stages = [{"products": 3.0, "memory": 1.0}] * 2
    for micro_batches, idle in ((1, 1 / 2), (2, 1 / 3), (8, 1 / 9)):
        by = paced(stages, micro_batches, 1, False)
        assert by["idle"] / sum(by.values()) == pytest.approx(idle)
    # Two chunks: half of the time that one stage waits for the other, 1 / (2 m) of what it computes.
    by = paced(stages, 2, 2, False)
    assert by["idle"] / sum(by.values()) == pytest.approx(1 / 5)
    assert "idle" not in paced(stages, 2, 1, True)


def test_chunks_have_the_work_of_whole_stages_and_send_more() -> None:
    one, two = (
        phases_of(*TWO_STAGES, "--actor_config.parallel_config.pp_interleave_num", chunks)["update"]
        for chunks in ("1", "2")
    )
    assert two.work.flops == pytest.approx(one.work.flops)
    assert two.work.sent > one.work.sent


def test_a_sum_over_ranks_moves_a_share_each_way_over_every_link() -> None:
    rates = Rates(SPEEDS["910B2"], BF16, 16)
    link = 56e9 * 0.6
    assert rates.sum_seconds(4e9, 1) == 0
    assert rates.sum_seconds(4e9, 4) == pytest.approx(2 * 1e9 / link)
    assert rates.sum_seconds(4e9, 16) == pytest.approx(2 * 4e9 * 15 / 16 / (25e9 * 0.6))


@each_row("most", [1, 3, None])
@each_row("length", [48, 96, 400])
@each_row("group", [1, 4, 8])
def test_samples_of_one_length_are_counted_into_rows_as_they_are_packed(
    most: int | None, length: int, group: int
) -> None:
    prompt, completion, count = 9, 21, 32
    prompts = [np.full(prompt, i // group + 1, np.int32) for i in range(count)]
    tokens = [np.full(completion, 7, np.int32)] * count
    logps = [np.zeros(completion, np.float32)] * count
    groups = [i // group for i in range(count)]
    rollout = Rollout.single_turn(prompts, tokens, ["stop"] * count, logps, groups)
    shape = MicroShape(2, length, most)
    samples = SampleCounts(count, group, prompt, completion, completion)
    packed = num_micro_batches(pack(rollout, range(count), shape), shape, 2)
    assert samples.micro_batches(shape, 2) == packed
    number, chosen = samples.in_rows(shape, 2, 1e-3)
    choice = ShapeChoice(shape, 1e-3).choose(PackedRollout(rollout), 2)
    assert (chosen.length, number) == (choice.length, samples.micro_batches(choice, 2))


def phases_of(*words: str) -> dict[str, PhaseSeconds]:
    return {phase.phase: phase for phase in Roofline(planned(*words)).step().phases}


def test_tokens_that_are_chosen_in_an_update_cost_it_one_more_pass_forward() -> None:
    several = ["--rl_config.updates_per_rollout", "1", "--rl_config.num_iterations", "2"]
    plain = phases_of(*several)
    # As many passes as old log-probs take, which are computed here by the same graph.
    passes = 2 * plain["old_logps"].seconds
    for words in (
        ["--rl_config.top_entropy_quantile", "0.2"],
        ["--rl_config.loss_type", "kl_cov"],
        ["--rl_config.loss_type", "clip_cov"],
    ):
        found = phases_of(*several, *words)
        assert found["update"].seconds - plain["update"].seconds == pytest.approx(passes, rel=0.02)
        assert found["rollout"] == plain["rollout"]


@pytest.mark.parametrize(
    "words",
    [
        ["--rl_config.importance_sampling_correction", "token_truncate"],
        ["--rl_config.rejection_veto", "1e-4"],
        ["--rl_config.kl_in_reward", "true"],
        ["--rl_config.distillation_coef", "1.0"],
    ],
)
def test_what_compares_the_trainers_log_probs_is_counted_with_one_update_too(
    words: list[str],
) -> None:
    one = ["--rl_config.updates_per_rollout", "1"]
    assert "old_logps" not in phases_of(*one)
    assert phases_of(*one, *words)["old_logps"].seconds > 0


def test_remax_draws_one_more_completion_of_each_prompt() -> None:
    before = phases_of()
    after = phases_of("--rl_config.advantage_estimator", "remax")
    assert {name for name in after if after[name] != before[name]} == {"rollout"}
    # Alone as long as a rollout of one completion a prompt.
    alone = phases_of(
        "--rl_config.num_generations", "1", "--rl_config.advantage_estimator", "remax"
    )
    extra = after["rollout"].seconds - before["rollout"].seconds
    assert 2 * extra == pytest.approx(alone["rollout"].seconds, rel=1e-6)


def test_accepted_drafts_save_steps_unless_there_are_no_drafts() -> None:
    accepted = "--context.roofline.accepted_drafts", "0.25"
    off = "--generate_config.draft_rows", "0"
    before, after = phases_of(), phases_of(*accepted)
    assert {name for name in after if after[name] != before[name]} == {"rollout"}
    # A fifth of the steps; what prompts take stays.
    saved = before["rollout"].seconds - after["rollout"].seconds
    assert 0.15 < saved / before["rollout"].seconds < 0.2
    assert phases_of(*accepted, *off)["rollout"] == before["rollout"]


@pytest.mark.parametrize(
    ("words", "notices"),
    [
        ((), []),
        (("--generate_config.use_vllm", "1"), ["it is the embedded generator's"]),
        (("--generate_config.sampling_config.repetition_penalty", "1.1"), ["no drafts"]),
    ],
)
def test_drafts_that_somebody_asks_for_and_does_not_get_are_told(
    words: tuple[str, ...], notices: list[str]
) -> None:
    found = planned("--generate_config.use_vllm", "0", *words, "--generate_config.draft_rows", "4")
    told = [notice for notice in found.notices if "draft_rows" in notice]
    assert len(told) == len(notices)
    assert all(part in notice for part, notice in zip(notices, told, strict=True))


def test_every_speed_is_a_key_and_the_key_wins() -> None:
    names = set(asdict(SPEEDS["host"]))
    assert names == set(RooflineConfig.model_fields) - {
        "device",
        "prompt_tokens",
        "completion_tokens",
        "accepted_drafts",
    }
    for device, known in SPEEDS.items():
        config = Config.model_validate({"context": {"roofline": {"device": device}}})
        assert speeds_of(config) == known
    for name in names:
        value = 3 if name in ("devices_per_host", "cores") else 0.25
        config = Config.model_validate({"context": {"roofline": {name: value}}})
        assert getattr(speeds_of(config), name) == value
    config = Config.model_validate({"context": {"roofline": {"launch_us": 0.0}}})
    assert speeds_of(config).launch_us == 0.0
    with pytest.raises(UserError, match="context.roofline.device is 'H100'"):
        speeds_of(Config.model_validate({"context": {"roofline": {"device": "H100"}}}))


def seconds_with(name: str, factor: float, plan: RunPlan) -> float:
    speeds = speeds_of(plan.config)
    changed: Speeds = replace(speeds, **{name: getattr(speeds, name) * factor})
    return Roofline(plan, speeds=changed).step().total


@each_row("name", sorted(asdict(SPEEDS["host"]).keys() - {"devices_per_host", "cores"}))
def test_a_faster_device_is_never_slower_for_it(name: str) -> None:
    plan = planned(*TWO_STAGES)
    faster = 0.5 if name.endswith(("_us", "_ns", "_ms")) else 2.0
    assert seconds_with(name, faster, plan) <= seconds_with(name, 1.0, plan)


def test_layouts_are_ranked_by_seconds_fit_and_learn_alike() -> None:
    loaded = load_config(CONFIG, TWO_STAGES)
    plan = planned(*TWO_STAGES)
    choices = layouts.ranked(loaded, plan, 40)
    totals = [choice.seconds.total for choice in choices]
    assert totals == sorted(totals) and len(totals) > 10
    own = Roofline(plan).step().total
    meshes = [(choice.plan.train.mesh, choice.plan.infer.mesh) for choice in choices]
    assert len(set(meshes)) == len(meshes), "each once"
    at = meshes.index((plan.train.mesh, plan.infer.mesh))
    # Two stages idle less with two chunks each.
    assert choices[at].plan.train.num_chunks == 2 and totals[at] < own
    assert totals[0] < own
    for choice in choices:
        assert choice.need.total <= 58 * 2**30
        assert choice.plan.world_size == 8
        assert choice.plan.batch.samples_per_step == plan.batch.samples_per_step
        assert choice.plan.batch.updates_per_step == plan.batch.updates_per_step
    best = choices[0]
    again = planned(*TWO_STAGES, *words_of(best.values).split())
    assert again.train.mesh == best.plan.train.mesh and again.infer.mesh == best.plan.infer.mesh
    assert Roofline(again).step().total == pytest.approx(best.seconds.total)
    assert most_needed(again) == best.need


def test_what_does_not_fit_is_tried_with_what_saves_memory() -> None:
    words = [*TWO_STAGES, "--context.max_device_memory", "26GB"]
    choices = layouts.ranked(load_config(CONFIG, words), planned(*words), 8)
    assert len(choices) == 8 and all(choice.need.total <= 26 * 2**30 for choice in choices)
    plans = [choice.plan for choice in choices]
    # Half of the optimizer's state fits, where it is shared out; of one replica there is nothing to share.
    assert {plan.train.mesh.dp for plan in plans if plan.shards_optimizer} == {2}
    assert {plan.train.mesh.dp for plan in plans if not plan.shards_optimizer} == {1}


def test_rows_that_are_long_are_also_shared_out() -> None:
    words = ["--rl_config.seq_length", "32768", "--rl_config.pack_num", "1"]
    words += ["--generate_config.max_prompt_length", "4096"]
    words += ["--generate_config.sampling_config.max_tokens", "28672"]
    choices = layouts.ranked(load_config(CONFIG, words), planned(*words), 16)
    by_degree = {choice.plan.train.mesh.cp: choice for choice in choices}
    assert {1, 2, 4} == by_degree.keys()
    for degree, choice in by_degree.items():
        again = planned(*words, *words_of(choice.values).split())
        assert again.train.mesh == choice.plan.train.mesh and again.train.mesh.cp == degree
        assert Roofline(again).step().total == pytest.approx(choice.seconds.total)
        assert again.world_size == 8 and again.reference is not None
        assert again.reference.layout.mesh.cp == again.infer.mesh.cp == 1


def test_experts_are_dealt_to_ranks_and_split_tokens_where_the_model_is_split(
    tmp_path: Path,
) -> None:
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512}
    experts |= {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}
    raw = {**MODEL, **experts, "model_type": "qwen3_moe", "head_dim": 64}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    example = CONFIG.parents[2] / "grpo" / "tiny_arithmetic" / "grpo_config.yaml"
    words = ["--actor_config.load", str(tmp_path), "--rl_config.beta", "0"]
    words += ["--actor_config.parallel_config.model_parallel", "1"]
    words += ["--actor_config.parallel_config.pipeline_stage", "1"]
    words += ["--actor_config.parallel_config.data_parallel", "4"]
    words += ["--generate_config.parallel_config.model_parallel", "2"]
    loaded = load_config(example, words)
    plan = plan_run(loaded.config, decoder_config(raw, "here"), 4)
    found = [choice.plan for choice in layouts.ranked(loaded, plan, 60)]
    assert {own.train.mesh.ep for own in found} == {1, 4}
    for own in found:
        assert own.train.splits_tokens == (own.train.mesh.tp > 1)
        assert own.infer.mesh.ep == own.infer.mesh.tp
        # An exchange is counted where experts are dealt out, and the products are the same.
        sent = RankShare(own, own.train, BF16).forward(64, 0, 1).sent
        assert (sent > 0) == (own.train.mesh.ep > 1)


def test_layouts_keep_updates_where_their_number_follows_from_the_layout() -> None:
    words = [*TWO_STAGES, "--actor_config.parallel_config.micro_batch_num", "2"]
    plan = planned(*words)
    assert plan.batch.updates_per_step == 32
    for choice in layouts.ranked(load_config(CONFIG, words), plan, 40):
        assert choice.plan.batch.updates_per_step == 32


def test_plan_prints_seconds_and_layouts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--config", str(CONFIG), "--layouts"]) == 0
    out = capsys.readouterr().out.splitlines()
    start = next(i for i, line in enumerate(out) if line.startswith("seconds"))
    phases = [line.split()[0] for line in out[start + 1 : start + 8]]
    assert phases[:3] == ["reshard", "rollout", "reference"] and "step" in phases
    first = next(i for i, line in enumerate(out) if line.startswith("ranked"))
    assert "trains in" in out[first] and "DP" in out[first + 1]
    assert any("the best: " in line for line in out)
    assert main(["plan", "--config", str(CONFIG)]) == 0
    assert "ranked" not in capsys.readouterr().out


def test_a_processors_run_is_estimated_with_its_own_kernels() -> None:
    lengths = {"max_prompt_length": 32, "sampling_config": {"max_tokens": 32}}
    config = Config.model_validate({"generate_config": lengths})
    plan = plan_run(config, decoder_config(MODEL, "here"), 1)
    step = Roofline(plan).step()
    assert all(np.isfinite(phase.seconds) for phase in step.phases) and step.total > 0


def test_caches_are_read_to_the_least_length_that_has_the_longest_sample() -> None:
    assert read_lengths(2048) == (512, 1024, 2048) and read_lengths(400) == (400,)
    assert [read_length(2048, position) for position in (0, 511, 512, 2047)] == [
        512,
        512,
        1024,
        2048,
    ]
