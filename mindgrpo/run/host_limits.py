"""Checks that this host meets a plan's needs: memory, disk, open files, package versions, environment variables."""

from __future__ import annotations

import math
import os
import resource
import shutil
import sys
from pathlib import Path

from mindgrpo.backend.dtypes import ITEM_BYTES
from mindgrpo.checkpoint.folders import Start, steps_in
from mindgrpo.checkpoint.save import SPARE_BYTES
from mindgrpo.errors import UserError, counted
from mindgrpo.models.lora import adapter_specs
from mindgrpo.models.parameters import num_parameters, parameter_specs
from mindgrpo.monitor.host_memory import format_bytes, host_memory
from mindgrpo.plan.memory import COPIES_IN_A_CHECKPOINT, unfinished_bytes
from mindgrpo.plan.run_plan import FLOAT_BYTES, RunPlan
from mindgrpo.run.machine_checks import Finding, needs

# A rank's memory beside weights and cache, and its open files: libraries, links to other ranks, logs.
RANK_BYTES = 300 << 20
RANK_DESCRIPTORS = 256
DESCRIPTORS_A_PEER = 4


def refuse_what_cannot_run(plan: RunPlan, ranks_here: int | None, start: Start | None) -> None:
    """Raises UserError if the plan cannot run on this host, and prints warnings.

    `ranks_here` is this host's number of ranks, None if unknown.
    """
    checks = [*needs(), disk(plan, start), descriptors(plan.world_size)]
    if ranks_here is not None and plan.config.context.target.keeps_weights_on_host:
        checks.append(memory(plan, ranks_here))
    for finding in checks:
        refuse(finding)
    for finding in checks:
        if finding.level == "warn":
            print(f"mindgrpo: warning: {finding.what}: {finding.remedy}", file=sys.stderr)


def memory(plan: RunPlan, ranks: int) -> Finding:
    most = max((row.total for row in plan.memory()), default=0)
    needed = ranks * (most + RANK_BYTES)
    host = host_memory()
    what = (
        f"{counted(ranks, 'rank')} need some {format_bytes(needed)} of memory at their peak, and this machine, or "
        f"container, has "
        f"{format_bytes(host.total)}, {format_bytes(host.available)} of it free"
    )
    remedy = "use fewer ranks, a smaller model, or more machines (python -m mindgrpo plan shows what takes it)"
    if needed > host.total:
        return Finding("error", what, remedy)
    return Finding("warn" if needed > host.available else "ok", what, remedy)


def refuse(finding: Finding) -> None:
    """Raises UserError if the finding is an error."""
    if finding.level == "error":
        raise UserError(f"{finding.what}, so the run cannot start: {finding.remedy}.")


def model_bytes(plan: RunPlan) -> int:
    return num_parameters(plan.model) * ITEM_BYTES[plan.export_dtype]


def has_room_for_model(plan: RunPlan, directory: Path) -> bool:
    try:
        return shutil.disk_usage(_existing(directory)).free > model_bytes(plan) + SPARE_BYTES
    except OSError:
        return False


def _checkpoint_bytes(plan: RunPlan) -> int:
    trained = num_parameters(plan.model)
    if plan.lora is not None:
        specs = adapter_specs(parameter_specs(plan.model), plan.lora)
        trained = sum(math.prod(spec.shape) for spec in specs)
    copies = trained * COPIES_IN_A_CHECKPOINT
    if plan.config.ref_config.sync_ref_model:
        copies += num_parameters(plan.model)
    return copies * FLOAT_BYTES + unfinished_bytes(plan)


def disk(plan: RunPlan, start: Start | None = None) -> Finding:
    """Compares free disk space with the run's output, less the size of files already in a resumed folder."""
    rl, kept = plan.config.rl_config, 0
    output = Path(plan.config.output_dir or "output")
    if start is not None and start.output is not None:
        output = start.output
    if rl.saves_checkpoints:
        kept = (rl.save_max_ckpt_num or 1) + 1  # one is written before the oldest goes
        kept = max(1, kept - len(steps_in(output)))
    needed = model_bytes(plan) + kept * _checkpoint_bytes(plan)
    folder = _existing(output)
    another = "name another --output_dir"
    try:
        space = shutil.disk_usage(folder)
    except OSError as error:
        return Finding("error", f"{folder} cannot be looked at ({error.strerror})", another)
    if space.total == 0 or not os.access(folder, os.W_OK | os.X_OK):
        why = "holds no files of users" if space.total == 0 else "cannot be written"
        what = f"output_dir {output} cannot be used, because {folder} {why}"
        return Finding("error", what, another)
    word = "checkpoint" if kept == 1 else "checkpoints"
    checkpoints = f" and {kept} {word}" if kept else ""
    what = (
        f"output_dir {output} gets the model{checkpoints}, {format_bytes(needed)}, and {folder} has "
        f"{format_bytes(space.free)} free"
    )
    fewer = "lower rl_config.save_max_ckpt_num, " if kept > 1 else ""
    remedy = f"free some, {fewer}or name an --output_dir on another disk"
    return Finding("ok" if needed <= space.free else "error", what, remedy)


def _existing(output: Path) -> Path:
    """Returns the folder, or if it does not exist its nearest existing parent."""
    return next((path for path in (output, *output.absolute().parents) if path.is_dir()), output)


def descriptors(ranks: int) -> Finding:
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = RANK_DESCRIPTORS + DESCRIPTORS_A_PEER * ranks
    what = f"a process may open {allowed} files, and a rank of {ranks} may need {needed}"
    if allowed == resource.RLIM_INFINITY or allowed >= needed:
        return Finding("ok", what)
    more = "" if most == resource.RLIM_INFINITY or most >= needed else ", as root"
    return Finding("error", what, f"run 'ulimit -n {needed}' before{more}")
