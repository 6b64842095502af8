"""Everything a run is given, read and checked in one process before a rank compiles: model, tokenizer, data, rewards.

Refuses whatever cannot work with one sentence; loads no weights and touches no device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindgrpo.config import Config, memory_bytes
from mindgrpo.data.prompts import PromptSet, columns_of
from mindgrpo.data.records import read_records
from mindgrpo.data.tokenizer import Tokenizer, load_tokenizer
from mindgrpo.errors import UserError
from mindgrpo.generate.settings import SamplingSettings
from mindgrpo.model.families import parameter_specs, read_config
from mindgrpo.model.pretrained import check_tensors
from mindgrpo.model.shapes import check_agreement
from mindgrpo.reward.call import own_columns
from mindgrpo.reward.limits import Limits
from mindgrpo.reward.score import Scorer
from mindgrpo.run_plan import RunPlan, plan_run

Reward = str | Callable[..., Any]


@dataclass(frozen=True)
class Inputs:
    """What a run works on; `held_out` is None without an evaluation data set, `scorer` where nobody scores."""

    plan: RunPlan
    tokenizer: Tokenizer
    prompts: PromptSet
    held_out: PromptSet | None
    scorer: Scorer | None
    sampling: SamplingSettings

    def check_rewards(self) -> None:
        """Two samples through every reward; waits until all have been imported. Raises UserError."""
        if self.scorer is None:
            return
        two = (self.prompts.prompts * 2)[:2]
        answers = [prompt.answer for prompt in two]
        ids = [self.tokenizer.encode(answer) for answer in answers]
        made = own_columns([prompt.text for prompt in two], ids, ["stop"] * len(two))
        self.scorer.dry_run(answers, answers, made | columns_of(two))


def prepare(
    config: Config,
    world_size: int | None,
    reward_functions: Sequence[Reward] | None = None,
    reward_weights: Sequence[float] | None = None,
    scores: bool = True,
) -> Inputs:
    """Raises UserError. `reward_functions` stand in for those of reward_config, weights included.

    Where this process `scores`, rewards begin to load first, to be checked with `check_rewards` at the end.
    """
    if not scores:
        return _read(config, world_size, None)
    scorer = _scorer(config, reward_functions, reward_weights)
    try:
        return _read(config, world_size, scorer)
    except BaseException:
        scorer.close()
        raise


def _read(config: Config, world_size: int | None, scorer: Scorer | None) -> Inputs:
    if not config.actor_config.load:
        raise UserError(
            "actor_config.load is empty; set it to the Hugging Face directory of the model to train."
        )
    model = read_config(config.actor_config.load)
    for role in (config.actor_config, config.ref_config, config.generate_config):
        if role.model_yaml:
            check_agreement(model, role.model_yaml, config.actor_config.load)
    plan = plan_run(config, model, world_size)
    check_tensors(config.actor_config.load, parameter_specs(model))
    if plan.reference is not None and config.reference_load != config.actor_config.load:
        check_tensors(config.reference_load, parameter_specs(model))
    tokenizer = load_tokenizer(config.tokenizer_dir)
    if tokenizer.vocab_size > model.vocab_size:
        raise UserError(
            f"The tokenizer in '{config.tokenizer_dir}' has ids up to {tokenizer.vocab_size - 1}, but the model's "
            f"vocab_size is {model.vocab_size}; set rl_config.tokenizer_dir to the model's own tokenizer."
        )
    _check_save(config)
    prompts = _prompts(config, tokenizer, config.rl_config.dataset_file, "rl_config.dataset_file")
    held_out = None
    if config.rl_config.eval_dataset_file:
        path = config.rl_config.eval_dataset_file
        held_out = _prompts(config, tokenizer, path, "rl_config.eval_dataset_file")
    sampling = sampling_settings(config, tokenizer)
    return Inputs(plan, tokenizer, prompts, held_out, scorer, sampling)


def sampling_settings(config: Config, tokenizer: Tokenizer) -> SamplingSettings:
    given = config.generate_config.sampling_config
    stops = given.eos_token_id
    stop_ids = (stops,) if isinstance(stops, int) else tuple(stops or tokenizer.stop_ids)
    return SamplingSettings(
        temperature=given.temperature,
        top_k=max(0, given.top_k),
        top_p=given.top_p,
        min_p=given.min_p,
        repetition_penalty=given.repetition_penalty,
        min_tokens=given.min_tokens,
        max_tokens=given.max_tokens,
        stop_ids=stop_ids,
    )


def _scorer(
    config: Config,
    reward_functions: Sequence[Reward] | None,
    reward_weights: Sequence[float] | None,
) -> Scorer:
    functions: Sequence[Reward] = config.reward_config.verifier_function
    weights: Sequence[float] | None = config.verifier_weights
    if reward_functions is not None:
        functions, weights = reward_functions, reward_weights
    if not functions:
        raise UserError(
            "reward_config.verifier_function is empty, so nothing would be learnt; name a reward, such as "
            "accuracy_reward, module:function or file.py:function."
        )
    rewards = config.reward_config
    limits = Limits(
        rewards.deadline, rewards.together_deadline, memory_bytes(rewards.memory), rewards.workers
    )
    facts = {"max_completion_length": config.generate_config.sampling_config.max_tokens}
    return Scorer(functions, weights, limits, facts)


def _prompts(config: Config, tokenizer: Tokenizer, path: str | None, key: str) -> PromptSet:
    if not path:
        raise UserError(
            f"{key} is not set; give a .jsonl or .mindrecord file of questions and answers."
        )
    template = None
    if config.rl_config.chat_template:
        try:
            template = Path(config.rl_config.chat_template).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(
                f"rl_config.chat_template '{config.rl_config.chat_template}' cannot be read ({error}); give the "
                "path of a jinja file or leave it out."
            ) from None
    return PromptSet(
        read_records(path),
        tokenizer,
        config.generate_config.max_prompt_length,
        config.rl_config.prompt_overflow,
        config.rl_config.system_prompt or "",
        template,
    )


def _check_save(config: Config) -> None:
    save = config.actor_config.save
    if save and Path(save).exists() and (not Path(save).is_dir() or any(Path(save).iterdir())):
        raise UserError(
            f"actor_config.save '{save}' exists and is not an empty folder, and nothing is written over; "
            "choose another or leave it out."
        )
