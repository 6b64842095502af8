"""Rewards given in code stand in for the configuration's. Does not prove a run: the distributed tests do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import small_runs
from mindspore import Tensor, ops

import mindgrpo
from mindgrpo.config import load_config
from mindgrpo.errors import UserError
from mindgrpo.run.preflight import prepare

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "grpo" / "tiny_arithmetic" / "grpo_config.yaml"


def my_reward(completions: list[str], answers: list[str]) -> list[float]:
    return [1.0 if a in c else 0.0 for c, a in zip(completions, answers, strict=True)]


def test_a_callable_replaces_the_functions_of_the_file_and_their_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    scorer = prepare(load_config(EXAMPLE).config, None, [my_reward]).scorer
    assert scorer is not None
    assert (scorer.names, scorer.weights) == (["my_reward"], [1.0])
    scorer.close()


def test_weights_given_in_code_must_match_the_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(UserError, match="2 weights were given for 1 reward function "):
        prepare(load_config(EXAMPLE).config, None, [my_reward], [1.0, 2.0])


# What a program may get wrong, and a part of the sentence.
WRONG = {
    "load_config('nowhere.yaml')": "nowhere.yaml",
    "load_config(EXAMPLE, ['--rl_config.beta', 'lots'])": "rl_config.beta is 'lots'",
    "GRPOTrainer(load_config(EXAMPLE), reward_functions=['nope'])": "'nope' is not built in",
    "GRPOTrainer(model='nowhere', reward_funcs=len)": "nowhere",
    "GRPOTrainer(args={})": "args is a builtins.dict, but must be a mindgrpo.GRPOConfig",
    "GRPOTrainer(peft_config=8)": "peft_config is a builtins.int, but must be PEFT's LoraConfig",
    "GRPOTrainer(peft_config={'r': 8})": "target_modules None, which PEFT reads by the model's class",
    "GRPOTrainer(peft_config={'lora_dropout': 0.1})": "lora_dropout 0.1, which adapters here do not",
    "from mindgrpo import LoraConfig": "set actor_config.lora.rank",
    "GRPOTrainer(processing_class=1)": "'processing_class'; it is called rl_config.tokenizer_dir",
    "GRPOTrainer(beta=0.1)": "'beta'; did you mean rl_config.beta",
    "GRPOTrainer('model')": "config is 'model', but must be",
    "GRPOTrainer.train(None, ignore_keys_for_eval=1)": "takes no argument 'ignore_keys_for_eval'",
    "from mindgrpo import GRPOConfig; GRPOConfig(per_device_train_batch_size=6, fsdp='full_shard')": (
        "per_device_train_batch_size: 6 samples a rollout are no whole number of groups of num_generations 8; set "
        "rl_config.prompts_per_step, such as 1; fsdp: layouts are sections parallel_config"
    ),
    "from mindgrpo import GRPOConfig; GRPOConfig(num_iterations=2, save_steps=5)": (
        "save_steps: TRL counts updates, of which a rollout has 2, and 5 are no whole number of rollouts; set "
        "rl_config.save_ckpt_interval"
    ),
}
PROGRAM = """
from mindgrpo import GRPOTrainer, load_config
EXAMPLE = {example!r}
{statement}
"""


def run_program(folder: Path, statement: str, *words: str) -> subprocess.CompletedProcess[str]:
    path = folder / "program.py"
    path.write_text(PROGRAM.format(example=str(EXAMPLE), statement=statement))
    return subprocess.run(
        [sys.executable, *(word if word != "PROGRAM" else str(path) for word in words)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
    )


@pytest.mark.parametrize("statement", WRONG)
def test_what_a_program_may_get_wrong_is_told_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, statement: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as told:
        exec(PROGRAM.format(example=str(EXAMPLE), statement=statement), {})
    sentence = str(told.value)
    assert WRONG[statement] in sentence and "\n" not in sentence


def test_a_program_that_is_wrong_ends_with_one_sentence(tmp_path: Path) -> None:
    statement = "GRPOTrainer(beta=0.1)"
    ended = run_program(tmp_path, statement, "PROGRAM")
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1), ended.stderr
    assert ended.stderr.startswith("mindgrpo: ") and WRONG[statement] in ended.stderr


def test_a_launched_program_that_is_wrong_ends_with_one_sentence_and_its_status(
    tmp_path: Path,
) -> None:
    statement = "load_config('nowhere.yaml')"
    launch = ("-m", "mindgrpo", "launch", "--ranks", "1", "--", "PROGRAM")
    ended = run_program(tmp_path, statement, *launch)
    assert ended.returncode == 2 and "Traceback" not in ended.stderr + ended.stdout
    (log,) = (tmp_path / "output" / "logs").glob("*/worker_0.log")
    (line,) = log.read_text().splitlines()
    assert line.startswith("mindgrpo: ") and WRONG[statement] in line


def test_who_catches_a_users_error_sees_it_and_other_errors_go_where_they_went(
    tmp_path: Path,
) -> None:
    statement = """
import sys
from mindgrpo.errors import UserError
try:
    load_config("nowhere.yaml")
except UserError as error:
    print("caught", error)
raise KeyError("mine")
"""
    ended = run_program(tmp_path, statement, "PROGRAM")
    assert ended.stdout.startswith("caught ") and ended.returncode == 1
    assert ended.stderr.startswith("Traceback") and ended.stderr.endswith("KeyError: 'mine'\n")
    own = "import sys; sys.excepthook = lambda *_: print('own hook')\n"
    path = tmp_path / "hooked.py"
    path.write_text(own + PROGRAM.format(example="", statement="raise KeyError('mine')"))
    ended = run_program(tmp_path, "", str(path))
    assert (ended.stdout, ended.stderr, ended.returncode) == ("own hook\n", "", 1)


def test_a_users_error_leaves_an_interactive_session_open(tmp_path: Path) -> None:
    lines = "from mindgrpo import load_config\nload_config('nowhere.yaml')\nprint('still here')\n"
    ended = subprocess.run(
        [sys.executable, "-i", "-q"],
        input=lines,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert ended.stdout == "still here\n" and "Traceback" not in ended.stderr
    assert "mindgrpo: " in ended.stderr and "nowhere.yaml" in ended.stderr


def test_the_package_lists_its_interface() -> None:
    assert set(dir(mindgrpo)) == set(mindgrpo.__all__) >= {"GRPOTrainer", "load_config"}
    assert all(hasattr(mindgrpo, name) for name in dir(mindgrpo))
    assert not hasattr(mindgrpo, "Nothing") and not hasattr(mindgrpo, "nothing")


def test_a_program_that_has_computed_with_mindspore_before_can_train(tmp_path: Path) -> None:
    small_runs.make_inputs(tmp_path / "inputs")
    assert ops.add(Tensor([1.0]), 1.0).asnumpy() == 2.0
    run = small_runs.run(tmp_path / "inputs", tmp_path / "run", "--rl_config.max_steps=1")
    assert len(small_runs.rows(run)) == 1
