"""`actor_config`, `ref_config` and `generate_config`: the model's roles, their layouts, and vLLM as the generator."""

from __future__ import annotations

import math
from os.path import basename, normpath
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, field_validator

from mindgrpo.algorithm.schedule import LRSchedule
from mindgrpo.parallel.mesh import CONFIG_KEYS, DENSE, Mesh
from mindgrpo.settings.section import AFTER_SIZE, BEFORE_LIST, BEFORE_TEXT, OptionalText, Section


class VllmConfig(Section):
    python: OptionalText = None
    """Python interpreter of an environment with vLLM; null: .venv-vllm, which `bash scripts/setup_env.sh --vllm`
    creates"""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """dtype of vLLM's weights and activations, to which the policy's weights are rounded; null: the run's compute
    dtype"""
    kv_cache_memory: Annotated[str | None, AFTER_SIZE] = None
    """size of the KV cache of each engine over all its workers, such as 4GB; null: enough for max_num_seqs samples of
    maximum length, or on a device what gpu_memory_utilization leaves"""
    max_silence_seconds: float = Field(300.0, gt=0)
    """end the job if an engine is silent for this many seconds"""
    max_start_seconds: float = Field(900.0, gt=0)
    """end the job if an engine is not ready after this many seconds; starting can take minutes on a busy machine"""
    arguments: Annotated[list[str], BEFORE_LIST] = []
    """additional arguments of vLLM's LLM class as name=value, such as [swap_space=4]"""

    @field_validator("arguments")
    @classmethod
    def _are_named(cls, values: list[str]) -> list[str]:
        for text in values:
            name, sign, value = text.partition("=")
            if not name.strip().isidentifier() or not sign or not value.strip():
                raise ValueError(f"must be a list of name=value, which '{text}' is not")
        return values

    @property
    def parsed_arguments(self) -> dict[str, Any]:
        """Returns the arguments by name, with values read as YAML."""
        pairs = (text.partition("=") for text in self.arguments)
        return {name.strip(): yaml.safe_load(value) for name, _, value in pairs}


# pydantic keeps the attribute name `model_config` for itself, so the key has another one in Python.
_MODEL_YAML = "model shapes in MindFormers' format; must agree with the model's config.json"
_OFFSET = (
    "number of layers to add to (or remove from) each pipeline stage, as a list (with pp_interleave_num above 1, one "
    "list per chunk); 0: an even split"
)


class ParallelConfig(Section):
    data_parallel: int | None = Field(None, ge=1)
    """number of data-parallel replicas; null: as many as the other axes leave of the run's ranks"""
    model_parallel: int = Field(1, ge=1)
    """number of ranks that share each layer (tensor-parallel size)"""
    pipeline_stage: int = Field(1, ge=1)
    """number of pipeline stages"""
    expert_parallel: int = Field(1, ge=1)
    """mixtures of experts: number of ranks that share a layer's experts (expert-parallel size), taken from the
    data_parallel x context_parallel x model_parallel ranks of a stage, in a generator from its model_parallel ranks;
    tokens are sent to the ranks of their experts and the outputs back. Results are the same, in a forward pass bit for
    bit"""

    @property
    def replicas(self) -> int:
        """Returns data_parallel; 1 where the run's ranks have yet to say."""
        return self.data_parallel or 1

    @property
    def replica_ranks(self) -> int:
        """Counts the ranks of a replica."""
        return math.prod(self._size(axis) for axis in DENSE if axis != "dp")

    @property
    def mesh(self) -> Mesh:
        """Returns the mesh of these ranks. Raises UserError."""
        return Mesh(**{axis: self._size(axis) for axis in CONFIG_KEYS})

    def _size(self, axis: str) -> int:
        """Returns the size of an axis; 1 where a role has no key for it."""
        return self.replicas if axis == "dp" else getattr(self, CONFIG_KEYS[axis], 1)

    @property
    def num_chunks(self) -> int:
        """Returns the number of chunks of layers of each pipeline stage."""
        return 1

    @property
    def splits_tokens(self) -> bool:
        """Tells whether the ranks of a layer share out its tokens between attention and MLP."""
        return False


class ScoreParallelConfig(ParallelConfig):
    context_parallel: int = Field(1, ge=1)
    """number of ranks that split the tokens of each row (context-parallel size): attention gathers the row's keys and
    values; everything else is computed and stored for a rank's own tokens only; results are the same"""
    expert_tensor_parallel: int = Field(1, ge=1)
    """mixtures of experts: number of ranks that split each expert's matrices (tensor-parallel size of experts),
    neighbouring ranks of a stage; results change by rounding only"""
    pp_interleave_num: int = Field(1, ge=1)
    """interleaved pipeline: number of chunks of layers on each pipeline stage, which has every pipeline_stage-th chunk
    of the model; divides pipeline bubbles by this number and multiplies the traffic between stages by it; results are
    the same"""
    use_seq_parallel: bool = False
    """sequence parallelism: between attention and MLP (norms, residuals), the model_parallel ranks of a layer split the
    tokens, which divides the memory of those activations by model_parallel; results are the same"""

    @property
    def num_chunks(self) -> int:
        return self.pp_interleave_num

    @property
    def splits_tokens(self) -> bool:
        return self.use_seq_parallel and self.model_parallel > 1


class TrainParallelConfig(ScoreParallelConfig):
    micro_batch_num: int | None = Field(None, ge=1)
    """number of micro-batches per update; null: as many as a rollout needs"""


class GenerateParallelConfig(ParallelConfig):
    @field_validator("pipeline_stage")
    @classmethod
    def _has_one_stage(cls, value: int) -> int:
        if value != 1:
            raise ValueError("must be 1: each generator replica holds all layers")
        return value


RECOMPUTED_MODULES = ("attention", "mlp")


class RecomputeConfig(Section):
    recompute: bool = False
    """recompute whole layers in the backward pass"""
    select_recompute: bool | int | list[str] = False
    """recompute only a part. true or [attention]: the attention of every layer; [mlp]: the MLP of every layer; a number
    n: every n-th layer completely"""

    @field_validator("select_recompute")
    @classmethod
    def _are_modules(cls, value: bool | int | list[str]) -> bool | int | list[str]:
        bad_list = isinstance(value, list) and (not value or set(value) - set(RECOMPUTED_MODULES))
        bad_number = isinstance(value, int) and not isinstance(value, bool) and value < 1
        if bad_list or bad_number:
            raise ValueError(
                "must be true, false, a number from 1 up, or a list of attention and mlp"
            )
        return value

    @property
    def modules(self) -> frozenset[str]:
        """Returns the modules of a layer that are recomputed, of attention and mlp."""
        if isinstance(self.select_recompute, list):
            return frozenset(self.select_recompute)
        if self.select_recompute is True:
            return frozenset(("attention",))
        return frozenset(RECOMPUTED_MODULES if self.recompute or self.select_recompute else ())

    @property
    def every(self) -> int:
        """Returns n where every n-th layer is recomputed."""
        select = self.select_recompute
        return select if isinstance(select, int) and select is not True and select else 1


class OptimizerConfig(Section):
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    """decay rate of the first moment"""
    adam_beta2: float = Field(0.95, ge=0, lt=1)
    """decay rate of the second moment"""
    eps: float = Field(1e-8, gt=0)
    """term added to the denominator for numerical stability"""
    weight_decay: float = Field(0.0, ge=0)
    """weight decay coefficient; not applied to norms and biases"""
    max_grad_norm: float = Field(1.0, gt=0)
    """maximum global norm of the gradients; larger gradients are scaled down"""
    opt_offload: bool = False
    """keep the moments in host memory and update the weights there"""


class LoraConfig(Section):
    rank: int | None = Field(None, ge=1)
    """rank of the LoRA adapters; null: train all weights without LoRA"""
    alpha: float | None = Field(None, gt=0)
    """LoRA scaling: adapters are multiplied by alpha / rank; null: alpha = rank"""
    target_modules: list[str] | None = Field(None, min_length=1)
    """matrices to add adapters to: q_proj, down_proj, ...; null: every matrix of a layer and of its experts, without
    the router"""


class ActorConfig(Section):
    load: Annotated[str, BEFORE_TEXT] = ""
    """Hugging Face directory of the model to train, or its name on a hub, such as Qwen/Qwen2.5-0.5B-Instruct"""
    save: OptionalText = None
    """folder for the final model; a new subfolder if it is not empty; null: OUTPUT/hf"""
    save_dtype: Literal["auto", "float32"] = "auto"
    """dtype of the final model's files. auto: context.compute_dtype, in which the trained model was used; float32: the
    optimizer's master weights, in files of twice the size"""
    model_yaml: OptionalText = Field(None, alias="model_config", description=_MODEL_YAML)
    offset: int | list[int] | list[list[int]] = Field(0, description=_OFFSET)
    parallel_config: TrainParallelConfig = TrainParallelConfig()
    recompute_config: RecomputeConfig = RecomputeConfig()
    enable_parallel_optimizer: bool = False
    """shard the optimizer state (moments, and float32 master weights of narrower weights) over the data_parallel x
    context_parallel ranks that hold the same weights, each of which updates its shard (ZeRO-1); no effect if there is
    only one such rank"""
    optimizer: OptimizerConfig = OptimizerConfig()
    lr_schedule: LRSchedule = LRSchedule()
    lora: LoraConfig = LoraConfig()


class CriticConfig(Section):
    load: OptionalText = None
    """Hugging Face directory of the critic, or its name on a hub: a sequence classifier with one label, such as a
    reward model, or a language model, whose values then begin at 0; null: actor_config.load"""
    parallel_config: ScoreParallelConfig | None = None
    """layout of the critic; null: that of the actor"""
    recompute_config: RecomputeConfig = RecomputeConfig()
    enable_parallel_optimizer: bool = False
    """shard the critic's optimizer state, as actor_config.enable_parallel_optimizer"""
    optimizer: OptimizerConfig = OptimizerConfig()
    lr_schedule: LRSchedule = LRSchedule()


class RefConfig(Section):
    load: OptionalText = None
    """Hugging Face directory of the reference model, or its name on a hub; null: actor_config.load"""
    model_yaml: OptionalText = Field(None, alias="model_config", description=_MODEL_YAML)
    offset: int | list[int] | list[list[int]] = Field(0, description=_OFFSET)
    ref_model_batch_size: int = Field(4, ge=1)
    """number of packed rows per forward pass on each data-parallel rank"""
    sync_ref_model: bool = False
    """update the reference model from the policy every ref_model_sync_steps steps"""
    ref_model_sync_steps: int = Field(50, ge=1)
    """number of steps between updates of the reference model"""
    ref_model_mixup_alpha: float = Field(1.0, gt=0, le=1)
    """weight of the policy when it is mixed into the reference model; 1: replace the reference model by a copy"""
    parallel_config: ScoreParallelConfig | None = None
    """layout of the reference model; null: that of the actor"""


class RewardModelConfig(Section):
    load: OptionalText = None
    """Hugging Face directory of a sequence classifier with one label, or its name on a hub: it scores each completion,
    as the last turn of its conversation, at the last token; null: no reward model"""
    name: OptionalText = None
    """name of its scores in metrics and completions; null: the name of its folder"""
    weight: float = 1.0
    """weight of its scores in the reward"""
    scale: Literal["none", "sigmoid", "batch"] = "none"
    """what becomes of a score: none: nothing; sigmoid: between 0 and 1; batch: minus the mean of a step's scores, and
    divided by their standard deviation"""
    max_length: int | None = Field(None, ge=1)
    """maximum length of a conversation in its tokens; a longer one is a failed score; null: rl_config.seq_length, or
    the model's positions if these are fewer"""
    batch_size: int = Field(4, ge=1)
    """number of packed rows per forward pass on each data-parallel rank"""
    chat_template: OptionalText = None
    """its chat template, like rl_config.chat_template; null: that of its own tokenizer"""
    parallel_config: ScoreParallelConfig | None = None
    """layout of the reward model; null: that of the actor"""

    @property
    def score_name(self) -> str:
        return self.name or basename(normpath(self.load or ""))


class SamplingConfig(Section):
    max_tokens: int = Field(128, ge=1)
    """maximum length of a completion in tokens"""
    min_tokens: int = Field(0, ge=0)
    """minimum length of a completion in tokens; stop tokens are suppressed until then"""
    temperature: float = Field(1.0, ge=0)
    """sampling temperature; 0: greedy, always the most likely token"""
    repetition_penalty: float = Field(1.0, gt=0)
    """penalty for repeated tokens; 1: off"""
    top_p: float = Field(1.0, gt=0, le=1)
    """sample from the most likely tokens up to this cumulative probability, including ties with the last one; 1: off"""
    top_k: int = Field(0, ge=-1)
    """sample from the k most likely tokens; 0 or -1: off"""
    min_p: float = Field(0.0, ge=0, lt=1)
    """minimum probability of a token, as a fraction of the largest one; 0: off"""
    eos_token_id: int | list[int] | None = None
    """ids of stop tokens; null: those of generation_config.json"""

    @field_validator("eos_token_id")
    @classmethod
    def _are_ids(cls, value: int | list[int] | None) -> int | list[int] | None:
        ids = [value] if isinstance(value, int) else value
        if ids is not None and (not ids or min(ids) < 0):
            raise ValueError("must be one token id, 0 or more, or a list of at least one")
        return value


class GenerateConfig(Section):
    load: OptionalText = None
    """empty, or the same as actor_config.load"""
    model_yaml: OptionalText = Field(None, alias="model_config", description=_MODEL_YAML)
    parallel_config: GenerateParallelConfig = GenerateParallelConfig()
    use_vllm: Literal[0, 1, 2] = 0
    """1: generate with vLLM; 0, 2 (MindRLHF's debugging mode): generate with the embedded generator"""
    max_model_len: int | None = Field(None, ge=2)
    """maximum length of prompt and completion together in tokens; null: max_prompt_length + max_tokens"""
    max_num_seqs: int | None = Field(None, ge=1)
    """maximum number of sequences in flight on each data-parallel rank; null: no limit"""
    draft_rows: int | Literal["auto"] = "auto"
    """embedded generator: number of rows of a decode step, beyond one per sequence, that check drafts; on devices, rows
    of ended sequences do too; drafts are found in texts of the same prompt and change no token, only how many steps
    a rollout takes; auto: as many as cost nothing; 0: no drafts"""
    draft_history: int = Field(64, ge=0)
    """embedded generator: MiB of host memory per rank for the latest completions of each prompt, to draft from in the
    next epoch; not saved in checkpoints; 0: draft only from the present rollout"""
    max_prompt_length: int = Field(512, ge=1)
    """maximum length of a prompt in tokens"""
    max_num_batched_tokens: int | None = Field(None, ge=1)
    """vLLM: maximum number of batched tokens per iteration; null: vLLM's default"""
    block_size: int | None = Field(None, ge=1)
    """vLLM: number of tokens per block of the KV cache; null: vLLM's default"""
    gpu_memory_utilization: float | None = Field(None, gt=0, le=1)
    """vLLM: fraction of a device's memory that an engine may use; on processors, fraction of the host's memory for all
    engines of the run together; null: 0.9 on a device, else no limit"""
    update_weights_bucket_megabytes: int = Field(256, ge=1)
    """devices: maximum amount of weights in MiB that a rank sends to others, and receives, at a time when the generator
    gets new ones; what is not contiguous takes as much memory beside the weights"""
    sampling_config: SamplingConfig = SamplingConfig()
    vllm: VllmConfig = VllmConfig()

    @field_validator("draft_rows")
    @classmethod
    def _counts_rows(cls, rows: object) -> object:
        if isinstance(rows, int) and rows < 0:
            raise ValueError("must be auto, 0 or more")
        return rows

    @property
    def bucket_bytes(self) -> int:
        return self.update_weights_bucket_megabytes << 20

    @property
    def uses_vllm(self) -> bool:
        return self.use_vllm == 1

    @property
    def longest(self) -> int:
        """Returns the maximum number of tokens of a prompt and its completion together."""
        return self.max_model_len or self.max_prompt_length + self.sampling_config.max_tokens
