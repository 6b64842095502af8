"""Makes the updates of a step, once all ranks agree on their batch; of GRPO and of supervised training alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from mindgrpo.algorithm.non_finite import NonFinite, NonFiniteUpdate
from mindgrpo.algorithm.packing import PackedRollout
from mindgrpo.algorithm.sample import TrainBatch
from mindgrpo.backend.contract import Backend
from mindgrpo.backend.rank_consistency import check_alike
from mindgrpo.grpo.metrics import SkippedUpdate, step_digests
from mindgrpo.models.expert_routes import StepExperts
from mindgrpo.training.policy import Policy
from mindgrpo.training.update import UpdateReport, update

DIFFERENT_SAMPLES = (
    "these are the same on every rank unless memory was damaged or ranks run different code or data"
)


def agree_on_batch(
    backend: Backend, batch: TrainBatch, rewards: np.ndarray, bad: NonFinite | None, step: int
) -> tuple[int, NonFinite] | None:
    """Compares the batch of step number `step` (from 0) over the ranks, which call it together.

    `bad` is this rank's number that is not finite. Returns (rank, number) of the first that has one, before anything
    is compared. Raises RanksDisagree.
    """
    by_rank = backend.world.gather_objects((bad, step_digests(batch, rewards)))
    for rank, (number, _) in enumerate(by_rank):
        if number is not None:
            return rank, number
    check_alike([digests for _, digests in by_rank], f"in step {step + 1}", DIFFERENT_SAMPLES)
    return None


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
    """Makes one update of each of `shares`, samples of the batch; returns reports, skipped updates and the last rate.

    `learning_rate` is by the update's number in the step. Skips all of them where `bad` names a number of the batch
    that is not finite. Raises what `check` raises of the first report, before the weights have changed. `experts` are
    as in `update`.
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
