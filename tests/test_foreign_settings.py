"""One decision on every setting of TRL, PEFT, verl and MindRLHF: taken, converted, refused by name, or without effect.

data/foreign_settings.yaml has the names, and what is decided. Does not prove that a run computes what a key says, nor
anything about settings of later releases than those that are named there.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from config_files import Loader, section
from tables import each_row

from mindgrpo.config.adapters import TAKEN, keys_of_adapters
from mindgrpo.config.foreign import meaning, with_row_length
from mindgrpo.config.meanings import Ignored, Meaning, Others, Refused
from mindgrpo.config.names import PENDING, aliases
from mindgrpo.config.schema import LIVE
from mindgrpo.errors import UserError
from mindgrpo.run.trl_config import GRPOConfig, adapters_of

DECISIONS: dict[str, dict[str, Any]] = yaml.safe_load(
    (Path(__file__).parent / "data" / "foreign_settings.yaml").read_text("utf-8")
)
BY_SETTINGS = ("trl", "trl_older", "trl_commands", "verl")
CISPO = {"loss_type": "cispo"}
KL = "actor_rollout_ref.actor.use_kl_loss"


def names_of(decided: Mapping[str, str]) -> Iterator[str]:
    for place, leaves in decided.items():
        yield from (f"{place}.{leaf}".lstrip(".") for leaf in leaves.split())


def decided(name: str, value: Any, **others: Any) -> Meaning:
    return meaning(name, value, Others({**others, name: value}))


def another(value: Any) -> Any:
    """A value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 7
    return {list: ["x"], dict: {"x": 1}}.get(type(value), "x")


@pytest.mark.parametrize("trainer", BY_SETTINGS)
def test_every_setting_is_taken_converted_refused_by_name_or_has_no_effect(
    trainer: str, subtests: pytest.Subtests
) -> None:
    groups = DECISIONS[trainer]
    for name in names_of(groups["same"]):
        with subtests.test(same=name):
            key = aliases().key_of(aliases().in_full(name))
            assert any(decided(name, one) in ({key: one}, {key: [one]}) for one in (7, "x"))
    for name in names_of(groups["ignored"]):
        with subtests.test(ignored=name):
            found = decided(name, 7)
            assert isinstance(found, Ignored) and found
    for name, (value, means, *others) in groups["converted"].items():
        with subtests.test(converted=name):
            assert decided(name, value, **(others[0] if others else {})) == means
            assert means.keys() <= {*LIVE, *PENDING}
    for name, harmless in groups["refused"].items():
        with subtests.test(refused=name):
            found = decided(name, another(harmless))
            assert isinstance(found, Refused) and "no key comes near" not in found
            assert isinstance(decided(name, harmless), Ignored)


def test_no_setting_has_two_decisions() -> None:
    for trainer, groups in DECISIONS.items():
        names = [*names_of(groups["same"]), *names_of(groups["ignored"])]
        names += [*groups["converted"], *groups["refused"]]
        assert len(names) == len(set(names)) > 10, trainer


def test_fields_of_the_training_arguments_that_are_installed_have_a_decision() -> None:
    package = importlib.util.find_spec("transformers")
    assert package is not None and package.origin is not None
    tree = ast.parse(Path(package.origin).with_name("training_args.py").read_text("utf-8"))
    (arguments,) = (
        node
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == "TrainingArguments"
    )
    fields = {
        node.target.id
        for node in arguments.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    groups = DECISIONS["trl"]
    known = {*names_of(groups["same"]), *names_of(groups["ignored"])}
    assert len(fields) > 100
    assert fields <= known | groups["converted"].keys() | groups["refused"].keys()


def test_grpo_config_takes_what_is_decided_and_says_what_has_no_effect() -> None:
    groups = DECISIONS["trl"]
    ignored = [*names_of(groups["ignored"])]
    config = GRPOConfig(**dict.fromkeys(ignored, 7), **groups["refused"])
    assert config.values == {}
    (notice,) = config.notices
    assert all(f"{name} (" in notice for name in ignored)
    for name, (value, means, *others) in groups["converted"].items():
        taken = GRPOConfig(**{**(others[0] if others else {}), name: value}).values
        assert {key: taken[key] for key in means} == means


def test_grpo_config_refuses_all_that_it_does_not_take_in_one_message() -> None:
    refused = {name: another(value) for name, value in DECISIONS["trl"]["refused"].items()}
    with pytest.raises(UserError) as error:
        GRPOConfig(generate_config={}, learning_rte=1, **refused)
    said = str(error.value)
    assert "learning_rte: did you mean learning_rate: it is called actor_config.lr_sch" in said
    # What is nowhere near is not answered with a neighbour.
    with pytest.raises(UserError, match=r"generate_config: it is a section of keys, as in config"):
        GRPOConfig(generate_config={})


def test_a_device_of_trl_is_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4}
    assert GRPOConfig(**batch, num_generations=8).values["rl_config.prompts_per_step"] == 4
    monkeypatch.setenv("MS_WORKER_NUM", "8")
    assert GRPOConfig(**batch, num_generations=8).values["rl_config.prompts_per_step"] == 32


@each_row(
    ("settings", "said"),
    [
        (
            {"per_device_train_batch_size": 5, "num_generations": 4},
            "5 samples a rollout are no whole number of groups of num_generations 4; set rl_config.prompts_per_step",
        ),
        (
            {"generation_batch_size": 8, "steps_per_generation": 2},
            "steps_per_generation and generation_batch_size say the same; keep one",
        ),
        (
            {"generation_batch_size": 24, "per_device_train_batch_size": 16},
            "no whole number of updates of 16 samples; set rl_config.prompts_per_step to 3",
        ),
        ({"max_steps": 5, "num_iterations": 2}, "set rl_config.max_steps, which counts rollouts"),
        ({"bf16": True, "fp16": True}, "bf16 and fp16 are both true"),
        ({"max_completion_length": None}, "completions without a limit"),
        ({"epsilon": 0.2, **CISPO}, "cispo bounds ratios by epsilon_high alone"),
        ({"epsilon_high": 0.5, **CISPO}, "has to be above 1"),
        ({"eval_strategy": "epoch"}, "its epoch has to be counted in steps"),
        ({"data_seed": 5, "seed": 4}, "rl_config.seed is the seed of the order"),
        ({"report_to": "all"}, "name those that are meant"),
        (
            {KL: True, "algorithm.use_kl_in_reward": True},
            "the KL is in the loss or in the rewards here",
        ),
        (
            {
                "algorithm.filter_groups.max_num_gen_batches": 0,
                "algorithm.filter_groups.enable": True,
            },
            "no limit there, and rl_config.dynamic_sampling_rounds is from 1 to 100",
        ),
        (
            {
                "algorithm.filter_groups.max_num_gen_batches": 1,
                "algorithm.filter_groups.enable": True,
            },
            "one batch leaves no round",
        ),
        ({"data.train_files": ["a.parquet", "b.parquet"]}, "one file or folder here; join these 2"),
        (
            {"data.apply_chat_template_kwargs.enable_thinking": False},
            "put {%- set enable_thinking = false %} at the head of a copy of the template",
        ),
        ({"reward_model.overlong_buffer.enable": True}, "name soft_overlong_punishment"),
        ({"nonsense": 1}, "no key comes near it"),
    ],
)
def test_what_cannot_be_taken_says_why_and_what_instead(
    settings: dict[str, Any], said: str
) -> None:
    others = Others(settings)
    meant = meaning(next(iter(settings)), next(iter(settings.values())), others)
    assert isinstance(meant, Refused) and said in meant


@each_row(
    ("settings", "said"),
    [
        ({"epsilon": 0.2, "epsilon_high": 5.0, **CISPO}, "which has no lower side"),
        ({"epsilon": 0.2, "loss_type": "sapo"}, "as there, with loss_type sapo"),
        ({"warmup_ratio": 0.1, "lr_scheduler_type": "constant"}, "with lr_scheduler_type constant"),
        ({"warmup_ratio": 0.1, "warmup_steps": 3}, "as there, with warmup_steps"),
        ({"eval_steps": 5, "eval_strategy": "no"}, "as there, with eval_strategy no"),
        ({"num_train_epochs": 0.5, "max_steps": 9}, "as there, with max_steps"),
        ({"algorithm.kl_ctrl.kl_coef": 0.7}, "without use_kl_in_reward=True"),
        ({"actor_rollout_ref.actor.kl_loss_coef": 0.7}, "without use_kl_loss=True"),
        ({"critic.optim.lr_warmup_steps_ratio": 0.5}, "keys of critic_config"),
        (
            {
                "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 40,
                "data.train_batch_size": 64,
            },
            "rl_config.prompts_per_step 64, and rl_config.batch_size counts packed rows",
        ),
        ({"lora_r": 8}, "as there, without use_peft"),
    ],
)
def test_what_has_no_effect_says_why(settings: dict[str, Any], said: str) -> None:
    others = Others(settings)
    meant = meaning(next(iter(settings)), next(iter(settings.values())), others)
    assert isinstance(meant, Ignored) and said in meant


def test_rows_are_as_long_as_both_lengths_need_unless_their_length_is_set() -> None:
    long = {"generate_config.sampling_config.max_tokens": 2000}
    prompt = {"generate_config.max_prompt_length": 40}
    assert with_row_length(long, {}) == {"rl_config.seq_length": 2512}
    assert with_row_length(long, prompt) == {"rl_config.seq_length": 2040}
    assert with_row_length(long, {"rl_config.seq_length": 4096}) == {}
    assert with_row_length({}, long) == {} == with_row_length(prompt, {})


def test_every_field_of_pefts_lora_config_is_taken_harmless_or_refused_by_name(
    subtests: pytest.Subtests,
) -> None:
    groups = DECISIONS["peft"]
    whole = {"target_modules": "all-linear"}
    names = {*names_of(groups["same"]), *groups["converted"]}
    assert names == TAKEN.keys()
    expected = keys_of_adapters(whole, {})
    for name, (value, means, others) in groups["converted"].items():
        assert keys_of_adapters({name: value, **others}, {}).items() >= means.items()
    for name in names_of(groups["ignored"]):
        assert keys_of_adapters({**whole, name: 7}, {}) == expected
    assert keys_of_adapters({**whole, **groups["refused"]}, {}) == expected
    for name, harmless in groups["refused"].items():
        with subtests.test(refused=name), pytest.raises(UserError, match=f"peft_config has {name}"):
            keys_of_adapters({**whole, name: another(harmless)}, {})
    everything = {name: another(harmless) for name, harmless in groups["refused"].items()}
    with pytest.raises(UserError) as error:
        keys_of_adapters({**whole, **everything}, {})
    assert all(f"{name} " in str(error.value) for name in everything)


def test_a_field_that_is_not_known_is_harmless_at_its_own_default_alone() -> None:
    @dataclasses.dataclass
    class LoraConfig:
        r: int = 4
        lora_alpha: int = 8
        target_modules: Any = "all-linear"
        brand_new: list[int] = dataclasses.field(default_factory=list)
        _internal: Any = None

    assert adapters_of(LoraConfig())["actor_config.lora.rank"] == 4
    with pytest.raises(UserError, match=r"peft_config has brand_new \[1\]"):
        adapters_of(LoraConfig(brand_new=[1]))
    with pytest.raises(UserError, match="peft_config has brand_new"):
        adapters_of({"target_modules": "all-linear", "brand_new": []})


def test_keys_of_published_files_of_mindrlhf_load_or_are_refused_by_name(load: Loader) -> None:
    groups = DECISIONS["mindrlhf"]
    assert set(names_of(groups["same"])) <= {*LIVE, *PENDING}
    for name in names_of(groups["ignored"]):
        (notice,) = load(section(name, "7")).notices
        assert "has no effect" in notice
    for name, harmless in groups["refused"].items():
        assert name in PENDING and load(section(name, yaml.safe_dump(harmless).split()[0]))
        with pytest.raises(UserError, match=name):
            load(section(name, "7"))
