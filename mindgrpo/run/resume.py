"""Resumes a run: loads the roles' weights from a checkpoint, and returns the resume state.

All functions are collective. A damaged checkpoint is skipped for the previous one, unless the user named it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from mindgrpo.backend.contract import Backend
from mindgrpo.checkpoint.differences import scoring_changes
from mindgrpo.checkpoint.folders import Candidate, Start
from mindgrpo.checkpoint.format import DamagedCheckpoint, Identity, restored_groups
from mindgrpo.checkpoint.load import check_tensors, load_role
from mindgrpo.checkpoint.remote_files import check_files, read_files
from mindgrpo.checkpoint.save import values_digest
from mindgrpo.config import Config
from mindgrpo.errors import UserError
from mindgrpo.grpo.roles import TrainedRoles
from mindgrpo.grpo.state import Run, State
from mindgrpo.monitor.console import Console
from mindgrpo.run.start import compare
from mindgrpo.weights.local_weights import Weights


def resume(
    run: Run[TrainedRoles],
    start: Start | None,
    now: Identity,
    console: Console,
) -> tuple[State, Candidate | None]:
    """Loads a checkpoint, if the run resumes; returns the state to start from and the checkpoint loaded, if any.

    Raises UserError.
    """
    if start is None or not start.candidates:
        return State(), None
    with console.phase("reading the checkpoint"):
        chosen = _restore(start, run.config, run.roles, now, console.line)
    stored, choices = chosen.manifest.state, run.roles.shape_choices
    owners = run.prompts.at([group.position for group in stored.unfinished])
    files = read_files(chosen.folder, chosen.manifest)
    state = State(
        step=stored.step,
        position=stored.prompts,
        solved=frozenset(stored.solved),
        unfinished=restored_groups(stored.unfinished, [owner.ids for owner in owners], files),
        baselines=stored.baselines,
        open_row=stored.open_row,
        best=stored.best,
        evaluations=list(stored.evaluations),
        first_step_seconds=stored.first_step_seconds,
        seconds=stored.seconds,
        compiles=stored.compiles,
    )
    for phase, shapes in stored.shapes.items():
        if phase in choices:
            choices[phase].restore(shapes.in_use, shapes.excess)
    console.line(f"  resumed from {chosen.folder}: {state.step} of {run.num_steps} steps are done")
    changes = scoring_changes(chosen.manifest.identity, now)
    if state.best is not None and changes:
        console.line(
            f"  the best checkpoint so far, of step {state.best.step}, is not compared with later ones: "
            f"{'; '.join(map(str, changes))}"
        )
        state.best = None
    return state, chosen


def saved_roles(config: Config, roles: TrainedRoles) -> dict[str, Weights]:
    """Returns all weights that training changes, by their names in checkpoints."""
    policy = roles.policy
    trained = "policy" if policy.adapters is None else "adapters"
    saved = {
        trained: policy.masters,
        "first_moments": policy.optimizer.first,
        "second_moments": policy.optimizer.second,
    }
    if config.ref_config.sync_ref_model and roles.reference is not None:
        saved["reference"] = roles.reference.weights
    if roles.critic is not None:
        saved["critic"] = roles.critic.masters
        saved["critic_first_moments"] = roles.critic.optimizer.first
        saved["critic_second_moments"] = roles.critic.optimizer.second
    return saved


def unsaved_digests(config: Config, roles: TrainedRoles) -> dict[str, str]:
    """Digests the weights that the run only reads, which must still be on the device. Collective."""
    digests = {}
    if roles.policy.adapters is not None:
        digests["base"] = values_digest(roles.policy.weights, roles.backend)
    if roles.reference is not None and not config.ref_config.sync_ref_model:
        digests["reference"] = values_digest(roles.reference.weights, roles.backend)
    if roles.encoder is not None:
        digests["vision encoder"] = values_digest(roles.encoder.weights, roles.backend)
    for model in roles.reward_models:
        digests[model.role] = values_digest(model.weights, roles.backend)
    return digests


def restored_roles(config: Config, start: Start | None) -> tuple[str, ...]:
    """Returns the roles whose weights come from a checkpoint and need not be loaded from the model."""
    if start is None or not start.candidates:
        return ()
    whole = () if config.actor_config.lora.rank is not None else ("policy",)
    others = ("reference",) if config.ref_config.sync_ref_model else ()
    return (*whole, *others, *(("critic",) if config.has_critic else ()))


def _restore(
    start: Start, config: Config, roles: TrainedRoles, now: Identity, say: Callable[[str], None]
) -> Candidate:
    """Loads the roles' weights from the newest undamaged candidate. Raises UserError."""
    saved = saved_roles(config, roles)
    reasons: list[str] = []
    for candidate in start.candidates:
        compare(candidate, config, now)
        reason = _load(candidate, saved, roles.backend)
        if reason is None:
            state = candidate.manifest.state
            roles.policy.updates, roles.policy.version = state.updates, state.weights_version
            roles.policy.masters_changed()
            if roles.critic is not None:
                roles.critic.updates = state.critic_updates or 0
                roles.critic.masters_changed()
            return candidate
        if start.only:
            raise UserError(reason)
        reasons.append(reason)
        say(f"  passed over: {reason}")
    raise UserError(f"No checkpoint in {start.source} is whole; the newest: {reasons[0]}")


def _load(candidate: Candidate, saved: Mapping[str, Weights], backend: Backend) -> str | None:
    """Loads a checkpoint, or returns why it is unusable; alike on all ranks. Raises UserError for another run's."""
    folder, manifest = candidate.folder, candidate.manifest
    check_tensors(folder, manifest, saved)
    error = None
    try:
        check_files(folder, manifest)
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
