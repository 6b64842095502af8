"""The configuration: what is accepted, what is refused and in which words.

Does not prove that a live key has its effect in a run; the tests of the rooms that read it do.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from mindgrpo.config import (
    FLAGS,
    Config,
    Loaded,
    load_config,
    memory_bytes,
    parse_command_line,
    require_run_keys,
    write_resolved,
)
from mindgrpo.config.names import KNOWN, NEIGHBOURS, SECTIONS
from mindgrpo.config.retired import PENDING, RETIRED
from mindgrpo.config.schema import LIVE
from mindgrpo.errors import UserError

TUTORIAL = Path(__file__).parent.parent / "examples/grpo/qwen_grpo_tutorial/grpo_config.yaml"

# Every key of the configuration that users run today, with the values that they wrote.
USERS_CONFIGURATION = """\
rl_config:
  model_name: 'qwen2.5'
  deterministic: "OFF"
  align_type: 'rlhf_stages'
  dataset_file: "/path/train.mindrecord"
  tokenizer_type: 'qwen'
  tokenizer_dir: "/path/"
  epochs: 10
  batch_size: 1
  sink_size: 1
  seq_length: 8192
  use_parallel: True
  load_ckpt_format: "hf_safetensors"
  parallel_mode: "semi_auto_parallel"
  enable_compile_cache: False
  save_strategy_dir: "./strategy/"
  save_data_file: "/tmp/grpo.mindrecord"
  packing: True
  pack_num: 1
  save_prompt_completions_data: True
  save_prompt_completions_interval: 1
  save_prompt_completions_dir: "/tmp/"
  reshard_mem_opt_level: 0
  save_ckpt_interval: 5
  save_max_ckpt_num: 5
  save_ckpt_format: "safetensors"
  enable_reshard_optimizer: False
  tensorboard: False
  tensorboard_dir: '/tmp/'
  tensorboard_queue_size: 10
  performance_stats: true
  micro_batch_interleaved: 1
  beta: 0.01
  num_generations: 8
  num_rollouts: 4
  chunk_size: 1
  gen_experience_kwargs: False
  num_iterations: 1
  epsilon_low: 0.2
  epsilon_high: 0.2
  enable_oldpolicy: True
  seed: 0
monitor_config:
  host_monitor_interval: -1.0
  host_monitor_steps: [ ]
  host_memory_protection: False
  host_max_memory_threshold: 0.95
actor_config:
  load: ""
  save: "/tmp/"
  model_config: "./model_configs/finetune.yaml"
  enable_alltoall: False
  offset: 0
  use_eod_attn_mask_compression: True
  loss_scale_value: 1
  parallel_config: {data_parallel: 1, model_parallel: 4, pipeline_stage: 2, micro_batch_num: 2,
    use_seq_parallel: False, vocab_emb_dp: False, context_parallel: 1}
  recompute_config:
    recompute: True
    select_recompute: False
  enable_parallel_optimizer: True
  optimizer:
    type: 'adamw'
    adam_beta1: 0.9
    adam_beta2: 0.95
    eps: 1.0e-8
    weight_decay: 0.01
    opt_offload: False
  lr_schedule:
    lr_decay_style: 'cosine'
    lr: 5.0e-7
    min_lr: 1.0e-10
    warmup_step: 10
    decay_steps: 200000
ref_config:
  model_config: "./model_configs/finetune.yaml"
  load: ""
  ref_model_batch_size: 2
  offset: 0
  use_eod_attn_mask_compression: True
  sync_ref_model: False
  ref_model_sync_steps: 50
  parallel_config: {data_parallel: 2, model_parallel: 4, pipeline_stage: 1, context_parallel: 1}
reward_config:
  verifier_function: ["accuracy_reward", "format_reward"]
  verifier_weight: [1.0, 1.0]
generate_config:
  model_config: "./model_configs/predict.yaml"
  load: ""
  infer_model_batch_size: 2
  parallel_config: {data_parallel: 2, model_parallel: 4, pipeline_stage: 1, context_parallel: 1}
  use_vllm: 1
  hf_config_path: "./config.json"
  block_size: 16
  max_model_len: 32768
  max_num_batched_tokens: 32768
  max_num_seqs: 1024
  max_prompt_length: 2048
  num_scheduler_steps: 32
  gpu_memory_utilization: 0.7
  sampling_config: {max_tokens: 512, min_tokens: 2, temperature: 0.8, repetition_penalty: 1.05,
    top_p: 0.8, top_k: 20, bos_token_id: 151643, eos_token_id: [151645, 151643],
    pad_token_id: 151643, detokenize: False}
context:
  mode: 0
  device_target: "Ascend"
  max_call_depth: 10000
  max_device_memory: "58GB"
  save_graphs: False
  save_graphs_path: "./graph/"
  device_id: 0
  jit_config:
    jit_level: "O0"
  memory_optimize_level: "O0"
  ascend_config:
    precision_mode: "must_keep_origin_dtype"
profiler_config:
  profile: false
  mstx: false
  stage: all
  profile_save_path: ./profiler_data
  profile_step_start: 0
  profile_step_end: 1
  profile_level: level1
  profile_with_memory: false
  profile_with_cpu: true
  profile_with_npu: true
  profile_with_stack: false
  profile_analysis: false
  profile_ranks: all
msprobe_config:
  msprobe: true
  dump_path: "./msprobe_dump"
  key_data_dump: true
  configurations_dump: true
"""
# What of it asks for features to come, switched off.
SWITCHED_OFF = (
    *("--rl_config.save_ckpt_interval", "0"),
    *("--generate_config.use_vllm", "0"),
    *("--msprobe_config.msprobe", "false"),
)


class Loader:
    def __init__(self, directory: Path) -> None:
        self.path = directory / "grpo_config.yaml"

    def __call__(self, text: str, *overrides: str, **flags: object) -> Loaded:
        self.path.write_text(text, encoding="utf-8")
        return load_config(self.path, overrides, flags)


@pytest.fixture
def load(tmp_path: Path) -> Loader:
    return Loader(tmp_path)


def section(key: str, value: str) -> str:
    """YAML that gives one dotted key."""
    parts = key.split(".")
    lines = [f"{'  ' * depth}{part}:" for depth, part in enumerate(parts)]
    return "\n".join(lines) + f" {value}\n"


# --- the whole ---------------------------------------------------------------------------------


def test_an_empty_file_is_all_defaults(load: Loader) -> None:
    loaded = load("")
    assert loaded.config == Config()
    assert set(loaded.origins.values()) == {"default"}
    assert loaded.notices == []


def test_the_users_configuration_loads_once_coming_features_are_off(load: Loader) -> None:
    config = load(USERS_CONFIGURATION, *SWITCHED_OFF).config
    assert config.actor_config.model_yaml == "./model_configs/finetune.yaml"
    assert config.actor_config.optimizer.weight_decay == 0.01
    assert config.generate_config.sampling_config.eos_token_id == [151645, 151643]
    assert config.ref_config.load is None


def test_every_retired_key_of_the_users_configuration_is_told_once(load: Loader) -> None:
    notices = load(USERS_CONFIGURATION, *SWITCHED_OFF).notices
    told = [notice.split(" ")[0] for notice in notices]
    assert len(told) == len(set(told))
    assert set(told) <= set(RETIRED)
    assert "rl_config.align_type" in told and "context.device_id" in told
    assert all("has no effect (grpo_config.yaml line" in notice for notice in notices)


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


def test_neighbours_names_lead_to_keys_that_are_not_retired() -> None:
    assert set(NEIGHBOURS.values()) <= {*LIVE, *PENDING}
    assert not set(NEIGHBOURS) & {key.rpartition(".")[2] for key in KNOWN}


def test_the_configuration_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        Config().rl_config.beta = 1.0  # type: ignore[misc]


# --- names -------------------------------------------------------------------------------------


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
        ("per_device_train_batch_size", "rl_config.batch_size"),
    ],
)
def test_a_neighbours_name_is_pointed_to_ours(load: Loader, name: str, ours: str) -> None:
    with pytest.raises(UserError, match=f"it is called {ours} here"):
        load(section(f"rl_config.{name}", "1"))


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


@pytest.mark.parametrize(
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
        ("rl_config.scale_rewards", "batch", "must be 'group' or 'none'"),
        ("rl_config.deterministic", "maybe", "must be 'ON' or 'OFF'"),
        ("actor_config.optimizer.type", "lamb", "must be 'adamw'"),
        ("actor_config.lr_schedule.lr", "0", "must be above 0"),
        ("generate_config.sampling_config.top_p", "1.5", "must be at most 1"),
        ("generate_config.sampling_config.min_p", "1.0", "must be below 1"),
        ("generate_config.sampling_config.eos_token_id", "[1, x]", "or a list of whole numbers"),
        ("generate_config.sampling_config.eos_token_id", "[]", "a list of at least one"),
        ("generate_config.parallel_config.pipeline_stage", "2", "must be 1, for the generator"),
        ("reward_config.verifier_function", "accuracy_reward", "write [accuracy_reward]"),
        ("context.max_device_memory", "lots", "must be a size above 0 such as 58GB"),
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


@pytest.mark.parametrize(
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
            "has 1 weights and reward_config.verifier_function has 2 functions",
        ),
        ("actor_config:\n  offset: [1, -1]\n", "has 2 entries for 1 pipeline stages"),
        ("rl_config:\n  eval_steps: 5\n", "nothing to evaluate on"),
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
        ("generate_config.use_vllm", "1", "set it to 0"),
        ("generate_config.use_vllm", "False", "set it to 0"),
        ("generate_config.trust_remote_code", "true", "is refused; set it to False"),
        ("rl_config.save_ckpt_interval", "5", "set it to 0"),
        ("rl_config.resume_training", "true", "set it to False"),
        ("actor_config.optimizer.opt_offload", "True", "set it to False"),
        ("actor_config.parallel_config.context_parallel", "2", "set it to 1"),
        ("actor_config.parallel_config.use_seq_parallel", "True", "set it to False"),
        ("actor_config.loss_scale_value", "65536", "set it to 1"),
        ("monitor_config.host_monitor_interval", "1.0", "set it to -1.0"),
        ("monitor_config.host_memory_protection", "true", "set it to False"),
        ("profiler_config.profile", "true", "set it to False"),
        ("msprobe_config.msprobe", "true", "set it to False"),
        ("context.mode", "1", "set it to 0"),
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
        assert pending.accepts(pending.set_to), key


def test_a_retired_section_is_told_once_whatever_is_in_it(load: Loader) -> None:
    notices = load(
        "ref_config:\n  recompute_config:\n    recompute: True\n    select_recompute: False\n"
    ).notices
    assert len(notices) == 1
    assert notices[0].startswith("ref_config.recompute_config has no effect (grpo_config.yaml ")


# --- command line --------------------------------------------------------------------------------


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
        (["--save_strategy_dir", "x"], "(which is retired: "),
        (["--rl_config.bta", "1"], "did you mean rl_config.beta (command line --rl_config.bta)"),
        (["--rl_config.beta"], "--rl_config.beta on the command line has no value"),
        (["--rl_config.epochs", "0"], "(command line --rl_config.epochs)"),
        (["beta", "1"], "'beta' on the command line belongs to no flag"),
        (["--resume_training"], "continuing an earlier run, which is not available yet"),
    ],
)
def test_a_wrong_command_line_is_refused(load: Loader, words: list[str], sentence: str) -> None:
    with pytest.raises(UserError) as refused:
        load("", *words)
    assert sentence in str(refused.value)


def test_the_command_line_is_parted_into_file_and_overrides(load: Loader) -> None:
    path, overrides = parse_command_line(
        [
            "--config",
            "a.yaml",
            "--rl_config.beta=0.5",
            "--output_dir",
            "o",
            "--rl_config.tensorboard",
        ]
    )
    assert path == Path("a.yaml")
    config = load("", *overrides).config
    assert (config.rl_config.beta, config.output_dir) == (0.5, "o")
    assert config.rl_config.tensorboard is True


def test_a_command_line_without_configuration_says_so() -> None:
    with pytest.raises(UserError, match="add --config FILE.yaml"):
        parse_command_line(["--rl_config.beta", "0.5"])


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
    loaded = load(USERS_CONFIGURATION, *SWITCHED_OFF, *words)
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
