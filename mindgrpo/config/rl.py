"""`rl_config` and `reward_config`: what a run does, its algorithm, and how completions are scored."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, field_validator

from mindgrpo.algorithm.estimators import AlgorithmConfig
from mindgrpo.config.roles import RewardModelConfig
from mindgrpo.settings.section import (
    AFTER_SIZE,
    BEFORE_LIST,
    BEFORE_NAME,
    BEFORE_UPPER,
    NULL_IS_EMPTY,
    OptionalText,
    Section,
    spelled,
)


def _switch_or_path(value: object) -> object:
    words = {"true": True, "false": False, "": False}
    return words.get(value.lower(), value) if isinstance(value, str) else value


def _one_or_several(value: object) -> object:
    return [value] if isinstance(value, str) and value else value or None


class CheckpointKeys(Section):
    """Checkpoints, resuming from them, and the end of a run before its last step."""

    save_ckpt_interval: int | None = Field(0, ge=0)
    """save a checkpoint every N steps and after the last step, in checkpoints/ of the run's folder; 0: none"""
    save_max_ckpt_num: int | None = Field(5, ge=1)
    """number of newest checkpoints to keep; null: all"""
    save_ckpt_best: OptionalText = None
    """name of a reward function: also keep the checkpoint with its highest held-out mean; null: off"""
    save_ckpt_async: bool = False
    """write checkpoints during the next step, from a copy in host memory"""
    resume_training: Annotated[bool | str, BeforeValidator(_switch_or_path)] = False
    """resume from a checkpoint: true for the latest one of output_dir (without output_dir, of the newest run of this
    configuration and kind of training that has one), or the path of a run or of a checkpoint"""
    resume_changed: Annotated[list[str], BEFORE_LIST] = []
    """keys that may differ from the resumed run, as the error message lists them, or all"""
    max_seconds: float | None = Field(None, gt=0)
    """end the run N seconds after its launch, once the current step is finished and saved; null: no limit"""

    @property
    def saves_checkpoints(self) -> bool:
        """Returns whether the run saves checkpoints."""
        return bool(
            self.save_ckpt_interval
            or self.save_ckpt_best
            or self.max_seconds
            or self.resume_training is not False
        )


class ConversationKeys(Section):
    tools: Annotated[list[str], BEFORE_LIST] = []
    """tools that the model may call: calculator, python, module:function or file.py:function. Functions need type hints
    and a docstring with an Args: section"""
    tool_parser: str = "auto"
    """format of tool calls. hermes: <tool_call> tags around JSON (Qwen); llama3: the turn is JSON with a name and
    parameters; module:function or file.py:function: a function that parses the text of a turn into a list of objects
    with name and arguments; auto: hermes or llama3, detected from the chat template"""
    tool_deadline: float = Field(10.0, gt=0)
    """timeout of a tool call in seconds; a call that takes longer is terminated and reported to the model as failed"""
    max_turns: int = Field(8, ge=1)
    """maximum number of model turns in a conversation with tools or an environment; tool calls in the last turn are not
    executed"""
    max_tool_calls: int | None = Field(None, ge=0)
    """maximum number of tool calls per conversation; further calls are answered with an error; null: no limit"""
    environment: Annotated[list[str] | None, BeforeValidator(_one_or_several)] = None
    """module:Class or file.py:Class with reset(row) and step(completion), which provides the prompt of each
    conversation, responds to its turns and rewards them; or one of a package: reasoning_gym:TASK, gem:NAME,
    textarena:NAME or, of a server, openenv:URL; arguments follow in brackets, (name=value, ...). A list: each row is
    given to one of these environments; a weight before a name, as in 0.7 * gem:NAME, says how often (default 1). null:
    no environment"""
    environment_deadline: float = Field(10.0, gt=0)
    """timeout of reset and step in seconds; an environment that takes longer is terminated, and its conversation ends
    as failed"""

    @property
    def has_conversations(self) -> bool:
        return bool(self.tools) or self.environment is not None


DEFAULT_PROMPTS = 1
DEFAULT_STALENESS = 2
DEFAULT_CHUNK = 64


class PartialRolloutKeys(Section):
    partial_rollout: bool = False
    """end a rollout once enough groups for the step are complete; unfinished completions continue in the next step,
    with its weights and before new prompts. Requires importance_sampling_correction"""
    over_sampling_batch_size: int | None = Field(None, ge=1)
    """number of prompts in flight with partial_rollout: 1 to 2 times the prompts per step; null: 1.5 times"""
    max_staleness: int | None = Field(
        None,
        ge=1,
        description="maximum number of further steps in which a completion of partial_rollout may continue; a step "
        f"waits for completions of this age; null: {DEFAULT_STALENESS}",
    )
    partial_rollout_chunk: int | None = Field(
        None,
        ge=1,
        description="number of tokens to generate per unfinished completion before checking whether enough groups are "
        f"complete; null: {DEFAULT_CHUNK}",
    )
    rollout_token_budget: int | None = Field(None, ge=1)
    """end a partial rollout after this many tokens with the groups that are complete (at least one); null: no budget"""

    @property
    def staleness_limit(self) -> int:
        return self.max_staleness or DEFAULT_STALENESS

    @property
    def rollout_chunk(self) -> int:
        return self.partial_rollout_chunk or DEFAULT_CHUNK


class TrainingKeys(CheckpointKeys):
    """What every run reads, supervised training too: its data, its length, its batches, and what it writes."""

    model_name: OptionalText = None
    """name of the model in the console output"""
    deterministic: Annotated[Literal["ON", "OFF"], BEFORE_UPPER, spelled("ON", "OFF")] = "OFF"
    """ON: request bit-reproducible kernels from the device"""
    dataset_file: OptionalText = None
    """training prompts and answers: a .jsonl, .json, .csv, .parquet, .arrow or .mindrecord file, a directory of
    Hugging Face datasets, or a name on a hub, such as openai/gsm8k:main; null, with an environment only: rows whose
    column seed counts from 0 to 9999"""
    dataset_split: OptionalText = None
    """split to read if dataset_file is a directory or a name on a hub; null: train, or the only split"""
    eval_dataset_file: OptionalText = None
    """held-out prompts and answers for evaluations, in the formats of dataset_file; null: no evaluation, or, if
    training rows are seeds (dataset_file null), the seeds 10000 to 10999"""
    eval_dataset_split: OptionalText = None
    """split to read if eval_dataset_file is a directory or a name on a hub; null: validation or test, whichever
    exists, or the only split"""
    dataset_map_keys: Annotated[list[str], BEFORE_LIST] = []
    """NAME=KEY pairs that rename columns of the data set, such as question=problem"""
    tokenizer_dir: OptionalText = None
    """directory of the tokenizer, or a name on a hub; null: actor_config.load"""
    system_prompt: OptionalText = None
    """system message for prompts that have none"""
    chat_template: OptionalText = None
    """chat template: a name such as qwen_r1, FILE.jinja or FILE.json:NAME; null: the tokenizer's own"""
    chat_template_date: OptionalText = None
    """date, or date and time, that a chat template gets from strftime_now, as in 2026-11-28; null: when the run began,
    also after it is resumed"""
    prompt_overflow: Literal["error", "drop", "left", "right"] = "error"
    """what to do with a prompt that is longer than generate_config.max_prompt_length. error: report an error; drop:
    skip the row; left, right: truncate the prompt on that side"""
    min_pixels: int | None = Field(None, ge=1)
    """smallest area in pixels that images are resized to; null: as the model's preprocessor_config.json says"""
    max_pixels: int | None = Field(None, ge=1)
    """largest area in pixels that images are resized to, 784 of them a token in Qwen2.5-VL; null: as the model's
    preprocessor_config.json says, but no more than generate_config.max_prompt_length tokens"""
    epochs: int = Field(1, ge=1)
    """number of passes over the data set if max_steps is null"""
    max_steps: int | None = Field(None, ge=1)
    """number of steps; the data set is repeated as often as needed; null: as many as epochs takes"""
    batch_size: int = Field(4, ge=1)
    """packed rows per micro-batch on each data-parallel rank of the trainer"""
    seq_length: int = Field(1024, ge=2)
    """maximum length of a packed row in tokens; the rows of a step are as long as their content, in one of a few
    lengths"""
    packing: bool = True
    """pack several samples into a row; false: one sample per row"""
    pack_num: int | None = Field(None, ge=1)
    """maximum number of samples per row; null: as many as fit"""
    micro_batch_interleaved: int = Field(1, ge=1)
    """split each micro-batch into this many parts to reduce the idle time of pipeline stages"""
    prompts_per_step: int | None = Field(
        None,
        ge=1,
        description="number of prompts per step, whatever the layout; null: num_rollouts x chunk_size x the "
        f"generator's data_parallel if one of the first two is set, else {DEFAULT_PROMPTS}",
    )
    router_aux_loss_coef: float = Field(0.0, ge=0)
    """coefficient of the load-balancing loss of experts (arXiv:2101.03961), computed from the load of all samples of an
    update; 0: off. A config.json's value is not used"""
    moe_router_bias_update_rate: float = Field(0.0, ge=0)
    """step by which each update moves a router's selection bias (DeepSeek-V3, arXiv:2408.15664): up for experts below
    the mean load, down for experts above it; 0: off"""
    eval_steps: int = Field(0, ge=0)
    """evaluate every N steps; 0: only before and after the run"""
    eval_on_start: bool = True
    """also evaluate before the first step"""
    eval_samples: int | None = Field(None, ge=1)
    """number of held-out prompts; null: all"""
    max_skipped_updates: int = Field(3, ge=0)
    """maximum number of consecutive updates that are skipped because of non-finite values; one more ends the run"""
    dump_weights: bool = True
    """when a batch with non-finite values is saved, also save the weights"""
    tensorboard: bool = True
    """write TensorBoard events"""
    tensorboard_dir: OptionalText = None
    """folder of the TensorBoard events; null: tensorboard/ in the run's folder"""
    tensorboard_queue_size: int = Field(10, ge=1)
    """number of events to buffer before writing"""
    performance_stats: bool = False
    """print the duration of each phase after every step"""

    @field_validator("chat_template_date")
    @classmethod
    def _is_date(cls, text: str | None) -> str | None:
        try:
            datetime.fromisoformat(text or "2026-11-28")
        except ValueError:
            raise ValueError("must be a date, as in 2026-11-28 or 2026-11-28 09:30:00") from None
        return text

    @field_validator("dataset_map_keys")
    @classmethod
    def _are_pairs(cls, pairs: list[str]) -> list[str]:
        names = [name.strip() for name, _, _ in (pair.partition("=") for pair in pairs)]
        if not all("=" in pair for pair in pairs) or len(set(names)) < len(names):
            raise ValueError(
                "must be NAME=KEY pairs with each NAME once, as in question=problem,answer=solution"
            )
        return pairs


class RLConfig(AlgorithmConfig, TrainingKeys, ConversationKeys, PartialRolloutKeys):
    dataset_type: Annotated[Literal["gsm8k", "openr1math", "plain"] | None, BEFORE_NAME] = None
    """how to read the gold answer. gsm8k: the text after the last ####, which every row must have; openr1math, plain:
    the whole answer; null: the text after the last #### if there is one, else the whole answer"""
    dataset_columns: Annotated[list[str] | None, BEFORE_LIST] = None
    """columns to pass to reward functions in addition to the answer; null: all"""
    num_rollouts: int | None = Field(None, ge=1)
    """MindRLHF's way to set the prompts of a step: number of rollouts of chunk_size prompts; null: 1"""
    chunk_size: int | None = Field(None, ge=1)
    """prompts per rollout on each data-parallel rank of the generator, as in MindRLHF; null: 1"""
    router_replay: bool = True
    """train each token with the experts that it had in the generator (R3); false: with those that a forward pass
    of the trainer chooses before the step's first update, the only way with vLLM. No effect on models without
    experts"""
    num_iterations: int = Field(1, ge=1)
    """number of passes over the samples of a step"""
    updates_per_rollout: int | None = Field(None, ge=1)
    """number of optimizer steps per pass over the samples; null: computed from micro_batch_num, else 1"""
    eval_modes: Annotated[list[Literal["sampled", "greedy"]], BEFORE_LIST] = Field(
        default=["sampled"], min_length=1
    )
    """decoding modes of evaluations. sampled: with eval_temperature and eval_top_p, metrics eval/...; greedy: always
    the most likely token, metrics eval_greedy/...; both: sampled,greedy"""
    eval_num_generations: int = Field(1, ge=1)
    """number of sampled completions per held-out prompt, for mean@n and pass@k"""
    eval_temperature: float | None = Field(None, ge=0)
    """sampling temperature in evaluations; 0: always the most likely token; null: that of training"""
    eval_top_p: float | None = Field(None, gt=0, le=1)
    """top_p in evaluations; null: that of training"""
    eval_pass_threshold: float = 1.0
    """minimum reward at which pass@k counts a completion as correct"""
    save_eval_completions: bool = True
    """write the completions of evaluations to eval_completions.jsonl"""
    logprob_gap_limit: float | Literal["auto"] | None = "auto"
    """end the run if a token's log-prob differs between generator and trainer by more than this; auto: 0 with
    context.batch_invariant, otherwise 0.01 if both compute in float32, else a limit on the mean over the tokens of a
    step (0.1 with context.float32_matmul_precision medium, 0.05 if vLLM computes in float16, 0.5 in bfloat16); null: no
    limit"""
    checksum_interval: int | None = Field(1, ge=1)
    """compare the checksums of the generator's and the policy's weights, and those of replicas, every N steps; null:
    never"""
    save_prompt_completions_data: bool = True
    """write the completions of training to completions.jsonl"""
    save_prompt_completions_interval: int = Field(1, ge=1)
    """write completions every N steps"""
    save_prompt_completions_dir: OptionalText = None
    """folder of completions.jsonl; null: the run's folder"""

    @field_validator("eval_modes")
    @classmethod
    def _are_different(cls, modes: list[str]) -> list[str]:
        if len(set(modes)) < len(modes):
            raise ValueError("must name each mode once, as in sampled,greedy")
        return modes

    @field_validator("logprob_gap_limit")
    @classmethod
    def _is_positive(cls, limit: object) -> object:
        if isinstance(limit, float) and limit <= 0:
            raise ValueError("must be above 0, or null for no limit")
        return limit

    @property
    def counts_rollouts(self) -> bool:
        """Whether the prompts of a step are counted as in MindRLHF, so that they follow the generator's layout."""
        has_rollouts = self.num_rollouts is not None or self.chunk_size is not None
        return self.prompts_per_step is None and has_rollouts

    @property
    def uses_seeds(self) -> bool:
        """Whether rows are seeds, of which an environment makes its examples."""
        return self.environment is not None and self.dataset_file is None


class RewardConfig(Section):
    verifier_function: Annotated[list[str], NULL_IS_EMPTY] = []
    """reward functions: names of built-in functions, module:function or file.py:function, each
    optionally with (argument=value); may be empty with a reward model, rl_config.environment or
    rl_config.distillation_coef"""
    verifier_weight: list[float] | None = None
    """weight of each function; null: 1.0 for each"""
    environment_weight: float = 1.0
    """weight of the rewards of rl_config.environment, which appear as a function named environment"""
    score_as_ended: bool = False
    """score groups as soon as they have ended, while others are generated: a function is called several times a step,
    with whole groups of a replica, on the first rank of each replica, and keeps a state of its own there"""
    completions: Literal["text", "messages"] | None = None
    """what your own reward functions get as completions and prompts: texts, or lists of messages as TRL passes them;
    null: text, but in GRPOTrainer(reward_funcs=...) messages for rows whose prompt is a list of messages"""
    deadline: float = Field(10.0, gt=0)
    """timeout for a single sample in seconds; a function that takes longer is terminated and counted as failed"""
    together_deadline: float | None = Field(None, gt=0)
    """timeout in seconds for scoring all samples of a step in one call; afterwards each sample is scored separately;
    null: deadline, at most 2.5 where samples can then be scored in parallel"""
    max_failed_steps: int | None = Field(5, ge=1)
    """end the run after this many consecutive steps in which no sample could be scored; null: no limit (a run without
    any scored step still ends with an error)"""
    memory: Annotated[str, AFTER_SIZE] = "2GB"
    """limit of the memory in use by each worker process"""
    workers: int = Field(1, ge=1)
    """number of worker processes per function; each scores a part of the samples of a step"""
    model: RewardModelConfig = RewardModelConfig()
    models: list[RewardModelConfig] = []
    """further reward models, each with the keys of reward_config.model; a list there is the same as one here"""

    @property
    def models_by_key(self) -> dict[str, RewardModelConfig]:
        """Returns the reward models by the key of their section."""
        first = {"reward_config.model": self.model} if self.model.load else {}
        return first | {f"reward_config.models[{i}]": own for i, own in enumerate(self.models)}
