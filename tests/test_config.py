"""The configuration: what is accepted, what is refused and in which words.

Does not prove that a live key has its effect in a run; the tests of the rooms that read it do.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from config_files import Loader, section
from pydantic import ValidationError
from tables import each_row

from mindgrpo.config import (
    FLAGS,
    Config,
    load_config,
    memory_bytes,
    require_run_keys,
    write_resolved,
)
from mindgrpo.config.names import KNOWN, PENDING, RETIRED, SECTIONS
from mindgrpo.config.schema import LIVE
from mindgrpo.errors import UserError

TUTORIAL = Path(__file__).parent.parent / "examples/grpo/qwen_grpo_tutorial/grpo_config.yaml"

USERS_CONFIGURATION = (Path(__file__).parent / "data/users_grpo_config.yaml").read_text("utf-8")


# --- the whole ---------------------------------------------------------------------------------


def test_an_empty_file_is_all_defaults(load: Loader) -> None:
    loaded = load("")
    assert loaded.config == Config()
    assert set(loaded.origins.values()) == {"default"}
    assert loaded.notices == []


def test_the_tutorial_configuration_has_live_keys_only() -> None:
    loaded = load_config(TUTORIAL)
    assert loaded.notices == []
    assert loaded.config.context.device_target is None


def test_a_key_is_live_or_retired_or_pending() -> None:
    live, retired, pending = set(LIVE), set(RETIRED), set(PENDING)
    assert not live & retired and not live & pending and not retired & pending
    assert not SECTIONS & live and not SECTIONS & retired and not SECTIONS & pending


def test_every_live_key_says_what_it_is() -> None:
    assert [key for key, known in LIVE.items() if not known.field.description] == []


def test_flags_lead_to_known_keys() -> None:
    assert set(FLAGS.values()) <= set(KNOWN)


def test_the_configuration_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        Config().rl_config.beta = 1.0  # type: ignore[misc]


def test_a_key_given_twice_is_refused_with_both_lines(load: Loader) -> None:
    with pytest.raises(UserError, match="rl_config.beta is given twice, on line 2 and on line 4"):
        load("rl_config:\n  beta: 1\n  seed: 0\n  beta: 2\n")


def test_a_section_given_twice_is_refused(load: Loader) -> None:
    with pytest.raises(UserError, match="rl_config is given twice"):
        load("rl_config:\n  beta: 1\nrl_config:\n  seed: 0\n")


def test_a_section_may_be_empty(load: Loader) -> None:
    assert load("rl_config:\nactor_config: {}\n").config == Config()


def test_anchors_and_merges_are_read_and_the_sections_own_value_wins(load: Loader) -> None:
    text = (
        "actor_config:\n  parallel_config: &layout\n    data_parallel: 2\n    model_parallel: 4\n"
        "generate_config:\n  parallel_config:\n    <<: *layout\n    data_parallel: 1\n"
    )
    parallel = load(text).config.generate_config.parallel_config
    assert (parallel.data_parallel, parallel.model_parallel) == (1, 4)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("rl_config: [1\n", "not valid YAML"),
        ("rl_config:\n\tbeta: 1\n", "(grpo_config.yaml line 2)"),
        ("- 1\n", "must hold sections"),
        ("rl_config:\n  on: 1\n", "is not a name (grpo_config.yaml line 2)"),
    ],
)
def test_a_file_that_is_not_a_configuration_is_refused(
    load: Loader, text: str, sentence: str
) -> None:
    with pytest.raises(UserError) as refused:
        load(text)
    assert sentence in str(refused.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere.yaml' cannot be read"):
        load_config(tmp_path / "nowhere.yaml", [], {})


# --- values ------------------------------------------------------------------------------------


@each_row(
    ("key", "value", "sentence"),
    [
        ("rl_config.epochs", "'8'", "is '8', but must be a whole number; write 8 without quotes"),
        ("rl_config.epochs", "8.0", "must be a whole number"),
        ("rl_config.epochs", "0", "is 0, but must be at least 1; leave it out for 1"),
        ("rl_config.seed", "true", "must be a whole number"),
        ("rl_config.seed", "null", "is null, but must be a whole number"),
        ("rl_config.beta", "-0.1", "must be at least 0"),
        ("rl_config.beta", ".nan", "must be a finite number"),
        ("rl_config.packing", "1", "must be true or false"),
        ("rl_config.packing", "'no'", "write no without quotes"),
        ("rl_config.model_name", "7", "must be text or null; put it in quotes"),
        ("rl_config.scale_rewards", "std", "must be 'group' or 'batch' or 'none' or null"),
        ("rl_config.deterministic", "maybe", "must be 'ON' or 'OFF'"),
        ("actor_config.optimizer.type", "lamb", "must be 'adamw'"),
        ("actor_config.lr_schedule.lr", "0", "must be above 0"),
        ("generate_config.sampling_config.top_p", "1.5", "must be at most 1"),
        ("generate_config.sampling_config.min_p", "1.0", "must be below 1"),
        ("generate_config.sampling_config.eos_token_id", "[1, x]", "or a list of whole numbers"),
        ("generate_config.sampling_config.eos_token_id", "[]", "a list of at least one"),
        ("generate_config.parallel_config.pipeline_stage", "2", "must be 1: each generator"),
        ("reward_config.verifier_function", "accuracy_reward", "write [accuracy_reward]"),
        ("context.max_device_memory", "lots", "must be a size above 0 such as 58GB"),
        ("context.mode", "2", "must be at most 1"),
        ("context.mode", "false", "must be a whole number"),
        ("context.save_graphs", "4", "must be at most 3"),
        ("context.jit_config.jit_level", "O3", "must be 'O0' or 'O1' or 'O2' or null"),
        ("actor_config.recompute_config.select_recompute", "[ffn]", "a list of attention and mlp"),
        ("actor_config.recompute_config.select_recompute", "0", "a number from 1 up"),
        ("monitor_config.host_monitor_steps", "[[3, 2]]", "pairs [first, last]"),
        ("monitor_config.host_monitor_steps", "[0]", "must hold step numbers from 1 up"),
        ("monitor_config.host_monitor_steps", "5", "lists of whole numbers; write [5]"),
        ("monitor_config.host_max_memory_threshold", "95", "must be at most 1"),
        ("profiler_config.stage", "rolout", "must be all, or of actor_generate"),
        ("profiler_config.stage", "[]", "must be all, or of actor_generate"),
        ("profiler_config.profile_level", "level9", "must be 'levelNone'"),
    ],
)
def test_a_wrong_value_is_refused_with_value_rule_and_place(
    load: Loader, key: str, value: str, sentence: str
) -> None:
    with pytest.raises(UserError) as refused:
        load(section(key, value))
    message = str(refused.value)
    assert message.startswith(f"{key} is ")
    assert sentence in message
    assert message.endswith(f"(grpo_config.yaml line {key.count('.') + 1}).")


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("rl_config.beta", "1", 1.0),
        ("actor_config.lr_schedule.lr", "1e-6", 1e-6),
        ("rl_config.deterministic", "on", "ON"),
        ("rl_config.deterministic", "OFF", "OFF"),
        ("rl_config.deterministic", "'On'", "ON"),
        ("rl_config.save_prompt_completions_dir", "2024-01-01", "2024-01-01"),
        ("rl_config.tokenizer_dir", '""', None),
        ("actor_config.load", "null", ""),
        ("actor_config.offset", "0", 0),
        ("rl_config.logprob_gap_limit", "null", None),
        ("generate_config.sampling_config.top_k", "-1", -1),
    ],
)
def test_a_value_is_read_as_it_is_written(
    load: Loader, key: str, value: str, expected: object
) -> None:
    loaded = load(section(key, value))
    read: object = loaded.config
    for name in LIVE[key].path:
        read = getattr(read, name)
    assert read == expected and type(read) is type(expected)
    assert loaded.origins[key] == f"grpo_config.yaml line {key.count('.') + 1}"


@each_row(
    ("text", "sentence"),
    [
        (
            "rl_config:\n  prompts_per_step: 4\n  chunk_size: 1\n",
            "set one of them to null (grpo_config.yaml line 2, grpo_config.yaml line 3)",
        ),
        ("rl_config:\n  prompts_per_step: 4\n  num_rollouts: 2\n", "set it to 1"),
        ("rl_config:\n  packing: False\n  pack_num: 4\n", "means one sample a row"),
        ("rl_config:\n  seq_length: 639\n", "add to 640 tokens, above rl_config.seq_length 639"),
        ("generate_config:\n  max_model_len: 600\n", "above generate_config.max_model_len 600"),
        ("generate_config:\n  sampling_config:\n    min_tokens: 129\n", "lower min_tokens"),
        ("actor_config:\n  lr_schedule:\n    min_lr: 1.0\n", "lower min_lr"),
        (
            "actor_config:\n  lr_schedule:\n    warmup_step: 1\n    warmup_ratio: 0.1\n",
            "both set the warm-up",
        ),
        ("actor_config:\n  load: a\ngenerate_config:\n  load: b\n", "leave generate_config.load"),
        (
            "reward_config:\n  verifier_function: [a, b]\n  verifier_weight: [1.0]\n",
            "has 1 weight and reward_config.verifier_function has 2 functions",
        ),
        ("actor_config:\n  offset: [1, -1]\n", "has 2 entries for 1 pipeline stage "),
        (
            "actor_config:\n  parallel_config:\n    pp_interleave_num: 2\n",
            "pp_interleave_num 2 deals chunks of layers to pipeline stages, but "
            "actor_config.parallel_config.pipeline_stage is 1; leave pp_interleave_num at 1",
        ),
        (
            "ref_config:\n  parallel_config:\n    pp_interleave_num: 3\n",
            "ref_config.parallel_config.pipeline_stage is 1; leave pp_interleave_num at 1",
        ),
        ("rl_config:\n  eval_steps: 5\n", "nothing to evaluate on"),
        (
            "actor_config:\n  recompute_config:\n    recompute: True\n    select_recompute: 2\n",
            "leaves nothing for actor_config.recompute_config.select_recompute 2 to choose",
        ),
        (
            "profiler_config:\n  profile: True\n  profile_step_start: 3\n  profile_step_end: 3\n",
            "so no step would be traced",
        ),
        (
            "rl_config:\n  save_prompt_completions_interval: 2\nmonitor_config:\n  per_token: 3\n",
            "must be a multiple of rl_config.save_prompt_completions_interval 2",
        ),
        (
            "rl_config:\n  save_prompt_completions_data: false\nmonitor_config:\n  per_token: 1\n",
            "set that to true, or per_token to 0",
        ),
        (
            "rl_config:\n  batch_size: 4\n  micro_batch_interleaved: 3\n",
            "must divide rl_config.batch_size 4",
        ),
    ],
)
def test_keys_that_contradict_each_other_are_refused(
    load: Loader, text: str, sentence: str
) -> None:
    with pytest.raises(UserError) as refused:
        load(text)
    assert sentence in str(refused.value)
    assert "(grpo_config.yaml line" in str(refused.value)


def test_the_generators_directory_may_be_the_actors(load: Loader) -> None:
    load("actor_config:\n  load: a/b\ngenerate_config:\n  load: a/b/\n")


@pytest.mark.parametrize(
    ("text", "size"),
    [("58GB", 58 * 2**30), ("512MB", 2**29), ("1.5g", 3 * 2**29), ("64 KiB", 65536), ("7", 7)],
)
def test_memory_sizes_are_binary(text: str, size: int) -> None:
    assert memory_bytes(text) == size


# --- pending and retired -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "instead"),
    [
        ("generate_config.trust_remote_code", "true", "is refused; set it to False"),
        ("generate_config.parallel_config.context_parallel", "2", "does not have; set it to 1"),
    ],
)
def test_an_active_value_of_a_pending_key_is_refused(
    load: Loader, key: str, value: str, instead: str
) -> None:
    with pytest.raises(UserError) as refused:
        load(section(key, value))
    assert str(refused.value).startswith(f"{key} ")
    assert instead in str(refused.value)


def test_what_a_pending_key_asks_to_be_set_to_is_accepted(load: Loader) -> None:
    for key, pending in PENDING.items():
        assert pending.accepts(pending.inactive), key


def test_a_retired_section_is_told_once_whatever_is_in_it(load: Loader) -> None:
    notices = load(
        "ref_config:\n  recompute_config:\n    recompute: True\n    select_recompute: False\n"
    ).notices
    assert len(notices) == 1
    assert notices[0].startswith("ref_config.recompute_config has no effect (grpo_config.yaml ")


# --- before and beside a run ---------------------------------------------------------------------


def test_all_settings_that_are_missing_are_named_at_once(load: Loader) -> None:
    with pytest.raises(UserError) as refused:
        require_run_keys(load("rl_config:\n  dataset_file: /path/to/train.jsonl\n"))
    message = str(refused.value)
    assert "rl_config.dataset_file is still '/path/to/train.jsonl'" in message
    assert "actor_config.load (" in message and "reward_config.verifier_function (" in message


def test_rewards_given_in_code_need_no_names(load: Loader) -> None:
    loaded = load("", "--dataset_file", "d", "--actor_checkpoint_path", "m")
    require_run_keys(loaded, rewards_in_code=True)
    with pytest.raises(UserError, match="reward_config.verifier_function"):
        require_run_keys(loaded)


def test_the_resolved_configuration_loads_to_the_same_value(load: Loader, tmp_path: Path) -> None:
    words = ["--rl_config.system_prompt", 'Think: "twice" # or\nmore, é', "--rl_config.epochs", "2"]
    loaded = load(USERS_CONFIGURATION, *words)
    write_resolved(loaded, tmp_path / "config_resolved.yaml")
    again = load_config(tmp_path / "config_resolved.yaml", [], {})
    assert again.config == loaded.config
    assert again.notices == []


def test_the_resolved_configuration_says_where_each_value_came_from(
    load: Loader, tmp_path: Path
) -> None:
    loaded = load("rl_config:\n  beta: 0.5\n", "--rl_config.epochs", "2")
    write_resolved(loaded, tmp_path / "config_resolved.yaml")
    lines = (tmp_path / "config_resolved.yaml").read_text(encoding="utf-8").splitlines()
    assert "  beta: 0.5  # grpo_config.yaml line 2" in lines
    assert "  epochs: 2  # command line --rl_config.epochs" in lines
    assert "  seed: 0  # default" in lines
    assert all("  # " in line or line.endswith(":") for line in lines)
