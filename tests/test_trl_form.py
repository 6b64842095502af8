"""GRPOTrainer(model=..., reward_funcs=..., train_dataset=...) trains what the same configuration file trains.

Does not prove anything of several ranks.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from small_runs import CONFIG, completions, make_inputs, model_bits, rows, run, spread

from mindgrpo import GRPOConfig, GRPOTrainer
from mindgrpo.config import Loaded, load_config, values_by_key
from mindgrpo.config.names import aliases
from mindgrpo.config.schema import LIVE
from mindgrpo.environments.packages import ReasoningGym
from mindgrpo.errors import UserError
from mindgrpo.run.trl_arguments import with_arguments

ONE_STEP = ("--rl_config.max_steps", "1")


def in_trls_form(prompts: Sequence[Any], completions: Sequence[str], **columns: Any) -> list[float]:
    assert len(prompts) == len(completions) == len(columns["ground_truth"])
    return spread(completions, columns["ground_truth"])


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_rows_in_memory_train_what_the_same_rows_in_a_file_train(tmp_path: Path) -> None:
    make_inputs(tmp_path)
    from_file = run(tmp_path, tmp_path / "a", *ONE_STEP, reward=spread)
    given = [json.loads(line) for line in (tmp_path / "train.jsonl").open()]
    data = [
        {
            "prompt": [{"role": "user", "content": row["question"]}],
            "ground_truth": row["answer"],
        }
        for row in given
    ]
    config = yaml.safe_load(CONFIG)
    own = {"max_tokens": "max_completion_length", "temperature": "temperature"}
    sampling = config["generate_config"]["sampling_config"]
    taken = {name: sampling.pop(key) for key, name in own.items() if key in sampling}
    model = tmp_path / "model"
    trainer = GRPOTrainer(
        config,
        model=model,
        reward_funcs=in_trls_form,
        train_dataset=data,
        eval_dataset=data,
        args=GRPOConfig(str(tmp_path / "b"), max_steps=1, report_to="none", **taken),
    )
    with pytest.raises(UserError, match="call train first"):
        trainer.save_model(tmp_path / "copy")
    with pytest.raises(UserError, match="loads its checkpoint when it is made"):
        trainer.train(resume_from_checkpoint=True)
    in_memory = trainer.train(resume_from_checkpoint=None)
    copy, written = trainer.save_model(tmp_path / "copy"), trainer.save_model()
    assert {path.name: path.read_bytes() for path in copy.iterdir()} == {
        path.name: path.read_bytes() for path in written.iterdir()
    }
    with pytest.raises(UserError, match="holds something and is not overwritten"):
        trainer.save_model(tmp_path / "copy")
    # The process goes on, and nothing in it has a phase's deadline.
    assert trainer.run.backend.health._checks == []
    (found,), (expected,) = rows(in_memory), rows(from_file)
    assert {key.replace("in_trls_form", "spread"): found[key] for key in found} == expected
    assert model_bits(in_memory) == model_bits(from_file)
    drawn = [
        [json.loads(row)["completion"] for row in completions(each)]
        for each in (in_memory, from_file)
    ]
    assert drawn[0] == drawn[1]


def test_an_environment_may_be_a_class_of_a_module() -> None:
    found = with_arguments(None, None, None, None, environment=ReasoningGym)
    expected = ["mindgrpo.environments.packages:ReasoningGym"]
    assert isinstance(found, Loaded) and found.config.rl_config.environment == expected
    with pytest.raises(UserError, match=r"write a class or function at the top of a module"):
        with_arguments(None, None, None, None, environment=lambda: ReasoningGym("chain_sum"))


def test_arguments_change_their_keys_of_a_loaded_configuration_and_no_other(tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(CONFIG)
    loaded = load_config(tmp_path / "small.yaml", ["--rl_config.eval_steps", "0"])
    changed = with_arguments(loaded, "the/model", [{"question": "q", "answer": "a"}], None)
    before, after = values_by_key(loaded.config), values_by_key(changed.config)
    assert {key for key in before if before[key] != after[key]} == {
        "actor_config.load",
        "rl_config.dataset_file",
    }
    assert Path(after["rl_config.dataset_file"]).read_text() == '{"question": "q", "answer": "a"}\n'
    assert with_arguments(loaded, None, None, None) is loaded


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"train_dataset": []}, "train_dataset has no rows"),
        ({"train_dataset": ["a text"]}, "train_dataset: row 0 is 'a text'"),
        (
            {"eval_dataset": [{"prompt": object()}]},
            "eval_dataset: row 0: column 'prompt' holds object",
        ),
        ({"config": {"rl_config": {"max_step": 3}}}, "max_steps"),
        ({"reward_funcs": spread, "reward_functions": [spread]}, "both given"),
        ({"train_dataset": [{"prompt": "a"}]}, "actor_config.load is empty"),
    ],
)
def test_what_cannot_work_is_one_sentence(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        GRPOTrainer(**({"reward_funcs": [spread]} | arguments))


def loaded_with(**arguments: Any) -> dict[str, Any]:
    """The values that are not defaults, by key."""
    loaded = with_arguments(None, None, None, None, **arguments)
    assert isinstance(loaded, Loaded)
    values = values_by_key(loaded.config)
    return {key: values[key] for key in LIVE if loaded.origins[key] != "default"}


def test_a_grpo_config_sets_the_keys_that_mean_the_same() -> None:
    taken = aliases().taken_from_trl
    assert taken.keys() == aliases().same_in_trl and set(taken.values()) <= LIVE.keys()
    args = GRPOConfig("out", learning_rate=2e-5, epsilon=0.1, max_steps=-1, num_train_epochs=3.0)
    assert loaded_with(args=args) == {
        "output_dir": "out",
        "actor_config.lr_schedule.lr": 2e-5,
        "rl_config.epsilon_low": 0.1,
        "rl_config.epsilon_high": 0.1,
        "rl_config.epochs": 3,
    }
    args = GRPOConfig(use_vllm=True, scale_rewards=False, report_to="wandb", epsilon_high=0.3)
    assert loaded_with(args=args) == {
        "generate_config.use_vllm": 1,
        "rl_config.scale_rewards": "none",
        "monitor_config.trackers": ["wandb"],
        "rl_config.epsilon_high": 0.3,
    }


class PeftsConfig:
    """Stands for PEFT's LoraConfig, which needs torch."""

    def __init__(self) -> None:
        self.r, self.lora_alpha, self.target_modules = 4, 16, {"v_proj", "q_proj"}
        self.lora_dropout, self.bias, self.task_type = 0.0, "none", "CAUSAL_LM"


def test_adapters_are_peft_s() -> None:
    keys = [f"actor_config.lora.{name}" for name in ("rank", "alpha", "target_modules")]
    found = loaded_with(peft_config=PeftsConfig())
    assert found == dict(zip(keys, (4, 16.0, ["q_proj", "v_proj"]), strict=True))
    every = {"r": 2, "target_modules": "all-linear"}
    assert loaded_with(peft_config=every) == dict(zip(keys, (2, 8.0, None), strict=True))
