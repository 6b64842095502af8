"""Conversations of three turns against single-turn completions of the same lengths, in tokens a second.

conversations.py [--turn 24] [--answer 8] [--repeats 5] prints one JSON line. 256 samples, 8 a prompt, by the embedded
generator in one process; the two take turns, and medians are compared. `ratio` counts all tokens behind a prompt, those
of tools too, `own_ratio` only what the policy wrote. Every turn calls the built-in calculator. Lengths are forced,
weights and prompts random.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import assembly
import launching
from work import Work, read_work

from mindgrpo.algorithm.sample import STOPPED, Request, Sample
from mindgrpo.backend.kernels.shapes import SamplingParams
from mindgrpo.config import memory_bytes
from mindgrpo.grpo.roles import Roles
from mindgrpo.rollout.conversations import Conversations
from mindgrpo.rollout.engine import SeedKey
from mindgrpo.rollout.tools import ToolTurns
from mindgrpo.tools.calls import ToolCall
from mindgrpo.tools.pool import ToolPool
from mindgrpo.workers.protocol import CallLimits

PROMPTS, TURNS = 32, 3


class AnyEnd(int):
    """Equal to every id: each turn has ended."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = int.__hash__


@dataclass
class Suffix:
    """`length` ids between two turns, whatever a tool says."""

    length: int
    end_id: int = AnyEnd()

    def ids(self, messages: Sequence[Any]) -> list[int]:
        return list(range(5, 5 + self.length))


class NoText:
    """For a tokenizer: what the policy wrote is of no interest here."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return ""


def call(text: str) -> list[ToolCall]:
    return [ToolCall("calculator", {"expression": "1+1"})]


@dataclass
class Generation:
    """`turn` tokens a turn; `roles` are awake."""

    roles: Roles
    sampling: SamplingParams
    turn: int
    version: int

    def complete(self, requests: Sequence[Request], turn: int) -> list[Sample]:
        capped = [replace(r, max_tokens=(self.turn,) * len(r.samples)) for r in requests]
        key = SeedKey(0, 0, 0, turn)
        made = self.roles.engine.generate(capped, self.sampling, key, self.version)
        return [replace(sample, finish_reason=STOPPED) for sample in made]


def in_turns(
    generation: Generation, requests: Sequence[Request], pool: ToolPool, suffix: Suffix
) -> tuple[int, float]:
    """Tokens behind prompts, and seconds."""
    responder = ToolTurns(call, pool)
    stand_ins: dict[str, Any] = {"tokenizer": NoText(), "suffix": suffix}
    driver = Conversations(responder=responder, max_turns=TURNS, **stand_ins)
    room = TURNS * generation.turn + (TURNS - 1) * suffix.length
    started = time.perf_counter()
    made = driver.run(requests, room, generation.complete)
    seconds = time.perf_counter() - started
    return sum(len(one.tokens) for one in made), seconds


def at_once(generation: Generation, requests: Sequence[Request], longest: int) -> tuple[int, float]:
    whole = replace(generation, turn=longest)
    started = time.perf_counter()
    made = whole.complete(requests, 0)
    return sum(len(one.tokens) for one in made), time.perf_counter() - started


def requests_of(work: Work, number: int) -> list[Request]:
    size = work.generations
    prompts = work.prompt_ids(number)
    return [Request(p, tuple(range(i * size, (i + 1) * size))) for i, p in enumerate(prompts)]


def measure(given: argparse.Namespace) -> None:
    longest = TURNS * given.turn + (TURNS - 1) * given.answer
    work = replace(read_work(launching.HERE / "work.json"), prompts=PROMPTS, new_tokens=longest)
    backend = assembly.join_ranks()
    if backend is None:
        return
    rows = assembly.Rows(1, 4)
    tools = {"tools": ["calculator"]}
    config = assembly.configuration(work, (1, 1, 1), (1, 1), rows, beta=0.0, rl_config=tools)
    plan = assembly.plan_of(config, assembly.model_of(work), 1)
    sampling = assembly.sampling_of(plan)
    roles = assembly.roles_of(plan, backend, sampling)
    roles.refresh_engine()
    generation = Generation(roles, sampling, given.turn, roles.enter_rollout())
    limits = CallLimits(10.0, memory_bytes(config.reward_config.memory))
    pool = ToolPool(["calculator"], ["calculator"], limits)
    speeds: dict[str, list[float]] = {"turns": [], "whole": []}
    for number in range(given.repeats + 1):
        requests = requests_of(work, number)
        for name, (tokens, seconds) in (
            ("turns", in_turns(generation, requests, pool, Suffix(given.answer))),
            ("whole", at_once(generation, requests, longest)),
        ):
            if tokens != work.samples * longest:
                raise RuntimeError(f"{name}: {tokens} tokens")
            if number:  # the first one compiles
                speeds[name].append(tokens / seconds)
    pool.close()
    turns, whole = (statistics.median(speeds[name]) for name in ("turns", "whole"))
    figures = {"bench": "conversations", "turns_tokens_a_second": turns}
    launching.give_figures(
        figures
        | {
            "whole_tokens_a_second": whole,
            "ratio": turns / whole,
            "own_ratio": turns / whole * TURNS * given.turn / longest,
            "all": speeds,
        }
    )
    backend.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--turn", type=int, default=24, help="tokens of a turn")
    parser.add_argument("--answer", type=int, default=8, help="tokens between two turns")
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    if launching.is_rank():
        measure(given)
        return
    print(json.dumps(launching.run_on_ranks(__file__, sys.argv[1:], 1)))


if __name__ == "__main__":
    main()
