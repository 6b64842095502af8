"""A worker process: loads one reward function and scores what it is sent, until nobody is there.

Says each outcome as it comes, so that what has been scored stays scored whatever happens next.
Refuses to watch its own deadline: the scoring rank does.
"""

from __future__ import annotations

import io
import os
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from mindgrpo.errors import UserError
from mindgrpo.rewards.attempt import Attempts, judged
from mindgrpo.rewards.call import Samples, Signature
from mindgrpo.rewards.load import describe, resolve
from mindgrpo.rewards.outcome import MEMORY, Failure, to_json
from mindgrpo.rewards.spec import Spec
from mindgrpo.rewards.workers import processes
from mindgrpo.rewards.workers.apart import Apart
from mindgrpo.rewards.workers.channel import Closed, WorkerEnd

TOGETHER, EACH, APART = "together", "each", "apart"


@dataclass(frozen=True)
class Order:
    """What a worker is started with: the reward, where modules are found, and bytes of memory."""

    spec: Spec
    search_path: list[str]
    memory: int


@dataclass(frozen=True)
class Task:
    """Samples to score: `mode` says how, `places` which of them; a deadline in seconds for APART."""

    mode: str
    samples: Samples
    places: list[int]
    deadline: float


def be_worker(channel_descriptor: int, output_descriptor: int) -> NoReturn:
    """Never returns; the process has been forked for this."""
    status = 0
    try:
        sys.stdout, sys.stderr = (printing_to(d, output_descriptor) for d in (1, 2))
        processes.no_core_files()
        serve(WorkerEnd(channel_descriptor))
    except (Closed, BrokenPipeError, ConnectionResetError):
        pass
    except BaseException as error:
        print(describe(error), file=sys.stderr)
        status = 1
    finally:
        # The user's exit handlers are not waited for.
        os._exit(status)


def printing_to(descriptor: int, target: int) -> io.TextIOWrapper:
    """By lines, so that what was printed before a function hung is there to be read."""
    os.dup2(target, descriptor)
    raw = io.BufferedWriter(io.FileIO(descriptor, "w", closefd=False))
    return io.TextIOWrapper(raw, "utf-8", "backslashreplace", line_buffering=True)


def serve(channel: WorkerEnd) -> None:
    order: Order = channel.receive()
    sys.path[:] = order.search_path
    processes.limit_memory(order.memory)
    started = time.monotonic()
    try:
        function = resolve(order.spec)
    except UserError as error:
        channel.say({"refused": str(error)})
        return
    except BaseException as error:
        channel.say({"refused": f"reward function {order.spec.text!r}: {describe(error)}"})
        return
    attempts = Attempts(function)
    seconds = time.monotonic() - started
    hello = {"signature": asdict(Signature.of(function)), "seconds": seconds, "pid": os.getpid()}
    flush()
    channel.say(hello)
    while True:
        task: Task = channel.receive()
        do(task, attempts, channel, order.memory)
        flush()
        channel.say({"done": True})


def do(task: Task, attempts: Attempts, channel: WorkerEnd, memory: int) -> None:
    def report(place: int, outcome: float | None | Failure) -> None:
        channel.say({"place": place, **to_json(outcome)})

    if task.mode == APART:
        flush()  # or every child would print it again
        score = lambda place: flushed(attempts.alone(task.samples, place))  # noqa: E731
        Apart(score, report, task.deadline, memory).run(task.places)
        return
    if task.mode == TOGETHER:
        values = attempts.together(task.samples.part(task.places))
        if not isinstance(values, Failure):
            for place, value in zip(task.places, values, strict=True):
                report(place, judged(value))
            return
        channel.say({"whole": [values.kind, values.message]})
        if values.kind == MEMORY:
            # What is left of this process is not fit to score in.
            os._exit(0)
    for place in task.places:
        outcome = attempts.alone(task.samples, place)
        report(place, outcome)
        if isinstance(outcome, Failure) and outcome.kind == MEMORY:
            os._exit(0)


def flushed(outcome: Any) -> Any:
    flush()
    return outcome


def flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        # The user's code may have closed or replaced it.
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
