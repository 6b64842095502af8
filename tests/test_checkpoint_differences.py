"""Which changes between two sessions of a run are free, told or refused, and where a run looks for checkpoints.

Does not prove that a free setting changes nothing: the distributed tests do, for layouts.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoint_model import save
from ranks_as_threads import run
from tables import each_row

from mindgrpo.checkpoint.differences import (
    IGNORED,
    IGNORED_NAMES,
    REPORTED,
    SCORED,
    check,
    differences,
    scoring_changes,
)
from mindgrpo.checkpoint.folders import find, folder_of
from mindgrpo.checkpoint.format import Identity, Manifest, StoredTokenizer
from mindgrpo.config import Config, values_by_key
from mindgrpo.config.schema import LIVE
from mindgrpo.config.supervised import is_supervised, supervised
from mindgrpo.config.yaml_file import Sourced
from mindgrpo.errors import UserError

BEFORE = Identity(
    code="0.4.0",
    config=values_by_key(Config()),
    model={"hidden_size": 16, "moe": {"num_experts": 4}, "layers": [{"is_local": False}]},
    data="a" * 64,
    batch={"prompts_per_step": 4},
    unsaved={"reference": "b" * 64},
    held_out="e" * 64,
    rewards={"spread": 1.0},
    tokenizer=StoredTokenizer(
        directory="model", template="{{ a }}", is_chosen=False, turn_end=None, stop_ids=[2]
    ),
)


def after(**settings: Any) -> Identity:
    return BEFORE.model_copy(update={"config": {**BEFORE.config, **settings}})


def judged(now: Identity, *allowed: str) -> list[str]:
    return check(differences(BEFORE, now), allowed, "output/x")


@pytest.mark.parametrize(
    "key",
    [
        "rl_config.seed",
        "rl_config.beta",
        "rl_config.loss_type",
        "rl_config.num_generations",
        "rl_config.dynamic_sampling",
        "rl_config.dataset_map_keys",
        "actor_config.optimizer.adam_beta1",
        "actor_config.lr_schedule.lr",
        "actor_config.lora.rank",
        "ref_config.sync_ref_model",
        "reward_config.verifier_weight",
        "generate_config.sampling_config.temperature",
        "generate_config.max_prompt_length",
    ],
)
def test_what_changes_the_run_is_refused_with_both_values_and_the_way_to_allow_it(key: str) -> None:
    now = after(**{key: "another"})
    with pytest.raises(UserError) as refused:
        judged(now)
    assert f"{key} was {BEFORE.config[key]!r} and is 'another'" in str(refused.value)
    assert str(refused.value).endswith(f"--rl_config.resume_changed {key}.")
    assert len(judged(now, key)) == len(judged(now, "all")) == 1


@pytest.mark.parametrize(
    "key",
    [
        "output_dir",
        "verbose",
        "actor_config.parallel_config.model_parallel",
        "actor_config.load",
        "context.max_device_memory",
        "rl_config.save_ckpt_interval",
        "rl_config.resume_training",
        "rl_config.tensorboard_dir",
        "rl_config.dataset_file",
        "rl_config.chunk_size",
    ],
)
def test_where_it_runs_and_what_it_shows_may_change_in_silence(key: str) -> None:
    assert judged(after(**{key: "another"})) == []


def test_when_it_ends_and_how_work_is_cut_may_change_and_is_told() -> None:
    told = judged(after(**{"rl_config.max_steps": 9, "rl_config.batch_size": 7}))
    assert told == [
        "changed since output/x: rl_config.batch_size was 4 and is 7",
        "changed since output/x: rl_config.max_steps was None and is 9",
    ]


@each_row(
    "key",
    [
        "context.compute_dtype",
        "context.float32_matmul_precision",
        "context.batch_invariant",
        "context.fp32_lm_head",
        "context.loss_scale",
        "context.mode",
        "context.plain_kernels",
        "rl_config.save_ckpt_best",
        "rl_config.eval_dataset_file",
        "rl_config.checksum_interval",
    ],
)
def test_what_changes_how_numbers_are_rounded_or_which_checkpoint_is_best_is_told(key: str) -> None:
    assert judged(after(**{key: "another"})) == [
        f"changed since output/x: {key} was {BEFORE.config[key]!r} and is 'another'"
    ]


def test_the_words_of_an_earlier_version_are_understood() -> None:
    """Bounds were numbers where null is the paper's now, and dimensions of a model had other names around them."""
    older = {**BEFORE.config, "rl_config.epsilon_low": 0.2, "generate_config.vllm.dtype": "float32"}
    model = {"hidden_size": 16, "family": {"qk_norm": None}, "moe": {"num_experts": 4, "old": 1}}
    model |= {"layers": [{"is_local": False, "has_experts": False}]}
    saved = BEFORE.model_copy(
        update={
            "config": older,
            "model": model,
            "held_out": None,
            "tokenizer": None,
            "rewards": None,
        }
    )
    assert differences(saved, BEFORE) == []
    lower = saved.model_copy(update={"config": {**older, "rl_config.epsilon_low": 0.1}})
    assert [str(one) for one in differences(lower, BEFORE)] == [
        "rl_config.epsilon_low was 0.1 and is 0.2"
    ]
    fewer = saved.model_copy(update={"model": {**model, "moe": {"num_experts": 2}}})
    assert [one.key for one in differences(fewer, BEFORE)] == ["model.moe"]


def test_the_template_matters_where_turns_are_rendered_with_it() -> None:
    assert BEFORE.tokenizer is not None
    another = BEFORE.tokenizer.model_copy(update={"template": "{{ b }}"})
    now = BEFORE.model_copy(update={"tokenizer": another})
    assert len(judged(now)) == 1
    with_tools = {"config": {**BEFORE.config, "rl_config.tools": ["calculator"]}}
    changes = differences(BEFORE.model_copy(update=with_tools), now.model_copy(update=with_tools))
    assert [(one.key, one.is_dangerous) for one in changes] == [("tokenizer.template", True)]
    stops = BEFORE.tokenizer.model_copy(update={"stop_ids": [2, 3]})
    with pytest.raises(UserError, match=r"tokenizer.stop_ids was \[2\] and is \[2, 3\]"):
        judged(BEFORE.model_copy(update={"tokenizer": stops}))


@each_row(
    ("change", "named"),
    [
        ({"config": {"rl_config.save_ckpt_best": "b"}}, "rl_config.save_ckpt_best"),
        ({"config": {"rl_config.eval_temperature": 0.5}}, "rl_config.eval_temperature"),
        ({"config": {"rl_config.eval_dataset_file": "moved.jsonl"}}, None),
        ({"config": {"rl_config.eval_steps": 7}}, None),
        ({"config": {"rl_config.beta": 7}}, None),
        ({"held_out": "f" * 64}, "held_out"),
        ({"rewards": {"another": 1.0}}, "rewards"),
    ],
)
def test_scores_are_compared_where_they_are_of_the_same_thing(
    change: dict[str, Any], named: str | None
) -> None:
    config = {**BEFORE.config, **change.get("config", {})}
    now = BEFORE.model_copy(update=change | {"config": config})
    assert [one.key for one in scoring_changes(BEFORE, now)] == ([] if named is None else [named])
    # Version 1 does not say what a path led to.
    first = BEFORE.model_copy(update={"held_out": None})
    found = [one.key for one in scoring_changes(first, now)]
    moved = "rl_config.eval_dataset_file"
    assert (moved in found) == (moved in change.get("config", {}))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"data": "c" * 64}, "data"),
        ({"model": {"hidden_size": 17}}, "model.hidden_size"),
        ({"batch": {"prompts_per_step": 5}}, "batch.prompts_per_step"),
        ({"unsaved": {"reference": "d" * 64}}, "weights.reference"),
        ({"rewards": {"spread": 0.5}}, "rewards"),
    ],
)
def test_other_contents_behind_the_same_settings_are_refused(
    change: dict[str, Any], named: str
) -> None:
    with pytest.raises(UserError, match=f"{named} was"):
        judged(BEFORE.model_copy(update=change))


def test_every_pattern_is_of_a_setting_that_there_is() -> None:
    for pattern in (*IGNORED, *REPORTED, *SCORED):
        # Not live yet, or of contents.
        if pattern not in (
            "rl_config.enable_compile_cache",
            "held_out",
            "tokenizer.",
            "rewards",
        ):
            assert any(key.startswith(pattern) for key in LIVE), pattern
    assert {name for key in LIVE for name in key.split(".")} >= IGNORED_NAMES


def made(tmp_path: Path, *names: str) -> None:
    for number, name in enumerate(names, start=1):
        for step in (number, 10 * number):
            run(1, save, tmp_path / name, (1, 1, 1), False, step)
            os.utime(folder_of(tmp_path / name, step), (number, number))


def test_the_latest_is_of_the_given_folder_or_of_the_newest_run_that_has_one(
    tmp_path: Path,
) -> None:
    made(tmp_path, "mine/1", "mine/2", "other/9")
    (tmp_path / "mine" / "3").mkdir()  # died before its first checkpoint
    assert find(False, None, "mine", tmp_path) is None
    given = find(True, str(tmp_path / "mine" / "1"), "mine", tmp_path)
    newest = find(True, None, "mine", tmp_path)
    assert given is not None and newest is not None
    assert [c.manifest.state.step for c in given.candidates] == [10, 1]
    assert given.output == given.source == tmp_path / "mine" / "1"
    assert [c.manifest.state.step for c in newest.candidates] == [20, 2]
    nothing = find(True, None, "third", tmp_path)
    assert nothing is not None and not nothing.candidates and nothing.output is None
    assert "has a checkpoint: this one starts from the beginning" in nothing.notes[0]


def test_the_latest_is_of_the_newest_run_of_the_same_kind(tmp_path: Path) -> None:
    made(tmp_path, "mine/1", "mine/2", "mine/3")

    def has_steps(*steps: int) -> Callable[[Manifest], bool]:
        return lambda manifest: manifest.state.step in steps

    found = find(True, None, "mine", tmp_path, has_steps(20, 10))
    assert found is not None and found.source == found.output == tmp_path / "mine" / "2"
    assert found.notes == [
        f"passed over: {tmp_path / 'mine' / '3'} is of the other kind of training"
    ]
    nothing = find(True, None, "mine", tmp_path, has_steps())
    assert nothing is not None and not nothing.candidates and len(nothing.notes) == 4


def test_supervised_training_is_told_by_its_settings() -> None:
    entries = supervised({"rl_config.seed": Sourced(1, "here")}, [])
    assert is_supervised({key: entry.value for key, entry in entries.items()})
    assert not is_supervised(BEFORE.config)
    assert not is_supervised({})


def test_a_path_is_a_run_or_a_checkpoint(tmp_path: Path) -> None:
    made(tmp_path, "run")
    for path in (tmp_path / "run", tmp_path / "run" / "checkpoints"):
        start = find(str(path), None, "x", tmp_path)
        assert start is not None and not start.only and len(start.candidates) == 2
    one = find(str(folder_of(tmp_path / "run", 1)), None, "x", tmp_path)
    assert one is not None and one.only and one.output == tmp_path / "run"
    branch = find(str(tmp_path / "run"), str(tmp_path / "new"), "x", tmp_path)
    assert branch is not None and branch.output == tmp_path / "new"
    copied = folder_of(tmp_path / "run", 1).rename(tmp_path / "copied")
    elsewhere = find(str(copied), None, "x", tmp_path)
    assert elsewhere is not None and elsewhere.output is None and elsewhere.only
    with pytest.raises(UserError, match="holds no checkpoint; name a run's folder"):
        find(str(tmp_path / "nowhere"), None, "x", tmp_path)


def test_unreadable_checkpoints_are_passed_over_unless_there_is_no_other(tmp_path: Path) -> None:
    made(tmp_path, "run")
    newest, first = (folder_of(tmp_path / "run", step) / "manifest.json" for step in (10, 1))
    newest.write_text("{")
    start = find(True, str(tmp_path / "run"), "x", tmp_path)
    assert start is not None and [c.manifest.state.step for c in start.candidates] == [1]
    assert start.notes[0].startswith(f"passed over: The manifest '{newest}' is not JSON")
    first.unlink()
    with pytest.raises(
        UserError, match="No checkpoint in .* can be read; the newest: .*is not JSON"
    ):
        find(True, str(tmp_path / "run"), "x", tmp_path)
