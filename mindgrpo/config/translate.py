"""Translates settings of other trainers, `name=value` as on their command lines, to the YAML that they mean here.

Takes over values that mean the same, and those that a rule of this file converts. Whatever else is set becomes a
comment with what is different, so that nothing is lost silently.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mindgrpo.config.command_line import FLAGS
from mindgrpo.config.load import as_yaml, config_with, parsed
from mindgrpo.config.names import aliases, suggestion
from mindgrpo.config.schema import LIVE
from mindgrpo.config.yaml_file import flatten
from mindgrpo.errors import UserError, sentences_of
from mindgrpo.strict_files import read_text

ACTOR, ROLLOUT, MODEL = (f"actor_rollout_ref.{name}" for name in ("actor", "rollout", "model"))
# Of names with a difference in aliases.yaml: those whose values are the same all the same.
SAME = (
    f"{ACTOR}.clip_ratio_low",
    f"{ACTOR}.optim.clip_grad",
    f"{ACTOR}.optim.warmup_style",
    f"{ACTOR}.ulysses_sequence_parallel_size",
    f"{ACTOR}.megatron.context_parallel_size",
    f"{ROLLOUT}.response_length",
    f"{ROLLOUT}.prompt_length",
    "data.max_response_length",
    "trainer.resume_from_path",
    "vllm_importance_sampling_mode",
    "vllm_importance_sampling_clip_max",
)
# Values by name: theirs -> ours; others are left as they are, or, where a name is also in ONLY, become comments.
WORDS: Mapping[str, Mapping[object, object]] = {
    f"{ACTOR}.kl_loss_type": {"kl": "k1", "mse": "k2", "low_var_kl": "k3"},
    f"{ACTOR}.loss_agg_mode": {
        "token-mean": "token_mean",
        "seq-mean-token-mean": "sample_mean",
        "seq-mean-token-sum": "sample_sum",
        "seq-mean-token-sum-norm": "constant",
    },
    f"{ROLLOUT}.name": {"vllm": 1},
    f"{ROLLOUT}.val_kwargs.do_sample": {True: ["sampled"], False: ["greedy"]},
    "algorithm.adv_estimator": {"grpo_passk": "pass_at_k"},
    "algorithm.norm_adv_by_std_in_grpo": {True: "group", False: "none"},
    "algorithm.rollout_correction.bypass_mode": {True: "generator"},
    "data.filter_overlong_prompts": {True: "drop"},
    "trainer.resume_mode": {"auto": True, "disable": False},
}
ONLY = tuple(name for name in WORDS if name != "algorithm.adv_estimator")
# Theirs for "not set", by name.
UNSET: Mapping[str, Sequence[object]] = {
    "trainer.save_freq": (-1,),
    "trainer.test_freq": (-1,),
    "trainer.total_training_steps": (-1,),
    "max_steps": (-1,),
    f"{MODEL}.lora_rank": (0,),
    f"{MODEL}.target_modules": ("all-linear",),
    f"{ROLLOUT}.top_k": (-1,),
}
LENGTHS = {"generate_config.max_prompt_length", "generate_config.sampling_config.max_tokens"}
NO_TRACKERS = ("console", "file", "tensorboard")
ASSIGNED = re.compile(r"(?:\+\+?|--)?(?P<name>[A-Za-z_][\w.]*)=(?P<value>.*)", re.DOTALL)
Settings = dict[str, Any]
Values = dict[str, object]


def is_setting(word: str) -> bool:
    """Says whether a word is `name=value` or names a file of such."""
    return bool(ASSIGNED.fullmatch(word)) or Path(word).is_file()


def translate(words: Sequence[str]) -> str:
    """Returns the YAML of `name=value` words and of files with them: shell scripts or YAML. Raises UserError."""
    settings: Settings = {}
    for word in words:
        match = ASSIGNED.fullmatch(word)
        settings |= {match["name"]: parsed(match["value"])} if match else read(Path(word))
    values: Values = {}
    origins: dict[str, str] = {}
    remarks: list[str] = []
    for name, value in settings.items():
        meant = meaning(name, value, settings)
        if isinstance(meant, str):
            remarks.append(f"{name}={value}: {meant}")
            continue
        values |= meant
        origins |= dict.fromkeys(meant, name)
    lengths = [value for key in LENGTHS if isinstance(value := values.get(key), int)]
    if "rl_config.seq_length" not in values and len(lengths) == len(LENGTHS):
        # Rows hold a prompt and its completion; others have no such limit.
        values["rl_config.seq_length"] = sum(lengths)
        origins["rl_config.seq_length"] = "the sum of both lengths"
    try:
        config_with(None, values)
    except UserError as error:
        remarks += [f"to be corrected: {sentence}" for sentence in sentences_of(error)]
    return "\n".join([*(f"# {remark}" for remark in remarks), *lines_of(values, origins)])


def read(path: Path) -> Settings:
    """Reads the settings of a file: a YAML file's keys, else each word `name=value` or `--name value` of a script."""
    text = read_text(path, "the settings", "give a script, or a YAML file of settings.")
    if path.suffix in (".yaml", ".yml"):
        document = parsed(text)
        if not isinstance(document, dict):
            raise UserError(f"{path} holds no keys; give a YAML file of them, or a script.")
        entries: Settings = {}
        for section, inner in document.items():
            entries |= {key: held.value for key, held in flatten(inner, str(section), "").items()}
        return entries
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise UserError(f"{path} cannot be read as a shell script: {error}.") from None
    return dict(settings_of(words))


def settings_of(words: Sequence[str]) -> Iterator[tuple[str, Any]]:
    for word, following in zip(words, [*words[1:], ""], strict=True):
        match = ASSIGNED.fullmatch(word)
        if match and (
            word.startswith("--") or "." in match["name"] or aliases().remedy(match["name"])
        ):
            yield match["name"], parsed(match["value"])
        elif word.startswith("--") and following and not following.startswith("-"):
            name = word[2:]
            if name in LIVE or word in FLAGS or aliases().remedy(name):
                yield name, parsed(following)


def meaning(name: str, value: Any, settings: Settings) -> Values | str:
    """Returns the values by key that a setting means, or why there is none."""
    full = aliases().full(name)
    if name in LIVE or f"--{name}" in FLAGS:
        key = FLAGS.get(f"--{name}", name)
        return {key: value}
    if full in RULES:
        return RULES[full](value, Others(settings))
    ours = aliases().taken_from_trl.get(name) or aliases().ours(name)
    if ours is None:
        return suggestion(name)
    if value is None or value in UNSET.get(full, ()):
        return {}
    difference = aliases().differences.get(full)
    words = WORDS.get(full, {})
    if isinstance(value, str | bool) and value in words:
        return {ours: words[value]}
    if full in ONLY or (difference and full not in (*SAME, *WORDS)):
        return f"{ours} here{f': {difference}' if difference else ''}"
    if name == "epsilon":
        return {ours: value, "rl_config.epsilon_high": settings.get("epsilon_high") or value}
    if isinstance(value, list) and len(value) == 1 and ours.endswith("_file"):
        value = value[0]
    return {ours: value}


class Others(dict[str, Any]):
    """The settings by their names in full."""

    def __init__(self, settings: Settings) -> None:
        super().__init__({aliases().full(name): value for name, value in settings.items()})


def updates(value: Any, others: Others) -> Values | str:
    prompts = others.get("data.train_batch_size")
    if isinstance(prompts, int) and isinstance(value, int) and value > 0 and prompts % value == 0:
        return {"rl_config.updates_per_rollout": prompts // value}
    return "data.train_batch_size / this number is rl_config.updates_per_rollout here"


def lowest_rate(value: Any, others: Others) -> Values | str:
    rate = others.get(f"{ACTOR}.optim.lr")
    if isinstance(rate, int | float) and isinstance(value, int | float):
        return {"actor_config.lr_schedule.min_lr": float(rate * value)}
    return "this number times the learning rate is actor_config.lr_schedule.min_lr here"


def both_sides(value: Any, others: Others) -> Values:
    high = others.get(f"{ACTOR}.clip_ratio_high", value)
    low = others.get(f"{ACTOR}.clip_ratio_low", value)
    return {"rl_config.epsilon_low": low, "rl_config.epsilon_high": high}


def kl_of(switch: str) -> Callable[[Any, Others], Values | str]:
    """Returns the rule of a weight of the KL that counts with a switch only."""

    def rule(value: Any, others: Others) -> Values | str:
        if others.get(switch) is True:
            return {"rl_config.beta": value}
        return f"without effect there, without {switch}=True"

    return rule


def switch_of_kl(value: Any, others: Others) -> Values | str:
    name = f"{ACTOR}.use_kl_loss"
    if value is True and f"{ACTOR}.kl_loss_coef" not in others:
        return f"rl_config.beta here: {aliases().differences[name]}"
    in_reward = others.get("algorithm.use_kl_in_reward") is True
    return {} if value is True or in_reward else {"rl_config.beta": 0.0}


def both_betas(value: Any, _: Others) -> Values | str:
    if not isinstance(value, list) or len(value) != 2:
        return "actor_config.optimizer.adam_beta1 and adam_beta2 here"
    keys = ("actor_config.optimizer.adam_beta1", "actor_config.optimizer.adam_beta2")
    return dict(zip(keys, value, strict=True))


def loss_mode(value: Any, _: Others) -> Values | str:
    if value == "vanilla":
        return "a clipped loss, such as rl_config.loss_type dapo, the average of which is loss_aggregation"
    if value == "gspo":
        return {"rl_config.importance_sampling_level": "sequence"}
    return {"rl_config.loss_type": {"geo_mean": "gmpo"}.get(value, value)}


def reward_file(value: Any, others: Others) -> Values:
    name = others.get("custom_reward_function.name") or "compute_score"
    return {"reward_config.verifier_function": [f"{value}:{name}"]}


def question_key(value: Any, _: Others) -> Values:
    return {} if value == "prompt" else {"rl_config.dataset_map_keys": [f"question={value}"]}


def truncation(value: Any, others: Others) -> Values:
    is_dropped = others.get("data.filter_overlong_prompts") is True
    return {} if is_dropped else {"rl_config.prompt_overflow": value}


def trackers(value: Any, _: Others) -> Values:
    listed = value if isinstance(value, list) else [value]
    return {"monitor_config.trackers": [name for name in listed if name not in NO_TRACKERS]}


RULES: Mapping[str, Callable[[Any, Others], Values | str]] = {
    f"{ACTOR}.ppo_mini_batch_size": updates,
    f"{ACTOR}.optim.min_lr_ratio": lowest_rate,
    f"{ACTOR}.optim.betas": both_betas,
    f"{ACTOR}.clip_ratio": both_sides,
    f"{ACTOR}.use_kl_loss": switch_of_kl,
    f"{ACTOR}.kl_loss_coef": kl_of(f"{ACTOR}.use_kl_loss"),
    "algorithm.kl_ctrl.kl_coef": kl_of("algorithm.use_kl_in_reward"),
    f"{ACTOR}.policy_loss.loss_mode": loss_mode,
    "custom_reward_function.path": reward_file,
    "custom_reward_function.name": lambda value, others: {},
    "data.prompt_key": question_key,
    "data.truncation": truncation,
    "trainer.logger": trackers,
}


def lines_of(values: Values, origins: Mapping[str, str]) -> Iterator[str]:
    """Yields YAML in the order of the schema, each value with the name that it is from."""
    above: list[str] = []
    for key in filter(values.__contains__, LIVE):
        *sections, leaf = key.split(".")
        for depth, section in enumerate(sections):
            if above[: depth + 1] != sections[: depth + 1]:
                yield f"{'  ' * depth}{section}:"
                above = sections[: depth + 1]
        above = sections
        origin = f"  # {origins[key]}" if origins[key] != key else ""
        yield f"{'  ' * len(sections)}{leaf}: {as_yaml(values[key])}{origin}"
