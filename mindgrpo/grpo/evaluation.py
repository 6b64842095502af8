"""Evaluates the policy on held-out prompts: several samples per prompt, a greedy completion, or both.

Training and `python -m mindgrpo eval` run this same code. Sample j of prompt i is drawn with the noise of (seed,
evaluation, step, i * n + j), which training never uses.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from mindgrpo.algorithm.pass_at_k import PromptScores, summarise
from mindgrpo.algorithm.sample import LENGTH, Rollout
from mindgrpo.backend.kernels.shapes import SamplingParams
from mindgrpo.data.prompts import Prompt
from mindgrpo.grpo.scoring import RolloutScorer, Scored
from mindgrpo.rollout.engine import SeedKey
from mindgrpo.rollout.noise import EVALUATION
from mindgrpo.rollout.replicas import Replicas
from mindgrpo.rollout.turns import turn_metrics

SAMPLED, GREEDY = "sampled", "greedy"
PREFIXES = {SAMPLED: "eval", GREEDY: "eval_greedy"}
Metric = float | int | None


@dataclass(frozen=True)
class Mode:
    """A decoding mode: `num_samples` per prompt with `settings`; pass@k counts rewards of `threshold` or more."""

    name: str
    num_samples: int
    settings: SamplingParams
    threshold: float

    @property
    def title(self) -> str:
        """Returns the mode's name in messages."""
        if self.name == GREEDY:
            return "held out, greedy"
        return "held out" if self.num_samples == 1 else f"held out, {self.num_samples} a prompt"


@dataclass(frozen=True)
class Outcome:
    """Results of an evaluation in one mode; `prompts` has one entry per sample.

    `seconds` is this rank's generation time, without compilation and scoring.
    """

    mode: Mode
    prompts: list[Prompt]
    rollout: Rollout
    scored: Scored
    seconds: float

    @cached_property
    def by_function(self) -> dict[str, PromptScores]:
        values = self.scored.scores.per_function
        return {
            name: summarise(rewards, self.rollout.group_ids, self.mode.threshold)
            for name, rewards in values.items()
        }

    @property
    def means(self) -> dict[str, float | None]:
        return {name: scores.mean for name, scores in self.by_function.items()}

    @property
    def truncated_fraction(self) -> float:
        return self.rollout.finish_reasons.count(LENGTH) / len(self.rollout)

    @property
    def num_tokens(self) -> int:
        """Returns the number of tokens that the policy generated."""
        return int(self.rollout.action_lengths.sum())

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds

    def metrics(self) -> dict[str, Metric]:
        """Returns the metrics by their names in metrics.jsonl."""
        prefix, n = PREFIXES[self.mode.name], self.mode.num_samples
        metrics: dict[str, Metric] = {}
        for name, scores in self.by_function.items():
            metrics[f"{prefix}/{name}/mean"] = scores.mean
            if n > 1:
                metrics[f"{prefix}/{name}/mean@{n}"] = scores.mean_at_n
            metrics[f"{prefix}/{name}/stderr"] = scores.error
            metrics |= {f"{prefix}/{name}/pass@{k}": p for k, p in scores.pass_at.items()}
            metrics[f"{prefix}/{name}/errors"] = self.scored.scores.errors.get(name, 0)
        if any(self.rollout.messages):
            of_turns = turn_metrics(self.rollout.messages)
            metrics |= {f"{prefix}/{name}": value for name, value in of_turns.items()}
        metrics[f"{prefix}/truncated_fraction"] = self.truncated_fraction
        metrics[f"{prefix}/completion_length"] = self.num_tokens / len(self.rollout)
        return metrics

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yields one row per sample, on rank 0."""
        rows = self.scored.rows(self.rollout, self.prompts)
        return ({"mode": self.mode.name, **row} for row in rows)


@dataclass(frozen=True)
class Evaluation:
    """Results of an evaluation: all `metrics`, and `means`, the first mode's mean by reward function, or the loss.

    In supervised training `means` holds the held-out loss (`is_loss`: lower is better) and `outcomes` is empty.
    """

    means: dict[str, float | None]
    metrics: dict[str, Metric]
    outcomes: Sequence[Outcome] = ()
    is_loss: bool = False

    @classmethod
    def of(cls, outcomes: Sequence[Outcome]) -> Evaluation:
        return cls(outcomes[0].means, evaluation_metrics(outcomes), outcomes)


def evaluation_metrics(outcomes: Sequence[Outcome]) -> dict[str, Metric]:
    """Returns the metrics of all modes by their names in metrics.jsonl."""
    return {key: value for outcome in outcomes for key, value in outcome.metrics().items()}


@dataclass(frozen=True)
class Evaluator:
    """Generates completions with `replicas` and scores them with `scorer`; `seed` is the run's."""

    replicas: Replicas
    scorer: RolloutScorer
    seed: int

    def run(
        self,
        prompts: Sequence[Prompt],
        modes: Sequence[Mode],
        step: int,
        version: int,
        check: Callable[[], None] = lambda: None,
    ) -> list[Outcome]:
        """Evaluates in all modes. Collective; the engine's weights, of `version`, and cache have to be on the device.

        `check` is called between generating and scoring, and may raise to end the evaluation.
        """
        compilations = self.replicas.backend.compile_log.entries
        drawn: list[tuple[Callable[..., Outcome], Callable[[], Scored]]] = []
        outcomes: list[Outcome] = []
        for mode in modes:
            num_compiled, started = len(compilations), time.perf_counter()
            rollout = self.replicas.generate(
                prompts,
                mode.num_samples,
                mode.settings,
                SeedKey(self.seed, EVALUATION, step),
                version,
            )
            compiling = sum(spent for _, spent in compilations[num_compiled:])
            seconds = time.perf_counter() - started - compiling
            check()
            owners = [prompts[group] for group in rollout.group_ids]
            outcome = partial(Outcome, mode, owners, rollout, seconds=seconds)
            if self.scorer.models:
                # All modes are drawn first: reward models take the device from the engine.
                drawn.append((outcome, partial(self.scorer.score, rollout, owners)))
                continue
            # The next mode is drawn while functions score this one.
            outcomes += [outcome(scored=wait()) for outcome, wait in drawn]
            drawn = [(outcome, self.scorer.begin(rollout, owners))]
        return outcomes + [outcome(scored=wait()) for outcome, wait in drawn]
