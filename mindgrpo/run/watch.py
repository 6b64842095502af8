"""Observes a running run: phases and their deadlines, traces, host memory, msprobe's dumps.

If a requested tool is missing, a note says so and the run continues.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

import numpy as np

from mindgrpo.backend.contract import Backend, ProfileSettings
from mindgrpo.config import Config, values_by_key
from mindgrpo.config.observation import ProfilerConfig
from mindgrpo.grpo.metrics import StepOutcome
from mindgrpo.health.heartbeat import LiveLine
from mindgrpo.health.watchdog import Watchdog
from mindgrpo.monitor.host_memory import HostMemoryMonitor
from mindgrpo.monitor.probe import Probe, key_data, load_saver
from mindgrpo.monitor.rank_log import own_log, rotate
from mindgrpo.monitor.run_directory import own_folder
from mindgrpo.monitor.trace import Event, PhaseTrace, write_trace
from mindgrpo.run.recorder import RunRecord
from mindgrpo.run.stop_signals import Stopping


class Watch:
    """Observes a run; `notes` are for the banner. Construction, `step` and `memory_exceeded` are collective."""

    def __init__(
        self, config: Config, backend: Backend, record: RunRecord, stopping: Stopping
    ) -> None:
        self._config, self._backend, self._record = config, backend, record
        self._stopping = stopping
        self._profile = Profile(config.profiler_config, backend, record)
        self.notes = [*self._profile.notes]
        self._monitor = self._make_monitor()
        self._probe = self._make_probe()
        self._log = own_log(os.environ)
        settings, health = config.monitor_config, backend.health
        health.report_output_directory(record.directory)
        if settings.phase_deadline_action != "off":
            watchdog = Watchdog(health, settings.deadlines, settings.phase_deadline_action)
            health.on_beat(watchdog.check)
        if record.console.shows_live:
            # This process has the terminal or notebook to itself; a launcher shows the line by itself.
            line, console = LiveLine(), record.console

            def show() -> None:
                heartbeat = health.heartbeat_of(health.rank)
                if heartbeat is not None:
                    console.live(line.text(heartbeat, time.monotonic()))

            health.on_beat(show)

    def _make_monitor(self) -> HostMemoryMonitor | None:
        """Starts the memory monitor on the first rank of each host."""
        settings = self._config.monitor_config
        if settings.seconds is None:
            return None
        here, rank = os.uname().nodename, self._backend.rank
        hosts = enumerate(self._backend.world.gather_objects((here, os.getpid())))
        processes = {other: pid for other, (host, pid) in hosts if host == here}
        if rank != min(processes):
            return None
        name = "host_memory.jsonl" if rank == 0 else f"host_memory_rank_{rank}.jsonl"
        say = self._record.console.line if rank == 0 else partial(print, flush=True)
        # Another host may not have it.
        self._record.directory.mkdir(parents=True, exist_ok=True)
        monitor = HostMemoryMonitor(settings, self._record.directory / name, processes, say)
        monitor.start()
        return monitor

    def _make_probe(self) -> Probe | None:
        settings = self._config.msprobe_config
        if not settings.msprobe or self._backend.rank != 0:
            return None
        try:
            saver = load_saver()
        except ImportError as error:
            self.notes.append(
                f"msprobe_config.msprobe asks for msprobe, which cannot be imported ({error}): "
                "nothing is dumped; pip install mindstudio-probe"
            )
            return None
        key = "msprobe_config.dump_path"
        folder = own_folder(settings.dump_path, self._record.label, "*", key)
        probe = Probe(saver, folder, self._record.console.line)
        if settings.configurations_dump:
            probe.configuration(values_by_key(self._config))
        return probe

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Starts observing step `step`, counted from 0."""
        self._backend.health.at_step(step + 1)
        if self._monitor is not None:
            self._monitor.step = step + 1
        settings = self._config.monitor_config
        if self._log is not None:
            # A log that cannot move (a full disk, somebody's chmod) is no reason to end a run.
            with suppress(OSError):
                rotate(self._log, int(settings.log_max_megabytes * 1e6), settings.log_backups)
        with self._profile.step(step):
            yield

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        with self._backend.health.phase(name), self._profile.phase(name):
            yield

    def beside(self, name: str, seconds: float) -> None:
        """Records work of so many seconds beside phases, which ends now, in the trace."""
        self._profile.bar(f"{name}, beside other phases", seconds)

    @contextmanager
    def step_phase(self, name: str) -> Iterator[None]:
        """Enters a phase of a step. Raises Stop before the phase if the run has to end."""
        # Once the weights have begun to change, the step is finished.
        if name != "sync_reference":
            self._stopping.check()
        with self.phase(name):
            yield

    def dump(self, outcome: StepOutcome) -> None:
        """Dumps the step's key data, if configured."""
        if self._probe is None or not self._config.msprobe_config.key_data_dump:
            return
        scores = outcome.scored.scores
        logps: dict[int, np.ndarray] = {}
        for report in reversed(outcome.reports):
            # What an update saw before it; of several passes the first.
            logps |= report.logps
        rewards = {"total": scores.total, **scores.per_function}
        self._probe.step(key_data(outcome.batch, rewards, logps))

    def memory_exceeded(self) -> str | None:
        """Returns why the run has to end because of host memory, the same on every rank; None if it need not."""
        if not self._config.monitor_config.host_memory_protection:
            return None
        own = self._monitor.exceeded if self._monitor is not None else None
        return next((words for words in self._backend.world.gather_objects(own) if words), None)

    def close(self) -> None:
        self._profile.finish()
        if self._monitor is not None:
            self._monitor.stop()


class Profile:
    """Records the phases of the requested steps, as a trace per rank and in the device's own profile."""

    def __init__(self, settings: ProfilerConfig, backend: Backend, record: RunRecord) -> None:
        self._settings, self._backend, self._record = settings, backend, record
        self.notes: list[str] = []
        self._trace: PhaseTrace | None = None
        self._active = self._wants = False
        self._window = ExitStack()
        if not settings.profile:
            return
        folder = None
        if backend.rank == 0:
            key = "profiler_config.profile_save_path"
            folder = own_folder(settings.profile_save_path, record.label, "*", key)
        self._folder: Path = backend.world.gather_objects(folder)[0]
        memory, processor = settings.profile_with_memory, settings.profile_with_cpu
        self._trace = PhaseTrace(backend.rank, settings.phases, memory, processor)
        self._hear_compiling()
        backend.span = self._part
        if settings.profile_with_npu and not backend.has_device_profile:
            self.notes.append(
                "profiler_config.profile_with_npu has no effect on this device, which has no profile "
                f"of its own: the trace in {self._folder} holds the phases of each rank"
            )

    def _hear_compiling(self) -> None:
        listener = self._backend.compile_log.listener

        def compiling(name: str, seconds: float | None) -> None:
            if listener is not None:
                listener(name, seconds)
            if seconds is not None and self._active and self._trace is not None:
                self._trace.bar(f"compile {name}", "compile", seconds)

        self._backend.compile_log.listener = compiling

    def bar(self, name: str, seconds: float) -> None:
        """Records a bar that ends now."""
        if self._active and self._trace is not None:
            self._trace.bar(name, "beside", seconds)

    @contextmanager
    def _part(self, name: str) -> Iterator[None]:
        with ExitStack() as spans:
            if self._active and self._trace is not None and self._wants:
                spans.enter_context(self._trace.span(name, "part"))
            yield

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        settings = self._settings
        if self._trace is None:
            yield
            return
        self._active = settings.covers(step, self._backend.rank)
        if self._active and settings.phases is None and step == settings.profile_step_start:
            self._window.enter_context(self._device_profile("steps"))
        with ExitStack() as spans:
            if self._active:
                spans.enter_context(self._trace.span(f"step {step + 1}", "step"))
            yield
        self._active = False
        if step + 1 == settings.profile_step_end:
            self.finish()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        with ExitStack() as spans:
            if self._settings.mstx:
                spans.enter_context(self._backend.device_mark(name))
            self._wants = self._trace is not None and self._trace.wants(name)
            if self._active and self._trace is not None and self._wants:
                if self._settings.phases is not None:
                    spans.enter_context(self._device_profile(name))
                spans.enter_context(self._trace.span(name))
            yield

    def _device_profile(self, name: str) -> ExitStack:
        stack, settings = ExitStack(), self._settings
        if self._backend.has_device_profile:
            asked = ProfileSettings(
                level=settings.profile_level.lower().removeprefix("level").strip("_"),
                with_device=settings.profile_with_npu,
                with_host=settings.profile_with_cpu,
                with_memory=settings.profile_with_memory,
                with_stack=settings.profile_with_stack,
                analyse=settings.profile_analysis,
                marks=settings.mstx,
            )
            folder = self._folder / f"device_rank_{self._backend.rank}" / name
            stack.enter_context(self._backend.device_profile(folder, asked))
        return stack

    def finish(self) -> None:
        """Writes the traces, on the first call only. Collective."""
        trace, self._trace = self._trace, None
        if trace is None:
            return
        self._window.close()
        rank = self._backend.rank
        if self._settings.profile_ranks == "all" or rank in self._settings.profile_ranks:
            self._write(self._folder / f"trace_rank_{rank}.json", trace.events)
        every = self._backend.world.gather_objects(trace.events)
        if rank == 0:
            path = self._folder / "trace.json"
            if self._write(path, [event for events in every for event in events]):
                say = self._record.console.line
                say(f"  trace of the phases: {path} (open it in chrome://tracing)")

    def _write(self, path: Path, events: Sequence[Event]) -> bool:
        """Returns whether the trace could be written; a failure does not end the run."""
        try:
            write_trace(path, events)
        except OSError as error:
            self._backend.health.say(f"warning: {path} cannot be written: {error.strerror}")
            return False
        return True
