"""Declares the fields of GRPOConfig, for editors and `help`.

Those after `*` are what `python -m mindgrpo config --trl_fields` prints, from the schema and its aliases.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Literal, ParamSpec

Fields = ParamSpec("Fields")


def only_given(declared: Callable[Fields, None]) -> Callable[Fields, None]:
    """Hands over the fields that the caller gives, and no defaults: those of a configuration beside them stay."""

    @wraps(declared)
    def init(self: Any, output_dir: str | None = None, **fields: Any) -> None:
        self.take(fields if output_dir is None else {"output_dir": output_dir} | fields)

    return init  # type: ignore[return-value]


class TRLFields:
    """Has TRL's names of keys; the defaults are those of this package. None: that of the key behind the field."""

    # fmt: off
    @only_given
    def __init__(
        self,
        output_dir: str | None = None,
        *,
        num_generations: int = 8,  # rl_config.num_generations
        generation_batch_size: int | None = None,  # rl_config.prompts_per_step
        per_device_train_batch_size: int | None = None,  # rl_config.prompts_per_step
        gradient_accumulation_steps: int | None = None,  # rl_config.prompts_per_step
        steps_per_generation: int | None = None,  # rl_config.updates_per_rollout
        num_iterations: int = 1,  # rl_config.num_iterations
        multi_objective_aggregation: str | None = None,  # rl_config.advantage_estimator
        loss_type: str = "grpo",  # rl_config.loss_type
        sapo_temperature_pos: float = 1.0,  # rl_config.sapo_temperature_pos
        sapo_temperature_neg: float = 1.05,  # rl_config.sapo_temperature_neg
        vespo_k_pos: float = 2.0,  # rl_config.vespo_k_pos
        vespo_lambda_pos: float = 3.0,  # rl_config.vespo_lambda_pos
        vespo_k_neg: float = 3.0,  # rl_config.vespo_k_neg
        vespo_lambda_neg: float = 2.0,  # rl_config.vespo_lambda_neg
        off_policy_mask_threshold: float | None = None,  # rl_config.off_policy_mask_threshold
        use_bias_correction_kl: bool = False,  # rl_config.unbiased_kl
        top_entropy_quantile: float = 1.0,  # rl_config.top_entropy_quantile
        importance_sampling_level: Literal["token", "sequence"] = "token",  # rl_config.importance_sampling_level
        delta: float | None = None,  # rl_config.delta
        mask_truncated_completions: bool = False,  # rl_config.mask_truncated_completions
        entropy_coef: float = 0.0,  # rl_config.entropy_coef
        bf16: bool | None = None,  # context.compute_dtype
        fp16: bool | None = None,  # context.compute_dtype
        model_init_kwargs: dict[str, Any] | str | None = None,  # context.compute_dtype
        cast_lm_head_to_fp32: bool = False,  # context.fp32_lm_head
        vllm_importance_sampling_correction: bool | None = None,  # rl_config.importance_sampling_correction
        vllm_importance_sampling_mode: str | None = None,  # rl_config.importance_sampling_correction
        vllm_importance_sampling_cap: float | None = None,  # rl_config.importance_sampling_cap
        vllm_importance_sampling_clip_max: float | None = None,  # rl_config.importance_sampling_cap
        vllm_importance_sampling_clip_min: float | None = None,  # rl_config.importance_sampling_floor
        epsilon: float | None = None,  # rl_config.epsilon_low
        epsilon_high: float | None = None,  # rl_config.epsilon_high
        beta: float = 0.01,  # rl_config.beta
        scale_rewards: bool | str | None = None,  # rl_config.scale_rewards
        max_tool_calling_iterations: int | None = None,  # rl_config.max_turns
        max_completion_length: int | None = None,  # generate_config.sampling_config.max_tokens
        max_prompt_length: int | None = None,  # generate_config.max_prompt_length
        temperature: float = 1.0,  # generate_config.sampling_config.temperature
        top_p: float = 1.0,  # generate_config.sampling_config.top_p
        top_k: int = 0,  # generate_config.sampling_config.top_k
        min_p: float = 0.0,  # generate_config.sampling_config.min_p
        repetition_penalty: float = 1.0,  # generate_config.sampling_config.repetition_penalty
        vllm_max_model_length: int | None = None,  # generate_config.max_model_len
        vllm_max_model_len: int | None = None,  # generate_config.max_model_len
        use_vllm: bool | int | None = None,  # generate_config.use_vllm
        vllm_gpu_memory_utilization: float | None = None,  # generate_config.gpu_memory_utilization
        vllm_tensor_parallel_size: int = 1,  # generate_config.parallel_config.model_parallel
        learning_rate: float = 1e-06,  # actor_config.lr_schedule.lr
        warmup_steps: int | None = None,  # actor_config.lr_schedule.warmup_step
        warmup_ratio: float | None = None,  # actor_config.lr_schedule.warmup_ratio
        lr_scheduler_type: str | None = None,  # actor_config.lr_schedule.lr_decay_style
        max_grad_norm: float = 1.0,  # actor_config.optimizer.max_grad_norm
        weight_decay: float = 0.0,  # actor_config.optimizer.weight_decay
        router_aux_loss_coef: float | None = None,  # rl_config.router_aux_loss_coef
        adam_epsilon: float = 1e-08,  # actor_config.optimizer.eps
        adam_beta1: float = 0.9,  # actor_config.optimizer.adam_beta1
        adam_beta2: float = 0.95,  # actor_config.optimizer.adam_beta2
        gradient_checkpointing: bool = False,  # actor_config.recompute_config.recompute
        activation_checkpointing: bool | None = None,  # actor_config.recompute_config.recompute
        use_cpu: bool | None = None,  # context.device_target
        no_cuda: bool | None = None,  # context.device_target
        num_generations_eval: int = 1,  # rl_config.eval_num_generations
        eval_on_start: bool = True,  # rl_config.eval_on_start
        num_train_epochs: float | None = None,  # rl_config.epochs
        max_steps: int | None = None,  # rl_config.max_steps
        eval_steps: int | None = None,  # rl_config.eval_steps
        eval_strategy: str | None = None,  # rl_config.eval_steps
        evaluation_strategy: str | None = None,  # rl_config.eval_steps
        save_steps: int | None = None,  # rl_config.save_ckpt_interval
        save_strategy: str | None = None,  # rl_config.save_ckpt_interval
        save_total_limit: int | None = 5,  # rl_config.save_max_ckpt_num
        resume_from_checkpoint: bool | str | None = False,  # rl_config.resume_training
        logging_dir: str | None = None,  # rl_config.tensorboard_dir
        log_completions: bool | None = None,  # rl_config.save_prompt_completions_data
        seed: int = 0,  # rl_config.seed
        data_seed: int | None = None,  # rl_config.seed
        full_determinism: bool | None = None,  # rl_config.deterministic
        reward_weights: list[float] | None = None,  # reward_config.verifier_weight
        report_to: str | list[str] | None = None,  # monitor_config.trackers
        project: str | None = None,  # monitor_config.tracker_project
        run_name: str | None = None,  # monitor_config.tracker_run_name
        sync_ref_model: bool = False,  # ref_config.sync_ref_model
        ref_model_mixup_alpha: float = 1.0,  # ref_config.ref_model_mixup_alpha
        ref_model_sync_steps: int | None = None,  # ref_config.ref_model_sync_steps
    ) -> None: ...
    # fmt: on

    def take(self, fields: dict[str, Any]) -> None:
        """Takes the fields that were given."""
        raise NotImplementedError
