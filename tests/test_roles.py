"""The roles of a small model as a run builds them: what of them lasts from phase to phase, and what they agree about.

Does not prove anything of weight sync or of steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import small_runs

from mindgrpo.algorithm.packing import PackedRollout
from mindgrpo.algorithm.sample import Rollout
from mindgrpo.backend.connect import SHARED_MEMORY, connect
from mindgrpo.backend.kernels.shapes import SamplingParams
from mindgrpo.config import load_config
from mindgrpo.grpo.build import make_roles
from mindgrpo.grpo.roles import Roles
from mindgrpo.memory.residency import Residency
from mindgrpo.models.decoder_config import read_config
from mindgrpo.models.pipeline import compute_log_probs
from mindgrpo.plan.run_plan import plan_run

TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def roles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Roles]:
    folder = tmp_path_factory.mktemp("inputs")
    small_runs.make_inputs(folder)
    keys = small_runs.input_keys(folder).items()
    words = [f"--{key}={value}" for key, value in keys]
    config = load_config(folder / "small.yaml", words).config
    plan = plan_run(config, read_config(Path(config.actor_config.load)), 1)
    # As on devices, where roles take turns whatever the room.
    keeps = Residency.__init__

    def none_stay(self: Residency, budget: int | None, _: bool, *rest: object) -> None:
        keeps(self, budget, False, *rest)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Residency, "__init__", none_stay)
        yield make_roles(
            plan, connect(SHARED_MEMORY, {}), SamplingParams(temperature=TEMPERATURE, max_tokens=4)
        )


def test_moments_and_weights_last_while_others_have_the_device(roles: Roles) -> None:
    roles.enter("update")
    optimizer = roles.policy.optimizer
    kept = (roles.policy.weights, optimizer.first, optimizer.second)
    before = []
    for number, weights in enumerate(kept[1:], 1):
        for buffer in weights.arrays.flat_buffers:
            buffer[:] = number
    for weights in kept:
        before.append([buffer.copy() for buffer in weights.arrays.flat_buffers])
    roles.enter("rollout")
    roles.enter("update")
    for weights, buffers in zip(kept, before, strict=True):
        for found, expected in zip(weights.arrays.flat_buffers, buffers, strict=True):
            np.testing.assert_array_equal(found, expected)
    assert all(np.any(buffer) for buffers in before for buffer in buffers)


def test_a_reference_that_is_the_policy_has_its_log_probs_at_every_temperature(
    roles: Roles,
) -> None:
    ids = [np.array([3, 5, 4, 6, 7, 8], np.int32), np.array([9, 4, 11], np.int32)]
    zeros = [np.zeros(len(own) - 1, np.float32) for own in ids]
    rollout = Rollout.single_turn(
        [own[:1] for own in ids], [own[1:] for own in ids], ["stop", "stop"], zeros, [0, 1]
    )
    assert roles.reference is not None
    found = []
    for phase, weights, pipeline in (
        ("reference", roles.reference.weights, roles.reference.pipeline),
        ("old_logps", roles.policy.weights, roles.policy.pipeline),
    ):
        roles.enter(phase)
        packed = PackedRollout(rollout)
        found.append(compute_log_probs(pipeline, weights.layout.mesh, roles.backend, packed))
    for reference, policy in zip(*found, strict=True):
        np.testing.assert_array_equal(reference, policy)
        assert np.all(reference < 0)
