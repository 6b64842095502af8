"""The losses of docs/algorithms.md against TRL's own code: one JSON line a loss, with the largest differences.

PYTHONPATH=. PEERS/trl/bin/python scripts/bench/peers/trl_losses.py. TRL's GRPOTrainer._compute_loss is called on given
log-probs, in float64, without a model; ours is algorithm/losses.py, its gradient by central differences. Five samples
of unequal length. Does not prove anything of the graph, which tests compare with the same formulas.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import trl
from trl.trainer.grpo_trainer import GRPOTrainer

from mindgrpo.algorithm.estimators import AlgorithmConfig
from mindgrpo.algorithm.losses import policy_loss, token_weights
from mindgrpo.algorithm.surrogates import Tokens
from mindgrpo.algorithm.token_selection import select_tokens

LENGTHS = np.array([5, 1, 9, 4, 6])
LONGEST, STEP = 12, 1e-6


def changed(config: AlgorithmConfig, **keys: Any) -> AlgorithmConfig:
    return config.model_copy(update=keys)


BASE = AlgorithmConfig(epsilon_low=0.2, epsilon_high=0.3, beta=0.0)
GSPO = changed(BASE, importance_sampling_level="sequence", epsilon_low=0.03, epsilon_high=0.04)
LOSSES = {
    "grpo, k3": changed(BASE, beta=0.05),
    "grpo, k3, unbiased": changed(BASE, beta=0.05, unbiased_kl=True),
    "dapo, delta": changed(BASE, loss_type="dapo", delta=1.5),
    "dr_grpo": changed(BASE, loss_type="dr_grpo"),
    "gspo": GSPO,
    "cispo": changed(BASE, loss_type="cispo", epsilon_low=1.0),
    "sapo": changed(BASE, loss_type="sapo"),
    "luspo": changed(GSPO, loss_type="luspo"),
    "vespo": changed(BASE, loss_type="vespo"),
    "top entropy": changed(BASE, top_entropy_quantile=0.3),
    "off-policy mask": changed(BASE, off_policy_mask_threshold=0.02),
}


class OneProcess:
    """What TRL's loss asks of accelerate."""

    num_processes, is_main_process, sync_gradients = 1, True, True

    def gather(self, x: Any) -> Any:
        return x

    def pad_across_processes(self, x: Any, dim: int, pad_index: float) -> Any:
        return x

    def reduce(self, x: Any, reduction: str) -> Any:
        return x


def trls(
    config: AlgorithmConfig, rows: dict[str, np.ndarray], mask: np.ndarray
) -> tuple[float, Any]:
    """Returns TRL's loss of `rows` [samples, tokens] and its gradient by each log-prob."""
    logps = torch.tensor(rows["logps"], requires_grad=True)
    # Its epsilon_high is the bound itself for cispo.
    low, high = config.clip_bounds
    high += config.loss_type == "cispo"
    arguments = SimpleNamespace(
        delta=config.delta,
        use_bias_correction_kl=config.unbiased_kl,
        steps_per_generation=1,
        **{
            name: value
            for name, value in config.model_dump().items()
            if name.startswith(("sapo", "vespo"))
        },
    )
    trainer = SimpleNamespace(
        args=arguments,
        accelerator=OneProcess(),
        model=SimpleNamespace(training=True),
        loss_type=config.loss_type,
        importance_sampling_level=config.importance_sampling_level,
        epsilon_low=low,
        epsilon_high=high,
        beta=config.beta,
        max_completion_length=LONGEST,
        top_entropy_quantile=config.top_entropy_quantile,
        off_policy_mask_threshold=config.off_policy_mask_threshold,
        current_gradient_accumulation_steps=1,
        aux_loss_enabled=False,
        use_vllm=False,
        _entropy_bonus_enabled=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
        get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
        get_gamma_weights=GRPOTrainer.get_gamma_weights,
        _get_per_token_logps_and_entropies=lambda *_, **__: (
            logps,
            torch.tensor(rows["entropy"]),
            None,
        ),
    )
    trainer.get_high_entropy_mask = lambda *given: GRPOTrainer.get_high_entropy_mask(
        trainer, *given
    )
    ids, kept = torch.zeros(mask.shape, dtype=torch.long), torch.tensor(mask)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": kept[:, :1],
        "completion_ids": ids,
        "completion_mask": kept,
        "advantages": torch.tensor(rows["advantages"][:, 0]),
        "old_per_token_logps": torch.tensor(rows["old"]),
        "ref_per_token_logps": torch.tensor(rows["reference"]),
        "num_items_in_batch": kept.sum(),
    }
    loss = GRPOTrainer._compute_loss(trainer, None, inputs)
    loss.backward()
    return float(loss.detach()), logps.grad.numpy()


def ours(
    config: AlgorithmConfig, rows: dict[str, np.ndarray], mask: np.ndarray
) -> tuple[float, Any]:
    """Returns our loss of the same and its gradient, [tokens]."""
    flat = {name: values[mask > 0] for name, values in rows.items()}
    weights = np.repeat(
        token_weights(LENGTHS, config, max_tokens=LONGEST).astype(np.float64), LENGTHS
    )
    ones = np.ones(weights.size)
    tokens = Tokens(**flat, weights=weights, rollout_is_weights=ones, lengths=LENGTHS)
    factors, _ = select_tokens(tokens, config, np.random.default_rng(0))
    tokens = replace(tokens, rollout_is_weights=factors)
    slopes = np.zeros(weights.size)
    for i in range(slopes.size):
        ends = []
        for sign in (1, -1):
            moved = tokens.logps.copy()
            moved[i] += sign * STEP
            ends.append(policy_loss(replace(tokens, logps=moved), config, tokens.logps))
        slopes[i] = (ends[0] - ends[1]) / (2 * STEP)
    return policy_loss(tokens, config), slopes


def main() -> None:
    rng = np.random.default_rng(7)
    shape = len(LENGTHS), int(LENGTHS.max())
    mask = (np.arange(shape[1]) < LENGTHS[:, None]).astype(np.int64)
    old = rng.uniform(-4.0, -0.5, shape)
    rows = {
        "logps": old + rng.normal(0, 0.25, shape),
        "old": old,
        "reference": old + rng.normal(0, 0.4, shape),
        "entropy": rng.uniform(0.1, 3.0, shape),
        "advantages": np.broadcast_to(rng.normal(size=(shape[0], 1)), shape),
    }
    for name, config in LOSSES.items():
        value, slopes = ours(config, rows, mask)
        its_value, its_slopes = trls(config, rows, mask)
        gap = float(np.abs(slopes - its_slopes[mask > 0]).max())
        figures = {"loss": value, "trl": its_value, "largest_slope": float(np.abs(slopes).max())}
        print(json.dumps({"name": name, "version": trl.__version__, **figures, "slope_gap": gap}))


if __name__ == "__main__":
    main()
