"""The reference's model where it is another one than the policy's: what is taken, and what is refused.

Does not prove what it computes: test_advantages.py and test_distributed.py do.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from tables import each_row

from mindgrpo.cli.verbs import main
from mindgrpo.config import load_config
from mindgrpo.config.schema import Config
from mindgrpo.errors import UserError
from mindgrpo.models.decoder_config import read_config
from mindgrpo.run.preflight import (
    check_vocabulary,
    prepare,
    read_teacher,
    read_tokenizer,
    scorer_of,
)

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "grpo" / "tiny_arithmetic"
MODEL = EXAMPLE / "model"


@pytest.fixture
def teacher(tmp_path: Path) -> Path:
    folder = tmp_path / "teacher"
    shutil.copytree(MODEL, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    return folder


def change(folder: Path, name: str, **values: object) -> None:
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | values), "utf-8")


def config_of(teacher: Path, *words: str) -> Config:
    own = ("--actor_config.load", str(MODEL), "--ref_config.load", str(teacher))
    return load_config(EXAMPLE / "grpo_config.yaml", [*own, *words]).config


def test_a_reference_of_the_same_shapes_is_no_teacher_and_one_of_others_is(teacher: Path) -> None:
    model = read_config(MODEL)
    assert read_teacher(config_of(teacher), model) is None
    # What no tensor shows.
    change(teacher, "config.json", rope_theta=5000.0)
    assert read_teacher(config_of(teacher), model) == read_config(teacher)
    change(teacher, "config.json", num_hidden_layers=2)
    found = read_teacher(config_of(teacher), model)
    assert found is not None and found.num_hidden_layers == 2
    off = ("--rl_config.beta", "0")
    assert read_teacher(config_of(teacher, *off), model) is None
    assert read_teacher(config_of(teacher, *off, "--rl_config.distillation_coef", "1"), model)
    with pytest.raises(UserError, match=r"sync_ref_model is true.*cannot become a copy of it"):
        read_teacher(config_of(teacher, "--ref_config.sync_ref_model", "true"), model)


def test_a_teacher_alone_trains_where_no_reward_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Left empty on the command line or in a file; an evaluation has nothing to measure then."""
    written = (EXAMPLE / "grpo_config.yaml").read_text("utf-8")
    empty = re.sub(r"(verifier_(function|weight):).*", r"\1", written)
    assert empty != written
    (tmp_path / "empty.yaml").write_text(empty, "utf-8")
    paths = {
        "actor_config.load": MODEL,
        "ref_config.load": MODEL,
        "rl_config.dataset_file": EXAMPLE / "train.jsonl",
        "rl_config.eval_dataset_file": EXAMPLE / "heldout.jsonl",
        "rl_config.beta": 0,
    }
    words = [word for key, value in paths.items() for word in (f"--{key}", str(value))]
    of_file = ["check", "--config", str(tmp_path / "empty.yaml"), *words]
    of_line = ["check", "--config", str(EXAMPLE / "grpo_config.yaml"), *words]
    of_line += ["--reward_config.verifier_function=[]", "--reward_config.verifier_weight=null"]
    for given in (of_file, of_line):
        assert main([*given, "--rl_config.distillation_coef", "1"]) == 0
        assert "rewards   none: the teacher's log-probs alone" in capsys.readouterr().out
        assert main(given) == 2
        assert "verifier_function (the reward functions) is not set" in capsys.readouterr().err
    evaluation = ["check", "eval", *of_file[1:], "--rl_config.distillation_coef", "1"]
    assert main(evaluation) == 2
    assert "verifier_function (the reward functions) is not set" in capsys.readouterr().err


@each_row(
    ("key", "value", "rewards", "told"),
    [
        ("dynamic_sampling", "true", [], "set dynamic_sampling to false"),
        ("dynamic_sampling", "true", [0.0], "set dynamic_sampling to false"),
        ("dynamic_sampling", "true", [0.5], None),
        ("no_positive_resampling", "0.9", [], "leave no_positive_resampling out"),
        ("advantage_estimator", "gdpo", [], "leave advantage_estimator out"),
        ("advantage_estimator", "remax", [0.0], "leave advantage_estimator out"),
        ("advantage_estimator", "rloo", [], None),
    ],
)
def test_what_is_about_rewards_is_refused_where_none_are_earned(
    key: str, value: str, rewards: list[float], told: str | None
) -> None:
    words = (f"--rl_config.{key}", value, "--rl_config.distillation_coef", "1")
    config = config_of(MODEL, *words)
    functions = ["accuracy_reward"] * len(rewards)
    if told is None:
        scorer_of(config, functions, rewards).close()
        return
    with pytest.raises(UserError, match=told):
        scorer_of(config, functions, rewards)


def test_a_teacher_that_reads_other_tokens_is_refused(teacher: Path) -> None:
    config, model = config_of(teacher), read_config(MODEL)
    tokenizer = read_tokenizer(config, model)
    named = "ref_config.load", str(teacher), tokenizer
    check_vocabulary(*named, model)
    change(teacher, "config.json", vocab_size=tokenizer.vocab_size - 1)
    with pytest.raises(UserError, match=r"knows \d+ tokens .*name a model with the same tokenizer"):
        check_vocabulary(*named, read_config(teacher))
    words = json.loads((teacher / "tokenizer.json").read_text("utf-8"))
    vocabulary = words["model"]["vocab"]
    first, second = sorted(vocabulary)[:2]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    change(teacher, "tokenizer.json", **words)
    with pytest.raises(UserError, match="another tokenizer than the policy: token "):
        check_vocabulary(*named, model)


def test_a_model_config_of_the_reference_is_compared_with_the_teachers_shapes(
    teacher: Path, tmp_path: Path
) -> None:
    change(teacher, "config.json", num_hidden_layers=2)
    own = read_config(teacher)
    dims = {
        "type": "LlamaConfig",
        "vocab_size": own.vocab_size,
        "hidden_size": own.hidden_size,
        "intermediate_size": own.intermediate_size,
        "num_heads": own.num_attention_heads,
        "n_kv_heads": own.num_key_value_heads,
        "qkv_has_bias": True,
        "rms_norm_eps": own.rms_norm_eps,
        "theta": own.rope_theta,
    }
    for layers, named in ((2, "safetensors"), (3, "teacher/config.json")):
        stated = {"model": {"model_config": dims | {"num_layers": layers}}}
        (tmp_path / "teacher.yaml").write_text(json.dumps(stated), "utf-8")
        config = config_of(teacher, "--ref_config.model_config", str(tmp_path / "teacher.yaml"))
        with pytest.raises(UserError, match=named):
            prepare(config, None)
