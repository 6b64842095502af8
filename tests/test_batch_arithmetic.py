"""Samples, updates and ranks that a configuration means.

Does not prove that the trainer takes as many updates, nor that a layout divides a model's heads.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tables import each_row

from mindgrpo.config import BatchPlan, Config, schedule_notes, validate_world
from mindgrpo.config.arithmetic import laid_out, nearest_layouts
from mindgrpo.errors import UserError, UserErrors


def config_of(
    train: dict[str, Any] | None = None,
    infer: dict[str, Any] | None = None,
    reference: dict[str, Any] | None = None,
    **rl: Any,
) -> Config:
    return Config.model_validate(
        {
            "rl_config": rl,
            "actor_config": {"parallel_config": train or {}},
            "generate_config": {"parallel_config": infer or {}},
            "ref_config": {"parallel_config": reference},
        }
    )


def users_config(**rl: Any) -> Config:
    return config_of(
        train={"model_parallel": 4, "pipeline_stage": 2, "micro_batch_num": 2},
        infer={"data_parallel": 2, "model_parallel": 4},
        **{"batch_size": 1, "pack_num": 1, "num_rollouts": 4, "chunk_size": 1} | rl,
    )


def test_samples_a_step_are_rollouts_times_chunk_times_infer_replicas_times_generations() -> None:
    plan = BatchPlan.of(users_config())
    assert (plan.prompts_per_step, plan.samples_per_step) == (8, 64)


def test_micro_batches_give_the_updates_that_users_got_before() -> None:
    plan = BatchPlan.of(users_config())
    assert (plan.updates_per_rollout, plan.samples_per_update) == (32, 2)


def test_prompts_per_step_and_its_default_do_not_depend_on_the_layout() -> None:
    for replicas in (1, 2, 8):
        infer = {"data_parallel": replicas}
        plan = BatchPlan.of(config_of(infer=infer, prompts_per_step=6))
        assert (plan.prompts_per_step, plan.samples_per_step) == (6, 48)
        by_default = BatchPlan.of(config_of(infer=infer))
        assert (by_default.prompts_per_step, by_default.samples_per_step) == (1, 8)
        assert by_default.lines()[0].startswith(
            "samples a step: prompts_per_step 1 (the default) x"
        )
    # What a run wrote of its configuration before the default was free of layouts means what it meant.
    written = config_of(infer={"data_parallel": 2}, num_rollouts=1, chunk_size=None)
    assert BatchPlan.of(written).prompts_per_step == 2


def test_one_update_a_rollout_where_nothing_says_otherwise() -> None:
    plan = BatchPlan.of(config_of(chunk_size=5))
    assert (plan.samples_per_step, plan.updates_per_rollout, plan.samples_per_update) == (40, 1, 40)


@pytest.mark.parametrize(("pack_num", "packing", "updates"), [(4, True, 8), (1, False, 32)])
def test_packed_rows_count_their_samples(pack_num: int, packing: bool, updates: int) -> None:
    plan = BatchPlan.of(users_config(pack_num=pack_num, packing=packing))
    assert plan.updates_per_rollout == updates


@pytest.mark.parametrize(("samples", "updates"), [(64, 32), (10, 3), (7, 7), (8, 5), (5, 1)])
def test_the_largest_update_has_the_samples_that_array_split_gives_it(
    samples: int, updates: int
) -> None:
    plan = BatchPlan.of(
        config_of(
            prompts_per_step=samples,
            num_generations=1,
            advantage_estimator="reinforce_plus_plus",
            updates_per_rollout=updates,
        )
    )
    split = np.array_split(np.arange(samples), updates)
    assert plan.samples_per_update == max(len(part) for part in split)


def test_iterations_multiply_the_optimizer_steps() -> None:
    plan = BatchPlan.of(config_of(prompts_per_step=2, updates_per_rollout=2, num_iterations=3))
    assert (plan.updates_per_rollout, plan.updates_per_step) == (2, 6)
    assert any("num_iterations 3 = 6" in line for line in plan.lines())


def test_the_lines_hold_the_users_numbers() -> None:
    lines = BatchPlan.of(users_config()).lines()
    assert lines[0] == (
        "samples a step: num_rollouts 4 x chunk_size 1 x generating data_parallel 2 x "
        "num_generations 8 = 64; rl_config.prompts_per_step 8 keeps it in every layout"
    )
    assert lines[1] == (
        "updates a rollout: ceil(64 samples / (batch_size 1 x data_parallel 1 x micro_batch_num 2 "
        "x pack_num 1)) = 32, 2 samples each"
    )
    assert lines[2].startswith("rows: at most 1024 tokens, at most 1 sample; 1 row a micro-batch")


@pytest.mark.parametrize(("updates", "warned"), [(16, False), (17, True)])
def test_more_updates_a_rollout_than_dapos_are_warned_of(updates: int, warned: bool) -> None:
    plan = BatchPlan.of(config_of(prompts_per_step=4, updates_per_rollout=updates))
    assert bool(plan.warnings()) is warned
    assert any(line.startswith("warning: ") for line in plan.lines()) is warned


@pytest.mark.parametrize(
    ("rl", "choices"),
    [
        (
            {"prompts_per_step": 2, "num_generations": 4, "updates_per_rollout": 20},
            ({"updates_per_rollout": 8}, {"num_generations": 10}, {"prompts_per_step": 5}),
        ),
        (
            {"num_rollouts": 2, "num_generations": 4, "updates_per_rollout": 20},
            ({"updates_per_rollout": 8}, {"num_generations": 10}, {"num_rollouts": 5}),
        ),
    ],
)
def test_more_updates_than_samples_are_refused_with_three_settings_that_work(
    rl: dict[str, Any], choices: tuple[dict[str, int], ...]
) -> None:
    with pytest.raises(UserError) as refused:
        BatchPlan.of(config_of(**rl))
    for choice in choices:
        ((name, value),) = choice.items()
        assert f"rl_config.{name} {value}" in str(refused.value)
        BatchPlan.of(config_of(**rl | choice))


def test_updates_and_micro_batches_that_disagree_are_refused() -> None:
    with pytest.raises(UserError, match="= 32; set one of the two to null"):
        BatchPlan.of(users_config(updates_per_rollout=2))
    assert BatchPlan.of(users_config(updates_per_rollout=32)).updates_per_rollout == 32


def test_layouts_that_fill_the_world_pass() -> None:
    validate_world(users_config(), 8)
    validate_world(config_of(), 1)
    shared = {"model_parallel": 2, "pipeline_stage": 2, "context_parallel": 2}
    validate_world(config_of(train=shared, infer={"data_parallel": 8}), 8)


@pytest.mark.parametrize(
    ("config", "key", "layout"),
    [
        (
            config_of(train={"data_parallel": 1, "model_parallel": 4}),
            "actor_config.parallel_config",
            "DP1/MP4/PP2",
        ),
        (
            config_of(train={"data_parallel": 8}, infer={"data_parallel": 4}),
            "generate_config.parallel_config",
            "DP4/MP2",
        ),
        (
            config_of(
                train={"data_parallel": 8},
                infer={"data_parallel": 8},
                reference={"model_parallel": 16},
            ),
            "ref_config.parallel_config",
            "DP1/MP8/PP1",
        ),
        (
            config_of(
                train={"data_parallel": 2, "context_parallel": 2}, infer={"data_parallel": 8}
            ),
            "actor_config.parallel_config",
            "DP2/MP1/PP1/CP4",
        ),
    ],
)
def test_a_layout_that_does_not_fill_the_world_names_its_keys_and_three_others(
    config: Config, key: str, layout: str
) -> None:
    with pytest.raises(UserError) as refused:
        validate_world(laid_out(config, 8), 8)
    message = str(refused.value)
    assert message.startswith(key) and "data_parallel" in message and "8 ranks" in message
    assert layout in message
    assert message.count("DP") == 3 and "DP8/MP1" in message


@each_row(
    ("train", "infer", "world", "filled"),
    [
        ({}, {}, 8, (8, 8)),
        ({"model_parallel": 4, "pipeline_stage": 2}, {}, 8, (1, 8)),
        ({"context_parallel": 2}, {"model_parallel": 4}, 8, (4, 2)),
        ({"data_parallel": 2}, {}, 8, (2, 8)),
        # Nobody says how many ranks there are.
        ({}, {}, None, (1, 1)),
        ({"data_parallel": 2, "model_parallel": 2}, {}, None, (2, 4)),
        ({}, {"data_parallel": 2, "model_parallel": 2}, None, (4, 2)),
        ({"model_parallel": 4}, {"model_parallel": 2}, None, (1, 2)),
    ],
)
def test_a_layout_without_data_parallel_takes_the_ranks_that_its_other_axes_leave(
    train: dict[str, int], infer: dict[str, int], world: int | None, filled: tuple[int, int]
) -> None:
    config = laid_out(config_of(train=train, infer=infer), world)
    actor, generate = config.actor_config.parallel_config, config.generate_config.parallel_config
    assert (actor.data_parallel, generate.data_parallel) == filled
    assert config.ref_config.parallel_config is None


def test_all_layouts_that_do_not_fill_the_world_are_said_at_once_data_parallelism_first() -> None:
    layouts = {"data_parallel": 1, "model_parallel": 4}
    with pytest.raises(UserErrors) as refused:
        validate_world(config_of(train=layouts, infer=layouts), 2)
    actor, generate = refused.value.sentences
    assert actor.startswith("actor_config") and generate.startswith("generate_config")
    assert "to DP2/MP1/PP1, " in actor and "to DP2/MP1 or DP1/MP2" in generate


def test_the_reference_may_use_fewer_ranks() -> None:
    validate_world(
        config_of(train={"data_parallel": 8}, infer={"data_parallel": 8}, reference={}), 8
    )


@pytest.mark.parametrize("world", [1, 2, 6, 8, 1024])
def test_nearest_layouts_fill_the_world_and_differ(world: int) -> None:
    layouts = nearest_layouts((1, 4, 2), world)
    assert len(set(layouts)) == len(layouts) == (1 if world == 1 else 3)
    for layout in layouts:
        degrees = [int(part[2:]) for part in layout.split("/")]
        assert np.prod(degrees) == world


def test_the_layout_asked_for_is_the_nearest_where_it_fits() -> None:
    assert nearest_layouts((1, 4, 2), 8)[:2] == ["DP1/MP4/PP2", "DP8/MP1/PP1"]


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        ({}, []),
        ({"decay_steps": 200}, []),
        ({"decay_steps": 200_000}, ["decay_steps 200000 is far beyond the run's 100 updates"]),
        ({"decay_steps": 200_000, "lr_decay_style": "constant"}, []),
        ({"warmup_step": 99}, []),
        ({"warmup_step": 100}, ["warmup_step 100 is not below the run's 100 updates"]),
    ],
)
def test_what_a_run_never_sees_of_its_schedule_is_told(
    schedule: dict[str, Any], words: list[str]
) -> None:
    config = Config.model_validate({"actor_config": {"lr_schedule": schedule}})
    notes = schedule_notes(config, 100)
    assert len(notes) == len(words)
    assert all(part in note for part, note in zip(words, notes, strict=True))


def test_parts_of_a_micro_batch_change_no_count_and_are_told() -> None:
    whole, parts = (
        BatchPlan.of(users_config(batch_size=4, micro_batch_interleaved=n)) for n in (1, 2)
    )
    assert whole.updates_per_rollout == parts.updates_per_rollout
    assert "4 rows a micro-batch in 2 parts" in "".join(parts.lines())
    assert "parts" not in "".join(whole.lines())
