"""`rl_config`: what a run does; the keys that choose the algorithm are in algorithm.py."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, field_validator

from mindgrpo.config.algorithm import AlgorithmKeys
from mindgrpo.config.section import (
    BEFORE_LIST,
    BEFORE_NAME,
    BEFORE_UPPER,
    OptionalText,
    Section,
    spelled,
)


def _switch_or_path(value: object) -> object:
    words = {"true": True, "false": False, "": False}
    return words.get(value.lower(), value) if isinstance(value, str) else value


class CheckpointKeys(Section):
    """Checkpoints, resuming from them, and the end of a run before its last step."""

    save_ckpt_interval: int | None = Field(0, ge=0)
    """a checkpoint every so many steps and after the last, in checkpoints/ of the run's folder; 0: none"""
    save_max_ckpt_num: int | None = Field(5, ge=1)
    """so many of the newest checkpoints stay; null: all of them"""
    save_ckpt_best: OptionalText = None
    """a reward's name: the checkpoint with its highest held-out mean is kept besides the newest"""
    save_ckpt_async: bool = False
    """write checkpoints beside the next step, from a copy in the host's memory"""
    save_ckpt_format: Literal["safetensors"] = "safetensors"
    """checkpoints are safetensors and one JSON file"""
    resume_training: Annotated[bool | str, BeforeValidator(_switch_or_path)] = False
    """go on from a checkpoint: true for the latest of output_dir (or of the configuration's newest run that has one),
    or the path of a run or of a checkpoint"""
    resume_changed: Annotated[list[str], BEFORE_LIST] = []
    """settings that may differ from the run that is gone on with, as its refusal names them; or all"""
    max_seconds: float | None = Field(None, gt=0)
    """end the run after so many seconds since its launch, when the step is done and saved"""

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


class RLConfig(AlgorithmKeys, CheckpointKeys):
    model_name: OptionalText = None
    """a name for the run's model, for reports"""
    deterministic: Annotated[Literal["ON", "OFF"], BEFORE_UPPER, spelled("ON", "OFF")] = "OFF"
    """ON asks the device for bit-reproducible kernels"""

    dataset_file: OptionalText = None
    """training prompts and answers: .jsonl, .json, .parquet, .arrow, .mindrecord or a directory of Hugging Face
    datasets"""
    dataset_split: OptionalText = None
    """of a directory's splits; null: train, or the only one"""
    eval_dataset_file: OptionalText = None
    """held-out prompts and answers"""
    eval_dataset_split: OptionalText = None
    """null: validation or test, whichever there is, or the only one"""
    dataset_type: Annotated[Literal["gsm8k", "openr1math", "plain"] | None, BEFORE_NAME] = None
    """where gold answers stand; null: after #### where there is one"""
    dataset_map_keys: Annotated[list[str], BEFORE_LIST] = []
    """NAME=KEY pairs for rows with other names: question=problem"""
    dataset_columns: Annotated[list[str] | None, BEFORE_LIST] = None
    """columns that rewards get besides the answer; null: all"""
    tokenizer_dir: OptionalText = None
    """default: actor_config.load"""
    system_prompt: OptionalText = None
    """put before every prompt"""
    chat_template: OptionalText = None
    """a name such as qwen_r1, FILE.jinja or FILE.json:NAME; null: the tokenizer's own"""
    prompt_overflow: Literal["error", "drop", "left", "right"] = "error"
    """what becomes of a prompt above generate_config.max_prompt_length"""

    epochs: int = Field(1, ge=1)
    """passes over the data set"""
    max_steps: int | None = Field(None, ge=1)
    """end after so many steps"""
    batch_size: int = Field(4, ge=1)
    """packed rows a micro-batch on each training data-parallel rank"""
    seq_length: int = Field(1024, ge=2)
    """longest packed row in tokens"""
    packing: bool = True
    """several samples a row; False means one"""
    pack_num: int | None = Field(None, ge=1)
    """at most so many samples a row; null: as many as fit"""

    micro_batch_interleaved: int = Field(1, ge=1)
    """parts that a micro-batch's rows pass the pipeline in, so that stages wait less"""

    prompts_per_step: int | None = Field(None, ge=1)
    """prompts a step whatever the layout, instead of chunk_size"""
    num_rollouts: int = Field(1, ge=1)
    """batches of prompts a step"""
    chunk_size: int | None = Field(None, ge=1)
    """prompts a rollout on each generating data-parallel rank (1)"""
    num_generations: int = Field(8, ge=1)
    """completions a prompt: the group"""
    num_iterations: int = Field(1, ge=1)
    """passes over the same samples"""
    updates_per_rollout: int | None = Field(None, ge=1)
    """optimizer steps that share out a pass over the samples"""

    seed: int = Field(0, ge=0)
    """of data order and sampling"""

    eval_steps: int = Field(0, ge=0)
    """evaluate every so many steps; 0: only before and after the run"""
    eval_on_start: bool = True
    """also evaluate before the first step"""
    eval_samples: int | None = Field(None, ge=1)
    """held-out prompts used; null: all"""
    eval_modes: Annotated[list[Literal["sampled", "greedy"]], BEFORE_LIST] = Field(
        default=["sampled"], min_length=1
    )
    """sampled: as eval_temperature and eval_top_p say, metrics eval/...; greedy: each prompt's likeliest completion,
    metrics eval_greedy/...; both: sampled,greedy"""
    eval_num_generations: int = Field(1, ge=1)
    """sampled completions a held-out prompt, for mean@n and pass@k"""
    eval_temperature: float | None = Field(None, ge=0)
    """of sampled completions; 0 takes the likeliest; null: the run's"""
    eval_top_p: float | None = Field(None, gt=0, le=1)
    """of sampled completions; null: the run's"""
    eval_pass_threshold: float = 1.0
    """pass@k counts a completion as passed from this reward on"""
    save_eval_completions: bool = True
    """write eval_completions.jsonl"""
    logprob_gap_limit: float | None = Field(0.01, gt=0)
    """largest generator/trainer log-prob difference; null: no limit"""
    checksum_interval: int | None = Field(1, ge=1)
    """every so many steps the generator's weights are compared with the policy's, and those of replicas, by
    checksums; null: never"""
    max_skipped_updates: int = Field(3, ge=0)
    """updates in a row that may be skipped for a number that is not finite; one more ends the run"""
    dump_weights: bool = True
    """a batch with a number that is not finite is kept with the weights that saw it"""

    save_prompt_completions_data: bool = True
    """write completions.jsonl"""
    save_prompt_completions_interval: int = Field(1, ge=1)
    """every so many steps"""
    save_prompt_completions_dir: OptionalText = None
    """where completions.jsonl goes; null: the run's folder"""
    tensorboard: bool = True
    """write TensorBoard events"""
    tensorboard_dir: OptionalText = None
    """where the events go; null: tensorboard/ in the run's folder"""
    tensorboard_queue_size: int = Field(10, ge=1)
    """events held before a write"""
    performance_stats: bool = False
    """print the seconds of every phase"""

    @field_validator("eval_modes")
    @classmethod
    def _are_different(cls, modes: list[str]) -> list[str]:
        if len(set(modes)) < len(modes):
            raise ValueError("must name each mode once, as in sampled,greedy")
        return modes

    @field_validator("dataset_map_keys")
    @classmethod
    def _are_pairs(cls, pairs: list[str]) -> list[str]:
        names = [name.strip() for name, _, _ in (pair.partition("=") for pair in pairs)]
        if not all("=" in pair for pair in pairs) or len(set(names)) < len(names):
            raise ValueError(
                "must be NAME=KEY pairs with each NAME once, as in question=problem,answer=solution"
            )
        return pairs
