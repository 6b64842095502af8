"""Follows a run from another terminal: the lines of its finished steps, then each new one, until the run has ended.

RUN is a run's folder, such as output/latest. Ctrl-C leaves the run as it is. A phase that takes long is shown where the
run was started by `mindgrpo launch` on this host.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from mindgrpo.cli.arguments import Arguments
from mindgrpo.cli.arguments import path as path_of
from mindgrpo.errors import UserError, counted
from mindgrpo.monitor.console import Console
from mindgrpo.monitor.metrics import StepFollower
from mindgrpo.monitor.run_directory import PROCESS_FILE, RunProcess, read_process

SECONDS_BETWEEN_LOOKS = 0.5
LONG_PHASE = 10.0
HELD_OUT = {"eval/": "held out", "eval_greedy/": "held out, greedy"}


def parser() -> Arguments:
    flags = Arguments(prog="mindgrpo watch")
    flags.add_argument("run", metavar="RUN", type=path_of, help="a run's folder")
    return flags


def main(argv: Sequence[str]) -> None:
    # A link such as output/latest may soon lead to another run.
    directory = parser().parse_args(list(argv)).run.resolve()
    if not (directory / PROCESS_FILE).exists() and not (directory / "metrics.jsonl").exists():
        raise UserError(
            f"{directory} holds no run (no metrics.jsonl); name a run's folder, such as output/latest."
        )
    try:
        _Watched(directory, Console(True)).follow()
    except KeyboardInterrupt:
        print()


class _Watched:
    def __init__(self, directory: Path, console: Console) -> None:
        self._directory, self._console = directory, console
        self._steps = StepFollower(directory)
        self._shown_phase: object = None
        self._has_said_host = False

    def follow(self) -> None:
        while True:
            # Asked first: what was written before the end is then read after it.
            ending = self._ending()
            for row in self._steps.rows():
                self._show(row)
            if ending is not None:
                self._console.line(f"  {ending}")
            if ending is not None or not self._console.is_read:
                return
            self._show_phase()
            time.sleep(SECONDS_BETWEEN_LOOKS)

    def _show(self, row: Mapping[str, Any]) -> None:
        for prefix, title in HELD_OUT.items():
            if any(key.startswith(prefix) for key in row):
                several = (key for key in row if key.startswith(prefix) and "/mean@" in key)
                samples = next(several, "").rpartition("@")[2]
                title += f", {samples} a prompt" if samples else ""
                self._console.means_line(title, row, prefix)
        if row["step"]:
            self._console.step_line(row, self._num_steps())

    def _num_steps(self) -> int | None:
        """Reads the number of steps; None where epochs say when the run ends."""
        try:
            text = (self._directory / "config_resolved.yaml").read_text(encoding="utf-8")
            steps = yaml.safe_load(text)["rl_config"]["max_steps"]
        except (OSError, yaml.YAMLError, TypeError, KeyError):
            return None
        return steps if isinstance(steps, int) else None

    def _ending(self) -> str | None:
        """Says why nothing more will come; None while the run continues."""
        process = read_process(self._directory)
        summary = self._summary()
        if summary is not None:
            reason = f": {summary['ended']}" if "ended" in summary else ""
            return f"the run has ended after {counted(summary['steps'], 'step')}{reason}"
        if process is None:
            return f"whether the run continues is not known: its folder has no {PROCESS_FILE}"
        if process.is_alive is None:
            self._say_host(process)
        if process.is_alive is False:
            return f"the run's process {process.pid} has ended without a summary.json: it failed or was killed"
        return None

    def _summary(self) -> dict[str, Any] | None:
        """Reads the summary; None where there is none, or that of an earlier session."""
        path, started = self._directory / "summary.json", self._directory / PROCESS_FILE
        try:
            if started.exists() and path.stat().st_mtime_ns < started.stat().st_mtime_ns:
                return None
            summary: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return summary

    def _say_host(self, process: RunProcess) -> None:
        if not self._has_said_host:
            self._has_said_host = True
            self._console.line(
                f"  the run is on host {process.host}: here only its summary.json says that it has ended"
            )

    def _show_phase(self) -> None:
        """Shows each phase that takes long once, and that in which watching begins."""
        process = read_process(self._directory)
        heartbeat = process.last_heartbeat() if process is not None else None
        if heartbeat is None:
            return
        seconds = heartbeat.seconds(time.monotonic())
        phase = (heartbeat.serial, heartbeat.graph)
        if phase != self._shown_phase and (self._shown_phase is None or seconds > LONG_PHASE):
            self._shown_phase = phase
            self._console.line(f"  now in {heartbeat.position}, for {seconds:.0f} s")
