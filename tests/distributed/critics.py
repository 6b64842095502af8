"""Updates of a critic in several layouts, for job.py. Judges nothing."""

from __future__ import annotations

from typing import Any

import cases as c
import numpy as np
from algorithms import loss_of

from mindgrpo.algorithm.packing import MicroShape, PackedRollout
from mindgrpo.algorithm.sample import LENGTH, Rollout, TrainBatch
from mindgrpo.backend.contract import Backend
from mindgrpo.backend.kernels.shapes import AdamWSettings
from mindgrpo.models.decoder import KEEP_ALL
from mindgrpo.models.decoder_config import decoder_config
from mindgrpo.models.parameters import parameter_specs
from mindgrpo.models.pipeline import compute_log_probs
from mindgrpo.parallel.mesh import Mesh
from mindgrpo.parallel.sharding import Layout
from mindgrpo.training.critic_update import update_critic
from mindgrpo.training.policy import Policy, UpdateSettings
from mindgrpo.weights.pretrained import fill_random

UPDATES = 3


def batch_of(values: list[np.ndarray] | None = None) -> TrainBatch:
    """Samples of several lengths, one without a token; returns are noise around the values, which are 0 at first."""
    rng = np.random.default_rng(7)
    prompts = [rng.integers(0, 60, n).astype(np.int32) for n in (3, 5, 2, 7) for _ in range(2)]
    tokens = [rng.integers(0, 60, n).astype(np.int32) for n in (9, 4, 12, 1, 6, 8, 10, 5)]
    none = [np.zeros(len(own), np.float32) for own in tokens]
    rollout = Rollout.single_turn(prompts, tokens, [LENGTH] * 8, none, [0, 0, 1, 1, 2, 2, 3, 3])
    known = values or none
    returns = [v + rng.standard_normal(len(v)).astype(np.float32) for v in known]
    return TrainBatch(rollout, np.zeros(8, np.float32), values=known, returns=returns)


def critic_updates(backend: Backend) -> dict[str, Any]:
    """By layout of this world: reports of updates, and values before and after them."""
    kind = "shared_memory" if backend.shares_memory else "device"
    return {
        case.name: _updates(backend, case)
        for case in c.CRITICS
        if case.world == (backend.world_size, kind)
    }


def _updates(backend: Backend, case: c.CriticCase) -> dict[str, Any]:
    config = decoder_config(c.CRITIC_MODEL, "the test's model").with_scalar_head()
    mesh = Mesh(*case.mesh)
    layout = Layout.of(mesh, parameter_specs(config, case.splits), 0, case.splits, case.chunks)
    unit = 32 if mesh.cp > 1 else mesh.tp
    settings = UpdateSettings(
        shape=MicroShape(2, 32, unit=unit, context_ranks=mesh.cp),
        num_positions=32,
        temperature=1.0,
        recompute=KEEP_ALL,
        loss_config=loss_of(),
        max_grad_norm=1.0,
        adamw=AdamWSettings(0.9, 0.95, 1e-8, 0.0),
        shards_optimizer=case.shards_optimizer,
        loss_scale=1.0 if case.dtype == "float32" else 256.0,
    )
    own, backend.compute_dtype = backend.compute_dtype, case.dtype
    critic = Policy(config, layout, backend, settings, role="critic")
    for pools in (*critic.pools.values(), *critic.host_pools.values()):
        for pool in pools:
            pool.load()
    fill_random(critic.masters, 5, 0.1)
    critic.masters_changed()
    packed = PackedRollout(batch_of().rollout)
    before = compute_log_probs(critic.pipeline, mesh, backend, packed)
    batch = batch_of(before)
    reports = [update_critic(critic, batch, packed, range(8), 0.001) for _ in range(UPDATES)]
    after = compute_log_probs(critic.pipeline, mesh, backend, packed)
    backend.compute_dtype = own
    return {
        "losses": [report.loss for report in reports],
        "norms": [report.grad_norm for report in reports],
        "before": np.concatenate(before).tolist(),
        "after": np.concatenate(after).tolist(),
    }
