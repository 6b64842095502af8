"""A worker process, which loads what users wrote and calls it as its rank asks, and its supervisor.

The supervisor is a fresh Python that forks the worker, which a rank with compute threads cannot. It ends the worker
with the rank, and whatever a worker leaves behind. The rank watches deadlines and memory. What the rank sends is
pickled; what it is sent are lines of JSON, because a process that somebody's code has wrecked may have written them.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import resource
import select
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NoReturn, Protocol, runtime_checkable

from mindgrpo.errors import UserError
from mindgrpo.health.processes import end_with_parent
from mindgrpo.rewards.call import Caller, Samples, Signature
from mindgrpo.rewards.load import Spec, resolve
from mindgrpo.rewards.outcome import MEMORY, Failure, Outcome, to_json
from mindgrpo.rewards.workers import processes
from mindgrpo.rewards.workers.isolated import IsolatedScoring
from mindgrpo.user_code import describe

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ORPHAN_CHECK_MILLISECONDS = 2000
# Makes a built-in fill, once and before it is forked, the caches that its first call fills.
WARM_UP = Samples([r"\boxed{(x + 1)^2}"], ["x^2 + 2x + 1"], {})


class Served(Protocol):
    """What a worker calls: a reward's Caller, or a conversation's tools."""

    @property
    def signature(self) -> Signature: ...
    def together(self, samples: Any) -> Sequence[Any] | Failure: ...
    def alone(self, samples: Any, index: int) -> Any: ...


@runtime_checkable
class Host(Protocol):
    """What serves in a way of its own: environments, whose processes outlive a task."""

    @property
    def signature(self) -> Signature: ...
    def serve(self, task: Any, report: Callable[[int, Any], None]) -> None: ...


@dataclass(frozen=True)
class Order:
    """What a worker is started with: what loads the user's code, its name, where modules are searched, and bytes of
    memory."""

    load: Callable[[], Served | Host]
    what: str
    search_path: list[str]
    memory: int


@dataclass(frozen=True)
class Task:
    """Samples to score: batches of indices in a call each, or each in a forked process that has `deadline` seconds."""

    isolated: bool
    samples: Any
    batches: list[list[int]]
    deadline: float


def load_reward(spec: Spec) -> Served:
    caller = Caller(resolve(spec))
    if not spec.source:
        caller.together(WARM_UP)
    return caller


def main() -> None:
    """Supervise a worker: the arguments are descriptors of its socket to the rank and of the pipe that it prints to.

    The last line on the socket is {"ended": how}, in one with what the worker wrote when it died, if it did.
    """
    rank, supervisor = os.getppid(), os.getpid()
    channel, output = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    # Ctrl-C and a launcher's goodbye are the rank's to obey; this ends when the rank does.
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    processes.adopt_orphans()
    worker = os.fork()
    if worker == 0:
        end_with_parent(supervisor)
        os.setsid()
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        run_worker(channel, output)
    events = select.poll()
    events.register(channel, 0)  # its end only: what comes in is for the worker
    events.register(os.pidfd_open(worker), select.POLLIN)
    while not events.poll(ORPHAN_CHECK_MILLISECONDS) and os.getppid() == rank:
        processes.kill_children(spared=worker)
    processes.kill_group(worker)
    ended = {"ended": processes.how_it_ended(os.waitpid(worker, 0)[1])}
    channel.setblocking(False)
    with suppress(OSError):
        channel.sendall(json.dumps(ended).encode() + b"\n")
    while processes.kill_children():
        pass


def run_worker(channel: socket.socket, output: int) -> NoReturn:
    """Serve on `channel`, print to the descriptor `output`, and end the process."""
    status = 0
    try:
        sys.stdout, sys.stderr = (printing_to(descriptor, output) for descriptor in (1, 2))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        serve(channel)
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


def serve(channel: socket.socket) -> None:
    def send(message: dict[str, Any]) -> None:
        flush()
        channel.sendall(json.dumps(message).encode() + b"\n")

    def report(index: int, outcome: Outcome) -> None:
        send({"index": index, **to_json(outcome)})

    received = channel.makefile("rb")
    order: Order = pickle.load(received)
    sys.path[:] = order.search_path
    processes.limit_memory(order.memory)
    try:
        caller = order.load()
    except UserError as error:
        return send({"refused": str(error)})
    except BaseException as error:
        return send({"refused": f"{order.what}: {describe(error)}"})
    send({"signature": asdict(caller.signature), "pid": os.getpid()})
    while True:
        task: Any = pickle.load(received)
        if isinstance(caller, Host):
            caller.serve(task, report)
        elif task.isolated:
            score = partial(score_alone, caller, task.samples)
            indices = [index for batch in task.batches for index in batch]
            IsolatedScoring(score, report, task.deadline, order.memory).run(indices)
        else:
            for batch in task.batches:
                outcomes = caller.together(task.samples.select(batch))
                if isinstance(outcomes, Failure):
                    send(to_json(outcomes))
                    if outcomes.kind == MEMORY:
                        return  # what is left of this process is not fit to score in
                    continue
                for index, outcome in zip(batch, outcomes, strict=True):
                    report(index, outcome)
        send({"done": True})


def score_alone(caller: Served, samples: Any, index: int) -> Outcome:
    outcome = caller.alone(samples, index)
    flush()
    return outcome


def flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        # The user's code may have closed or replaced it.
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
