"""Conversations of three turns against single-turn completions of the same lengths, in tokens a second.

conversations.py [--turn 24] [--answer 8] [--repeats 5] prints one JSON line. 256 samples, 8 a prompt, by the embedded
generator in one process; the two take turns, and medians are compared. `ratio` counts all tokens behind a prompt, those
of tools too, `own_ratio` only what the policy wrote. Every turn calls the built-in calculator. Lengths are forced,
weights and prompts random.

With --seconds S, 32 conversations of 8 turns call a tool that takes 0 to S seconds, drawn by sample and turn: `ratio`
compares the seconds where each continues when its reply is there with those where all wait for the slowest reply.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import assembly
import launching
from work import Work, read_work

from mindgrpo.algorithm.sample import STOPPED, Request, Sample
from mindgrpo.backend.kernels.shapes import SamplingParams
from mindgrpo.config import memory_bytes
from mindgrpo.grpo.roles import Roles
from mindgrpo.rollout.conversations import Conversations, Reply
from mindgrpo.rollout.engine import SeedKey
from mindgrpo.rollout.tools import ToolTurns
from mindgrpo.tools.calls import ToolCall
from mindgrpo.tools.pool import ToolPool
from mindgrpo.workers.protocol import CallLimits

PROMPTS, TURNS = 32, 3
SLOW_PROMPTS, SLOW_TURNS = 4, 8
SLOW_TOOL = f"{launching.HERE}/sleeping.py:sleeps"


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


class Ids:
    """For a tokenizer: a text is the ids in digits."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return " ".join(map(str, ids))


def call(text: str) -> list[ToolCall]:
    return [ToolCall("calculator", {"expression": "1+1"})]


@dataclass(frozen=True)
class SlowCall:
    """Parses a text as a call that takes 0 to `longest` seconds, as its hash says."""

    longest: float

    def __call__(self, text: str) -> list[ToolCall]:
        share = zlib.crc32(text.encode()) / 2**32
        return [ToolCall("sleeps", {"seconds": share * self.longest})]


class InRounds(ToolTurns):
    """Waits for all replies."""

    def answer(self, asked: Mapping[int, Sequence[ToolCall]], patience: float) -> dict[int, Reply]:
        return super().answer(asked, math.inf)


@dataclass
class Generation:
    """`turn` tokens a turn; `roles` are awake."""

    roles: Roles
    sampling: SamplingParams
    turn: int
    version: int

    def complete(self, requests: Sequence[Request]) -> list[Sample]:
        capped = [replace(r, max_tokens=(self.turn,) * len(r.samples)) for r in requests]
        made = self.roles.engine.generate(capped, self.sampling, SeedKey(0, 0, 0), self.version)
        return [replace(sample, finish_reason=STOPPED) for sample in made]


def in_turns(
    generation: Generation,
    requests: Sequence[Request],
    responder: ToolTurns,
    suffix: Suffix,
    turns: int,
) -> tuple[int, float]:
    """Tokens behind prompts, and seconds."""
    stand_ins: dict[str, Any] = {"tokenizer": Ids(), "suffix": suffix}
    driver = Conversations(responder=responder, max_turns=turns, **stand_ins)
    room = length_of(generation.turn, suffix.length, turns)
    started = time.perf_counter()
    made = driver.run(requests, room, generation.complete)
    seconds = time.perf_counter() - started
    return sum(len(one.tokens) for one in made), seconds


def at_once(generation: Generation, requests: Sequence[Request], longest: int) -> tuple[int, float]:
    whole = replace(generation, turn=longest)
    started = time.perf_counter()
    made = whole.complete(requests)
    return sum(len(one.tokens) for one in made), time.perf_counter() - started


def requests_of(work: Work, number: int) -> list[Request]:
    size = work.generations
    prompts = work.prompt_ids(number)
    return [Request(p, tuple(range(i * size, (i + 1) * size))) for i, p in enumerate(prompts)]


def length_of(turn: int, answer: int, turns: int) -> int:
    return turns * turn + (turns - 1) * answer


def measure(given: argparse.Namespace) -> None:
    is_slow = given.seconds is not None
    prompts, turns = (SLOW_PROMPTS, SLOW_TURNS) if is_slow else (PROMPTS, TURNS)
    longest = length_of(given.turn, given.answer, turns)
    work = replace(read_work(launching.HERE / "work.json"), prompts=prompts, new_tokens=longest)
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
    limits = CallLimits(10.0 + (given.seconds or 0.0), memory_bytes(config.reward_config.memory))
    texts, names = ([SLOW_TOOL], ["sleeps"]) if is_slow else (["calculator"], ["calculator"])
    pool, suffix = ToolPool(texts, names, limits), Suffix(given.answer)

    def run(name: str, requests: Sequence[Request]) -> tuple[int, float]:
        if name == "whole":
            return at_once(generation, requests, longest)
        parser = SlowCall(given.seconds) if is_slow else call
        responder = (InRounds if name == "rounds" else ToolTurns)(parser, pool)
        return in_turns(generation, requests, responder, suffix, turns)

    seconds: dict[str, list[float]] = {"turns": [], "rounds" if is_slow else "whole": []}
    for number in range(given.repeats + 1):
        for name, own in seconds.items():
            tokens, took = run(name, requests_of(work, number))
            if tokens != work.samples * longest:
                raise RuntimeError(f"{name}: {tokens} tokens")
            if number:  # the first one compiles
                own.append(took)
    pool.close()
    launching.give_figures(
        {"bench": "conversations", **figures_of(seconds, work, given.turn, turns)}
    )
    backend.close()


def figures_of(
    seconds: dict[str, list[float]], work: Work, turn: int, turns: int
) -> dict[str, Any]:
    medians = {name: statistics.median(own) for name, own in seconds.items()}
    if "rounds" in medians:
        ratio = medians["turns"] / medians["rounds"]
        return {"seconds": medians, "ratio": ratio, "all": seconds}
    tokens = work.samples * work.new_tokens
    ratio = medians["whole"] / medians["turns"]
    return {
        "turns_tokens_a_second": tokens / medians["turns"],
        "whole_tokens_a_second": tokens / medians["whole"],
        "ratio": ratio,
        "own_ratio": ratio * turns * turn / work.new_tokens,
        "all": {name: [tokens / one for one in own] for name, own in seconds.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--turn", type=int, default=24, help="tokens of a turn")
    parser.add_argument("--answer", type=int, default=8, help="tokens between two turns")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, help="the longest reply of a slow tool")
    given = parser.parse_args()
    if launching.is_rank():
        measure(given)
        return
    print(json.dumps(launching.run_on_ranks(__file__, sys.argv[1:], 1)))


if __name__ == "__main__":
    main()
