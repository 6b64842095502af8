"""`monitor_config`, `profiler_config` and `msprobe_config`: how a run is watched, not what it computes."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from mindgrpo.settings.section import BEFORE_LIST, BEFORE_TEXT, OptionalText, Section, spelled

# Users' names for phases -> ours; ours are accepted as well.
PROFILED_STAGES: dict[str, str] = {
    "actor_generate": "rollout",
    "actor_old_log_prob": "old_logps",
    "reference_log_prob": "reference",
    "critic_values": "values",
    "critic_update": "update_critic",
    "actor_update": "update",
}
for _phase in ("reshard", "images", "score", *PROFILED_STAGES.values(), "sync_reference"):
    PROFILED_STAGES[_phase] = _phase

TENSORBOARD = "tensorboard"
TRACKERS = (TENSORBOARD, "wandb", "swanlab", "mlflow", "trackio")
OWN_TRACKER = re.compile(r"[^:]+:[^\W\d]\w*")

_Seconds = Annotated[float | None, Field(gt=0)]


def _of_phase(what: str) -> Any:
    return Field(None, description=f"maximum seconds for {what}; null: phase_deadline_seconds")


class PhaseDeadlines(Section):
    """Deadlines by phase; the names are those in the last line of a failed job."""

    load: _Seconds = _of_phase("loading weights")
    compile: _Seconds = _of_phase("compiling one graph, which does not count in other phases")
    reshard: _Seconds = _of_phase("transferring the weights to the generator")
    images: _Seconds = _of_phase("encoding images")
    rollout: _Seconds = _of_phase("generating completions")
    score: _Seconds = _of_phase("the reward functions and models")
    reference: _Seconds = _of_phase("computing the reference's log-probs")
    old_logps: _Seconds = _of_phase("computing the policy's old log-probs")
    values: _Seconds = _of_phase("computing the critic's values")
    update_critic: _Seconds = _of_phase("the critic's updates of a step")
    update: _Seconds = _of_phase("the updates of a step")
    sync_reference: _Seconds = _of_phase("updating the reference model")
    evaluate: _Seconds = _of_phase("one evaluation")
    checkpoint: _Seconds = _of_phase("one checkpoint")
    export: _Seconds = _of_phase("exporting the final model")


class MonitorConfig(Section):
    host_monitor_interval: float = -1.0
    """interval in seconds between measurements of host memory; 0 or less: off"""
    host_monitor_steps: list[int | list[int]] = []
    """steps in which measurements are recorded: numbers from 1 and [first, last] pairs; empty: all steps"""
    host_memory_protection: bool = False
    """end this run (and no other program) when used host memory exceeds host_max_memory_threshold; checked every second
    unless host_monitor_interval is set"""
    host_max_memory_threshold: float = Field(0.95, gt=0, le=1)
    """maximum fraction of the host's memory in use by all programs together"""
    phase_deadline_seconds: _Seconds = 600.0
    """default deadline of a phase in seconds; null: only the deadlines of phase_deadlines"""
    phase_deadline_action: Annotated[Literal["off", "warn", "stop"], spelled(True, "off")] = "warn"
    """when a phase exceeds its deadline: off: do nothing; warn: print which rank the others are waiting for; stop: also
    end the job"""
    phase_deadlines: PhaseDeadlines = PhaseDeadlines()
    log_max_megabytes: float = Field(64.0, gt=0)
    """maximum size in MB of a rank's log file before it is rotated (worker_0.log.1, then .2); checked once per step"""
    log_backups: int = Field(2, ge=0, le=99)
    """number of rotated log files to keep per rank"""
    per_token: int = Field(0, ge=0)
    """write the log-prob, gap, ratio, entropy and KL of every token to per_token.jsonl every N steps, a multiple of
    rl_config.save_prompt_completions_interval; 0: never"""
    report: bool = True
    """write report.html, a page about the run, into its folder at the end"""
    trackers: Annotated[list[str], BEFORE_LIST] = Field(
        [],
        description="where to record metrics, completions and the configuration besides the run's folder: "
        f"{', '.join(TRACKERS)} (tensorboard: as rl_config.tensorboard), or your own class as module:Class or "
        "file.py:Class; see docs/trackers.md",
    )
    tracker_project: OptionalText = None
    """project (or experiment) of the run in the trackers; null: mindgrpo"""
    tracker_run_name: OptionalText = None
    """name of the run in the trackers; null: the name of its folder"""
    tracker_finish_seconds: float = Field(60.0, gt=0)
    """maximum seconds to wait at the end of a run for all trackers to send their data; then they are terminated"""

    @field_validator("host_monitor_steps")
    @classmethod
    def _are_steps(cls, value: list[int | list[int]]) -> list[int | list[int]]:
        for entry in value:
            pair = entry if isinstance(entry, list) else [entry, entry]
            if len(pair) != 2 or not 1 <= pair[0] <= pair[1]:
                raise ValueError(
                    "must hold step numbers from 1 up and pairs [first, last] of such, as [1, [5, 8]]"
                )
        return value

    @field_validator("trackers")
    @classmethod
    def _are_trackers(cls, value: list[str]) -> list[str]:
        for name in value:
            if name not in TRACKERS and not OWN_TRACKER.fullmatch(name):
                raise ValueError(f"must hold {', '.join(TRACKERS)}, module:Class or file.py:Class")
        labels = [name.rpartition(":")[2] for name in value]
        if len({*labels}) < len(labels):
            raise ValueError("must name each tracker once, and classes by different names")
        return value

    @property
    def deadlines(self) -> dict[str, float]:
        """Returns seconds by phase, and `default` for the phases without a deadline of their own."""
        deadlines = {**self.phase_deadlines.model_dump(), "default": self.phase_deadline_seconds}
        return {phase: seconds for phase, seconds in deadlines.items() if seconds is not None}

    @property
    def seconds(self) -> float | None:
        """Returns the seconds between measurements of host memory; None if it is not measured."""
        if self.host_monitor_interval > 0:
            return self.host_monitor_interval
        return 1.0 if self.host_memory_protection else None

    def covers(self, step: int) -> bool:
        """Returns whether measurements during `step`, counted from 1, are recorded."""
        spans = [entry if isinstance(entry, list) else [entry] for entry in self.host_monitor_steps]
        return not spans or any(span[0] <= step <= span[-1] for span in spans)


class ProfilerConfig(Section):
    profile: bool = False
    """write a trace of the phases for chrome://tracing"""
    mstx: bool = False
    """mark the phases in the accelerator's own profile as well"""
    stage: str | list[str] = Field(
        "all", description="phases to trace: all, or some of " + ", ".join(PROFILED_STAGES)
    )
    profile_save_path: Annotated[str, BEFORE_TEXT] = "./profiler_data"
    """folder for the traces; each run creates a subfolder"""
    profile_step_start: int = Field(0, ge=0)
    """first step to trace, counted from 0"""
    profile_step_end: int = Field(1, ge=-1)
    """step before which tracing ends, counted from 0; -1: trace to the end of the run"""
    profile_level: Literal["levelNone", "level_none", "level0", "level1", "level2"] = "level1"
    """level of detail of the accelerator's own profile"""
    profile_with_memory: bool = False
    """also record memory at the end of each phase"""
    profile_with_cpu: bool = True
    """record the processor time of phases, and the host in the accelerator's profile"""
    profile_with_npu: bool = True
    """record the accelerator's own profile, if there is an accelerator"""
    profile_with_stack: bool = False
    """record call stacks in the accelerator's own profile"""
    profile_analysis: bool = False
    """analyse the accelerator's own profile when tracing ends"""
    profile_ranks: Literal["all"] | list[int] = "all"
    """ranks to trace"""

    @field_validator("stage")
    @classmethod
    def _are_stages(cls, value: str | list[str]) -> str | list[str]:
        names = [value] if isinstance(value, str) else value
        if not names or any(name != "all" and name not in PROFILED_STAGES for name in names):
            raise ValueError("must be all, or of " + ", ".join(PROFILED_STAGES))
        return value

    @property
    def phases(self) -> frozenset[str] | None:
        """Returns the phases to trace; None for all."""
        names = [self.stage] if isinstance(self.stage, str) else self.stage
        if "all" in names:
            return None
        return frozenset(PROFILED_STAGES[name] for name in names)

    def covers(self, step: int, rank: int) -> bool:
        """Returns whether `rank` traces `step`, counted from 0."""
        after = self.profile_step_end != -1 and step >= self.profile_step_end
        listed = self.profile_ranks == "all" or rank in self.profile_ranks
        return self.profile and listed and step >= self.profile_step_start and not after


class MsprobeConfig(Section):
    msprobe: bool = False
    """dump data with msprobe's SingleSave, if msprobe is installed"""
    dump_path: Annotated[str, BEFORE_TEXT] = "./msprobe_dump"
    """folder for the dumps; each run creates a subfolder"""
    key_data_dump: bool = True
    """dump the tokens, log-probs, rewards and advantages of each step, with statistics"""
    configurations_dump: bool = True
    """dump all values of the configuration"""
