"""A worker process: loads one reward function and scores what its rank sends, until the rank is gone.

The rank watches deadlines and memory from outside. What it sends is pickled; what it is sent is JSON,
because a process that somebody's code has wrecked may have written it.
"""

from __future__ import annotations

import io
import json
import os
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from mindgrpo.errors import UserError
from mindgrpo.rewards.attempt import Attempts, judged
from mindgrpo.rewards.call import Samples, Signature
from mindgrpo.rewards.load import describe, resolve
from mindgrpo.rewards.outcome import MEMORY, Failure, to_json
from mindgrpo.rewards.spec import Spec
from mindgrpo.rewards.workers import processes
from mindgrpo.rewards.workers.isolated import IsolatedScoring

# Makes a built-in fill, once and before it is forked, the caches that its first call fills.
WARM_UP = Samples([r"\boxed{(x + 1)^2}"], ["x^2 + 2x + 1"], {})


@dataclass(frozen=True)
class Order:
    """What a worker is started with: the reward, where modules are searched, and bytes of memory."""

    spec: Spec
    search_path: list[str]
    memory: int


@dataclass(frozen=True)
class Task:
    """Samples `indices` to score, here or each in a forked process that has `deadline` seconds."""

    isolated: bool
    samples: Samples
    indices: list[int]
    deadline: float


def run_worker(channel: int, output: int) -> NoReturn:
    """Serve on the descriptor `channel`, print to `output`, and end the process."""
    status = 0
    try:
        sys.stdout, sys.stderr = (printing_to(descriptor, output) for descriptor in (1, 2))
        processes.no_core_files()
        serve(Connection(channel))
    except (EOFError, ConnectionError):
        pass
    except BaseException as error:
        print(describe(error), file=sys.stderr)
        status = 1
    finally:
        # The user's exit handlers are not waited for.
        os._exit(status)


def printing_to(descriptor: int, target: int) -> io.TextIOWrapper:
    """Print by lines, so that what was printed before a function hung is there to be read."""
    os.dup2(target, descriptor)
    raw = io.BufferedWriter(io.FileIO(descriptor, "w", closefd=False))
    return io.TextIOWrapper(raw, "utf-8", "backslashreplace", line_buffering=True)


def serve(rank: Connection) -> None:
    def send(message: dict[str, Any]) -> None:
        flush()
        rank.send_bytes(json.dumps(message).encode())

    def report(index: int, outcome: float | None | Failure) -> None:
        send({"index": index, **to_json(outcome)})

    order: Order = rank.recv()
    sys.path[:] = order.search_path
    processes.limit_memory(order.memory)
    try:
        function = resolve(order.spec)
    except UserError as error:
        return send({"refused": str(error)})
    except BaseException as error:
        return send({"refused": f"reward function {order.spec.text!r}: {describe(error)}"})
    attempts = Attempts(function)
    if not order.spec.source:
        attempts.together(WARM_UP)
    send({"signature": asdict(Signature.of(function)), "pid": os.getpid()})
    while True:
        task: Task = rank.recv()
        if task.isolated:
            isolated = IsolatedScoring(
                partial(alone, attempts, task.samples), report, task.deadline, order.memory
            )
            isolated.run(task.indices)
        else:
            # A built-in gets one sample at a time: what it has scored when it hangs stays scored.
            batches = [task.indices] if order.spec.source else [[index] for index in task.indices]
            for batch in batches:
                values = attempts.together(task.samples.select(batch))
                if isinstance(values, Failure):
                    send(to_json(values))
                    if values.kind == MEMORY:
                        return  # what is left of this process is not fit to score in
                    continue
                for index, value in zip(batch, values, strict=True):
                    report(index, judged(value))
        send({"done": True})


def alone(attempts: Attempts, samples: Samples, index: int) -> float | None | Failure:
    outcome = attempts.alone(samples, index)
    flush()
    return outcome


def flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        # The user's code may have closed or replaced it.
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
