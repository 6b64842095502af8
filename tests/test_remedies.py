"""Remedies: what a message recommends exists where it is recommended, and does what it is recommended for.

Messages are read from the package's sources. Does not prove that a remedy is the best one, nor that a message says
what is wrong.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import yaml
from config_files import Loader, section

from mindgrpo.algorithm.surrogates import LOSS_TYPES
from mindgrpo.cli.verbs import MODULES, USAGE, main
from mindgrpo.config.command_line import FLAGS
from mindgrpo.config.names import PENDING, RETIRED, SECTIONS, aliases
from mindgrpo.config.schema import LIVE
from mindgrpo.errors import UserError
from mindgrpo.launch.options import FLAGS as LAUNCH_FLAGS
from mindgrpo.settings.section import kinds

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "mindgrpo"
# Stands for a value in a message: what touches it is not known.
HOLE = "\0"
# What the value of another trainer's name means here.
DIFFERENCES: dict[str, str] = yaml.safe_load((PACKAGE / "config/aliases.yaml").read_text()).get(
    "differences", {}
)
FLAG = re.compile(r"(?<![\w-])--[A-Za-z](?:[\w.-]*\w)?")
DOTTED = re.compile(rf"[\w{HOLE}]+(?:\.[\w{HOLE}]+)+")
CONVERTER = "examples/grpo/qwen_grpo_tutorial/rlhf_data.py"
# Whose flags the messages of a file outside of cli/ are about.
PROGRAMS = {
    "config/command_line.py": "eval",
    "config/reference.py": "config",
    "config/trl_fields.py": "config",
    "doctor/examine.py": "doctor",
    "report/write.py": "report",
    "rollout/vllm/install.py": "engine",
}
PAGE = re.compile(r"\b(?:docs|scripts|examples)/[\w/.-]+\w")
COMMAND = re.compile(r"(?:python -m mindgrpo|`mindgrpo) (\w+)")
VARIABLE = re.compile(r"\bMINDGRPO_[A-Z_]+\b")
# Of Docker, srun, hf, modelscope and scripts/setup_env.sh.
FOREIGN_FLAGS = {
    "--device",
    "--ntasks",
    "--ntasks-per-node",
    "--repo-type",
    "--local-dir",
    "--local_dir",
    "--revision",
    "--vllm",
}


def text_of(node: ast.expr) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) or HOLE for part in node.values)
    return None


def texts(node: ast.AST) -> Iterator[str]:
    """Strings with a blank in them; of an f-string with holes. No docstrings."""
    for inner in ast.iter_child_nodes(node):
        if isinstance(inner, ast.Expr) and text_of(inner.value) is not None:
            continue
        text = text_of(inner) if isinstance(inner, ast.expr) else None
        if text is None:
            yield from texts(inner)
        elif " " in text:
            yield text


def messages() -> Iterator[tuple[str, str]]:
    """The file and the text of all that the package may say."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for text in texts(ast.parse(path.read_text("utf-8"))):
            yield path.relative_to(PACKAGE).as_posix(), text
    for text in (*RETIRED.values(), *aliases().absent.values(), *DIFFERENCES.values()):
        yield "config/aliases.yaml", text
    for known in LIVE.values():
        yield "config/schema.py", known.meaning


def strings(path: Path) -> set[str]:
    nodes = ast.walk(ast.parse(path.read_text("utf-8")))
    constants = {node.value for node in nodes if isinstance(node, ast.Constant)}
    return {value for value in constants if isinstance(value, str)}


def all_strings() -> set[str]:
    """What programs compare arguments and names of variables with, among others."""
    return set().union(*map(strings, PACKAGE.rglob("*.py")))


def keys_with_suffixes() -> set[str]:
    """Keys and sections, in full and by their last words."""
    parts = [key.split(".") for key in (*LIVE, *PENDING, *RETIRED, *SECTIONS)]
    return {".".join(words[start:]) for words in parts for start in range(len(words))}


def test_every_flag_that_a_message_names_is_one_of_its_program() -> None:
    of_runs = {"--config", *FLAGS, *LAUNCH_FLAGS, "--KEY", "--key", "--section.key", "--help"}
    wrong = []
    for where, text in messages():
        known = of_runs | own_flags(where) | FOREIGN_FLAGS
        # Of the verbs whose commands the message gives.
        known = known.union(*(flags_of_verb(verb) for verb in COMMAND.findall(text)))
        for flag in FLAG.findall(text):
            is_key = flag[2:] in LIVE or flag[2:] in SECTIONS
            if flag not in known and not is_key and flag + HOLE not in text:
                wrong.append((where, flag, text))
    assert wrong == []


def own_flags(where: str) -> set[str]:
    """Of the program whose messages stand in a file, beside those of runs."""
    if where == "cli/verbs.py":
        return {flag for usage in USAGE.values() for flag in FLAG.findall(usage)}
    if where == "data/mindrecord.py":
        return strings(ROOT / CONVERTER)
    return flags_of_verb(PROGRAMS.get(where, Path(where).stem if where.startswith("cli/") else ""))


def flags_of_verb(verb: str) -> set[str]:
    if verb not in USAGE:
        return set()
    own = strings(PACKAGE / "cli" / f"{MODULES.get(verb, verb)}.py") | set(
        FLAG.findall(USAGE[verb])
    )
    return {word for word in own if word.startswith("--")}


def test_every_flag_of_a_verbs_usage_is_read_somewhere() -> None:
    read = all_strings()
    flags = {flag for usage in USAGE.values() for flag in FLAG.findall(usage)} - {"--key"}
    assert {flag for flag in flags if flag not in read} == set()


def test_every_key_that_a_message_names_exists() -> None:
    known, tops = keys_with_suffixes(), {name.split(".")[0] for name in SECTIONS}
    inner = {name.rpartition(".")[2] for name in SECTIONS}
    wrong = []
    for where, text in messages():
        for key in DOTTED.findall(text):
            first = key.split(".")[0]
            is_other = key.endswith((".md", ".py")) or key == "vllm.LLM"
            if HOLE in key or is_other or first not in tops | inner:
                continue
            if key not in known:
                wrong.append((where, key, text))
    assert wrong == []


def test_no_message_recommends_a_retired_key() -> None:
    recommended = [
        (where, key)
        for where, text in messages()
        for key in DOTTED.findall(text)
        if key in RETIRED and where != "launch/options.py"
    ]
    assert recommended == []


def test_every_page_script_verb_and_variable_that_a_message_names_exists() -> None:
    read = all_strings()
    wrong = []
    for where, text in messages():
        wrong += [(where, page) for page in PAGE.findall(text) if not (ROOT / page).exists()]
        wrong += [(where, verb) for verb in COMMAND.findall(text) if verb not in USAGE]
        wrong += [(where, name) for name in VARIABLE.findall(text) if name not in read]
    assert wrong == []


# Where a key's type alone does not make a value: it has to fit others.
SAMPLES = {
    "actor_config.lora.target_modules": "q_proj",
    "generate_config.load": "",
    "generate_config.max_model_len": "4096",
    "rl_config.clip_cov_high": "9.0",
    "rl_config.delta": "2.0",
    "rl_config.dual_clip": "3.0",
}
PARTIAL = ["--rl_config.importance_sampling_correction=token_truncate"]
NEEDS = {
    "rl_config.dynamic_sampling_rounds": ["--rl_config.dynamic_sampling"],
    "rl_config.importance_sampling_cap": [
        "--rl_config.importance_sampling_correction=token_truncate"
    ],
    "rl_config.importance_sampling_floor": [
        "--rl_config.importance_sampling_correction=token_mask"
    ],
    **{
        f"rl_config.{key}": [f"--rl_config.loss_type={kind}"]
        for kind, loss in LOSS_TYPES.items()
        for key in loss.keys
        if key not in LOSS_TYPES["grpo"].keys
    },
    "rl_config.over_sampling_batch_size": [*PARTIAL, "--rl_config.partial_rollout"],
    "rl_config.partial_rollout": PARTIAL,
}


def sample(key: str) -> str:
    """A value of a key's type, as a command line has it; its default where it has one."""
    if key in SAMPLES:
        return SAMPLES[key]
    field = LIVE[key].field
    default = field.get_default(call_default_factory=True)
    if default not in (None, "", []):
        return yaml.safe_dump([default], default_flow_style=True, width=10**9).strip()[1:-1]
    lowest = max((getattr(bound, "ge", 0) or 0 for bound in field.metadata), default=0)
    return value_of(kinds(field.annotation), lowest)


def value_of(wanted: tuple[Any, ...], lowest: float) -> str:
    kind = next(kind for kind in wanted if kind is not type(None))
    if get_origin(kind) is Literal:
        return str(get_args(kind)[0])
    if get_origin(kind) is list:
        return "[]"
    return {int: str(int(lowest) or 1), float: str(lowest or 0.5), bool: "false", str: "1GB"}[kind]


def test_the_key_that_takes_the_place_of_a_name_takes_a_value_of_its_type(
    load: Loader, subtests: pytest.Subtests
) -> None:
    for key in sorted({*aliases().by_key, *FLAGS.values()}):
        with subtests.test(key=key):
            check_value(load, key)


def check_value(load: Loader, key: str) -> None:
    flags = [flag for flag, target in FLAGS.items() if target == key]
    if key in PENDING:
        assert load("", f"--{key}={yaml.safe_dump(PENDING[key].inactive).split()[0]}")
        return
    if key in RETIRED:
        assert load("", f"--{key}=x").notices
        return
    for flag in (f"--{key}", *flags):
        loaded = load("", f"{flag}={sample(key)}", *NEEDS.get(key, ()))
        assert loaded.origins[key] == f"command line {flag}"


def test_the_remedy_for_each_name_of_another_trainer_can_be_carried_out(load: Loader) -> None:
    names = [name for key in aliases().by_key for name in aliases().names_of(key)]
    for name in names:
        if aliases().remedy(name) is None:  # a word that says nothing by itself
            continue
        with pytest.raises(UserError) as refused:
            load("", f"--{'x.' if '.' not in name else ''}{name}=1")
        said = re.search(r"it is called ([\w.]+) here", str(refused.value))
        assert said and said[1] in (*LIVE, *PENDING), f"{name}: {refused.value}"


def test_a_mistyped_key_is_answered_with_a_key_that_has_an_effect(load: Loader) -> None:
    for key in LIVE:
        with pytest.raises(UserError) as refused:
            load(section(f"{key}x", "1"))
        said = re.search(r"(?:did you mean|it is called) ([\w.]+)", str(refused.value))
        assert said and said[1] in (*LIVE, *PENDING), f"{key}x: {refused.value}"


def test_several_names_of_one_trainer_for_a_key_say_in_what_they_differ() -> None:
    theirs = aliases()
    silent = [
        name
        for by_trainer in theirs.by_key.values()
        for trainer, names in by_trainer.items()
        for name in names[1:]
        if trainer != "others" and name not in DIFFERENCES
    ]
    assert silent == []
    names = {name for key in theirs.by_key for name in theirs.names_of(key)}
    assert set(DIFFERENCES) <= names


EXPLAINED = [
    ("trainer.device", ["called context.device_target here"]),
    ("reward_model.reward_manager", ["reward_config.verifier_function"]),
    ("data.reward_fn_key", ["reward_config.verifier_function"]),
    (
        "custom_reward_function.name",
        ["called reward_config.verifier_function", "file.py:function"],
    ),
    ("actor_rollout_ref.rollout.enable_chunked_prefill", ["generate_config.vllm.arguments"]),
    (
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu",
        ["called rl_config.batch_size here: old log-probs"],
    ),
    (
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu",
        ["called ref_config.ref_model_batch_size here"],
    ),
    ("actor_rollout_ref.actor.use_kl_loss=True", ["beta: 0.001  # actor_rollout_ref.actor.use_kl"]),
    ("algorithm.kl_ctrl.kl_coef", ["rl_config.beta here", "rl_config.kl_in_reward"]),
    (
        "+data.filter_overlong_prompts=True",
        ['prompt_overflow: "drop"  # data.filter_overlong_prompts'],
    ),
    ("sft_path_infer", ["called generate_config.model_config here"]),
    ("sft_path_train", ["called actor_config.model_config here"]),
    ("load_sft_checkpoint_train", ["called actor_config.load here"]),
    ("gradient_aggregation_group", ["is retired", "buckets"]),
    ("resume", ["called rl_config.resume_training here"]),
    ("peft_config", ["actor_config.lora.rank"]),
]


def test_config_explains_a_name_as_what_it_is(
    capsys: pytest.CaptureFixture[str], subtests: pytest.Subtests
) -> None:
    for name, answers in EXPLAINED:
        with subtests.test(name=name):
            assert main(["config", "--explain", name]) == 0
            said = capsys.readouterr().out
            for answer in answers:
                assert answer in said


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (
            ["--resume"],
            "--resume is no flag of this program; it is called --rl_config.resume_training",
        ),
        (["--resume", "true"], "it is called --rl_config.resume_training here"),
        (["--sft_path_infer", "x.yaml"], "it is called --generate_config.model_config here"),
        (["algorithm.adv_estimator=grpo"], "it is called --rl_config.advantage_estimator here"),
        (["my file"], "write --key value, and quote values that hold spaces"),
    ],
)
def test_a_word_of_another_trainers_command_line_is_answered_with_the_flag(
    load: Loader, words: list[str], remedy: str
) -> None:
    with pytest.raises(UserError) as refused:
        load("", *words)
    assert remedy in str(refused.value)
