"""`rl_config` and `reward_config`: what a run does, its algorithm, and how completions are scored."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, field_validator

from mindgrpo.config.section import (
    AFTER_SIZE,
    BEFORE_LIST,
    BEFORE_NAME,
    BEFORE_UPPER,
    OptionalText,
    Section,
    spelled,
)

DEFAULT_CAP = 2.0
DEFAULT_ROUNDS = 3

# What each estimator divides by, where scale_rewards does not say.
SCALES = {
    "grpo": "group",
    "rloo": "none",
    "reinforce_plus_plus": "batch",
    "reinforce_plus_plus_baseline": "batch",
}


class AlgorithmKeys(Section):
    loss_type: Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo"] = "grpo"
    """weight of each token. grpo: 1 / length of its sample, then the mean over samples; dapo, bnpo: 1 / number of
    tokens of the update; dr_grpo: 1 / (samples x max_tokens); cispo: as dapo, with the clipped ratio as a constant
    weight"""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """token: the ratio of each token; sequence: its geometric mean over the sample (GSPO)"""
    epsilon_low: float = Field(0.2, gt=0, le=1)
    """lower clip bound of the ratio: 1 - epsilon_low"""
    epsilon_high: float = Field(0.2, gt=0)
    """upper clip bound of the ratio: 1 + epsilon_high, also for cispo"""
    delta: float | None = Field(None, gt=1)
    """two-sided clip: upper bound of the ratio in the unclipped term"""
    dual_clip: float | None = Field(None, gt=1)
    """dual clip: bounds the surrogate if the advantage is negative"""

    advantage_estimator: Literal[
        "grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"
    ] = "grpo"
    """baseline that is subtracted from the reward. grpo: mean of the group; rloo: mean of the other samples of the
    group; reinforce_plus_plus: mean over the tokens of the step; reinforce_plus_plus_baseline: mean of the group, then
    mean over the tokens of the step"""
    # Users of other trainers write true for the group's deviation and false for none.
    scale_rewards: Annotated[Literal["group", "batch", "none"] | None, spelled("group", "none")] = (
        None
    )
    """divide advantages by the standard deviation of the rewards of the group, of the step (batch), or not at all
    (none); null: as in the paper of the estimator (grpo: group, rloo: none, reinforce_plus_plus: batch)"""

    advantage_std_floor: float = Field(1e-6, gt=0)
    """added to the standard deviation before dividing by it; 1e-6 is verl's value, TRL adds 1e-4"""

    beta: float = Field(0.01, ge=0)
    """weight of the KL term; 0: no KL term, and no reference model is loaded"""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """with d = logp - reference: k1: d; k2: d^2 / 2; k3: exp(-d) + d - 1. In the loss, the gradient of k1 has mean 0:
    use k1 with kl_in_reward"""
    kl_in_reward: bool = False
    """subtract beta x KL from the rewards instead of adding it to the loss; needs old log-probs"""
    entropy_coef: float = Field(0.0, ge=0)
    """weight of the entropy bonus; 0: none"""

    mask_truncated_completions: bool = False
    """exclude completions that were cut at max_tokens from the loss"""
    dynamic_sampling: bool = False
    """replace groups with equal rewards (zero advantage) by groups of further prompts"""
    dynamic_sampling_rounds: int | None = Field(
        None,
        ge=1,
        le=100,
        description=f"maximum number of replacement rounds per step; null: {DEFAULT_ROUNDS}",
    )

    importance_sampling_correction: Literal[
        "none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"
    ] = "none"
    """multiply the surrogate by p_trainer / p_generator of the token or of the sequence, limited to the cap (truncate)
    or set to 0 above it (mask); needs old log-probs"""
    importance_sampling_cap: float | None = Field(
        None, ge=1, description=f"cap of importance_sampling_correction; null: {DEFAULT_CAP}"
    )
    enable_oldpolicy: bool = True
    """compute old log-probs if a rollout has more than one update; false: the ratio is 1"""

    @property
    def reward_scale(self) -> str:
        return self.scale_rewards or SCALES[self.advantage_estimator]

    @property
    def correction_cap(self) -> float:
        return self.importance_sampling_cap or DEFAULT_CAP

    @property
    def resampling_rounds(self) -> int:
        """The most replacements a step; 0 without dynamic sampling."""
        return (self.dynamic_sampling_rounds or DEFAULT_ROUNDS) if self.dynamic_sampling else 0


def _switch_or_path(value: object) -> object:
    words = {"true": True, "false": False, "": False}
    return words.get(value.lower(), value) if isinstance(value, str) else value


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
    save_ckpt_format: Literal["safetensors"] = "safetensors"
    """checkpoints are safetensors files and one JSON file"""
    resume_training: Annotated[bool | str, BeforeValidator(_switch_or_path)] = False
    """resume from a checkpoint: true for the latest one of output_dir (without output_dir, of the newest run of this
    configuration that has one), or the path of a run or of a checkpoint"""
    resume_changed: Annotated[list[str], BEFORE_LIST] = []
    """keys that may differ from the run that is resumed, as the error message lists them; or all"""
    max_seconds: float | None = Field(None, gt=0)
    """end the run after N seconds since its launch, when the current step is finished and saved"""

    @field_validator("save_ckpt_format", mode="before")
    @classmethod
    def _no_ckpt(cls, value: object) -> object:
        if value == "ckpt":
            raise ValueError(
                "cannot be ckpt: such files hold no layout and no digest; checkpoints are safetensors, and "
                "actor_config.load reads a model's .ckpt"
            )
        return value

    @property
    def saves_checkpoints(self) -> bool:
        """Whether checkpoints were asked for."""
        return bool(
            self.save_ckpt_interval
            or self.save_ckpt_best
            or self.max_seconds
            or self.resume_training is not False
        )


class ConversationKeys(Section):
    tools: Annotated[list[str], BEFORE_LIST] = []
    """tools that completions may call: calculator, python, module:function or file.py:function; functions with type
    hints and a docstring with an Args: section"""
    tool_parser: str = "auto"
    """form of the calls. hermes: <tool_call> tags around JSON (Qwen); llama3: the turn is JSON with a name and
    parameters; module:function or file.py:function: a function from a turn's text to a list of objects with name and
    arguments; auto: hermes or llama3, as the chat template shows them"""
    tool_deadline: float = Field(10.0, gt=0)
    """seconds of one call; one that takes longer is terminated, and the model reads that it failed"""
    max_turns: int = Field(8, ge=1)
    """turns of the policy in a conversation with tools or an environment; tools that the last one calls are not run"""
    max_tool_calls: int | None = Field(None, ge=0)
    """calls in a conversation; further ones are answered with an error; null: no limit"""
    environment: OptionalText = None
    """module:Class or file.py:Class with reset(row) and step(completion), which gives every conversation its prompt,
    answers its turns and rewards them; null: none"""
    environment_deadline: float = Field(10.0, gt=0)
    """seconds of one reset or step; an environment that takes longer is terminated, and its conversation ends as
    failed"""
    turn_advantages: bool = False
    """an advantage for each turn, from the environment's rewards of this and the later turns; false: one a
    conversation, from their sum"""

    @property
    def has_conversations(self) -> bool:
        return bool(self.tools) or self.environment is not None


DEFAULT_STALENESS = 2
DEFAULT_CHUNK = 64


class PartialRolloutKeys(Section):
    partial_rollout: bool = False
    """end a rollout when the groups of a step are whole; unfinished completions go on in the next step, under its
    weights and first in line; needs importance_sampling_correction"""
    over_sampling_batch_size: int | None = Field(None, ge=1)
    """prompts under way with partial_rollout, from the prompts of a step to twice as many; null: one and a half times
    as many"""
    max_staleness: int | None = Field(
        None,
        ge=1,
        description="number of steps that a completion of partial_rollout may go on after the one that began it; a "
        f"step waits for those that are this old; null: {DEFAULT_STALENESS}",
    )
    partial_rollout_chunk: int | None = Field(
        None,
        ge=1,
        description="tokens that every unfinished completion gets before the rollout looks whether enough groups are "
        f"whole; null: {DEFAULT_CHUNK}",
    )
    rollout_token_budget: int | None = Field(None, ge=1)
    """tokens after which a partial rollout ends with the groups that are whole, one at least; null: no budget"""

    @property
    def staleness_limit(self) -> int:
        return self.max_staleness or DEFAULT_STALENESS

    @property
    def rollout_chunk(self) -> int:
        return self.partial_rollout_chunk or DEFAULT_CHUNK


class RLConfig(AlgorithmKeys, CheckpointKeys, ConversationKeys, PartialRolloutKeys):
    model_name: OptionalText = None
    """name of the model in the console output"""
    deterministic: Annotated[Literal["ON", "OFF"], BEFORE_UPPER, spelled("ON", "OFF")] = "OFF"
    """ON: request bit-reproducible kernels from the device"""

    dataset_file: OptionalText = None
    """training prompts and answers: .jsonl, .json, .csv, .parquet, .arrow, .mindrecord or a directory of Hugging Face
    datasets"""
    dataset_split: OptionalText = None
    """split of a directory; null: train, or the only one"""
    eval_dataset_file: OptionalText = None
    """held-out prompts and answers"""
    eval_dataset_split: OptionalText = None
    """split of a directory; null: validation or test, whichever exists, or the only one"""
    dataset_type: Annotated[Literal["gsm8k", "openr1math", "plain"] | None, BEFORE_NAME] = None
    """how the gold answer is read; null: the text after the last #### if there is one, else the whole answer"""
    dataset_map_keys: Annotated[list[str], BEFORE_LIST] = []
    """NAME=KEY pairs for rows with other column names: question=problem"""
    dataset_columns: Annotated[list[str] | None, BEFORE_LIST] = None
    """columns that are passed to reward functions in addition to the answer; null: all"""
    tokenizer_dir: OptionalText = None
    """directory of the tokenizer; null: actor_config.load"""
    system_prompt: OptionalText = None
    """system prompt for every prompt that has none"""
    chat_template: OptionalText = None
    """a name such as qwen_r1, FILE.jinja or FILE.json:NAME; null: the tokenizer's own"""
    prompt_overflow: Literal["error", "drop", "left", "right"] = "error"
    """what to do with a prompt of more than generate_config.max_prompt_length tokens: report an error, drop the row, or
    cut the prompt at its left or right end"""

    epochs: int = Field(1, ge=1)
    """passes over the data set, where max_steps is null"""
    max_steps: int | None = Field(None, ge=1)
    """number of steps, over as many passes as that takes; null: epochs passes"""
    batch_size: int = Field(4, ge=1)
    """packed rows per micro-batch on each data-parallel rank of the trainer"""
    seq_length: int = Field(1024, ge=2)
    """maximum length of a packed row in tokens"""
    packing: bool = True
    """pack several samples into a row; False: one sample per row"""
    pack_num: int | None = Field(None, ge=1)
    """maximum number of samples per row; null: as many as fit"""

    micro_batch_interleaved: int = Field(1, ge=1)
    """number of parts into which the rows of a micro-batch are divided for the pipeline, to reduce idle time of the
    stages"""

    prompts_per_step: int | None = Field(None, ge=1)
    """prompts per step, independent of the layout; replaces chunk_size"""
    num_rollouts: int = Field(1, ge=1)
    """batches of prompts per step"""
    chunk_size: int | None = Field(None, ge=1)
    """prompts per rollout on each data-parallel rank of the generator; null: 1"""
    num_generations: int = Field(8, ge=1)
    """completions per prompt (group size)"""
    num_iterations: int = Field(1, ge=1)
    """passes over the same samples"""
    updates_per_rollout: int | None = Field(None, ge=1)
    """optimizer steps into which one pass over the samples is divided"""

    seed: int = Field(0, ge=0)
    """seed of the data order and of sampling"""

    eval_steps: int = Field(0, ge=0)
    """evaluate every N steps; 0: only before and after the run"""
    eval_on_start: bool = True
    """also evaluate before the first step"""
    eval_samples: int | None = Field(None, ge=1)
    """number of held-out prompts; null: all"""
    eval_modes: Annotated[list[Literal["sampled", "greedy"]], BEFORE_LIST] = Field(
        default=["sampled"], min_length=1
    )
    """sampled: with eval_temperature and eval_top_p, metrics eval/...; greedy: the most likely completion of each
    prompt, metrics eval_greedy/...; both: sampled,greedy"""
    eval_num_generations: int = Field(1, ge=1)
    """sampled completions per held-out prompt, for mean@n and pass@k"""
    eval_temperature: float | None = Field(None, ge=0)
    """temperature of sampled completions in evaluations; 0: the most likely token; null: that of the run"""
    eval_top_p: float | None = Field(None, gt=0, le=1)
    """top_p of sampled completions in evaluations; null: that of the run"""
    eval_pass_threshold: float = 1.0
    """pass@k counts a completion as passed if its reward is at least this value"""
    save_eval_completions: bool = True
    """write eval_completions.jsonl"""
    logprob_gap_limit: float | Literal["auto"] | None = "auto"
    """maximum difference of a token's log-prob between generator and trainer; a larger one ends the run; auto: 0.01
    where both compute in float32, else of the mean over a step's tokens, 0.1 with context.float32_matmul_precision
    medium, and 0.05 where vLLM computes in float16, 0.5 in bfloat16; null: no limit"""
    checksum_interval: int | None = Field(1, ge=1)
    """compare the checksums of the generator's weights with the policy's, and those of replicas, every N steps; null:
    never"""
    max_skipped_updates: int = Field(3, ge=0)
    """number of consecutive updates that may be skipped because of non-finite numbers; one more ends the run"""
    dump_weights: bool = True
    """save the weights together with a batch that has a non-finite number"""

    save_prompt_completions_data: bool = True
    """write completions.jsonl"""
    save_prompt_completions_interval: int = Field(1, ge=1)
    """write completions every N steps"""
    save_prompt_completions_dir: OptionalText = None
    """folder of completions.jsonl; null: the run's folder"""
    tensorboard: bool = True
    """write TensorBoard events"""
    tensorboard_dir: OptionalText = None
    """folder of the TensorBoard events; null: tensorboard/ in the run's folder"""
    tensorboard_queue_size: int = Field(10, ge=1)
    """number of events that are buffered before a write"""
    performance_stats: bool = False
    """print the seconds of every phase after each step"""

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

    @field_validator("dataset_map_keys")
    @classmethod
    def _are_pairs(cls, pairs: list[str]) -> list[str]:
        names = [name.strip() for name, _, _ in (pair.partition("=") for pair in pairs)]
        if not all("=" in pair for pair in pairs) or len(set(names)) < len(names):
            raise ValueError(
                "must be NAME=KEY pairs with each NAME once, as in question=problem,answer=solution"
            )
        return pairs


class RewardConfig(Section):
    verifier_function: list[str] = []
    """reward functions: built-in names, module:function or file.py:function, each optionally with (argument=value)"""
    verifier_weight: list[float] | None = None
    """one weight per function; null: 1.0 for each"""
    environment_weight: float = 1.0
    """weight of the rewards of rl_config.environment, which are a function named environment"""
    deadline: float = Field(10.0, gt=0)
    """seconds for a single sample; a function that takes longer is terminated and counted as failed"""
    together_deadline: float | None = Field(None, gt=0)
    """seconds for all samples of a step in one call, after which each sample is scored separately; null: deadline, at
    most 2.5"""
    max_failed_steps: int | None = Field(5, ge=1)
    """end the run after so many steps in a row in which no sample could be scored; null: only a run of nothing but such
    steps, which is an error in any case"""
    memory: Annotated[str, AFTER_SIZE] = "2GB"
    """memory limit of a worker process"""
    workers: int = Field(1, ge=1)
    """number of processes among which the samples of a function are divided; each call receives a part of the step"""
