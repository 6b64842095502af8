"""Reads and checks the inputs of a run before anything compiles: model configuration, tokenizer, data, rewards.

Loads no weights and touches no device.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from mindgrpo.backend.kernels.shapes import SamplingParams
from mindgrpo.config import Config, memory_bytes
from mindgrpo.config.algorithm_checks import without_rewards
from mindgrpo.data.examples import RowForm, parse_key_map
from mindgrpo.data.image_prompts import RunImages
from mindgrpo.data.prompts import PromptSet
from mindgrpo.data.row_files import Seeds
from mindgrpo.data.sources import (
    ALONE,
    FOR_EVALUATION,
    FOR_TRAINING,
    Examples,
    Ranks,
    SplitChoice,
    open_examples,
)
from mindgrpo.data.supervised import SupervisedForm, SupervisedRowForm
from mindgrpo.data.tokenizer import Tokenizer, load_tokenizer
from mindgrpo.errors import UserError, counted, error_of
from mindgrpo.grpo.inputs import Inputs, sampling_params
from mindgrpo.grpo.scoring import CompletionForm
from mindgrpo.memory.residency import check_budget
from mindgrpo.models.decoder_config import DecoderConfig, read_config
from mindgrpo.models.mindformers_yaml import check_agreement
from mindgrpo.models.parameters import parameter_specs
from mindgrpo.models.precision import dtype_notices
from mindgrpo.plan.memory import check_engine
from mindgrpo.plan.model_roles import OtherModels
from mindgrpo.plan.run_plan import RunPlan, plan_run
from mindgrpo.rewards.classifier_texts import ClassifierTexts
from mindgrpo.rewards.executors import Limits
from mindgrpo.rewards.score import Scorer
from mindgrpo.rollout.environment import NAME as ENVIRONMENT_NAME
from mindgrpo.rollout.environment import EnvironmentForm, RowsOfMixture, Trial
from mindgrpo.rollout.turns import Turns, read_turns
from mindgrpo.rollout.vllm.environment import find_python, read_versions, untried
from mindgrpo.rollout.vllm.settings import BLOCK_MULTIPLE
from mindgrpo.run.image_inputs import check_encoders, read_images
from mindgrpo.weights.pretrained import check_tensors

Reward = str | Callable[..., Any]
# Where an environment makes its examples; held-out ones are apart.
SEEDS = {"dataset_file": range(10_000), "eval_dataset_file": range(10_000, 11_000)}


MESSAGES_NOTE = (
    "your reward functions get completions as lists of messages, as TRL passes them where prompts are such lists "
    "(reward_config.completions: text for texts)"
)


def try_environment(turns: Turns | None, prompts: PromptSet, ranks: Ranks) -> Trial | None:
    """Tries the environment on one rank, if there is one. Raises UserError on all ranks."""
    if not isinstance(turns, EnvironmentForm):
        return None
    trial: Trial = ranks.by_one(lambda: turns.check(prompts))
    return trial


def prepare(
    config: Config,
    world_size: int | None,
    reward_functions: Sequence[Reward] | None = None,
    reward_weights: Sequence[float] | None = None,
    ranks: Ranks = ALONE,
    scores: bool = True,
    form: CompletionForm = "text",
) -> Inputs:
    """Reads and checks all inputs. Raises UserError. `reward_functions` replace those of reward_config and its weights.

    Collective over `ranks`, which share the work of reading data. If this process `scores`, reward functions start to
    load first, and have to be checked with `check_rewards` afterwards. `form` is the format of completions for them if
    reward_config.completions is unset; as_prompts also passes the column `answer` unchanged.
    """
    with ExitStack() as unless_read:
        scorer = scorer_of(config, reward_functions, reward_weights) if scores else None
        if scorer is not None:
            unless_read.callback(scorer.close)
        inputs = _read(config, world_size, ranks, scorer, form)
        unless_read.pop_all()
    asked, notes = config.reward_config.completions, inputs.notes
    if asked is None and form == "as_prompts" and inputs.prompts[0].example.is_conversation:
        notes = (*notes, MESSAGES_NOTE)
    return replace(inputs, form=asked or form, notes=notes)


def read_model(config: Config) -> DecoderConfig:
    """Reads the configuration of the actor's model."""
    if not config.actor_config.load:
        raise UserError(
            "actor_config.load is empty; set it to the Hugging Face directory of the model to train."
        )
    return generating(read_config(config.actor_config.load), "actor_config.load")


def generating(model: DecoderConfig, key: str) -> DecoderConfig:
    """Returns `model` if it has a vocabulary in its head. Raises UserError, with the `key` that names it."""
    if model.head == "vocabulary":
        return model
    raise UserError(
        f"{key} names a sequence classifier, which scores texts and writes none; name a language model here, and the "
        "classifier in reward_config.model.load."
    )


def read_reward_models(
    config: Config, keys: Collection[str] | None = None
) -> dict[str, DecoderConfig]:
    """Reads the configurations of the reward models (of those in sections `keys`), by section. Raises UserError."""
    models = {}
    for key, own in config.reward_config.models_by_key.items():
        if keys is not None and key not in keys:
            continue
        model = read_config(str(own.load))
        if model.moe is not None:
            raise UserError(
                f"{key}.load '{own.load}' has experts ({model.model_type}), which a reward model cannot have yet; name "
                "a dense model."
            )
        if model.raw.get("quantization_config"):
            raise UserError(
                f"{key}.load '{own.load}' is quantised (quantization_config in config.json), which is not read; name "
                "the model that it was made from."
            )
        if model.vision is not None:
            raise UserError(
                f"{key}.load '{own.load}' sees images ({model.model_type}), which reward models are not given yet; "
                "name a model of text."
            )
        models[key] = model.with_scalar_head()
    return models


def read_other_models(config: Config, model: DecoderConfig) -> OtherModels:
    """Reads the configurations of models beside the policy, which is `model`. Raises UserError."""
    return OtherModels(read_teacher(config, model), read_reward_models(config), read_critic(config))


def read_critic(config: Config) -> DecoderConfig | None:
    """Reads the configuration of the critic; None if it is the policy's, or if there is no critic."""
    if not config.has_critic or config.critic_load == config.actor_config.load:
        return None
    return read_config(config.critic_load).with_scalar_head()


def read_classifier_texts(
    config: Config, tokenizer: Tokenizer | None, models: Mapping[str, DecoderConfig]
) -> dict[str, ClassifierTexts]:
    """Reads the tokenizers of the reward models; `tokenizer` is the policy's, if there is one. Raises UserError."""
    texts = {}
    for key, own in config.reward_config.models_by_key.items():
        model, directory = models[key], str(own.load)
        try:
            theirs = load_tokenizer(directory).known_to(model.vocab_size)
            date = None if tokenizer is None else tokenizer.date
            theirs = replace(theirs.with_template(own.chat_template), date=date)
        except UserError as error:
            raise UserError(f"{key}: {error}") from error
        pad_id = model.raw.get("pad_token_id")
        texts[key] = ClassifierTexts(theirs, tokenizer, pad_id if type(pad_id) is int else None)
    return texts


def read_teacher(config: Config, model: DecoderConfig) -> DecoderConfig | None:
    """Reads the configuration of the reference model; None if it equals the policy's, `model`.

    Raises UserError if they differ although the reference is to be updated from the policy.
    """
    if not config.has_reference or config.reference_load == config.actor_config.load:
        return None
    teacher = generating(read_config(config.reference_load), "ref_config.load")
    if replace(teacher, raw={}) == replace(model, raw={}):
        return None
    if config.ref_config.sync_ref_model:
        raise UserError(
            f"ref_config.sync_ref_model is true, but the model in ref_config.load '{config.reference_load}' is another "
            "one than the policy's and cannot become a copy of it; set sync_ref_model to false."
        )
    return teacher


def check_vocabulary(key: str, directory: str, tokenizer: Tokenizer, model: DecoderConfig) -> None:
    """Raises UserError if a `model` of other shapes in `directory`, named by `key`, has not the run's vocabulary."""
    known = load_tokenizer(directory).codec.get_vocab(with_added_tokens=True)
    vocabulary = tokenizer.codec.get_vocab(with_added_tokens=True).items()
    # Tokens outside of the policy's vocabulary occur in no sample.
    own = {token: number for token, number in vocabulary if number < tokenizer.num_known}
    differing = sorted(token for token, number in own.items() if known.get(token) != number)
    if differing:
        token = differing[0]
        raise UserError(
            f"{key} '{directory}' has another tokenizer than the policy: token {token!r} is {own[token]} "
            f"here and {known.get(token)} there; name a model with the same tokenizer."
        )
    largest = max(own.values(), default=0)
    if largest >= model.vocab_size:
        raise UserError(
            f"{key} '{directory}' knows {model.vocab_size} tokens (vocab_size), but the tokenizer has ids "
            f"up to {largest}; name a model with the same tokenizer."
        )


def read_tokenizer(config: Config, model: DecoderConfig) -> Tokenizer:
    """Reads the tokenizer, with the configured chat template and date, and limits it to the model's vocabulary."""
    rl = config.rl_config
    tokenizer = load_tokenizer(config.tokenizer_dir, model_directory=config.actor_config.load)
    date = datetime.fromisoformat(rl.chat_template_date) if rl.chat_template_date else None
    return replace(tokenizer.known_to(model.vocab_size).with_template(rl.chat_template), date=date)


def held_out_prompts(
    config: Config,
    tokenizer: Tokenizer,
    ranks: Ranks,
    turns: Turns | None,
    evaluates: bool,
    keeps_answer: bool = False,
    images: RunImages | None = None,
) -> PromptSet | None:
    """Returns the held-out prompts, which may be seeds if the run `evaluates`; None without held-out rows.

    `keeps_answer` is that of RowForm.
    """
    rl = config.rl_config
    if not rl.eval_dataset_file and not (rl.uses_seeds and evaluates):
        return None
    choice = replace(FOR_EVALUATION, name=rl.eval_dataset_split)
    how = "eval_dataset_file", keeps_answer, images
    return _prompts(config, tokenizer, ranks, turns, choice, *how)


def prepare_supervised(config: Config, world_size: int | None, ranks: Ranks = ALONE) -> Inputs:
    """Reads all inputs of supervised training. Collective over `ranks`, which share the work. Raises UserError."""
    plan, tokenizer = _read_model(config, world_size, generates=False)
    rl, images = config.rl_config, read_images(config, plan.model, config.rl_config.seq_length)
    form = SupervisedForm(
        tokenizer, rl.seq_length, rl.prompt_overflow, rl.system_prompt or "", images=images
    )
    key_map = parse_key_map(rl.dataset_map_keys)
    rows = SupervisedRowForm(None, key_map, sees_images=images is not None)

    def read(key: str, path: str, choice: SplitChoice) -> PromptSet:
        return PromptSet(open_examples(path, rows, choice, ranks=ranks, key=key), form, ranks)

    assert rl.dataset_file is not None
    choice = replace(FOR_TRAINING, name=rl.dataset_split)
    training, held_out = read("rl_config.dataset_file", rl.dataset_file, choice), None
    if rl.eval_dataset_file:
        choice = replace(FOR_EVALUATION, name=rl.eval_dataset_split)
        held_out = read("rl_config.eval_dataset_file", rl.eval_dataset_file, choice)
    sampling = sampling_params(config, tokenizer)
    notes = tuple(dtype_notices(config))
    return Inputs(
        plan=plan,
        tokenizer=tokenizer,
        prompts=training,
        held_out=held_out,
        sampling=sampling,
        notes=notes,
        images=images,
    )


def _read_model(
    config: Config, world_size: int | None, generates: bool = True
) -> tuple[RunPlan, Tokenizer]:
    model = read_model(config)
    others, directory = read_other_models(config, model), config.actor_config.load
    teacher = others.teacher
    for role in (config.actor_config, config.generate_config):
        if role.model_yaml:
            check_agreement(model, role.model_yaml, directory)
    if config.ref_config.model_yaml:
        own = (model, directory) if teacher is None else (teacher, config.reference_load)
        check_agreement(own[0], config.ref_config.model_yaml, own[1])
    plan = replace(plan_run(config, model, world_size, others), generates=generates)
    check_engine(plan)
    check_budget(plan.memory(), config.context.max_device_bytes)
    check_tensors(config.actor_config.load, parameter_specs(model))
    check_encoders(plan)
    for beside in plan.forward_roles:
        if beside is not plan.reference or beside.load != config.actor_config.load:
            check_tensors(beside.load, beside.layout.specs)
    tokenizer = read_tokenizer(config, model)
    if plan.critic is not None:
        specs = plan.critic.train.specs
        check_tensors(config.critic_load, specs, may_lack_score=True)
    for key, load, shapes in (
        ("ref_config.load", config.reference_load, teacher),
        ("critic_config.load", config.critic_load, others.critic),
    ):
        if shapes is not None:
            check_vocabulary(key, load, tokenizer, shapes)
    save = config.actor_config.save
    if save and Path(save).exists() and not Path(save).is_dir():
        raise UserError(
            f"actor_config.save '{save}' is a file and is not overwritten; name a folder or leave it out."
        )
    return plan, tokenizer


def _read(
    config: Config,
    world_size: int | None,
    ranks: Ranks,
    scorer: Scorer | None,
    form: CompletionForm,
) -> Inputs:
    plan, tokenizer = _read_model(config, world_size)
    rl = config.rl_config
    choice = replace(FOR_TRAINING, name=rl.dataset_split)
    images = read_images(config, plan.model, config.generate_config.max_prompt_length)
    turns = read_turns(config, tokenizer, images)
    evaluates, keeps_answer = rl.eval_steps > 0, form == "as_prompts"
    own = keeps_answer, images
    prompts = _prompts(config, tokenizer, ranks, turns, choice, "dataset_file", *own)
    held_out = held_out_prompts(config, tokenizer, ranks, turns, evaluates, *own)
    if rl.role_column is not None and rl.role_column not in prompts.column_names:
        raise UserError(
            f"rl_config.role_column is {rl.role_column}, but the columns of rl_config.dataset_file {rl.dataset_file} "
            f"are {', '.join(prompts.column_names) or 'none'}; name one of its columns, or leave role_column out."
        )
    sampling = sampling_params(config, tokenizer)
    if sampling.greedy and rl.num_generations > 1:
        raise UserError(
            "generate_config.sampling_config.temperature is 0, which draws the same completion "
            f"rl_config.num_generations ({rl.num_generations}) times, so every advantage would be 0; set temperature "
            "above 0."
        )
    trial = try_environment(turns, prompts, ranks)
    texts = read_classifier_texts(config, tokenizer, plan.other_models.reward_models)
    notes = (
        *_stop_notes(sampling, plan.model.vocab_size),
        *plan.notices,
        *engine_notes(config),
        *turn_notes(config, trial),
        *ended_notes(config),
    )
    return Inputs(
        plan=plan,
        tokenizer=tokenizer,
        prompts=prompts,
        held_out=held_out,
        scorer=scorer,
        sampling=sampling,
        notes=notes,
        turns=turns,
        trial=trial,
        classifier_texts=texts,
        images=images,
    )


def ended_notes(config: Config) -> list[str]:
    """Says who calls reward functions where groups are scored as they end."""
    if not config.reward_config.score_as_ended:
        return []
    ranks = counted(config.generate_config.parallel_config.replicas, "rank")
    return [
        "reward functions get whole groups as they end (reward_config.score_as_ended), several times a step: on "
        f"{ranks}, each with a state of its own"
    ]


def engine_notes(config: Config) -> list[str]:
    """Returns notes on the environment of vLLM's engines. Raises UserError if there is no such environment."""
    if not config.generate_config.uses_vllm:
        return []
    block = config.generate_config.block_size
    if config.context.target.keeps_weights_on_host and block and block % BLOCK_MULTIPLE:
        raise UserError(
            f"generate_config.block_size is {block}, but where processors compute vLLM takes multiples of "
            f"{BLOCK_MULTIPLE}; set it to {-(-block // BLOCK_MULTIPLE) * BLOCK_MULTIPLE}, or leave it out."
        )
    python = find_python(config.generate_config.vllm.python, os.environ)
    warning = untried(read_versions(python))
    return [] if warning is None else [warning]


def _stop_notes(sampling: SamplingParams, vocab_size: int) -> list[str]:
    """Warns of stop ids outside of the vocabulary: they never end a sample, so completions run to max_tokens."""
    outside = [i for i in sampling.stop_ids if i >= vocab_size]
    if not outside:
        return []
    left = len(outside) < len(sampling.stop_ids)
    return [
        f"generate_config.sampling_config.eos_token_id {', '.join(map(str, outside))} is outside of "
        f"the model's {vocab_size} tokens and ends no sample"
        + ("" if left else ", nor does any other id; leave the key out for the model's own")
    ]


def turn_notes(config: Config, trial: Trial | None) -> list[str]:
    """Warns of an environment in which conversations end before their second turn."""
    most = config.generate_config.sampling_config.max_tokens
    if trial is None or config.rl_config.max_turns == 1 or trial.two_turns <= most:
        return []
    return [
        f"generate_config.sampling_config.max_tokens is {most}, but counts a whole conversation, and two turns like "
        f"the gold answer of the first row take {trial.two_turns} tokens with the environment's reply between them: "
        "conversations end after one turn; raise it"
    ]


def scorer_of(
    config: Config,
    reward_functions: Sequence[Reward] | None = None,
    reward_weights: Sequence[float] | None = None,
) -> Scorer:
    rewards = config.reward_config
    functions: Sequence[Reward] = rewards.verifier_function
    weights: Sequence[float] | None = config.verifier_weights
    if reward_functions is not None:
        # Weights of the configuration belong to the configuration's functions.
        own = None if functions else rewards.verifier_weight
        if own is not None and reward_weights is not None and list(reward_weights) != own:
            raise UserError(
                f"reward_weights is {list(reward_weights)} and reward_config.verifier_weight is {own}; leave one of "
                "them out."
            )
        functions, weights = reward_functions, own if reward_weights is None else reward_weights
    has_environment = config.rl_config.environment is not None
    may_be_empty = config.may_lack_functions
    if not functions and not may_be_empty:
        raise UserError(
            "reward_config.verifier_function is empty, so there is no reward to train with; name a reward, such as "
            "accuracy_reward, module:function or file.py:function."
        )
    earning = [1.0] * len(functions) if weights is None else list(weights)
    earning += [rewards.environment_weight] * has_environment
    models = rewards.models_by_key
    earning += [own.weight for own in models.values()]
    if not any(earning) and (sentences := [*without_rewards(config.rl_config)]):
        raise error_of(f"{sentence}." for sentence in sentences)
    limits = Limits(
        rewards.deadline, rewards.together_deadline, memory_bytes(rewards.memory), rewards.workers
    )
    facts = {"max_completion_length": config.generate_config.sampling_config.max_tokens}
    scorer = Scorer(functions, weights, limits, facts, may_be_empty=may_be_empty)
    taken = {own.score_name: f"the scores of {key}" for key, own in models.items()}
    if has_environment:
        taken[ENVIRONMENT_NAME] = "the rewards of rl_config.environment"
    for name in scorer.names:
        if name in taken:
            scorer.close()
            raise UserError(f"A reward function is named {name}, as {taken[name]} are; rename it.")
    return scorer


def _prompts(
    config: Config,
    tokenizer: Tokenizer,
    ranks: Ranks,
    turns: Turns | None,
    choice: SplitChoice,
    name: str,
    keeps_answer: bool,
    images: RunImages | None,
) -> PromptSet:
    rl, key = config.rl_config, f"rl_config.{name}"
    path: str | None = getattr(rl, name)
    key_map = parse_key_map(rl.dataset_map_keys)
    rows = RowForm(rl.dataset_type, key_map, rl.dataset_columns, keeps_answer, images is not None)
    if path:
        examples = open_examples(path, rows, choice, decode=tokenizer.decode, ranks=ranks, key=key)
    elif rl.uses_seeds:
        examples = Examples(Seeds(SEEDS[name]), RowForm())
    else:
        raise UserError(
            f"{key} is not set; give a JSONL, JSON, CSV, Parquet or MindRecord file of questions and answers, or a "
            "directory of Hugging Face datasets."
        )
    longest = config.generate_config.max_prompt_length
    schemas = () if turns is None else turns.schemas
    mixture = turns.mixture if isinstance(turns, EnvironmentForm) else None
    fits = longest, rl.prompt_overflow, rl.system_prompt or "", schemas, images
    return PromptSet(examples, RowsOfMixture(tokenizer, *fits, mixture), ranks)
