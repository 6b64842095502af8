"""Opens a run: connects the ranks, reads and checks what it is given, starts what records and watches it."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

from mindgrpo.backend.connect import connect
from mindgrpo.backend.contract import Backend
from mindgrpo.backend.rank_consistency import on_first_rank
from mindgrpo.checkpoint.folders import Start
from mindgrpo.config import Config, Loaded, config_with, schedule_notes
from mindgrpo.data.prompt_source import DataSampler, PromptSource
from mindgrpo.data.sources import Ranks
from mindgrpo.grpo.settings import runtime_settings
from mindgrpo.monitor.trackers.registry import check_installed
from mindgrpo.plan.run_plan import RunPlan
from mindgrpo.run.host_limits import refuse_small_disk
from mindgrpo.run.preflight import Inputs, Reward, prepare
from mindgrpo.run.recorder import RunRecord
from mindgrpo.run.start import check_same_start, find_start
from mindgrpo.run.stop_signals import Stopping
from mindgrpo.run.watch import Watch


@dataclass(frozen=True)
class OpenRun:
    """What a run of `num_steps` steps has before its weights are read; `start` is None unless it was asked to go on."""

    config: Config
    backend: Backend
    inputs: Inputs
    prompts: PromptSource
    start: Start | None
    record: RunRecord
    watch: Watch
    stopping: Stopping
    num_steps: int

    @property
    def plan(self) -> RunPlan:
        return self.inputs.plan

    @property
    def num_updates(self) -> int:
        return self.num_steps * self.plan.batch.updates_per_step


def open_run(
    config: Config | Loaded,
    name: str,
    reward_functions: Sequence[Reward] | None = None,
    reward_weights: Sequence[float] | None = None,
) -> OpenRun:
    """All ranks together; shows the banner. Raises UserError, on all ranks alike."""
    launched = float(os.environ.get("MINDGRPO_LAUNCHED_AT", time.time()))
    loaded = config if isinstance(config, Loaded) else config_with(config, {})
    config = loaded.config
    context, rl = config.context, config.rl_config
    settings = runtime_settings(config)
    backend = connect(context.target, dict(os.environ), settings)
    check_same_start(config, backend)
    ranks = Ranks(backend.rank, backend.world_size, backend.world.gather_objects)
    on_first_rank(backend, lambda: check_installed(config.monitor_config.trackers))
    scores = backend.rank == 0
    inputs = prepare(config, backend.world_size, reward_functions, reward_weights, ranks, scores)
    prompts = PromptSource(DataSampler(inputs.prompts, rl.seed), inputs.plan.batch.prompts_per_step)
    start = on_first_rank(backend, lambda: find_start(config, inputs, name))
    on_first_rank(backend, lambda: refuse_small_disk(inputs.plan, start))
    record = RunRecord(loaded, name, inputs.plan, backend, launched, start)
    watch = Watch(config, backend, record)
    stopping = Stopping(backend, launched, rl.max_seconds)
    num_steps = inputs.plan.num_steps(len(inputs.prompts))
    run = OpenRun(config, backend, inputs, prompts, start, record, watch, stopping, num_steps)
    notes = [*inputs.notes, *schedule_notes(config, run.num_updates), *backend.unmet, *watch.notes]
    record.banner(inputs, [*notes, *(start.notes if start else [])])
    return run
