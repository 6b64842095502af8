"""Steps with partial rollouts against steps that wait for the longest completion, alternating in one process.

partial.py [--steps 12] [--long 0.01] [--times 10] [--chunk 64] prints one JSON line. Lengths are forced: uniform
around a median of 32 tokens, and a share of `long` completions `times` as long. Weights, prompts and rewards are
random. The first steps, which compile and fill what is under way, are not counted.
"""

from __future__ import annotations

import argparse
import json
import sys
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import assembly
import launching
import numpy as np
from work import Work, random_rewards, read_work

from mindgrpo.algorithm.sample import STOPPED, Request, Rollout, Sample
from mindgrpo.backend.contract import Backend
from mindgrpo.backend.kernels.shapes import SamplingParams
from mindgrpo.data.prompts import Prompt
from mindgrpo.grpo.metrics import StepOutcome
from mindgrpo.grpo.scoring import Scored
from mindgrpo.grpo.state import State
from mindgrpo.grpo.step import Stepper, make_stepper
from mindgrpo.rewards.scores import Scores
from mindgrpo.rollout.engine import RolloutEngine, SeedKey

MEDIAN, PROMPTS, WARM_UP = 32, 16, 3


def lengths_of(prompt: np.ndarray, given: argparse.Namespace, count: int) -> list[int]:
    """Of a prompt's completions, a function of its tokens alone."""
    rng = np.random.default_rng(zlib.crc32(prompt.tobytes()))
    usual = rng.integers(MEDIAN // 2, MEDIAN + MEDIAN // 2 + 1, count)
    return np.where(rng.random(count) < given.long, given.times * MEDIAN, usual).tolist()


class ForcedLengths:
    """The engine, whose completions stop where `lengths_of` says; everything else is the engine's."""

    def __init__(self, engine: RolloutEngine, work: Work, given: argparse.Namespace) -> None:
        self._engine, self._work, self._given = engine, work, given

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def generate(
        self, requests: Sequence[Request], sampling: SamplingParams, key: SeedKey, version: int
    ) -> list[Sample]:
        size, capped, last = self._work.generations, [], set()
        for request in requests:
            own = request.prompt[: self._work.prompt_tokens]
            wanted = lengths_of(own, self._given, size)
            drawn = len(request.prompt) - len(own)
            allowed = request.max_tokens or (sampling.max_tokens,) * len(request.samples)
            left = [wanted[sample % size] - drawn for sample in request.samples]
            last |= {
                s for s, n, most in zip(request.samples, left, allowed, strict=True) if n <= most
            }
            limits = tuple(min(n, most) for n, most in zip(left, allowed, strict=True))
            capped.append(replace(request, max_tokens=limits))
        samples = self._engine.generate(capped, sampling, key, version)
        return [replace(s, finish_reason=STOPPED) if s.number in last else s for s in samples]


class Task:
    """Prompts by position, rewards at random."""

    def __init__(self, work: Work) -> None:
        self._work, self._step, self._taken = work, 0, 0

    def begin_step(self, step: int) -> list[Any]:
        return self.at(self.next_positions(self._work.prompts))

    def replace(self, groups: Sequence[int]) -> list[Any]:
        raise NotImplementedError("a bench replaces no groups")

    def next_positions(self, count: int) -> range:
        begin, self._taken = self._taken, self._taken + count
        return range(begin, self._taken)

    def at(self, positions: Sequence[int]) -> list[Any]:
        size = self._work.prompts
        return assembly.prompts_of(self._work.prompt_ids(at // size)[at % size] for at in positions)

    def assign(self, positions: Sequence[int]) -> None:
        """Rewards are of no prompt."""

    def owners(self, group_ids: Sequence[int]) -> list[Prompt]:
        return []

    def begin(self, rollout: Rollout, prompts: Sequence[Prompt]) -> Callable[[], Scored]:
        scored = self.score(rollout, prompts)
        return lambda: scored

    def score(self, rollout: Rollout, prompts: Sequence[Prompt]) -> Scored:
        self._step += 1
        rewards = random_rewards(self._step, len(rollout))
        return Scored(Scores({"random": rewards}, rewards, rewards != rewards), [])


def stepper(work: Work, given: argparse.Namespace, backend: Backend, is_partial: bool) -> Stepper:
    keys: dict[str, Any] = {"importance_sampling_correction": "token_truncate"}
    if is_partial:
        keys |= {"partial_rollout": True, "partial_rollout_chunk": given.chunk}
    rows = assembly.Rows(1, 4)
    config = assembly.configuration(work, (1, 1, 1), (1, 1), rows, beta=0.0, rl_config=keys)
    plan = assembly.plan_of(config, assembly.model_of(work), 1)
    task: Any = Task(work)
    sampling = assembly.sampling_of(plan)
    roles = assembly.roles_of(plan, backend)
    made = make_stepper(assembly.run_of(roles, task, sampling, 1e-6), task)
    made.replicas.engine = ForcedLengths(roles.engine, work, given)
    return made


def figures(outcomes: Sequence[StepOutcome]) -> dict[str, float]:
    """Means over steps: what is long and what is short takes turns."""
    seconds = [outcome.seconds for outcome in outcomes]
    tokens = sum(int(outcome.batch.rollout.completion_lengths.sum()) for outcome in outcomes)
    total = sum(one["step"] for one in seconds)
    longest = max(int(outcome.batch.rollout.completion_lengths.max()) for outcome in outcomes)
    return {
        "step_s": total / len(outcomes),
        "rollout_s": sum(one["rollout"] for one in seconds) / len(outcomes),
        "tokens_a_second": tokens / total,
        "tokens_a_step": tokens / len(outcomes),
        "longest": longest,
    }


def measure(given: argparse.Namespace) -> None:
    base = read_work(launching.HERE / "work.json")
    work = replace(base, prompts=PROMPTS, new_tokens=given.times * MEDIAN)
    backend = assembly.join_ranks()
    if backend is None:
        return
    both = {name: stepper(work, given, backend, name == "partial") for name in ("whole", "partial")}
    outcomes: dict[str, list[StepOutcome]] = {name: [] for name in both}
    states = {name: State() for name in both}
    for _ in range(WARM_UP + given.steps):
        for name, one in both.items():
            outcomes[name].append(one.run(states[name]))
    found = {name: figures(own[WARM_UP:]) for name, own in outcomes.items()}
    ages = [o.partial.age_max for o in outcomes["partial"][WARM_UP:] if o.partial is not None]
    whole, partial = found["whole"], found["partial"]
    launching.give_figures(
        {
            "bench": "partial",
            "steps": given.steps,
            **found,
            "step_ratio": partial["step_s"] / whole["step_s"],
            "tokens_ratio": partial["tokens_a_second"] / whole["tokens_a_second"],
            "largest_age": max(ages),
        }
    )
    backend.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=12, help="timed steps of each")
    parser.add_argument("--long", type=float, default=0.01, help="share of long completions")
    parser.add_argument("--times", type=int, default=10, help="medians that a long one has")
    parser.add_argument("--chunk", type=int, default=64, help="rl_config.partial_rollout_chunk")
    given = parser.parse_args()
    if launching.is_rank():
        measure(given)
        return
    print(json.dumps(launching.run_on_ranks(__file__, sys.argv[1:], 1)))


if __name__ == "__main__":
    main()
