"""Describes a run in a few lines before its first step, with warnings about keys whose names would mislead."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mindgrpo.algorithm.estimators import REJECTIONS
from mindgrpo.algorithm.surrogates import LOSS_TYPES, clipped_surrogate, gpg
from mindgrpo.config import BatchPlan, Config, Loaded
from mindgrpo.errors import counted
from mindgrpo.models.parameters import num_parameters
from mindgrpo.models.vision_config import num_vision_parameters
from mindgrpo.plan.micro_shapes import row_lines
from mindgrpo.run.named_sources import with_names

if TYPE_CHECKING:  # `mindgrpo plan` needs neither
    from mindgrpo.backend.contract import Backend
    from mindgrpo.grpo.inputs import Inputs
    from mindgrpo.plan.run_plan import RunPlan

# Ratios of whole samples stay much nearer to 1 than tokens'; the paper clips at 3e-4 and 4e-4.
WIDE_FOR_SEQUENCES = 0.1
SUPERVISED = (
    "supervised: the mean negative log-likelihood of completions, over the tokens of a step"
)


def run_sections(loaded: Loaded, inputs: Inputs, backend: Backend) -> dict[str, list[str]]:
    """Returns the banner's lines by section, in order, without those of the run's folder and notes."""
    plan, tokenizer = inputs.plan, inputs.tokenizer
    config, model, lora = plan.config, plan.model, plan.lora
    steps = f"{plan.steps_text(len(inputs.prompts))} on {counted(backend.world_size, 'rank')}"
    computes_in: str = backend.compute_dtype
    if computes_in == "float32":
        computes_in = f"matmul precision {backend.matmul_precision}"
    name = loaded.config.rl_config.model_name or with_names(config).actor_config.load
    described = [f"{name}: {model.model_type}, {num_parameters(model) / 1e6:.2f} M parameters"]
    if model.vision is not None:
        count = num_vision_parameters(model.vision) / 1e6
        described.append(f"vision encoder: {count:.2f} M parameters, frozen")
    if lora is not None:
        on = ", ".join(lora.targets)
        described.append(f"LoRA: rank {lora.rank}, alpha {lora.alpha:g}, on {on}")
    stops = inputs.sampling.stop_ids if plan.generates else ()
    texts = (f"{i} {tokenizer.decode([i], skip_special_tokens=False)!r}" for i in stops)
    return {
        "run": [f"{steps} ({backend.name}, {computes_in})"],
        "model": described,
        "layouts": plan.layout_lines(),
        "batch": [*_batch_lines(plan), *row_lines(config)],
        "algorithm": algorithm_lines(config, plan.batch) if plan.generates else [SUPERVISED],
        "memory": plan.memory_lines() if config.verbose else [plan.most_memory()],
        "reshard": plan.reshard_lines() if plan.generates else [],
        "data": inputs.data_lines(),
        "prompt": [],
        "stops": [", ".join(texts)] if plan.generates else [],
        "kernels": [*backend.notices],
    }


def _batch_lines(plan: RunPlan) -> list[str]:
    lines = plan.batch.lines()
    # The first two are about completions and how often they are used.
    return (
        lines
        if plan.generates
        else [f"{counted(plan.batch.prompts_per_step, 'row')} a step", *lines[2:]]
    )


def algorithm_lines(config: Config, batch: BatchPlan) -> list[str]:
    """Describes loss, advantages, KL and filters, with warnings."""
    rl = config.rl_config
    bounds = {
        "delta": rl.delta,
        "dual clip": rl.dual_clip,
        "entropy bonus": rl.entropy_coef or None,
    }
    extra = [f"{name} {value:g}" for name, value in bounds.items() if value is not None]
    loss = [
        f"loss {rl.loss_type}",
        *([f"averaged as {rl.loss_aggregation}"] if rl.loss_aggregation else []),
        f"ratios by {rl.importance_sampling_level}",
        *(["clip {:g} below, {:g} above".format(*rl.clip_bounds)] if rl.clips else []),
        *extra,
    ]
    kl = "no KL"
    if rl.beta > 0:
        kl = f"KL {rl.kl_estimator} x {rl.beta:g} in the {'reward' if rl.kl_in_reward else 'loss'}"
    if rl.distillation_coef:
        kl += f"; distilled from {config.reference_load} x {rl.distillation_coef:g}"
    samples = []
    if rl.dynamic_sampling:
        samples.append(f"groups of equal rewards replaced up to {rl.resampling_rounds} times")
    if rl.mask_truncated_completions:
        samples.append("truncated completions left out")
    if rl.mask_equal_groups:
        samples.append("groups of equal rewards left out")
    if rl.importance_sampling_correction != "none":
        floor = rl.importance_sampling_floor
        below = "" if floor is None else f" and below {floor:g}"
        samples.append(
            f"{rl.importance_sampling_correction} above {rl.importance_sampling_cap:g}{below}"
        )
    for name in REJECTIONS:
        if (bound := getattr(rl, name)) is not None:
            samples.append(f"{name} {bound:g}")
    lines = [
        ", ".join(loss),
        f"advantages {rl.advantage_estimator}, scaled by {rl.reward_scale}; {kl}",
        *([", ".join(samples)] if samples else []),
    ]
    return lines + [f"warning: {warning}" for warning in _warnings(config, batch)]


def _warnings(config: Config, batch: BatchPlan) -> list[str]:
    rl = config.rl_config
    loss, warnings = LOSS_TYPES[rl.loss_type], []
    if rl.beta > 0 and rl.kl_estimator == "k1" and not rl.kl_in_reward:
        warnings.append(
            "the gradient of k1 in the loss has mean 0 and does not limit the divergence; use k2 or k3, or "
            "rl_config.kl_in_reward"
        )
    if rl.kl_in_reward and rl.kl_estimator != "k1":
        warnings.append(
            f"{rl.kl_estimator} in the reward has another gradient than the KL divergence; "
            "rl_config.kl_estimator k1 is exact there"
        )
    by_sequence = rl.importance_sampling_level == "sequence"
    if by_sequence and rl.clips and max(rl.clip_bounds) >= WIDE_FOR_SEQUENCES:
        low, high = rl.clip_bounds
        warnings.append(
            f"ratios of whole samples hardly reach clips of {low:g} and {high:g}; GSPO's paper has "
            "rl_config.epsilon_low 3e-4, epsilon_high 4e-4"
        )
    if rl.advantage_estimator == "rloo" and rl.aggregation == "sample_mean":
        warnings.append(
            f"loss_type {rl.loss_type} divides each sample by its length, which RLOO's paper does not; "
            "rl_config.loss_type dr_grpo has its gradient"
        )
    if rl.loss_type == "dr_grpo" and rl.reward_scale != "none":
        warnings.append("Dr. GRPO's paper has rl_config.scale_rewards none as well")
    bounded = rl.delta is not None or rl.dual_clip is not None
    bounded = bounded or rl.off_policy_mask_threshold is not None or rl.unbiased_kl
    has_ratio = bounded or by_sequence or loss.surrogate not in (clipped_surrogate, gpg)
    if batch.updates_per_step == 1 and rl.old_source == "trainer" and has_ratio:
        warnings.append(
            "with one update a rollout every ratio is 1, so clips and ratio levels change nothing; "
            "see rl_config.updates_per_rollout and num_iterations"
        )
    if rl.loss_type == "gpg" and batch.updates_per_step > 1:
        warnings.append(
            "loss_type gpg has no ratio, so that later updates of a rollout are off-policy"
        )
    return warnings
