"""Names: every key that users' configurations carry, unknown ones, and those of other trainers.

Does not prove that a live key has its effect in a run; the tests of the rooms that read it do.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from config_files import Loader, section
from tables import each_row

from mindgrpo.config.names import PENDING, RETIRED, SECTIONS, aliases, retired_key
from mindgrpo.config.schema import LIVE
from mindgrpo.config.yaml_file import read_yaml
from mindgrpo.errors import UserError

ROOT = Path(__file__).parent.parent
USERS_CONFIGURATION = (ROOT / "tests/data/users_grpo_config.yaml").read_text("utf-8")


def test_the_users_configuration_loads_as_it_is(load: Loader) -> None:
    config = load(USERS_CONFIGURATION).config
    assert (ROOT / str(config.actor_config.model_yaml)).is_file()
    assert (ROOT / str(config.generate_config.model_yaml)).is_file()
    assert config.actor_config.optimizer.weight_decay == 0.01
    assert config.generate_config.sampling_config.eos_token_id == [151645, 151643]
    assert config.ref_config.load is None


def test_what_has_no_effect_in_the_users_configuration_is_told_once(load: Loader) -> None:
    loaded = load(USERS_CONFIGURATION)
    told = [notice.split(" ")[0] for notice in loaded.notices]
    assert len(told) == len(set(told))
    assert set(told) <= set(RETIRED)
    assert "rl_config.align_type" in told and "context.device_id" in told
    assert all("(grpo_config.yaml line" in notice for notice in loaded.notices)


def test_no_key_of_the_users_configuration_is_passed_over(load: Loader) -> None:
    loaded = load(USERS_CONFIGURATION)
    given = {key for key in read_yaml(load.path) if key not in SECTIONS}
    assert len(given) == 139
    told = {notice.split(" ")[0] for notice in loaded.notices}
    for key in given:
        is_live = loaded.origins.get(key, "").startswith("grpo_config.yaml line")
        inactive = key in PENDING and key not in told
        assert is_live + (retired_key(key) in told or key in told) + inactive == 1, key


def test_aliases_lead_to_keys_that_are_not_retired() -> None:
    theirs = aliases()
    names = [name for key in theirs.by_key for name in theirs.names_of(key)]
    leaves = {name.rpartition(".")[2] for name in names}
    assert set(theirs.by_key) | theirs.same_in_mindrlhf <= {*LIVE, *PENDING}
    assert len(names) == len(set(names)) > 300
    assert not set(theirs.absent) & {key.rpartition(".")[2] for key in (*LIVE, *PENDING)}
    assert not leaves & set(theirs.absent)
    assert not set(theirs.sections) & SECTIONS
    trainers = {trainer for by_trainer in theirs.by_key.values() for trainer in by_trainer}
    assert trainers == {"mindrlhf", "trl", "verl", "others"}


def test_an_alias_is_found_as_its_trainer_writes_it_and_by_its_last_word() -> None:
    theirs = aliases()
    ours = {key.rpartition(".")[2] for key in (*theirs.by_key, *theirs.same_in_mindrlhf)}
    first: dict[str, str] = {}
    for key in theirs.by_key:
        for name in theirs.names_of(key):
            leaf = name.rpartition(".")[2]
            if "." in name:
                assert theirs.ours(name) == key
                first.setdefault(leaf, key)
            elif name not in ours:
                assert theirs.ours(name) == key
    for leaf, key in first.items():
        bare = next((k for k in theirs.by_key if leaf in theirs.names_of(k)), key)
        expected = None if leaf in theirs.generic | ours else bare
        assert theirs.ours(leaf) == expected, leaf


@each_row(
    ("name", "key"),
    [
        ("actor_rollout_ref.rollout.n", "rl_config.num_generations"),
        ("n", "rl_config.num_generations"),
        ("actor_rollout_ref.rollout.val_kwargs.n", "rl_config.eval_num_generations"),
        ("actor_rollout_ref.rollout.val_kwargs.temperature", "rl_config.eval_temperature"),
        ("actor_rollout_ref.rollout.temperature", "generate_config.sampling_config.temperature"),
        ("actor_rollout_ref.model.path", "actor_config.load"),
        ("algorithm.filter_groups.enable", "rl_config.dynamic_sampling"),
        ("actor_rollout_ref.actor.optim.lr", "actor_config.lr_schedule.lr"),
        ("trainer.default_local_dir", "output_dir"),
        ("logging_dir", "rl_config.tensorboard_dir"),
        ("report_to", "monitor_config.trackers"),
        ("trainer.logger", "monitor_config.trackers"),
        ("project_name", "monitor_config.tracker_project"),
        ("trainer.experiment_name", "monitor_config.tracker_run_name"),
        ("run_name", "monitor_config.tracker_run_name"),
        ("num_generations_eval", "rl_config.eval_num_generations"),
    ],
)
def test_names_of_verl_and_trl_lead_to_the_key_of_the_same_meaning(name: str, key: str) -> None:
    assert aliases().ours(name) == key


def test_a_word_that_says_nothing_by_itself_leads_to_no_key() -> None:
    assert {word: aliases().ours(word) for word in ("enable", "path", "temperature", "lr")} == {
        "enable": None,
        "path": None,
        "temperature": None,
        "lr": None,
    }


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("rl_config:\n  bta: 1\n", "did you mean rl_config.beta (grpo_config.yaml line 2)"),
        ("actor_config:\n  beta: 1\n", "did you mean rl_config.beta (grpo_config.yaml line 2)"),
        ("rl_config:\n  lr: 1\n", "did you mean actor_config.lr_schedule.lr ("),
        ("beta: 1\n", "did you mean rl_config.beta (grpo_config.yaml line 1)"),
        ("rl_conf:\n  beta: 1\n", "'rl_conf' is no section; did you mean rl_config ("),
        ("rl_conf:\n  beta: 1\n", "(grpo_config.yaml line 1)"),
        ("actor_config:\n  optimiser:\n    eps: 1\n", "did you mean actor_config.optimizer ("),
        ("zzz: 1\n", "no key comes near it"),
        ("rl_config:\n  beta:\n    x: 1\n", "rl_config.beta takes one value"),
        ("rl_config: 5\n", "rl_config is a section of keys and cannot be 5"),
    ],
)
def test_unknown_key_names_the_nearest_one_and_its_line(
    load: Loader, text: str, sentence: str
) -> None:
    with pytest.raises(UserError) as refused:
        load(text)
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("n_samples_per_prompt", "rl_config.num_generations"),
        ("clip_ratio", "rl_config.epsilon_low"),
        ("mini_batch_size", "rl_config.updates_per_rollout"),
        ("kl_loss_coef", "rl_config.beta"),
        ("train_batch_size", "rl_config.prompts_per_step"),
        ("max_completion_length", "generate_config.sampling_config.max_tokens"),
        ("per_device_train_batch_size", "rl_config.prompts_per_step"),
        ("gradient_accumulation_steps", "rl_config.prompts_per_step"),
    ],
)
def test_another_trainers_name_is_pointed_to_ours(load: Loader, name: str, ours: str) -> None:
    with pytest.raises(UserError, match=f"it is called {ours} here"):
        load(section(f"rl_config.{name}", "1"))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "data:\n  train_batch_size: 8\n",
            "keep there is in rl_config here (grpo_config.yaml line 1)",
        ),
        ("actor_config:\n  optim:\n    lr: 1.0\n", "is in actor_config.optimizer and"),
        ("rl_config:\n  bf16: True\n", "it is called context.compute_dtype here"),
        (
            "rl_config:\n  param_offload: True\n",
            "weights are offloaded automatically between the phases",
        ),
    ],
)
def test_what_only_other_trainers_have_is_explained(load: Loader, text: str, sentence: str) -> None:
    with pytest.raises(UserError) as refused:
        load(text)
    assert sentence in str(refused.value)
