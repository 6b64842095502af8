"""Counts a step's samples and their tokens, the rows that take them, and the calls that bring prompts in. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from mindgrpo.algorithm.packing import MicroShape
from mindgrpo.algorithm.row_shapes import TOKENS_PER_MICRO_BATCH, row_lengths
from mindgrpo.plan.run_plan import RunPlan
from mindgrpo.rollout.embedded.kv_cache import read_length


@dataclass(frozen=True)
class SampleCounts:
    """`count` samples, `group` of them a prompt, and their lengths in tokens."""

    count: float
    group: int
    prompt: int
    completion: float
    longest: int

    @classmethod
    def of(cls, plan: RunPlan) -> SampleCounts:
        config, own = plan.config, plan.config.context.roofline
        generate = config.generate_config
        longest = generate.sampling_config.max_tokens
        prompt = own.prompt_tokens or max(1, generate.max_prompt_length // 10)
        completion = min(own.completion_tokens or math.ceil(0.6 * longest), longest)
        group = config.rl_config.num_generations
        return cls(plan.batch.samples_per_step, group, prompt, completion, longest)

    @property
    def prompts(self) -> float:
        return math.ceil(self.count / self.group)

    @property
    def greedy(self) -> SampleCounts:
        """Returns the counts of one more completion of each prompt, as remax draws."""
        return replace(self, count=self.prompts, group=1)

    @property
    def tokens(self) -> float:
        """Counts what a row must hold: prompts once, and no last token."""
        return self.prompts * self.prompt + self.count * (self.completion - 1)

    @property
    def pairs(self) -> float:
        """Counts the pairs of a token with those that it sees."""
        own = self.count * self.completion * (self.prompt + self.completion / 2)
        return own + self.prompts * self.prompt**2 / 2

    def a_row(self, shape: MicroShape) -> int:
        """Counts the samples that a row takes."""
        cost = max(1.0, self.completion - 1)
        whole = self.prompt + self.group * cost
        groups = int(shape.length // whole)
        room = shape.length - groups * whole - self.prompt
        fit = groups * self.group + max(0, int(room // cost))
        return max(1, min(fit, shape.max_per_row or fit, math.ceil(self.count)))

    def in_rows(
        self, widest: MicroShape, shares: int, column_cost: float
    ) -> tuple[int, MicroShape]:
        """Returns each rank's micro-batches and their shape: of those up to `widest` the one that costs least.

        As algorithm/row_shapes.py chooses, whose `column_cost` this is.
        """
        lengths = [n for n in row_lengths(widest) if n >= self.prompt + self.longest]
        options = []
        for length in lengths or [widest.length]:
            shape = replace(widest, length=length)
            number = self.micro_batches(shape, shares)
            tokens = shape.tokens * (1.0 + length * column_cost)
            options.append((number * (TOKENS_PER_MICRO_BATCH + tokens), number, shape))
        _, number, shape = min(options, key=lambda option: option[0])
        return number, shape

    def micro_batches(self, shape: MicroShape, shares: int) -> int:
        rows = math.ceil(self.count / self.a_row(shape))
        return max(1, math.ceil(rows / (shape.rows * shares)))


def prompt_calls(prompts: int, first: int, at_once: int) -> int:
    """Counts calls that bring prompts in: `at_once` of the `first` that find free slots, later ones by themselves."""
    first = min(prompts, max(1, first))
    return math.ceil(first / at_once) + prompts - first


def mean_read(length: int, prompt: int, longest: int, steps: float) -> float:
    """Returns how far a cache of `length` is read on average: as the first samples grow, then to the longest."""
    reads = [read_length(length, min(length, prompt + made) - 1) for made in range(longest)]
    return (sum(reads) + (steps - longest) * reads[-1]) / steps
