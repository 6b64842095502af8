"""Held-out prompts answered and scored: several samples a prompt, the likeliest answer, or both, and what they tell.

The trainer's evaluations and `python -m mindgrpo eval` are this same code. The noise of sample j of prompt i is that of
(seed, evaluation, step, i x n + j): none of training's. Refuses to say when, and to bring the weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from mindgrpo.algorithm.pass_at_k import PromptScores, summarise
from mindgrpo.algorithm.types import LENGTH, Samples
from mindgrpo.backend.contract import Backend
from mindgrpo.config import Config
from mindgrpo.data.prompts import Prompt
from mindgrpo.data.tokenizer import Tokenizer
from mindgrpo.grpo.rollout import Scored, generate, score
from mindgrpo.parallel.sharding import Layout
from mindgrpo.rewards.score import Scorer
from mindgrpo.rollout.embedded.engine import Draw, Generator
from mindgrpo.rollout.noise import EVALUATION
from mindgrpo.rollout.sampling_params import SamplingSettings

SAMPLED, GREEDY = "sampled", "greedy"
PREFIXES = {SAMPLED: "eval", GREEDY: "eval_greedy"}
Figure = float | int | None


@dataclass(frozen=True)
class Mode:
    """One way of answering: `num_samples` a prompt, drawn by `settings`; a reward of `threshold` or more has passed."""

    name: str
    num_samples: int
    settings: SamplingSettings
    threshold: float

    @property
    def title(self) -> str:
        """As people read it."""
        if self.name == GREEDY:
            return "held out, greedy"
        return "held out" if self.num_samples == 1 else f"held out, {self.num_samples} a prompt"


def modes_of(config: Config, sampling: SamplingSettings) -> list[Mode]:
    """What the configuration asks for, in its order; `sampling` is the run's."""
    rl = config.rl_config
    own = replace(
        sampling,
        temperature=sampling.temperature if rl.eval_temperature is None else rl.eval_temperature,
        top_p=sampling.top_p if rl.eval_top_p is None else rl.eval_top_p,
    )
    known = {
        SAMPLED: Mode(SAMPLED, rl.eval_num_generations, own, rl.eval_pass_threshold),
        # A second likeliest answer would be the first one again.
        GREEDY: Mode(GREEDY, 1, replace(sampling, temperature=0.0), rl.eval_pass_threshold),
    }
    return [known[name] for name in rl.eval_modes]


@dataclass(frozen=True)
class Outcome:
    """`prompts` one a sample; `seconds` of generating alone, on this rank, without those of compiling."""

    mode: Mode
    prompts: list[Prompt]
    samples: Samples
    scored: Scored
    seconds: float

    @cached_property
    def by_function(self) -> dict[str, PromptScores]:
        values = self.scored.scores.per_function
        return {
            name: summarise(given, self.samples.groups, self.mode.threshold)
            for name, given in values.items()
        }

    @property
    def means(self) -> dict[str, float | None]:
        return {name: found.mean for name, found in self.by_function.items()}

    @property
    def truncated_fraction(self) -> float:
        return self.samples.finish_reasons.count(LENGTH) / len(self.samples)

    @property
    def num_tokens(self) -> int:
        """Of completions."""
        return int(self.samples.completion_lengths.sum())

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds

    def figures(self) -> dict[str, Figure]:
        """As metrics name them."""
        prefix, n = PREFIXES[self.mode.name], self.mode.num_samples
        figures: dict[str, Figure] = {}
        for name, found in self.by_function.items():
            figures[f"{prefix}/{name}/mean"] = found.mean
            if n > 1:
                figures[f"{prefix}/{name}/mean@{n}"] = found.mean_at_n
            figures[f"{prefix}/{name}/stderr"] = found.error
            figures |= {f"{prefix}/{name}/pass@{k}": p for k, p in found.pass_at.items()}
            figures[f"{prefix}/{name}/errors"] = self.scored.scores.errors.get(name, 0)
        figures[f"{prefix}/truncated_fraction"] = self.truncated_fraction
        figures[f"{prefix}/completion_length"] = self.num_tokens / len(self.samples)
        return figures

    def line(self) -> str:
        """For the console of a run."""
        parts = []
        for name, found in self.by_function.items():
            told = f"{name} {figure(found.mean)}"
            if self.mode.num_samples > 1:
                best = max(found.pass_at)
                told += f" ± {figure(found.error)} pass@{best} {figure(found.pass_at[best])}"
            parts.append(told)
        return f"{self.mode.title}:  " + "  ".join(parts)

    def rows(self) -> list[dict[str, Any]]:
        """One a sample; texts are there on rank 0 alone."""
        per_function = self.scored.scores.per_function
        return [
            {
                "mode": self.mode.name,
                "prompt": prompt.text,
                "completion": self.scored.texts[i],
                "answer": prompt.answer,
                "finish_reason": self.samples.finish_reasons[i],
                "length": len(self.samples.completions[i]),
                "rewards": {name: number(values[i]) for name, values in per_function.items()},
            }
            for i, prompt in enumerate(self.prompts)
        ]


def figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def number(value: float) -> float | None:
    return None if value != value else float(value)


@dataclass(frozen=True)
class Evaluator:
    """Who answers and who scores; `scorer` is wanted on rank 0."""

    generator: Generator
    layout: Layout
    backend: Backend
    scorer: Scorer | None
    tokenizer: Tokenizer
    seed: int

    def run(
        self,
        prompts: Sequence[Prompt],
        modes: Sequence[Mode],
        step: int,
        version: int,
        check: Callable[[], None] = lambda: None,
    ) -> list[Outcome]:
        """All ranks together; the generator has its weights, of `version`, and its cache on the device.

        `check` is called after generating, and raises where the evaluation is to end there.
        """
        return [self._run(list(prompts), mode, step, version, check) for mode in modes]

    def _run(
        self,
        prompts: list[Prompt],
        mode: Mode,
        step: int,
        version: int,
        check: Callable[[], None],
    ) -> Outcome:
        entries = self.backend.compile_log.entries
        compiled, started = len(entries), time.perf_counter()
        samples = generate(
            self.generator,
            self.layout,
            self.backend,
            [prompt.ids for prompt in prompts],
            mode.num_samples,
            Draw(self.seed, EVALUATION, step),
            version,
            settings=mode.settings,
        )
        seconds = time.perf_counter() - started - sum(spent for _, spent in entries[compiled:])
        check()
        owners = [prompts[group] for group in samples.groups]
        scored = score(self.scorer, self.tokenizer, self.backend, owners, samples)
        return Outcome(mode, owners, samples, scored, seconds)
