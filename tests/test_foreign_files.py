"""`config --explain FILE`: what programs of TRL's and scripts of verl's say becomes a configuration, at the first go.

Does not prove that a run of such a configuration learns; nor that a decision on a setting is right
(test_foreign_settings.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from tables import each_row

from mindgrpo.cli.verbs import main
from mindgrpo.config import Loaded, load_config, values_by_key
from mindgrpo.config.foreign_files import of_words, read
from mindgrpo.config.python_values import calculated
from mindgrpo.config.shell_words import commands
from mindgrpo.errors import UserError
from mindgrpo.run.trl_arguments import with_arguments
from mindgrpo.run.trl_config import GRPOConfig

# Of TRL's: 22 fields, two rewards that read messages, and LoRA.
FIELDS = """
    output_dir="out",
    learning_rate=5e-6,
    adam_beta1=0.9,
    adam_beta2=0.99,
    weight_decay=0.1,
    warmup_ratio=0.1,
    lr_scheduler_type="constant_with_warmup",
    max_grad_norm=0.1,
    beta=0.04,
    temperature=0.9,
    num_generations=8,
    per_device_train_batch_size=8,
    gradient_accumulation_steps=4,
    max_prompt_length=MAX_LENGTH - 256,
    max_completion_length=256,
    num_train_epochs=1,
    save_strategy="steps",
    save_steps=50,
    logging_steps=1,
    bf16=True,
    use_vllm=False,
    report_to="none",
"""
PROGRAM = f"""
from my_rewards import close
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

MAX_LENGTH = 128 * 3

def right(completions, answer, **kwargs):
    return [1.0 if a in c[0]["content"] else 0.0 for c, a in zip(completions, answer)]

def main():
    lora = LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    args = GRPOConfig({FIELDS})
    trainer = GRPOTrainer(
        model="org/name", reward_funcs=[right, close], args=args, train_dataset=load(), peft_config=lora
    )
    trainer.train()

if __name__ == "__main__":
    main()
"""
MEANT = {
    "output_dir": "out",
    "rl_config.save_ckpt_interval": 50,
    "rl_config.beta": 0.04,
    "rl_config.prompt_overflow": "left",
    "rl_config.epochs": 1,
    "rl_config.seq_length": 384,
    "rl_config.prompts_per_step": 4,
    "rl_config.num_generations": 8,
    "actor_config.optimizer.adam_beta1": 0.9,
    "actor_config.optimizer.adam_beta2": 0.99,
    "actor_config.optimizer.weight_decay": 0.1,
    "actor_config.optimizer.max_grad_norm": 0.1,
    "actor_config.lr_schedule.lr_decay_style": "constant",
    "actor_config.lr_schedule.lr": 5e-6,
    "actor_config.lr_schedule.warmup_ratio": 0.1,
    "actor_config.lora.rank": 16,
    "actor_config.lora.alpha": 32.0,
    "actor_config.lora.target_modules": ["q_proj", "v_proj"],
    "generate_config.use_vllm": 0,
    "generate_config.max_prompt_length": 128,
    "generate_config.sampling_config.max_tokens": 256,
    "generate_config.sampling_config.temperature": 0.9,
    "context.compute_dtype": "bfloat16",
    "monitor_config.trackers": [],
}
LORA = {"r": 16, "lora_alpha": 32, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}


def explained(*words: str, capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, Any], list[str]]:
    """The values that the printed YAML sets, by key, and its remarks."""
    assert main(["config", "--explain", *words]) == 0
    printed = capsys.readouterr().out
    remarks = [line for line in printed.splitlines() if line.startswith("#")]
    return set_in(with_arguments(yaml.safe_load(printed) or {}, None, None, None)), remarks


def set_in(loaded: object) -> dict[str, Any]:
    assert isinstance(loaded, Loaded)
    values = values_by_key(loaded.config)
    return {key: value for key, value in values.items() if loaded.origins[key] != "default"}


def test_a_program_of_trl_becomes_a_configuration_with_all_of_its_fields(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "train.py"
    path.write_text(PROGRAM)
    values, remarks = explained(str(path), capsys=capsys)
    rewards = [f"{path}:right", "my_rewards:close"]
    own = {"actor_config.load": "org/name", "reward_config.verifier_function": rewards}
    assert values == MEANT | own
    data, logging, one_process, same = remarks
    assert "GRPOTrainer(train_dataset=load()): not a value that stands in train.py" in data
    assert "logging_steps=1: without effect, metrics are written in every step" in logging
    assert "that of one process; multiply it by the number of TRL's processes" in one_process
    assert "as it is here: save_strategy=steps" in same
    values, remarks = explained(str(path), "num_processes=8", capsys=capsys)
    assert values["rl_config.prompts_per_step"] == 32
    assert not any("one process" in remark for remark in remarks)


def test_the_same_fields_are_taken_by_grpo_config_at_the_first_go() -> None:
    """Where `from trl import ...` became `from mindgrpo import ...`: no message asks for anything."""
    args = eval(f"GRPOConfig({FIELDS})", {"GRPOConfig": GRPOConfig, "MAX_LENGTH": 384})
    loaded = with_arguments(None, None, None, None, args=args, peft_config=LORA)
    assert set_in(loaded) == MEANT
    assert isinstance(loaded, Loaded)
    (notice,) = loaded.notices
    assert "logging_steps (metrics are written in every step)" in notice


@each_row(
    ("program", "found", "remark"),
    [
        ("args = dict(beta=0.1)\nGRPOConfig(**args)", {"beta": 0.1}, None),
        ("GRPOConfig('out', beta=-0.1 * 2)", {"output_dir": "out", "beta": -0.2}, None),
        ("import trl\ntrl.GRPOConfig(run_name=f'a-{1 + 1}')", {"run_name": "a-2"}, None),
        ("GRPOConfig(beta=float(x))", {}, "GRPOConfig(beta=float(x)): not a value that stands in"),
        ("b = 1\nb = f()\nGRPOConfig(beta=b)", {}, "GRPOConfig(beta=b): not a value"),
        (
            "m = AutoModel.from_pretrained('a/b', torch_dtype=t)\nGRPOTrainer(model=m)",
            {"model_name_or_path": "a/b"},
            None,
        ),
        ("GRPOTrainer('m', 'accuracy_reward')", {"reward_funcs": "accuracy_reward"}, None),
        (
            "def f(): pass\nGRPOTrainer(model='m', reward_funcs=f)",
            {},
            "an import of train.py would train; move the function to a file of its own",
        ),
        ("print(1)", {}, "has no call of GRPOConfig, LoraConfig, GRPOTrainer"),
    ],
)
def test_python_is_read_as_python(
    tmp_path: Path, program: str, found: dict[str, Any], remark: str | None
) -> None:
    path = tmp_path / "train.py"
    path.write_text(program)
    read_ = read(path)
    assert read_.settings.items() >= found.items()
    assert any(remark in one for one in read_.remarks) if remark else read_.remarks == []


def test_a_program_that_is_none_is_refused_with_the_line(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("a = 1\nGRPOConfig(beta=\n")
    with pytest.raises(UserError, match=r"train\.py line 2 is no Python"):
        read(tmp_path / "train.py")


# Of verl's, for GSM8K, as its examples write scripts: variables, sums and lists.
SCRIPT = """
set -x  # as verl's
export VLLM_ATTENTION_BACKEND=XFORMERS
DATA_DIR=${DATA_DIR:-"$HOME/data/gsm8k"}
train_path=$DATA_DIR/train.parquet
max_response=$((256 * (2 + 2)))
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    data.train_files="['$train_path']" data.val_files=${DATA_DIR}/test.parquet \\
    data.train_batch_size=1024 data.max_prompt_length=512 data.max_response_length=${max_response} \\
    data.filter_overlong_prompts=True data.truncation='error' \\
    actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct \\
    actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.model.use_remove_padding=True \\
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \\
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=40 \\
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.001 \\
    actor_rollout_ref.actor.kl_loss_type=low_var_kl actor_rollout_ref.actor.entropy_coeff=0 \\
    actor_rollout_ref.model.enable_gradient_checkpointing=True \\
    actor_rollout_ref.actor.fsdp_config.param_offload=False \\
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=False \\
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=40 \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 actor_rollout_ref.rollout.name=vllm \\
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 actor_rollout_ref.rollout.n=5 \\
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=40 \\
    actor_rollout_ref.ref.fsdp_config.param_offload=True algorithm.use_kl_in_reward=False \\
    trainer.critic_warmup=0 trainer.logger='["console","wandb"]' \\
    trainer.project_name='verl_grpo_example_gsm8k' trainer.experiment_name='qwen' \\
    trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.save_freq=20 trainer.test_freq=5 \\
    trainer.total_epochs=15 $@ 2>&1 | tee run.log
"""
GSM8K = {
    "rl_config.save_ckpt_interval": 20,
    "rl_config.advantage_estimator": "grpo",
    "rl_config.beta": 0.001,
    "rl_config.kl_estimator": "k3",
    "rl_config.entropy_coef": 0,
    "rl_config.dataset_file": "/home/me/data/gsm8k/train.parquet",
    "rl_config.eval_dataset_file": "/home/me/data/gsm8k/test.parquet",
    "rl_config.prompt_overflow": "drop",
    "rl_config.epochs": 15,
    "rl_config.seq_length": 1536,
    "rl_config.prompts_per_step": 1024,
    "rl_config.num_generations": 5,
    "rl_config.updates_per_rollout": 4,
    "rl_config.eval_steps": 5,
    "actor_config.load": "Qwen/Qwen2.5-0.5B-Instruct",
    "actor_config.parallel_config.data_parallel": 8,
    "actor_config.recompute_config.recompute": True,
    "actor_config.optimizer.opt_offload": False,
    "actor_config.lr_schedule.lr": 1e-6,
    "generate_config.parallel_config.data_parallel": 4,
    "generate_config.parallel_config.model_parallel": 2,
    "generate_config.use_vllm": 1,
    "generate_config.max_prompt_length": 512,
    "generate_config.gpu_memory_utilization": 0.6,
    "generate_config.sampling_config.max_tokens": 1024,
    "monitor_config.trackers": ["wandb"],
    "monitor_config.tracker_project": "verl_grpo_example_gsm8k",
    "monitor_config.tracker_run_name": "qwen",
}


def test_a_script_of_verl_becomes_a_configuration_with_its_layout_and_paths(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    path = tmp_path / "run.sh"
    path.write_text(SCRIPT)
    values, remarks = explained(str(path), capsys=capsys)
    assert values == GSM8K
    assert any("start it with mindgrpo launch --ranks 8" in remark for remark in remarks)
    assert any("for openai/gsm8k that is [accuracy_reward]" in remark for remark in remarks)
    assert not any(
        "no key comes near" in remark or "to be corrected" in remark for remark in remarks
    )


@each_row(
    ("script", "words"),
    [
        ("a=1\nrun x=$a y=${a}b z='$a' w=\"$a c\"", [["run", "x=1", "y=1b", "z=$a", "w=1 c"]]),
        ("a=4 b=$((a / 2))\nrun n=$(( $a * (b + 1) ))", [["run", "n=12"]]),
        (
            "run a=${NONE_OF_IT:-5} b=${NONE_OF_IT} c=$(date)",
            [["run", "a=5", "b=${NONE_OF_IT}", "c=$(date)"]],
        ),
        (
            "ARGS=(\n  data.x=1  # one\n  data.y=2\n)\nrun a#b",
            [["data.x=1"], ["data.y=2"], [")"], ["run", "a#b"]],
        ),
        ("x=1; run $x && go 'a b'\\''c'", [["run", "1"], ["go", "a b'c"]]),
        ("run a=\\\n1 \\\n  b=2", [["run", "a=1", "b=2"]]),
    ],
)
def test_a_shell_script_is_read_as_a_shell_does(script: str, words: list[list[str]]) -> None:
    assert list(commands(script, "run.sh")) == words


def test_a_quote_that_is_open_is_refused_with_its_line() -> None:
    with pytest.raises(UserError, match=r"run\.sh line 2: a quote is not closed"):
        list(commands("one\ntwo 'x\n", "run.sh"))


@each_row(
    ("command", "found"),
    [
        (
            "trl grpo --beta 0.04 --bf16 --num_generations 8",
            {"beta": 0.04, "bf16": True, "num_generations": 8},
        ),
        (
            "accelerate launch train.py --reward_funcs accuracy_reward format_reward --reward_weights 1.0 0.5",
            {"reward_funcs": ["accuracy_reward", "format_reward"], "reward_weights": [1.0, 0.5]},
        ),
        (
            "python train.py --nonsense 5 --max_prompt_length=9",
            {"nonsense": 5, "max_prompt_length": 9},
        ),
        ("pip install --upgrade trl", {}),
        ("env NAME=x run +data.seed=3 train_batch_size=8", {"data.seed": 3, "train_batch_size": 8}),
    ],
)
def test_flags_and_words_of_a_command_are_settings(command: str, found: dict[str, Any]) -> None:
    assert dict(of_words(command.split())) == found


def test_what_a_value_refers_to_is_read_or_said_not_to_be_known(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [
        "trainer.default_local_dir=out/${trainer.project_name}",
        "trainer.project_name=mine",
        "data.train_files=$DATA/train.parquet",
        "data.val_files=$(ls *.parquet)",
        "actor_rollout_ref.rollout.prompt_length=${oc.select:data.max_prompt_length,512}",
    ]
    values, remarks = explained(*words, capsys=capsys)
    assert values == {"output_dir": "out/mine", "monitor_config.tracker_project": "mine"}
    assert [remark.partition("=")[2] for remark in remarks[:3]] == [
        "$DATA/train.parquet: a variable or a command whose value is not known here; write it out",
        "$(ls *.parquet): a variable or a command whose value is not known here; write it out",
        "${oc.select:data.max_prompt_length,512}: without effect, it follows another setting",
    ]


def test_only_plain_numbers_are_calculated() -> None:
    assert calculated("(1 + 2) * 3 - 4 // 2", {}) == 7 and calculated("a * 2", {"a": 4}) == 8
    for text in ("9 ** 9 ** 9", "1 / 0", "__import__('os')", "'a' * 9", "(" * 300, "1 +"):
        assert calculated(text, {}) is None


def test_a_yaml_file_of_trl_keeps_values_that_are_mappings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "trl.yaml").write_text(
        "model_name_or_path: org/name\nlr_scheduler_kwargs: {min_lr: 1.0e-7}\n"
        "model_init_kwargs: {dtype: bfloat16}\nloss_type: cispo\nepsilon_high: 5.0\n"
    )
    values, remarks = explained(str(tmp_path / "trl.yaml"), capsys=capsys)
    assert values == {
        "rl_config.loss_type": "cispo",
        "rl_config.epsilon_low": 1.0,
        "rl_config.epsilon_high": 4.0,
        "actor_config.load": "org/name",
        "context.compute_dtype": "bfloat16",
    }
    (remark,) = remarks
    assert "lr_scheduler_kwargs={'min_lr': 1e-07}: set actor_config.lr_schedule.min_lr" in remark


def test_null_where_a_list_is_wanted_is_answered_with_the_empty_list(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text("rl_config:\n  dataset_map_keys: [a=b]\n")
    with pytest.raises(UserError, match=r"write \[\] for none, or leave it out"):
        load_config(tmp_path / "my.yaml", ["--rl_config.dataset_map_keys", "null"])
    loaded = load_config(tmp_path / "my.yaml", ["--rl_config.dataset_map_keys", "[]"])
    assert loaded.config.rl_config.dataset_map_keys == []
