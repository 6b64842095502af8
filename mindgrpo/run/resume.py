"""Going on from a checkpoint: its weights and counts into this run's roles.

A checkpoint that turns out damaged is passed over for the one before, unless the user named it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from mindgrpo.backend.contract import Backend
from mindgrpo.checkpoint.folders import Candidate, Start
from mindgrpo.checkpoint.format import DamagedCheckpoint, Identity
from mindgrpo.checkpoint.load import check_tensors, load_role
from mindgrpo.checkpoint.shards import values_digest
from mindgrpo.config import Config
from mindgrpo.errors import UserError
from mindgrpo.grpo.roles import Roles
from mindgrpo.run.start import compare
from mindgrpo.weights.local_weights import Weights


def saved_roles(config: Config, roles: Roles) -> dict[str, Weights]:
    """Everything that a run changes, by the name that it has in a checkpoint."""
    policy = roles.policy
    trained = "policy" if policy.adapters is None else "adapters"
    saved = {
        trained: policy.masters,
        "first_moments": policy.optimizer.first,
        "second_moments": policy.optimizer.second,
    }
    if config.ref_config.sync_ref_model and roles.reference is not None:
        saved["reference"] = roles.reference.weights
    return saved


def unsaved_digests(config: Config, roles: Roles) -> dict[str, str]:
    """Of weights that the run only reads, which must still be on the device; all ranks together."""
    digests = {}
    if roles.policy.adapters is not None:
        digests["base"] = values_digest(roles.policy.weights, roles.backend)
    if roles.reference is not None and not config.ref_config.sync_ref_model:
        digests["reference"] = values_digest(roles.reference.weights, roles.backend)
    return digests


def restored_roles(config: Config, start: Start | None) -> tuple[str, ...]:
    """Roles that a checkpoint fills, so that nobody need read their first weights."""
    if start is None or not start.candidates:
        return ()
    whole = () if config.actor_config.lora.rank is not None else ("policy",)
    return (*whole, "reference") if config.ref_config.sync_ref_model else whole


def restore(
    start: Start, config: Config, roles: Roles, now: Identity, say: Callable[[str], None]
) -> Candidate | None:
    """Fills the roles from the newest candidate that is whole; None where there is no candidate. Raises UserError."""
    if not start.candidates:
        return None
    saved = saved_roles(config, roles)
    reasons: list[str] = []
    for candidate in start.candidates:
        compare(candidate, config, now)
        reason = _load(candidate, saved, roles.backend)
        if reason is None:
            state = candidate.manifest.state
            roles.policy.updates, roles.policy.version = state.updates, state.weights_version
            roles.policy.masters_changed()
            return candidate
        if start.only:
            raise UserError(reason)
        reasons.append(reason)
        say(f"  passed over: {reason}")
    raise UserError(f"No checkpoint in {start.source} is whole; the newest: {reasons[0]}")


def _load(candidate: Candidate, saved: Mapping[str, Weights], backend: Backend) -> str | None:
    """Why the checkpoint cannot be used, the same on all ranks. Raises UserError for another run's."""
    folder, manifest = candidate.folder, candidate.manifest
    check_tensors(folder, manifest, saved)
    error = None
    try:
        for role, weights in saved.items():
            load_role(folder, manifest, role, weights)
    except DamagedCheckpoint as damaged:
        error = str(damaged)
    error = next((message for message in backend.world.gather_objects(error) if message), None)
    if error is not None:
        return error
    for role, weights in saved.items():
        if values_digest(weights, backend) != manifest.sums.get(role):
            return f"{folder} does not hold the values of {role} that were saved; use an earlier checkpoint."
    return None
