"""An optimizer that is shared out over replicas beside one that is not, without a model's passes, for job.py.

Gradients are whole numbers, whose sums and sums of squares are exact in any order: then all bits have to be the same.
Those of noise show in which order gradients are added. Judges nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cases as c
import numpy as np
from algorithms import loss_of
from saving import IDENTITY

from mindgrpo.algorithm.packing import MicroShape
from mindgrpo.backend.contract import Backend
from mindgrpo.backend.kernels.shapes import AdamWSettings
from mindgrpo.checkpoint.format import Manifest, RunState, read_manifest
from mindgrpo.checkpoint.load import load_role
from mindgrpo.checkpoint.save import Saver, values_digest
from mindgrpo.models.decoder import KEEP_ALL
from mindgrpo.models.decoder_config import decoder_config
from mindgrpo.models.lora import TARGETS, LoraSettings, fill_adapters
from mindgrpo.models.parameters import parameter_specs
from mindgrpo.parallel.mesh import Mesh
from mindgrpo.parallel.sharding import Layout
from mindgrpo.training.gradient_sync import sums_of
from mindgrpo.training.policy import Policy, UpdateSettings
from mindgrpo.weights.local_weights import Weights
from mindgrpo.weights.pretrained import fill_random, generator_of

SEED = 11
LARGEST_GRADIENT = 3


def policy_of(backend: Backend, case: c.Sharded, mesh: tuple[int, int, int], on: bool) -> Policy:
    config = decoder_config(c.SHARDED_MODEL, "the test's model")
    settings = UpdateSettings(
        shape=MicroShape(c.MICRO_ROWS, c.ROW_LENGTH),
        num_positions=c.ROW_LENGTH,
        temperature=1.0,
        recompute=KEEP_ALL,
        loss_config=loss_of(),
        max_tokens=c.MAX_TOKENS,
        max_grad_norm=c.MAX_GRAD_NORM,
        adamw=AdamWSettings(0.9, 0.95, c.ADAM_EPS, c.WEIGHT_DECAY),
        moments_on_host=case.moments_on_host,
        shards_optimizer=on,
    )
    layout = Layout.of(Mesh(*mesh), parameter_specs(config))
    lora = LoraSettings(case.lora, 1.0, TARGETS) if case.lora else None
    own, backend.compute_dtype = backend.compute_dtype, case.dtype
    policy = Policy(config, layout, backend, settings, lora)
    backend.compute_dtype = own
    for pool in backend.live_pools:
        pool.load()
    if policy.adapters is None:
        fill_random(policy.masters, SEED, c.INITIAL_SCALE)
    else:
        fill_adapters(policy.masters, SEED)
    policy.masters_changed()
    return policy


def fill_gradients(policy: Policy, update: int, exact: bool) -> None:
    """Of `exact` ones the sum over replicas is the same for any number of these; the others are noise."""
    gradients = policy.gradients
    # Ranks of one replica that sum a parameter have equal parts of it.
    parts = {name: len(ranks) for ranks, names in sums_of(gradients).shared for name in names}
    mesh, rank = gradients.layout.mesh, gradients.rank
    share = mesh.index(rank, "dp")
    with gradients.on_host(write=True) as host:
        for spec in gradients.specs():
            part = host.hf_views.get(spec.name)
            if part is None:
                continue
            box = gradients.boxes[spec.name].slices
            if not exact:
                noise = generator_of(spec.name, 100 * update + share)
                part[...] = noise.normal(size=spec.shape).astype(np.float32)[box]
                continue
            size = (1 + mesh.dp, *spec.shape)
            numbers = generator_of(spec.name, update).integers(
                -LARGEST_GRADIENT, LARGEST_GRADIENT + 1, size
            )
            own = numbers[1 + share] if share else numbers[0] - numbers[2:].sum(axis=0)
            part[...] = own[box].astype(np.float32) / 16 / parts.get(spec.name, 1)


def roles_of(policy: Policy) -> dict[str, Weights]:
    optimizer = policy.optimizer
    return {"policy": policy.masters, "first": optimizer.first, "second": optimizer.second}


def differing(own: Weights, whole: Weights) -> list[str]:
    """Names the parameters of which this rank's share has other bits than `whole` there."""
    with own.on_host() as found, whole.on_host() as expected:
        return [
            f"{own.name} {name}"
            for name, part in found.hf_views.items()
            if part.tobytes()
            != expected.hf_views[name][own.boxes[name].within(whole.boxes[name]).slices].tobytes()
        ]


def own_sums(policy: Policy, gradients: Weights) -> tuple[list[str], float]:
    """Names the gradients of which the rows of this rank are not those of `gradients`; and the norm."""
    norm = policy.gradient_norm()
    own = policy.optimizer.first.layout
    summed = Weights(own, policy.backend.rank, policy.backend, "sum", on_host_only=True)
    with summed.on_host(write=True) as taken, policy.gradients.on_host() as given:
        for name, part in taken.hf_views.items():
            inner = summed.boxes[name].within(policy.gradients.boxes[name])
            part[...] = given.hf_views[name][inner.slices]
    return differing(summed, gradients), norm


def compared(backend: Backend, case: c.Sharded) -> dict[str, Any]:
    """Where the two differ, sums of noise first, then after each update; their norms; and the bytes of their state."""
    off, on = (policy_of(backend, case, case.mesh, is_on) for is_on in (False, True))
    for policy in (off, on):
        fill_gradients(policy, 0, exact=False)
    norms = [off.gradient_norm()]
    wrong, norm = own_sums(on, off.gradients)
    norms.append(norm)
    for policy in (off, on):
        policy.clear_gradients()
    for update in (1, 2):
        norms += [updated(policy, update) for policy in (off, on)]
        pairs = zip(roles_of(on).values(), roles_of(off).values(), strict=True)
        for own, whole in (*pairs, (on.trained, off.trained)):
            wrong += differing(own, whole)
    state = [p.optimizer.first.num_bytes + p.optimizer.second.num_bytes for p in (off, on)]
    return {"wrong": wrong, "norms": norms, "state_bytes": state}


def updated(policy: Policy, update: int) -> float:
    fill_gradients(policy, update, exact=True)
    norm = policy.gradient_norm()
    policy.apply(norm, c.LEARNING_RATE)
    with policy.gradients.on_host() as host:
        assert not any(run.any() for run in host.flat_buffers)
    return norm


def moved(folder: Path, backend: Backend, case: c.Sharded) -> list[str]:
    """Updates in one layout after the other, by way of checkpoints, beside as many in one; names roles that differ."""
    unhurt = policy_of(backend, case, c.SHARDED_MOVES[0][0], on=False)
    saver, wrong = Saver(folder, backend), []
    policy: Policy | None = None
    for step, (mesh, on) in enumerate(c.SHARDED_MOVES, start=1):
        taken = policy_of(backend, case, mesh, on)
        if policy is not None:
            checkpoint = _saved(saver, step, policy)
            manifest = read_manifest(checkpoint)
            for role, weights in roles_of(taken).items():
                load_role(checkpoint, manifest, role, weights)
            taken.updates = policy.updates
            taken.masters_changed()
        policy = taken
        found = []
        for run in (unhurt, policy):
            updated(run, step)
            roles = roles_of(run) | {"trained": run.trained}
            found.append({name: values_digest(role, backend) for name, role in roles.items()})
        wrong += [f"{name} in {mesh}" for name in found[0] if found[0][name] != found[1][name]]
    return wrong


def _saved(saver: Saver, step: int, policy: Policy) -> Path:
    state = RunState(step=step, prompts=0, updates=policy.updates, weights_version=0)

    def complete(stored: dict[str, Any]) -> Manifest:
        return Manifest(layout="", state=state, identity=IDENTITY, **stored)

    saver.begin(step, roles_of(policy), complete, background=False)
    return saver.commit()


def sharded_optimizers(folder: Path, backend: Backend) -> dict[str, Any]:
    """Of the cases of this world by name; in shared memory the first of them is moved as well."""
    world = (backend.world_size, "shared_memory" if backend.shares_memory else "device")
    own = [case for case in c.SHARDED if case.world == world]
    found: dict[str, Any] = {case.name: compared(backend, case) for case in own}
    return {"compared": found} | (
        {"moved": moved(folder, backend, own[0])} if backend.shares_memory else {}
    )
