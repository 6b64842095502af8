"""`python -m mindgrpo config`: one key in words, and the page of all keys, which is true.

Does not prove that a description is a good one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
from tables import each_row

from mindgrpo.cli.verbs import main
from mindgrpo.config import load_config, values_by_key
from mindgrpo.config.command_line import FLAGS
from mindgrpo.config.names import KNOWN, RETIRED, SECTIONS, aliases
from mindgrpo.config.reference import explain, other_trainers, reference
from mindgrpo.errors import UserError

ALIASES = (*(n for key in aliases().by_key for n in aliases().names_of(key)), *aliases().absent)
DOCS = Path(__file__).resolve().parent.parent / "docs"
# Made by `python -m mindgrpo config FLAG > docs/PAGE`: flag, page, what makes it.
PAGES = [
    ("--reference", "configuration.md", reference),
    ("--other_trainers", "from_other_trainers.md", other_trainers),
]


@pytest.mark.parametrize(("flag", "name", "made"), PAGES)
def test_a_generated_page_is_what_the_data_says(
    flag: str, name: str, made: Callable[[], str]
) -> None:
    wanted = f"write it anew with: python -m mindgrpo config {flag} > docs/{name}"
    assert (DOCS / name).read_text("utf-8") == made() + "\n", wanted
    assert f"python -m mindgrpo config {flag} > docs/{name}" in made()


def test_the_pages_have_every_key_and_every_name() -> None:
    page = reference()
    for key in KNOWN:
        assert f"`{key}`" in page or f"| `{key.rpartition('.')[2]}` |" in page, key
    for flag in FLAGS:
        assert f"`{flag}`" in page, flag
    for name in (*ALIASES, *aliases().by_key, *aliases().same_in_mindrlhf):
        assert f"`{name}`" in other_trainers(), name


def test_the_page_of_other_trainers_has_each_name_in_its_trainers_column() -> None:
    (row,) = [r for r in other_trainers().splitlines() if r.startswith("| `rl_config.epsilon_low`")]
    mindrlhf, verl, trl, others = row.split("|")[2:6]
    assert mindrlhf.strip() == "same" and trl.strip() == "`epsilon`"
    assert "`actor_rollout_ref.actor.clip_ratio_low`" in verl and "`eps_clip`" in others


@pytest.mark.parametrize("page", [reference(), other_trainers()])
def test_a_generated_page_is_well_formed_markdown(page: str) -> None:
    for line in page.splitlines():
        if line.startswith("|"):
            assert line.endswith("|")
            cells = line.replace("\\|", "").count("|") - 1
            assert cells in (2, 4, 5), line


@each_row(
    ("name", "words"),
    [
        ("rl_config.beta", ["takes    a number, at least 0", "default  0.01", "kl_loss_coef"]),
        ("beta", ["rl_config.beta: "]),
        ("--dataset_file", ["rl_config.dataset_file: ", "flag     --dataset_file, --rl_config."]),
        ("clip_ratio", ["clip_ratio is called rl_config.epsilon_low here: both", "default  null"]),
        ("actor_config.clip_ratio", ["is called rl_config.epsilon_low here: both"]),
        ("actor_rollout_ref.rollout.n", ["n is called rl_config.num_generations here."]),
        (
            "actor_rollout_ref.rollout.val_kwargs.temperature",
            ["is called rl_config.eval_temperature here."],
        ),
        ("temperature", ["generate_config.sampling_config.temperature: ", "in TRL: temperature"]),
        ("bf16", ["bf16 is called context.compute_dtype here: its true is bfloat16"]),
        ("mixed_precision", ["mixed_precision is no key here: set context.compute_dtype"]),
        ("rl_config.align_type", ["is retired, it has no effect: "]),
        ("ref_config.recompute_config.recompute", ["ref_config.recompute_config is retired"]),
        ("actor_config.optimizer", ["is a section of", "  actor_config.optimizer.eps"]),
        ("optimizer", ["actor_config.optimizer is a section of"]),
        (
            "generate_config.use_vllm",
            ["generate_config.use_vllm: 1: generate with vLLM", "in TRL: use_vllm"],
        ),
        ("rl_config.enable_compile_cache", ["which is not available yet; leave it at False"]),
        ("model_config", ["actor_config.model_config: ", "ref_config.model_config: "]),
    ],
)
def test_a_name_is_explained(name: str, words: list[str]) -> None:
    said = explain(name)
    for part in words:
        assert part in said


def test_every_name_that_is_known_can_be_explained() -> None:
    for name in (*KNOWN, *SECTIONS, *ALIASES, *FLAGS):
        assert explain(name)


def test_a_retired_key_is_not_offered_in_its_section() -> None:
    assert "rl_config.align_type" in RETIRED
    assert "rl_config.align_type" not in explain("rl_config")


def test_a_name_that_nobody_has_is_refused_with_the_nearest() -> None:
    with pytest.raises(
        UserError, match=r"'rl_config.bta' is no key .* did you mean rl_config.beta"
    ):
        explain("rl_config.bta")


def test_the_verb_prints_and_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--explain", "rl_config.beta", "rl_config.seed"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("rl_config.beta: ") and "\n\nrl_config.seed: " in said
    assert main(["config", "--reference"]) == 0
    assert capsys.readouterr().out == (DOCS / "configuration.md").read_text("utf-8")
    assert main(["config", "--other_trainers"]) == 0
    assert capsys.readouterr().out == (DOCS / "from_other_trainers.md").read_text("utf-8")
    for words in ([], ["--explain"], ["--reference", "x"], ["--all"]):
        assert main(["config", *words]) == 2
        refused = capsys.readouterr()
        assert refused.out == "" and refused.err.startswith("mindgrpo: config takes --explain KEY")


# A script of verl's, and what its settings mean.
SCRIPT = """
export NAME=x  # no setting, as is set=-x
python3 -m verl.trainer.main_ppo --config-path=conf \\
    algorithm.adv_estimator=grpo_passk algorithm.norm_adv_by_std_in_grpo=False \\
    data.train_batch_size=64 data.max_prompt_length=512 +data.max_response_length=1024 \\
    data.filter_overlong_prompts=True data.truncation='error' data.prompt_key=question_key \\
    data.train_files="['my data/train.parquet']" \\
    actor_rollout_ref.actor.ppo_mini_batch_size=16 actor_rollout_ref.actor.clip_ratio=0.1 \\
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \\
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.002 \\
    actor_rollout_ref.actor.kl_loss_type=low_var_kl actor_rollout_ref.actor.entropy_coeff=0 \\
    actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.optim.min_lr_ratio=0.1 \\
    actor_rollout_ref.actor.optim.betas=[0.9,0.98] algorithm.kl_ctrl.kl_coef=0.7 \\
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum actor_rollout_ref.rollout.name=vllm \\
    actor_rollout_ref.rollout.val_kwargs.do_sample=False \\
    custom_reward_function.path=my.py custom_reward_function.name=score \\
    trainer.logger='["console","wandb"]' trainer.save_freq=-1 trainer.nnodes=1 $@
"""
MEANT = {
    "rl_config.advantage_estimator": "pass_at_k",
    "rl_config.scale_rewards": "none",
    "rl_config.prompts_per_step": 64,
    "rl_config.updates_per_rollout": 4,
    "rl_config.seq_length": 1536,
    "rl_config.prompt_overflow": "drop",
    "rl_config.dataset_map_keys": ["question=question_key"],
    "rl_config.dataset_file": "my data/train.parquet",
    "rl_config.epsilon_low": 0.1,
    "rl_config.epsilon_high": 0.1,
    "rl_config.beta": 0.002,
    "rl_config.kl_estimator": "k3",
    "rl_config.entropy_coef": 0.0,
    "rl_config.loss_aggregation": "sample_sum",
    "rl_config.eval_modes": ["greedy"],
    "actor_config.lr_schedule.lr": 1e-6,
    "actor_config.lr_schedule.min_lr": 1e-7,
    "actor_config.optimizer.adam_beta1": 0.9,
    "actor_config.optimizer.adam_beta2": 0.98,
    "reward_config.verifier_function": ["my.py:score"],
    "generate_config.use_vllm": 1,
    "generate_config.max_prompt_length": 512,
    "generate_config.sampling_config.max_tokens": 1024,
    "monitor_config.trackers": ["wandb"],
}


def test_settings_of_others_become_a_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.sh").write_text(SCRIPT)
    assert main(["config", "--explain", str(tmp_path / "run.sh"), "rl_config.seed=3"]) == 0
    printed = capsys.readouterr().out
    (tmp_path / "my.yaml").write_text(printed)
    loaded = load_config(tmp_path / "my.yaml")
    values = values_by_key(loaded.config)
    found = {key: values[key] for key in values if loaded.origins[key] != "default"}
    rate = found["actor_config.lr_schedule.min_lr"]
    assert isinstance(rate, float) and math.isclose(rate, 1e-7)
    assert found | {"actor_config.lr_schedule.min_lr": 1e-7} == MEANT | {"rl_config.seed": 3}
    remarks = [line for line in printed.splitlines() if line.startswith("#")]
    parts = (
        "data.truncation=error: without effect, as there, with filter_overlong_prompts=True",
        "rl_config.prompts_per_step 64, and rl_config.batch_size counts packed rows",
        "without effect, as there, without use_kl_in_reward=True",
        "number of ranks",
        "as it is here: trainer.save_freq=-1",
    )
    for remark, part in zip(remarks, parts, strict=True):
        assert part in remark
    # The same settings in a file of sections.
    (tmp_path / "verl.yaml").write_text("trainer: {total_epochs: 3}\ndata: {max_prompt_length: 9}")
    words = [str(tmp_path / "verl.yaml"), "--learning_rate=2", "max_steps=-1", "nonsense=1"]
    assert main(["config", "--explain", *words]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "# nonsense=1: no key comes near it, leave it out",
        "# as it is here: max_steps=-1",
        "rl_config:",
        "  epochs: 3  # trainer.total_epochs",
        "actor_config:",
        "  lr_schedule:",
        "    lr: 2  # learning_rate",
        "generate_config:",
        "  max_prompt_length: 9  # data.max_prompt_length",
    ]
    assert main(["config", "--explain", "rl_config.beta=-1"]) == 0
    assert "# to be corrected: rl_config.beta is -1, but must" in capsys.readouterr().out
