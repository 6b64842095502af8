"""Which changes between two sessions of a run are free, told or refused, and where a run looks for checkpoints.

Does not prove that a free setting changes nothing: the distributed tests do, for layouts.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from checkpoint_model import save
from ranks_as_threads import run

from mindgrpo.checkpoint.differences import (
    IGNORED,
    IGNORED_NAMES,
    REPORTED,
    check,
    differences,
)
from mindgrpo.checkpoint.folders import find, folder_of
from mindgrpo.checkpoint.format import Identity
from mindgrpo.config import Config, values_by_key
from mindgrpo.config.schema import LIVE
from mindgrpo.errors import UserError

BEFORE = Identity(
    code="0.4.0",
    config=values_by_key(Config()),
    model={"hidden_size": 16},
    data="a" * 64,
    batch={"prompts_per_step": 4},
    unsaved={"reference": "b" * 64},
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


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"data": "c" * 64}, "data"),
        ({"model": {"hidden_size": 17}}, "model.hidden_size"),
        ({"batch": {"prompts_per_step": 5}}, "batch.prompts_per_step"),
        ({"unsaved": {"reference": "d" * 64}}, "weights.reference"),
    ],
)
def test_other_contents_behind_the_same_settings_are_refused(
    change: dict[str, Any], named: str
) -> None:
    with pytest.raises(UserError, match=f"{named} was"):
        judged(BEFORE.model_copy(update=change))


def test_every_pattern_is_of_a_setting_that_there_is() -> None:
    for pattern in (*IGNORED, *REPORTED):
        if pattern != "rl_config.enable_compile_cache":  # not live yet
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
