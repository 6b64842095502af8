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
from mindgrpo.models.decoder_config import LayerKind, MoeConfig, decoder_config
from mindgrpo.parallel.mesh import Mesh
from mindgrpo.plan import layouts
from mindgrpo.plan.memory import most_needed
from mindgrpo.plan.run_plan import RunPlan, plan_run
from mindgrpo.plan.sample_counts import SampleCounts, mean_read, prompt_calls
from mindgrpo.plan.seconds import PhaseSeconds, Rates, Roofline, speeds_of
from mindgrpo.plan.work import FUSED, NATIVE, LayerWork, Passes
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
    layer = LayerWork(plan, plan.train, FUSED, BF16)
    size = 3584 * (7 + 2) * 128 + 7 * 128 * 3584 + 3 * 3584 * 4736
    assert layer.size == size
    work = layer.forward(Passes(8192, 0, 8192 * 8192), 1, False)
    assert work.products == 2 * 8192 * size == pytest.approx(0.955e12, rel=0.01)
    assert work.attention == 4 * 8192 * 8192 * 7 * 128 == pytest.approx(0.24e12, rel=0.01)
    assert (work.sums, work.summed) == (2, 2 * 8192 * 3584 * BF16)
    wide = planned(*TWO_STAGES, "--context.reduce_dtype", "float32")
    in_float32 = LayerWork(wide, wide.train, FUSED, BF16).forward(Passes(8192, 0, 0), 1, False)
    assert in_float32.summed == 2 * work.summed


def test_tokens_compute_their_experts_and_read_those_that_any_of_them_chose() -> None:
    """Qwen3-30B-A3B: 32 query heads and 4 of keys of 128, 2,048 wide, 8 of 128 experts of 768."""
    dense = planned(*TWO_STAGES)
    layout = replace(dense.train, mesh=Mesh(4, 1, 2))
    moe = MoeConfig(num_experts=128, per_token=8, inner=768, scores="softmax", renormalise=True)
    kinds = (LayerKind(has_experts=True),) * dense.model.num_hidden_layers
    model = replace(dense.model, hidden_size=2048, num_attention_heads=32, num_key_value_heads=4)
    plan = replace(dense, model=replace(model, moe=moe, layers=kinds))
    layer = LayerWork(plan, layout, FUSED, BF16)
    attention, expert, router = 2048 * (2 * 32 + 2 * 4) * 128, 3 * 2048 * 768, 2048 * 128
    assert layer.size == attention + 8 * expert + router
    many = layer.forward(Passes(8192, 0, 0), 1, False)
    assert many.products == 2 * 8192 * layer.size
    # All experts are read; of two tokens, eight each that may be the same.
    assert many.weights == pytest.approx(BF16 * (attention + 128 * expert + router))
    two = layer.forward(Passes(2, 0, 0), 1, False)
    used = 128 * (1 - (120 / 128) ** 2)
    assert two.weights == pytest.approx(BF16 * (attention + used * expert + router))
    half = (*kinds[::2], *[LayerKind()] * (len(kinds) // 2))
    mixed = LayerWork(replace(plan, model=replace(plan.model, layers=half)), layout, FUSED, BF16)
    dense_size = attention + 3 * 2048 * dense.model.intermediate_size
    assert mixed.size == (layer.size + dense_size) / 2


def test_a_layer_is_computed_forward_and_once_more_in_any_stage_that_recomputes_all() -> None:
    plan = planned(*TWO_STAGES)
    layer, passes = LayerWork(plan, plan.train, FUSED, BF16), Passes(8192, 0, 8192 * 8192)
    forward = layer.forward(passes, 1, False)
    for recomputed in (0.0, 1.0):
        # Beside the stage's forward graph.
        first = layer.backward(passes, 1, recomputed, False)
        assert first.products == 3 * forward.products
        assert first.sums == 3
    last = layer.backward(passes, 1, 1.0, True)
    assert last.products == first.products + forward.products
    earlier = LayerWork(plan, plan.train, replace(FUSED, hands_inputs_on=False), BF16)
    assert earlier.backward(passes, 1, 1.0, False).products == 4 * forward.products


def test_a_row_of_one_sample_is_attended_to_causally() -> None:
    seconds = {
        is_causal: Roofline(planned(*TWO_STAGES), replace(FUSED, is_causal=is_causal))
        ._update()
        .by["attention"]
        for is_causal in (True, False)
    }
    assert seconds[True] == pytest.approx(seconds[False] / 2)


@pytest.mark.parametrize("dp, mp, pp", [(8, 1, 1), (2, 4, 1), (1, 4, 2), (1, 1, 4), (2, 2, 2)])
def test_all_ranks_together_have_the_models_products_in_any_layout(
    dp: int, mp: int, pp: int
) -> None:
    words = [
        word
        for axis, size in (("data_parallel", dp), ("model_parallel", mp), ("pipeline_stage", pp))
        for word in (f"--actor_config.parallel_config.{axis}", str(size))
    ]
    plan = planned(*words)
    layer = LayerWork(plan, plan.train, FUSED, BF16)
    tokens = 64 / dp
    counted = sum(
        layer.forward(Passes(tokens, 0, 0), sum(map(len, chunks)), False).products
        for chunks in plan.train.stage_layers
    )
    whole = 28 * (3584 * (28 + 2 * max(4, mp)) * 128 + 28 * 128 * 3584 + 3 * 3584 * 18944)
    assert counted * mp * dp == 2 * 64 * whole


def test_stages_wait_for_one_another_as_long_as_the_schedule_says() -> None:
    """Equal stages of two with two micro-batches: one of three parts is idle."""
    plan = planned(*TWO_STAGES)
    roofline = Roofline(plan)
    stage = LayerWork(plan, plan.train, FUSED, BF16).forward(Passes(8192, 0, 0), 14, False)
    for micro_batches, idle in ((1, 1 / 2), (2, 1 / 3), (8, 1 / 9)):
        phase = roofline._pipelined("update", [[stage], [stage]], micro_batches, 4, 1.0)
        assert phase.idle_share == pytest.approx(idle)
    # Two chunks: half of the time that one stage waits for the other, 1 / (2 m) of what it computes.
    chunks = [[stage * 0.5] * 2] * 2
    phase = roofline._pipelined("update", chunks, 2, 4, 1.0)
    assert phase.idle_share == pytest.approx(1 / 5)
    shared = Roofline(plan, speeds=SPEEDS["host"])
    assert shared._pipelined("update", [[stage], [stage]], 2, 4, 1.0).idle_share == 0


def test_chunks_have_the_work_of_whole_stages_and_send_more() -> None:
    one, two = (
        Roofline(planned(*TWO_STAGES, "--actor_config.parallel_config.pp_interleave_num", chunks))
        for chunks in ("1", "2")
    )
    whole, halves = one._update().work, two._update().work
    assert halves.products == pytest.approx(whole.products)
    assert halves.attention == pytest.approx(whole.attention)
    assert halves.sent > whole.sent


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


def test_rows_as_long_as_their_content_cost_less_and_nothing_else_changes() -> None:
    plan = planned(*TWO_STAGES)
    before, after = (
        {
            phase.phase: phase
            for phase in Roofline(plan, replace(FUSED, fits_rows=fits)).step().phases
        }
        for fits in (False, True)
    )
    assert after["update"].seconds < before["update"].seconds / 4
    for name in ("rollout", "reshard", "optimizer"):
        assert after[name] == before[name]
    assert {n: p.limit for n, p in after.items()} == {n: p.limit for n, p in before.items()}


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
        assert found["update"].limit == plain["update"].limit
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
    counts = Roofline(planned()).samples
    assert (counts.greedy.count, counts.greedy.group) == (counts.prompts, 1)
    assert counts.greedy.prompts == counts.prompts
    # Alone as long as a rollout of one completion a prompt.
    alone = phases_of(
        "--rl_config.num_generations", "1", "--rl_config.advantage_estimator", "remax"
    )
    extra = after["rollout"].seconds - before["rollout"].seconds
    assert 2 * extra == pytest.approx(alone["rollout"].seconds, rel=1e-6)


def test_no_estimate_is_below_its_limit() -> None:
    for words in ([], TWO_STAGES, ["--actor_config.optimizer.opt_offload", "true"]):
        for phase in Roofline(planned(*words)).step().phases:
            assert 0 <= phase.limit <= phase.seconds * 1.000001, phase.phase


def test_every_speed_is_a_key_and_the_key_wins() -> None:
    names = set(asdict(SPEEDS["host"]))
    assert names == set(RooflineConfig.model_fields) - {
        "device",
        "prompt_tokens",
        "completion_tokens",
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
    again = planned(*TWO_STAGES, *best.words.split())
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
        again = planned(*words, *choice.words.split())
        assert again.train.mesh == choice.plan.train.mesh and again.train.mesh.cp == degree
        assert Roofline(again).step().total == pytest.approx(choice.seconds.total)
        assert again.world_size == 8 and again.reference is not None
        assert again.reference.mesh.cp == again.infer.mesh.cp == 1


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
        assert own.train.splits_tokens == (own.train.mesh.mp > 1)
        assert own.infer.mesh.ep == own.infer.mesh.mp
        # An exchange is counted where experts are dealt out, and the products are the same.
        sent = LayerWork(own, own.train, FUSED, BF16).forward(Passes(64, 0, 0), 1, False).sent
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
    assert Roofline(plan).counts in (NATIVE, FUSED)
    assert all(np.isfinite(phase.seconds) for phase in step.phases) and step.total > 0


def test_caches_are_read_to_the_least_length_that_has_the_longest_sample() -> None:
    assert read_lengths(2048) == (512, 1024, 2048) and read_lengths(400) == (400,)
    assert [read_length(2048, position) for position in (0, 511, 512, 2047)] == [
        512,
        512,
        1024,
        2048,
    ]
    # 100 tokens of prompt: 413 tokens, 512 and 75 more, then 200 while others end.
    read = (413 * 512 + 512 * 1024 + (75 + 200) * 2048) / 1200
    assert mean_read(2048, 100, 1000, 1200) == pytest.approx(read)


def test_prompts_come_together_where_they_are_short() -> None:
    """Eight prompts in four slots of their groups: half a call each at first, then as slots are free."""
    assert [prompt_calls(8, 4, at_once) for at_once in (1, 2, 4)] == [8, 6, 5]
    assert prompt_calls(1, 4, 4) == 1
    short = ("--generate_config.max_prompt_length", "256")

    def rollout(plan: RunPlan) -> tuple[float, float]:
        work = next(p for p in Roofline(plan).step().phases if p.phase == "rollout").work
        return work.kernels, plan.cache_config.prompts_at_once

    (kernels, at_once), (others, one) = rollout(planned(*short)), rollout(planned())
    assert at_once > 1 == one and kernels < others
