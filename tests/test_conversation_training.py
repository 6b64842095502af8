"""Conversations of four turns trained on the bundled model: loss and gradient against NumPy, packed against unpacked.

Does not prove that an engine draws right.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mindspore as ms
import numpy as np
import pytest
from algorithms import loss_of
from four_turns import (
    LENGTH,
    LONG,
    TURNS,
    batch_of,
    conversations,
    log_probs,
    numpy_loss,
    policy_of,
)
from mindspore import Tensor

from mindgrpo.algorithm.losses import token_weights
from mindgrpo.algorithm.packing import MicroBatch, MicroShape, PackedRollout
from mindgrpo.algorithm.sample import Rollout, TrainBatch
from mindgrpo.backend.cpu.backend import CpuBackend
from mindgrpo.training.policy import Policy
from mindgrpo.training.stage_graphs import LossInputs, PolicyLoss
from mindgrpo.training.update import UpdateReport, update

LOSSES = {
    "grpo": loss_of(beta=0.05),
    "dapo": loss_of(loss_type="dapo", epsilon_high=0.28, beta=0.05),
    "dr_grpo": loss_of(loss_type="dr_grpo"),
}
UNPACKED, PACKED = MicroShape(1, LENGTH, 1), MicroShape(1, LONG)


@dataclass(frozen=True)
class Trained:
    """`gradient` by parameter, before clipping."""

    report: UpdateReport
    gradient: dict[str, np.ndarray]


@pytest.fixture(scope="module")
def backend() -> CpuBackend:
    return CpuBackend({})


@pytest.fixture(scope="module")
def rollout() -> Rollout:
    return conversations()


@pytest.fixture(scope="module")
def policies(backend: CpuBackend) -> Callable[[str, MicroShape], Policy]:
    made: dict[tuple[str, MicroShape], Policy] = {}

    def of(name: str, shape: MicroShape) -> Policy:
        if (name, shape) not in made:
            made[name, shape] = policy_of(backend, LOSSES[name], shape)
        return made[name, shape]

    return of


@pytest.fixture(scope="module")
def logps(policies: Callable[[str, MicroShape], Policy], rollout: Rollout) -> list[np.ndarray]:
    return log_probs(policies("grpo", UNPACKED), rollout)


@pytest.fixture(scope="module")
def batch(rollout: Rollout, logps: list[np.ndarray]) -> TrainBatch:
    return batch_of(rollout, logps)


def trained(policy: Policy, batch: TrainBatch, monkeypatch: pytest.MonkeyPatch) -> Trained:
    """One update whose gradient is looked at and not applied."""
    policy.clear_gradients()
    monkeypatch.setattr(policy, "apply", lambda norm, lr: None)
    report = update(policy, batch, PackedRollout(batch.rollout), range(len(batch)), 1e-2)
    return Trained(report, {n: g.copy() for n, g in policy.gradients.arrays.hf_views.items()})


def linear(policy: Policy, rollout: Rollout, slopes: list[np.ndarray]) -> dict[str, np.ndarray]:
    """The gradient of sum_t slope_t logp_t: at ratio 1 a token's term has the slope -weight * advantage."""
    policy.clear_gradients()
    mesh = policy.weights.layout.mesh
    batches = PackedRollout(rollout).micro_batches(policy.settings.shape, mesh.dp, 0)

    def inputs(micro: MicroBatch) -> LossInputs:
        zeros = np.zeros(micro.picks.size, np.float32)
        ones = np.ones_like(zeros)
        advantages = micro.spread([-s.astype(np.float32) for s in slopes])
        return LossInputs(
            zeros, zeros, advantages, ones, ones, zeros.astype(np.int32), zeros, zeros
        )

    policy.accumulate(batches, [inputs(micro) for micro in batches], False)
    policy.gradient_norm()
    return {name: part.copy() for name, part in policy.gradients.arrays.hf_views.items()}


def distance(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> float:
    """The 2-norm of the difference over that of what is expected."""
    pairs = [(found[name].astype(np.float64), expected[name]) for name in expected]
    difference = sum(float(((a - b) ** 2).sum()) for a, b in pairs)
    return (difference / sum(float((b.astype(np.float64) ** 2).sum()) for _, b in pairs)) ** 0.5


def test_the_conversations_have_four_turns_with_context_between(rollout: Rollout) -> None:
    for messages, mask in zip(rollout.messages, rollout.action_mask, strict=True):
        assert [m["role"] for m in messages] == ["assistant", "tool"] * (TURNS - 1) + ["assistant"]
        assert np.count_nonzero(np.diff(mask.astype(int))) == 2 * (TURNS - 1)
    assert len(set(rollout.action_lengths.tolist())) == len(rollout)
    assert (rollout.action_lengths < rollout.completion_lengths).all()


@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_and_its_slope_by_each_log_prob_are_numpys(
    batch: TrainBatch, logps: list[np.ndarray], name: str
) -> None:
    loss = LOSSES[name]
    expected, slopes = numpy_loss(loss, batch, logps)
    assert batch.old_logps is not None and batch.reference_logps is not None
    weights = token_weights(batch.rollout.action_lengths, loss, max_tokens=LENGTH)
    shape = MicroShape(len(batch), LENGTH, 1)
    (micro,) = PackedRollout(batch.rollout).micro_batches(shape, 1, 0)
    blank = np.zeros(micro.picks.size, np.float32)
    inputs = [micro.spread(logps), blank, micro.spread(batch.old_logps)]
    inputs += [micro.spread(batch.reference_logps), micro.spread(batch.advantages)]
    inputs += [micro.spread(weights) * micro.actions, blank, blank.astype(np.int32), blank, blank]
    cell = ms.value_and_grad(PolicyLoss(loss, True), 0)
    value, slope = cell(*(Tensor(array) for array in inputs))
    assert float(value) == pytest.approx(expected, rel=1e-5)
    found = micro.gather(slope.asnumpy())
    for i, mask in enumerate(batch.rollout.action_mask):
        np.testing.assert_allclose(found[i], slopes[i], rtol=1e-4, atol=1e-7)
        assert not found[i][~mask].any() and found[i][mask].any()


@pytest.mark.parametrize("name", LOSSES)
def test_an_update_has_numpys_loss_and_gradient(
    policies: Callable[[str, MicroShape], Policy],
    batch: TrainBatch,
    logps: list[np.ndarray],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    expected, slopes = numpy_loss(LOSSES[name], batch, logps)
    found = trained(policies(name, UNPACKED), batch, monkeypatch)
    assert found.report.loss == pytest.approx(expected, rel=1e-4)
    assert found.report.clip_fraction > 0.05
    # Ratio 1 and no KL: what the plain loss differentiates is the log-probs alone.
    gradient = linear(policies("dr_grpo", UNPACKED), batch.rollout, slopes)
    size = sum(float((g.astype(np.float64) ** 2).sum()) for g in gradient.values()) ** 0.5
    assert found.report.grad_norm == pytest.approx(size, rel=1e-4) and size > 0.01
    assert distance(found.gradient, gradient) < 1e-4


@pytest.mark.parametrize("name", ["grpo", "dapo"])
def test_packed_rows_have_the_loss_and_gradient_of_one_conversation_a_row(
    policies: Callable[[str, MicroShape], Policy],
    batch: TrainBatch,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    rows = PackedRollout(batch.rollout)
    assert max(map(len, rows.rows(PACKED))) > 1 == max(map(len, rows.rows(UNPACKED)))
    packed, unpacked = (
        trained(policies(name, shape), batch, monkeypatch) for shape in (PACKED, UNPACKED)
    )
    assert packed.report.loss == pytest.approx(unpacked.report.loss, rel=1e-5)
    assert packed.report.grad_norm == pytest.approx(unpacked.report.grad_norm, rel=1e-5)
    assert distance(packed.gradient, unpacked.gradient) < 1e-4
