"""How far a run is in its prompts: one number, as their order is a function of (seed, epoch) alone.

Refuses to skip or repeat: what is taken is the next in order, for a step's own prompts and for those that replace some.
"""

from __future__ import annotations

from dataclasses import dataclass

from mindgrpo.data.prompts import Prompt, PromptSet


@dataclass
class DataSampler:
    """`position` counts the prompts handed out since the start of the run; setting it resumes one."""

    prompts: PromptSet
    seed: int
    position: int = 0

    def take(self, count: int) -> list[Prompt]:
        taken, _ = self.prompts.take(self.position, count, self.seed)
        self.position += count
        return taken

    @property
    def epoch(self) -> int:
        """Of the next prompt, from 0."""
        return self.position // len(self.prompts)
