"""Runs the updates of a step, after all ranks agree on the batch; shared by GRPO and supervised training."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from mindgrpo.algorithm.non_finite import NonFinite, NonFiniteUpdate
from mindgrpo.algorithm.packing import PackedRollout
from mindgrpo.algorithm.sample import TrainBatch
from mindgrpo.backend.contract import Backend
from mindgrpo.backend.rank_consistency import check_alike
from mindgrpo.grpo.metrics import CriticUpdates, SkippedUpdate, step_digests
from mindgrpo.models.expert_routes import StepExperts
from mindgrpo.training.critic_update import CriticReport, update_critic
from mindgrpo.training.policy import Policy
from mindgrpo.training.update import UpdateReport, update

DIFFERENT_SAMPLES = (
    "these are the same on every rank unless memory was damaged or ranks run different code or data"
)


def agree_on_batch(
    backend: Backend, batch: TrainBatch, rewards: np.ndarray, bad: NonFinite | None, step: int
) -> tuple[int, NonFinite] | None:
    """Verifies that all ranks have the same batch of step `step` (from 0). Collective. Raises RanksDisagree.

    `bad` is a non-finite number found on this rank. If any rank has one, returns (rank, number) of the first such rank
    without a comparison; otherwise None.
    """
    by_rank = backend.world.gather_objects((bad, step_digests(batch, rewards)))
    for rank, (number, _) in enumerate(by_rank):
        if number is not None:
            return rank, number
    check_alike([digests for _, digests in by_rank], f"in step {step + 1}", DIFFERENT_SAMPLES)
    return None


def make_critic_updates(
    critic: Policy,
    batch: TrainBatch,
    packed: PackedRollout,
    shares: Sequence[np.ndarray],
    learning_rate: Callable[[int], float],
    bad: tuple[int, NonFinite] | None,
) -> CriticUpdates:
    """Runs one update of the critic for each of `shares`; arguments are those of `make_updates`."""
    reports: list[CriticReport] = []
    lr, skipped = 0.0, 0
    for index, share in enumerate(shares):
        lr = learning_rate(index)
        if bad is not None:
            skipped += 1
            continue
        try:
            reports.append(update_critic(critic, batch, packed, share.tolist(), lr))
        except NonFiniteUpdate:
            skipped += 1
    return CriticUpdates(reports, skipped, lr)


def make_updates(
    policy: Policy,
    batch: TrainBatch,
    packed: PackedRollout,
    shares: Sequence[np.ndarray],
    learning_rate: Callable[[int], float],
    bad: tuple[int, NonFinite] | None,
    check: Callable[[UpdateReport], None] | None = None,
    experts: StepExperts | None = None,
) -> tuple[list[UpdateReport], list[SkippedUpdate], float]:
    """Runs one update for each of `shares`, arrays of sample indices; returns reports, skipped updates and the last lr.

    `learning_rate` maps the update's index in the step to its rate. All updates are skipped if `bad` names a non-finite
    number in the batch. `check` gets the first report; its exceptions propagate before any weight has changed.
    `experts` are as in `update`.
    """
    reports: list[UpdateReport] = []
    skipped: list[SkippedUpdate] = []
    lr = 0.0
    if bad is None:
        experts = experts or policy.pipeline.experts_of(packed)
    for index, share in enumerate(shares):
        members = share.tolist()
        lr = learning_rate(index)
        if bad is not None:
            skipped.append(SkippedUpdate(index, members, lr, bad[1], bad[0]))
            continue
        try:
            own_check = None if reports else check
            reports.append(update(policy, batch, packed, members, lr, own_check, experts))
        except NonFiniteUpdate as error:
            skipped.append(SkippedUpdate(index, members, lr, error.number, error.rank))
    return reports, skipped, lr
