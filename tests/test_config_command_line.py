"""Flags and overrides: which reach which key, as what value, and which are refused.

Does not prove that the programs hand their arguments over; their own tests do.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from config_files import Loader, section

from mindgrpo.config import Config, load_config, parse_command_line
from mindgrpo.errors import UserError


def test_an_override_wins_and_says_where_it_came_from(load: Loader) -> None:
    loaded = load(
        "rl_config:\n  beta: 0.5\n  seed: 3\n", "--rl_config.beta=0.0", "--rl_config.max_steps", "3"
    )
    assert loaded.config.rl_config.beta == 0.0
    assert loaded.config.rl_config.max_steps == 3
    assert loaded.origins["rl_config.beta"] == "command line --rl_config.beta"
    assert loaded.origins["rl_config.seed"] == "grpo_config.yaml line 3"
    assert loaded.origins["rl_config.epochs"] == "default"


def test_flags_given_in_python_stand_between_file_and_overrides(load: Loader) -> None:
    flags: dict[str, object] = {"rl_config.beta": 0.2, "rl_config.seed": 4}
    loaded = load("rl_config:\n  beta: 0.5\n", "--rl_config.beta", "0.0", **flags)
    assert (loaded.config.rl_config.beta, loaded.config.rl_config.seed) == (0.0, 4)
    assert loaded.origins["rl_config.seed"] == "argument rl_config.seed"


@pytest.mark.parametrize("words", [["--config", "FILE"], ["--config=FILE"]])
def test_arguments_of_a_program_may_name_the_file_that_it_reads(
    load: Loader, tmp_path: Path, words: list[str]
) -> None:
    (other := tmp_path / "other.yaml").write_text("rl_config:\n  seed: 7\n")
    given = [word.replace("FILE", str(load.path)) for word in words]
    config = load("rl_config:\n  seed: 3\n", *given, "--rl_config.beta=0.5").config
    assert (config.rl_config.seed, config.rl_config.beta) == (3, 0.5)
    # The command line wins, as over every value of the file; the one in code need not exist then.
    given = [word.replace("FILE", str(other)) for word in words]
    assert load_config(load.path, given).config.rl_config.seed == 7
    assert load_config(tmp_path / "none.yaml", given).config.rl_config.seed == 7


def test_the_users_flags_reach_their_keys(load: Loader) -> None:
    config = load(
        "",
        *("--dataset_file", "2024", "--tokenizer_dir", "a: b", "--model_name", "qwen"),
        *("--actor_checkpoint_path", "m", "--ref_checkpoint_path", "r"),
        *("--generate_checkpoint_path", "m", "--save_checkpoint_dir", "s", "--output_dir", "o"),
        *("--verifier_function", "qwen_accuracy_reward, f.py:g", "--verifier_weight", "1,0.5"),
        *("--tensorboard", "false"),
    ).config
    assert config.rl_config.dataset_file == "2024"
    assert config.tokenizer_dir == "a: b"
    assert (config.actor_config.load, config.reference_load) == ("m", "r")
    assert (config.actor_config.save, config.output_dir) == ("s", "o")
    assert config.reward_config.verifier_function == ["qwen_accuracy_reward", "f.py:g"]
    assert config.verifier_weights == [1.0, 0.5]
    assert config.rl_config.tensorboard is False


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--actor_config.offset", "1,-1"], [1, -1]),
        (["--actor_config.offset", "[1, -1]"], [1, -1]),
        (["--actor_config.offset", "0"], 0),
    ],
)
def test_a_list_is_written_with_commas_or_in_brackets(
    load: Loader, words: list[str], expected: object
) -> None:
    text = section("actor_config.parallel_config.pipeline_stage", "2")
    assert load(text, *words).config.actor_config.offset == expected


def test_one_weight_is_a_list_of_one(load: Loader) -> None:
    config = load("", "--verifier_function", "a", "--verifier_weight", "1.0").config
    assert config.reward_config.verifier_function == ["a"]
    assert config.reward_config.verifier_weight == [1.0]


def test_a_retired_flag_is_accepted_and_told(load: Loader) -> None:
    (notice,) = load("", "--save_strategy_dir", "x").notices
    assert notice.startswith("rl_config.save_strategy_dir has no effect (command line ")


def test_a_section_can_be_set_or_taken_back_as_a_whole(load: Loader) -> None:
    text = "ref_config:\n  parallel_config:\n    data_parallel: 2\n"
    assert (
        load(text, "--ref_config.parallel_config", "null").config.ref_config == Config().ref_config
    )
    merged = load(text, "--ref_config.parallel_config", "{model_parallel: 4}").config
    assert merged.reference_parallel.data_parallel == 2
    assert merged.reference_parallel.model_parallel == 4


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--beta", "1"], "--beta is no flag of this program; did you mean --rl_config.beta."),
        (["--dataset_fil", "x"], "did you mean --dataset_file."),
        (["--max_completion_length=3"], "--generate_config.sampling_config.max_tokens here"),
        (["--clip_ratio", "0.1"], "it is called --rl_config.epsilon_low here"),
        (["--actor_rollout_ref.rollout.n", "8"], "it is called rl_config.num_generations here"),
        (
            ["--use_wandb", "true"],
            "--use_wandb is no flag of this program; it is called --monitor_config.trackers here",
        ),
        (["--rl_config.bta", "1"], "did you mean rl_config.beta (command line --rl_config.bta)"),
        (["--rl_config.beta"], "--rl_config.beta on the command line has no value"),
        (["--rl_config.epochs", "0"], "(command line --rl_config.epochs)"),
        (["beta", "1"], "'beta' on the command line belongs to no flag"),
        (["--rl_config.save_ckpt_format", "ckpt"], "cannot be ckpt: such files hold no layout"),
        (["--rl_config.save_ckpt_best", "accuracy_reward"], "is known from evaluations alone"),
        (["--rl_config.save_ckpt_interval", "-5"], "(command line --rl_config.save_ckpt_interval)"),
    ],
)
def test_a_wrong_command_line_is_refused(load: Loader, words: list[str], sentence: str) -> None:
    with pytest.raises(UserError) as refused:
        load("", *words)
    assert sentence in str(refused.value)


def test_the_command_line_is_parted_into_file_and_overrides(load: Loader) -> None:
    files, overrides = parse_command_line(
        [
            "--config",
            "a.yaml",
            "--rl_config.beta=0.5",
            "--output_dir",
            "o",
            "--rl_config.tensorboard",
        ]
    )
    assert files == [Path("a.yaml")]
    config = load("", *overrides).config
    assert (config.rl_config.beta, config.output_dir) == (0.5, "o")
    assert config.rl_config.tensorboard is True


def test_a_command_line_without_configuration_says_so() -> None:
    with pytest.raises(UserError, match="add --config FILE.yaml"):
        parse_command_line(["--rl_config.beta", "0.5"])


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ([], False),
        (["--resume_training"], True),
        (["--resume_training", "true"], True),
        (["--resume_training", "False"], False),
        (["--resume_training="], False),
        (["--resume_training", "output/run/1"], "output/run/1"),
        (["--rl_config.resume_training", "2024"], "2024"),
    ],
)
def test_going_on_is_a_switch_or_a_path(load: Loader, words: list[str], value: bool | str) -> None:
    assert load("", *words).config.rl_config.resume_training == value


def test_settings_that_may_change_are_a_list_of_words(load: Loader) -> None:
    loaded = load("", "--rl_config.resume_changed", "rl_config.seed,data")
    assert loaded.config.rl_config.resume_changed == ["rl_config.seed", "data"]
