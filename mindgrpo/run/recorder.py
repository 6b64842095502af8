"""Writes a run's output: folder, metrics, completions, summary and picture; prints to the console.

Only rank 0 writes and prints; calls on other ranks do nothing. After a failed write, rank 0 writes nothing more, and
`check_written` raises on all ranks.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

import mindgrpo
from mindgrpo.backend.contract import Backend
from mindgrpo.backend.rank_consistency import on_first_rank
from mindgrpo.checkpoint.folders import Candidate, Start
from mindgrpo.checkpoint.format import version_runs
from mindgrpo.config import Loaded, write_resolved
from mindgrpo.data.images import ImageFile
from mindgrpo.data.prompts import Prompt
from mindgrpo.errors import CannotWrite, counted, writing
from mindgrpo.grpo.evaluation import PREFIXES, Evaluation, Metric
from mindgrpo.grpo.inputs import Inputs
from mindgrpo.grpo.metrics import StepOutcome, token_rows
from mindgrpo.grpo.state import State
from mindgrpo.monitor.console import Console, number
from mindgrpo.monitor.curve import CurveProcess
from mindgrpo.monitor.metrics import MetricsWriter, append_rows
from mindgrpo.monitor.run_directory import write_process
from mindgrpo.monitor.trackers.started import Trackers
from mindgrpo.report.write import write_at_end
from mindgrpo.rewards.scores import Scores
from mindgrpo.rollout.engine import Capabilities
from mindgrpo.run.banner import run_sections
from mindgrpo.run.evaluation_log import before_and_after, write_evaluation
from mindgrpo.run.named_sources import with_names
from mindgrpo.run.start import OutputPaths, continue_files, label_of, make_output_paths

# In a run's folder, for its report.
MOST_THUMBNAILS = 4096


class RunRecord:
    """Records a run. `launched` is the launcher's start time, in seconds since the epoch."""

    def __init__(
        self,
        loaded: Loaded,
        name: str,
        backend: Backend,
        launched: float,
        start: Start | None = None,
    ) -> None:
        """Creates the folders; `start` is where a resumed run begins. Only process.json is written before `begin`."""
        self._loaded, self._backend = loaded, backend
        self._launched, self._start = launched, start
        self._is_writer = backend.rank == 0
        self._failed: CannotWrite | None = None
        # Digests of images whose thumbnails are in the folder.
        self._thumbnails = set[str]()
        self.console = Console(self._is_writer)
        self._state = State()
        self.trackers = Trackers((), {}, self.console.line)
        # All are made now: a folder that cannot be written is better reported before a run than after it.
        self._paths: OutputPaths = on_first_rank(backend, lambda: self._make_paths(name))
        self.directory, self.model_directory = self._paths.directory, self._paths.model

        def compiling(name: str, seconds: float | None) -> None:
            if seconds is not None:
                self.console.line(f"  compiled {name}: {seconds:.1f} s")

        backend.compile_log.listener = compiling

    def _make_paths(self, name: str) -> OutputPaths:
        paths = make_output_paths(self._loaded.config, name, self._start)
        with writing(paths.directory):
            write_process(paths.directory, self._backend.health.heartbeat_file)
        return paths

    @property
    def label(self) -> str:
        """Returns this run's name in folders that it shares with others."""
        return label_of(self.directory)

    def begin(self, state: State, chosen: Candidate | None, is_complete: bool = False) -> None:
        """Opens the files, cut back to the end of the `chosen` checkpoint's step, whose state is `state`.

        Raises CannotWrite.
        """
        self._state = state
        on_first_rank(self._backend, lambda: self._open_files(chosen, is_complete))

    def _open_files(self, chosen: Candidate | None, is_complete: bool) -> None:
        for line in continue_files(self._paths, self._start, chosen, is_complete):
            self.console.line(f"  {line}")
        queue_size = self._loaded.config.rl_config.tensorboard_queue_size
        resolved, board = self.directory / "config_resolved.yaml", self._paths.tensorboard
        with writing(resolved):
            named = replace(self._loaded, config=with_names(self._loaded.config))
            write_resolved(named, resolved)
        say, done = self.console.line, self._state.step
        self._metrics = MetricsWriter(self.directory, board, queue_size, done, say)
        self._picture = self.directory / (
            "loss_curve.png" if self._loaded.is_supervised else "reward_curve.png"
        )
        self._curve = CurveProcess(self._metrics.path, self._picture)
        settings, kept = self._loaded.config.monitor_config, self._paths.completions
        about = {
            "directory": str(self.directory.absolute()),
            "completions": str(kept.absolute() / "completions.jsonl") if kept else None,
            "project": settings.tracker_project or mindgrpo.__name__,
            "name": settings.tracker_run_name or self.label,
        }
        self.trackers = Trackers(settings.trackers, about, say)

    @contextmanager
    def _recording(self) -> Iterator[None]:
        """Stores a write error for `check_written`; nothing is written after it."""
        try:
            yield
        except CannotWrite as failed:
            self._failed, self._is_writer = failed, False

    def check_written(self) -> None:
        """Raises CannotWrite on all ranks if a file could not be written. Collective."""

        def check() -> None:
            if self._failed is not None:
                raise self._failed

        on_first_rank(self._backend, check)

    def history(self) -> dict[str, Any]:
        """Returns the recorder's current part of the RunState."""
        return {
            "seconds": self._state.seconds + time.time() - self._launched,
            "compiles": self._state.compiles + len(self._backend.compile_log.entries),
            "places": self._paths.outside,
        }

    def banner(self, inputs: Inputs, notes: Sequence[str] = ()) -> None:
        sections = run_sections(self._loaded, inputs, self._backend)
        sections["run"].append(str(self.directory))
        sections["prompt"] = inputs.prompt_lines()
        sections["elsewhere"] = self._paths.elsewhere
        sections["notes"] = [*notes, *self._loaded.notices]
        self.console.banner(f"mindgrpo {mindgrpo.__version__}", sections)

    def step(self, step: int, num_steps: int, metrics: Mapping[str, Any]) -> None:
        """Writes and prints the step's metrics; `step` counts from 1."""
        if self._state.first_step_seconds is None:
            seconds = self._state.first_step_seconds = time.time() - self._launched
            self.console.line(f"  from launch to the end of the first step: {seconds:.1f} s")
        if not self._is_writer:
            return
        with self._recording():
            self._metrics.write(step, metrics)
        self.console.step_line({"step": step, **metrics}, num_steps)
        if self._loaded.config.rl_config.performance_stats:
            times = [f"{k[5:]} {v:.2f}" for k, v in metrics.items() if k.startswith("time/")]
            self.console.line("  seconds: " + "  ".join(times))
        self._curve.draw_sometimes(next(iter(self._state.evaluations), {}))
        self.trackers.check()

    def evaluated(self, step: int, evaluation: Evaluation) -> dict[str, Metric]:
        """Writes an evaluation, and keeps its means for the summary; returns its metrics."""
        self._state.evaluations.append(evaluation.means)
        if evaluation.is_loss:
            self.console.line(f"  held-out loss after step {step}: {evaluation.means['loss']:.4f}")
            return evaluation.metrics
        for outcome in evaluation.outcomes:
            self.rewards(f"evaluation after step {step}", outcome.scored.scores)
            prefix = f"{PREFIXES[outcome.mode.name]}/"
            self.console.means_line(outcome.mode.title, outcome.metrics(), prefix)
        if self._is_writer:
            keeps = self._loaded.config.rl_config.save_eval_completions
            with self._recording():
                write_evaluation(self.directory, step, evaluation.outcomes, keeps)
        return evaluation.metrics

    def rewards(self, when: str, scores: Scores) -> None:
        """Prints a line for each reward function that failed; writes the functions' own output to a file."""
        if not self._is_writer:
            return
        for name, line in scores.messages.items():
            count = scores.errors[name]
            failed = f"failed on {count} of {len(scores.total)} samples, " if count else ""
            self.console.line(f"  warning: {when}: reward {name}: {failed}{line}")
        for name, report in scores.reports.items():
            if report.printed:
                size = report.counts.get("printed_bytes", 0)
                text = f"== {name}, {when}, {size} bytes\n{report.printed.rstrip()}\n"
                path = self.directory / "reward_output.txt"
                with self._recording(), writing(path), path.open("a", encoding="utf-8") as output:
                    output.write(text)

    def samples(self, step: int, owners: Sequence[Prompt], outcome: StepOutcome) -> None:
        """Writes the samples of step `step` (from 1), and their reward failures; `owners` has a prompt per sample."""
        self.rewards(f"step {step}", outcome.scored.scores)
        if not self._is_writer or self._paths.completions is None:
            return
        batch, ids = outcome.batch, outcome.batch.rollout.completion_ids
        versions = batch.rollout.weights_version if outcome.partial is not None else None
        rows = (
            {**row, "advantage": batch.advantages[i], "token_ids": ids[i]}
            | (
                {}
                if versions is None
                else {"weights_versions": np.array(version_runs(versions[i]))}
            )
            for i, row in enumerate(outcome.scored.rows(batch.rollout, owners))
        )
        rl, every = self._loaded.config.rl_config, self._loaded.config.monitor_config.per_token
        interval = rl.save_prompt_completions_interval
        with self._recording():
            append_rows(self._paths.completions / "completions.jsonl", step, rows, interval)
            self._write_thumbnails(owners)
            if every:
                by_token = token_rows(batch, outcome.reports, rl.kl_estimator)
                append_rows(self.directory / "per_token.jsonl", step, by_token, every)

    def _write_thumbnails(self, owners: Sequence[Prompt]) -> None:
        """Writes a small picture of each image that has none, up to MOST_THUMBNAILS."""
        folder, images = self.directory / "images", dict[str, ImageFile]()
        for prompt in owners:
            images |= prompt.images
        if images and not self._thumbnails:
            self._thumbnails = {path.stem for path in folder.glob("*.png")}
        for digest, image in images.items():
            if digest in self._thumbnails or len(self._thumbnails) == MOST_THUMBNAILS:
                continue
            path = folder / f"{digest}.png"
            with writing(path):
                folder.mkdir(exist_ok=True)
                path.write_bytes(image.thumbnail())
            self._thumbnails.add(digest)

    def close(
        self,
        num_steps: int,
        engine: Capabilities | None,
        ended: str | None = None,
        best: dict[str, Any] | None = None,
    ) -> None:
        """Writes summary and report. `ended`: why the run ends before its last step, None if it does not.

        `engine` are the capabilities of the engine, if there was one; `best` is the best checkpoint's reward, score,
        step and path.
        """
        if not self._is_writer:
            return
        self._metrics.close()
        evaluations = self._state.evaluations
        before, after = [*evaluations, {}][0], [{}, *evaluations][-1]
        history, monitor = self.history(), self._loaded.config.monitor_config
        actor = self._loaded.config.actor_config
        replicas = actor.parallel_config.replicas * actor.parallel_config.context_parallel
        summary: dict[str, Any] = {
            "steps": num_steps,
            "seconds": history["seconds"],
            "first_step_seconds": self._state.first_step_seconds,
            "compiles": history["compiles"],
            "eval_before": before,
            "eval_after": after,
            **({} if engine is None else {"engine": engine.name}),
            "compute_dtype": self._backend.compute_dtype,
            "float32_matmul_precision": self._backend.matmul_precision,
            "batch_invariant": self._backend.kernels.batch_invariant,
            "backend": self._backend.name,
            "ranks": self._backend.world_size,
            "optimizer_shards": replicas if actor.enable_parallel_optimizer else 1,
            "host": platform.node(),
        }
        if engine is not None and engine.release is not None:
            summary["engine_version"] = engine.release
        if best is not None:
            summary["best_checkpoint"] = best
        if ended is not None:
            summary["ended"] = ended
        path = self.directory / "summary.json"
        with self._recording(), writing(path):
            path.write_text(json.dumps(summary, indent=2) + "\n")
        self.trackers.ask_to_finish()
        if num_steps and (failed := self._curve.draw_last(next(iter(self._state.evaluations), {}))):
            self.console.line(f"  warning: {failed}")
        page, failed = write_at_end(self.directory) if monitor.report else (None, None)
        if failed:
            self.console.line(f"  warning: {failed}")
        if ended is None:
            graphs = f"{counted(summary['compiles'], 'graph')} compiled a rank"
            rows = self.directory / "evaluations.jsonl"
            best_lines = []
            if best:
                scored = f"step {best['step']}, {best['reward']} {number(best['score'])}"
                best_lines = [scored, best["path"]]
            sections = {
                "seconds": [f"{summary['seconds']:.0f}, {graphs}"],
                "held out": before_and_after(rows) if rows.exists() else [],
                "best": best_lines,
                "model": [str(self.model_directory)],
                "curve": [str(self._picture)],
                "report": [str(page)] if page and not failed else [],
            }
            self.console.banner("done", sections)
