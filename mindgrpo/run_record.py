"""What a run leaves behind and says: its folder, metrics, completions, summary, picture, and the console.

Only rank 0 writes and speaks; the other ranks call the same lines in vain. Refuses to compute figures.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mindgrpo
from mindgrpo.algorithm.samples import Samples
from mindgrpo.algorithm.summary import algorithm_lines
from mindgrpo.backend import Backend
from mindgrpo.config import Loaded, write_resolved
from mindgrpo.data.prompts import Prompt
from mindgrpo.evaluation import Figure, Outcome, figure, number
from mindgrpo.experience import Scored
from mindgrpo.monitor import run_directory
from mindgrpo.monitor.completions import CompletionsWriter, Sample
from mindgrpo.monitor.console import Console
from mindgrpo.monitor.curve import draw_reward_curve
from mindgrpo.monitor.evaluations import write_evaluation
from mindgrpo.monitor.metrics import MetricsWriter
from mindgrpo.preflight import Inputs
from mindgrpo.reward.scores import Scores
from mindgrpo.run_plan import RunPlan

STEPS_BETWEEN_PICTURES = 10


class RunRecord:
    """`launched` is when the launcher started, in seconds since the epoch."""

    def __init__(
        self, loaded: Loaded, name: str, plan: RunPlan, backend: Backend, launched: float
    ) -> None:
        self._loaded, self._plan, self._backend = loaded, plan, backend
        self._launched = launched
        self._is_writer = backend.rank == 0
        self._name = name
        self.console = Console(self._is_writer)
        self._evaluations: list[dict[str, float | None]] = []
        self._first_step_seconds: float | None = None
        self._elsewhere: list[str] = []
        places = self._make_places() if self._is_writer else None
        # Both are made now: a folder that cannot be written is better told before a run than after it.
        self.directory: Path
        self.model_directory: Path
        self.directory, self.model_directory = backend.world.gather_objects(places)[0]
        backend.compile_log.listener = self._compiling
        if self._is_writer:
            self._open()

    def _make_places(self) -> tuple[Path, Path]:
        config = self._loaded.config
        directory = run_directory.create(config.output_dir, self._name)
        save = config.actor_config.save
        if not save:
            return directory, directory / "hf"
        label = _label(directory)
        return directory, run_directory.own_place(save, label, "*", "actor_config.save")

    @property
    def label(self) -> str:
        """This run's name in folders that it shares with others."""
        return _label(self.directory)

    def _open(self) -> None:
        rl = self._loaded.config.rl_config
        write_resolved(self._loaded, self.directory / "config_resolved.yaml")
        board = None
        if rl.tensorboard:
            board = self.directory / "tensorboard"
            if rl.tensorboard_dir:
                board = self._own_place(rl.tensorboard_dir, "*tfevents*", "tensorboard_dir")
        self._metrics = MetricsWriter(self.directory, board, rl.tensorboard_queue_size)
        self._completions = None
        if rl.save_prompt_completions_data:
            folder = self.directory
            if rl.save_prompt_completions_dir:
                folder = self._own_place(
                    rl.save_prompt_completions_dir,
                    "completions.jsonl",
                    "save_prompt_completions_dir",
                )
            self._completions = CompletionsWriter(
                folder / "completions.jsonl", rl.save_prompt_completions_interval
            )

    def _own_place(self, given: str, taken: str, key: str) -> Path:
        """A folder outside of the run's own, and the user told where in it."""
        place = run_directory.own_place(given, self.label, taken, f"rl_config.{key}")
        self._elsewhere.append(f"{key}: {place}")
        return place

    def _compiling(self, name: str, seconds: float | None) -> None:
        if seconds is not None:
            self.console.line(f"  compiled {name}: {seconds:.1f} s")

    def banner(self, num_steps: int, inputs: Inputs, notes: Sequence[str] = ()) -> None:
        plan, backend = self._plan, self._backend
        first = inputs.prompts[0]
        name = self._loaded.config.rl_config.model_name or plan.config.actor_config.load
        stops = ", ".join(
            f"{i} {inputs.tokenizer.decode([i], skip_special_tokens=False)!r}"
            for i in inputs.sampling.stop_ids
        )
        data = [inputs.prompts.report()]
        if inputs.held_out is not None:
            data.append(f"held out: {inputs.held_out.report()}")
        sections: list[tuple[str, Sequence[str]]] = [
            (
                "run",
                [
                    f"{num_steps} steps on {backend.world_size} ranks ({backend.name}), {self.directory}"
                ],
            ),
            (
                "model",
                [
                    f"{name}: {plan.model.model_type}, {plan.model.num_parameters / 1e6:.2f} M parameters"
                ],
            ),
            ("layouts", plan.layout_lines()),
            ("batch", plan.batch.lines()),
            ("algorithm", algorithm_lines(plan.config, plan.batch)),
            ("memory", plan.memory_lines()),
            ("reshard", plan.reshard_lines()),
            ("data", data),
            ("prompt", [repr(first.text)]),
            ("stops", [stops]),
        ]
        if backend.notices:
            sections.append(("kernels", backend.notices))
        if self._elsewhere:
            sections.append(("elsewhere", self._elsewhere))
        if notes or self._loaded.notices:
            sections.append(("notes", [*notes, *self._loaded.notices]))
        self.console.banner(f"mindgrpo {mindgrpo.__version__}", sections)

    def step(self, step: int, num_steps: int, figures: Mapping[str, Any]) -> None:
        """`step` counts from 1."""
        if self._first_step_seconds is None:
            self._first_step_seconds = time.time() - self._launched
            self.console.line(
                f"  from launch to the end of the first step: {self._first_step_seconds:.1f} s"
            )
        if not self._is_writer:
            return
        self._metrics.write(step, figures)
        self.console.step_line({"step": step, **figures}, num_steps)
        if self._loaded.config.rl_config.performance_stats:
            times = [f"{k[5:]} {v:.2f}" for k, v in figures.items() if k.startswith("time/")]
            self.console.line("  seconds: " + "  ".join(times))
        if step % STEPS_BETWEEN_PICTURES == 0:
            self._draw()

    def evaluated(self, step: int, outcomes: Sequence[Outcome]) -> dict[str, Figure]:
        """Keeps an evaluation, the first mode's means for the summary; its figures as metrics name them."""
        self._evaluations.append(outcomes[0].means)
        figures: dict[str, Figure] = {}
        for outcome in outcomes:
            self.rewards(f"evaluation after step {step}", outcome.scored.scores)
            self.console.line(f"  {outcome.line()}")
            figures |= outcome.figures()
        if self._is_writer:
            keeps = self._loaded.config.rl_config.save_eval_completions
            write_evaluation(self.directory, step, outcomes, keeps)
        return figures

    def not_evaluated(self) -> None:
        """There is nothing to compare later evaluations with."""
        self._evaluations.append({})

    def rewards(self, when: str, scores: Scores) -> None:
        """One line for each reward that failed on a sample; what rewards printed goes to a file."""
        if not self._is_writer:
            return
        for name, line in scores.messages.items():
            count = scores.errors[name]
            failed = f"failed on {count} of {len(scores.total)} samples, " if count else ""
            self.console.line(f"  reward {name}: {failed}{line}")
        for name, report in scores.reports.items():
            if report.printed:
                with (self.directory / "reward_output.txt").open("a", encoding="utf-8") as output:
                    size = report.counts.get("printed_bytes", 0)
                    output.write(f"== {name}, {when}, {size} bytes\n{report.printed.rstrip()}\n")

    def completions(
        self, step: int, owners: Sequence[Prompt], samples: Samples, scored: Scored
    ) -> None:
        if not self._is_writer:
            return
        if self._completions is None:
            return
        per_function = scored.scores.per_function
        self._completions.write(
            step,
            (
                Sample(
                    prompt=owners[i].text,
                    completion=scored.texts[i],
                    answer=owners[i].answer,
                    finish_reason=samples.finish_reasons[i],
                    length=len(samples.completions[i]),
                    rewards={name: number(values[i]) for name, values in per_function.items()},
                    advantage=float(samples.advantages[i]),
                    token_ids=samples.completions[i].tolist(),
                )
                for i in range(len(samples))
            ),
        )

    def _draw(self) -> None:
        before = self._evaluations[0] if self._evaluations else None
        draw_reward_curve(
            self.directory / "metrics.jsonl", self.directory / "reward_curve.png", before
        )

    def close(self, num_steps: int) -> None:
        if not self._is_writer:
            return
        self._metrics.close()
        evaluations = self._evaluations
        summary = {
            "steps": num_steps,
            "seconds": time.time() - self._launched,
            "first_step_seconds": self._first_step_seconds,
            "compiles": len(self._backend.compile_log.entries),
            "eval_before": evaluations[0] if evaluations else {},
            "eval_after": evaluations[-1] if evaluations else {},
        }
        (self.directory / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        self._draw()
        self.console.banner(
            "done",
            [
                (
                    "seconds",
                    [f"{summary['seconds']:.0f}, {summary['compiles']} graphs compiled a rank"],
                ),
                (
                    "held out",
                    [f"{_told(evaluations[0])} -> {_told(evaluations[-1])}"]
                    if any(evaluations)
                    else [],
                ),
                ("model", [str(self.model_directory)]),
                ("curve", [str(self.directory / "reward_curve.png")]),
            ],
        )


def _label(directory: Path) -> str:
    return "-".join(directory.absolute().parts[-2:]).strip("/")


def _told(means: Mapping[str, float | None]) -> str:
    return ", ".join(f"{name} {figure(value)}" for name, value in means.items()) or "-"
