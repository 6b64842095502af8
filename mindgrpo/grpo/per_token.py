"""A step's figures of every token, for per_token.jsonl: one row a sample, its arrays as text."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from mindgrpo.algorithm.losses import kl_estimate
from mindgrpo.algorithm.types import TrainBatch
from mindgrpo.grpo.metrics import trainer_logps
from mindgrpo.training.update import UpdateReport

_LARGEST = float(np.finfo(np.float16).max)


def encoded(values: np.ndarray) -> str:
    """Base64 of little-endian float16; what is beyond its range becomes its largest, nan stays nan."""
    narrow = np.clip(values, -_LARGEST, _LARGEST).astype("<f2")
    return base64.b64encode(narrow.tobytes()).decode("ascii")


def token_rows(
    batch: TrainBatch, reports: Sequence[UpdateReport], kl_estimator: str
) -> Iterator[dict[str, Any]]:
    """One a sample, in order; each array has the length of its completion, and nan where the policy wrote no token.

    `logprob` is the generator's, `gap` the trainer's minus it, before the first update. `log_ratio` (to the log-probs
    before the step; 0 where none are kept), `entropy` and `kl` are of the last update that had the sample in its loss.
    What was not computed of a sample is left out.
    """
    trainer = trainer_logps(batch, reports) or {}
    last = {i: report for report in reports for i in report.logps}
    old, reference, in_loss = batch.old_logps, batch.reference_logps, batch.sample_mask
    for i, generator in enumerate(batch.rollout.generator_logps):
        arrays = {"logprob": generator}
        if i in trainer:
            arrays["gap"] = trainer[i] - generator
        if i in last and (in_loss is None or in_loss[i]):
            logps = last[i].logps[i]
            arrays["log_ratio"] = logps - (logps if old is None else old[i])
            arrays["entropy"] = last[i].entropies[i]
            if reference is not None:
                # k3 of a small difference is a small number left over from large ones.
                exact = logps.astype(np.float64)
                arrays["kl"] = kl_estimate(exact, reference[i], kl_estimator)
        mask = batch.rollout.action_mask[i]
        texts = {name: encoded(np.where(mask, v, np.nan)) for name, v in arrays.items()}
        yield {"sample": i, "length": len(generator), **texts}
