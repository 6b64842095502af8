"""Tasks that are added while a worker answers others, and tools and environments whose replies come one by one.

What waits here waits for a file that something else makes. Does not prove that a hung reward function is ended:
test_reward_pool.py does.
"""

from __future__ import annotations

import math
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed.scripted_turns import Ids, Suffix

from mindgrpo.algorithm.sample import STOPPED, Request, Sample
from mindgrpo.environments.contract import Observation, Opening
from mindgrpo.environments.mixture import Mixture
from mindgrpo.environments.pool import EnvironmentPool
from mindgrpo.processes.fork import AnsweringChannel
from mindgrpo.processes.linux import TimeUsed
from mindgrpo.rollout.conversations import Conversations
from mindgrpo.rollout.tools import ToolTurns
from mindgrpo.tools.calls import ToolCall
from mindgrpo.tools.pool import TOOL, ToolPool, ToolService
from mindgrpo.workers import forked
from mindgrpo.workers.client import Worker
from mindgrpo.workers.protocol import EXIT, TIMEOUT, CallFailure, CallLimits, Task

# For what hangs, and for what ends by itself, however slow the machine.
DEADLINE, PATIENCE, MEMORY = 1.0, 300.0, 1 << 30
CORES = len(os.sched_getaffinity(0))
USERS = """
import os, time

def wait_for(path):
    while not os.path.exists(path):
        time.sleep(0.01)

def waits(path: str) -> str:
    wait_for(path)
    return "waited"

def makes(path: str) -> str:
    open(path, "w").close()
    return "made"

def says(text: str, times: int) -> str:
    return text * times

def dies() -> str:
    os._exit(3)

def kills() -> str:
    os.kill(os.getppid(), 9)
    wait_for("/never")

class Files:
    def reset(self, row):
        self.row = row
        return "go"

    def step(self, completion):
        if completion == "waits":
            wait_for(self.row["path"])
        if completion == "makes":
            open(self.row["path"], "w").close()
        if completion == "kills the worker":
            os.kill(os.getppid(), 9)
            wait_for("/never")
        return completion, 1.0, completion == "ends"

    def close(self):
        with open(self.row["closed"], "a") as file:
            file.write("x")
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("users") / "own_files.py"
    made.write_text(USERS)
    return made


@pytest.fixture
def worker(file: Path) -> Iterator[Worker]:
    texts = tuple(f"{file}:{name}" for name in ("waits", "makes", "says", "kills"))
    made = Worker(partial(ToolService, texts, 1 << 21), TOOL, "tools", MEMORY)
    yield made
    made.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "file"


def waits(path: Path) -> ToolCall:
    return ToolCall("waits", {"path": str(path)})


def makes(path: Path) -> ToolCall:
    return ToolCall("makes", {"path": str(path)})


def says(text: str, times: int = 1) -> ToolCall:
    return ToolCall("says", {"text": text, "times": times})


def begin(worker: Worker, calls: Mapping[int, ToolCall], deadline: float = PATIENCE) -> None:
    worker.begin({n: Task(call, n) for n, call in calls.items()}, deadline, PATIENCE)


def collect(
    worker: Worker, until: Callable[[dict[int, Any]], bool] = lambda _: False
) -> tuple[dict[int, Any], CallFailure | None]:
    """The answers until some are there, and why there are no others."""
    answers: dict[int, Any] = {}
    failure = worker.collect(
        PATIENCE,
        lambda n, answer, _: answers.update({n: answer}),
        until=lambda: -math.inf if until(answers) else math.inf,
    )
    return answers, failure


def test_a_task_is_answered_while_another_one_waits_for_it(worker: Worker, path: Path) -> None:
    begin(worker, {0: waits(path)})
    begin(worker, {1: says("a")})
    assert collect(worker, lambda answers: bool(answers)) == ({1: "a"}, None)
    assert collect(worker, lambda _: True) == ({}, None)
    begin(worker, {2: makes(path), 1: says("a")})
    answers, failure = collect(worker)
    assert failure is None and sorted(answers) == [0, 1, 2]
    assert worker.is_running and worker.restarts == 0


def test_more_tasks_are_begun_where_all_that_are_allowed_wait(worker: Worker, path: Path) -> None:
    most = 2 * CORES
    begin(worker, {n: waits(path) for n in range(most)})
    begin(worker, {most: makes(path)})
    answers, failure = collect(worker)
    assert failure is None and len(answers) == most + 1


@pytest.mark.parametrize("slept", [True, False])
def test_more_tasks_are_begun_at_a_time_where_one_that_is_answered_slept(
    monkeypatch: pytest.MonkeyPatch, path: Path, slept: bool
) -> None:
    monkeypatch.setattr(forked, "PATIENCE_SECONDS", math.inf)
    monkeypatch.setattr(forked, "has_slept", lambda *_: slept)

    def answer(call: str) -> str:
        while call == "waits" and not path.exists():
            time.sleep(0.01)
        if call == "makes":
            path.touch()
        return call

    calls = ["ends", *["waits"] * (2 * CORES), "makes"]
    answers: dict[int, Any] = {}
    processes = forked.ForkedProcesses(answer, answers.__setitem__, MEMORY)
    own, other = socket.socketpair()
    with own, other:
        rank = AnsweringChannel(own)
        processes.add({n: Task(call, n, closes=True) for n, call in enumerate(calls)}, PATIENCE)
        while not answers:
            processes.advance(rank)
        if not slept:
            for _ in range(5):
                processes.advance(rank)
            assert not path.exists() and list(answers) == [0]
            path.touch()
        while processes.is_busy:
            processes.advance(rank)
    assert answers == dict(enumerate(calls))


def test_a_task_that_computes_or_starts_a_process_has_not_slept() -> None:
    def has_slept(run: Callable[[], object]) -> bool:
        before = TimeUsed.read()
        run()
        return forked.has_slept(before, TimeUsed.read())

    assert not has_slept(lambda: sum(range(3_000_000)))
    assert not has_slept(lambda: subprocess.run(["sleep", "0.1"], check=True))
    # One may have waited for a core.
    assert any(has_slept(lambda: time.sleep(0.1)) for _ in range(10))


def test_each_task_has_its_own_deadline(worker: Worker, path: Path) -> None:
    begin(worker, {0: waits(path)})
    begin(worker, {1: waits(path)}, DEADLINE)
    answers, failure = collect(worker, lambda answers: bool(answers))
    assert failure is None and list(answers) == [1] and answers[1].kind == TIMEOUT
    path.touch()
    assert collect(worker) == ({0: "waited"}, None)


def test_a_worker_that_dies_leaves_a_failure_and_takes_tasks_again(
    worker: Worker, path: Path
) -> None:
    begin(worker, {0: waits(path)})
    begin(worker, {1: ToolCall("kills")})
    answers, failure = collect(worker)
    assert not answers and failure is not None and failure.kind == EXIT
    assert not worker.is_running and worker.restarts == 1
    begin(worker, {0: says("a")})
    assert collect(worker) == ({0: "a"}, None)


def test_a_rank_that_reads_no_answers_holds_up_no_task(worker: Worker, path: Path) -> None:
    begin(worker, {n: says("a", 1 << 20) for n in range(2 * CORES)} | {999: makes(path)})
    while not path.exists():
        time.sleep(0.01)
    # Much is to be taken in, too, before the first answer is read.
    begin(worker, {n: says("a" * (1 << 20)) for n in range(1000, 1004)})
    answers, failure = collect(worker)
    assert failure is None and len(answers) == 2 * CORES + 5


@pytest.fixture
def tools(file: Path) -> Iterator[ToolPool]:
    texts = ["calculator", *(f"{file}:{name}" for name in ("waits", "makes", "dies"))]
    pool = ToolPool(texts, ["calculator", "waits", "makes", "dies"], CallLimits(PATIENCE, MEMORY))
    yield pool
    pool.close()


@pytest.fixture
def environments(file: Path) -> Iterator[EnvironmentPool]:
    pool = EnvironmentPool(Mixture.read([f"{file}:Files"]), CallLimits(PATIENCE, MEMORY))
    yield pool
    pool.close()


SUM = ToolCall("calculator", {"expression": "1 + 1"})


def test_a_turn_of_several_calls_is_answered_when_all_of_them_are(
    tools: ToolPool, path: Path
) -> None:
    other = path.with_name("other")
    found = tools.ask({0: [SUM, waits(path), waits(other)], 1: [SUM], 2: [makes(path)]}, 0.0)
    while 2 not in found:
        found |= tools.ask({}, 0.0)
    assert sorted(found) == [1, 2] and [a.text for a in found[1] + found[2]] == ["2", "made"]
    found = tools.ask({1: [makes(other)]})
    assert [a.text for a in found[0]] == ["2", "waited", "waited"] and len(found) == 2


def test_a_bounded_call_that_ends_the_worker_fails_those_that_were_pending(
    tools: ToolPool, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tools, "_bounded", frozenset({"calculator", "dies"}))
    assert list(tools.ask({0: [waits(path)], 1: [SUM]}, 0.0)) == [1]
    found = tools.ask({1: [ToolCall("dies"), SUM], 2: [makes(path)]})
    assert [answer.failure for answer in found[0]] == [EXIT]
    assert [answer.failure for answer in found[1]] == [EXIT, None]
    assert [answer.failure for answer in found[2]] == [None]


def test_calls_that_nobody_waits_for_any_more_are_ended(tools: ToolPool, path: Path) -> None:
    assert list(tools.ask({0: [waits(path)], 1: [SUM]}, 0.0)) == [1]
    tools.end_all()
    assert list(tools.ask({1: [ToolCall("calculator", {"expression": "2 + 2"})]})) == [1]


class Noting:
    """For a worker: notes until when it is to wait, before two answers and after each."""

    is_running = False

    def __init__(self, answer: Any) -> None:
        self._answer, self.until = answer, list[float]()

    def begin(self, *_: Any) -> None:
        """Nothing is started."""

    def take_output(self) -> None:
        """Nothing was printed."""

    def collect(self, seconds: float, record: Any, until: Callable[[], float]) -> None:
        self.until.append(until())
        for number, at in ((1, 7.0), (0, 5.0)):
            record(number, self._answer, at)
            self.until.append(until())


@pytest.mark.parametrize("has_environment", [False, True], ids=["tools", "environment"])
def test_others_are_waited_for_from_when_the_first_result_was_there(
    tools: ToolPool,
    environments: EnvironmentPool,
    monkeypatch: pytest.MonkeyPatch,
    has_environment: bool,
) -> None:
    pool: Any = environments if has_environment else tools
    noting = Noting(Observation((), 1.0).as_json() if has_environment else "text")
    monkeypatch.setattr(pool, "_worker", noting)
    call = [ToolCall("makes", {"path": ""})]
    questions = dict.fromkeys(range(3), "on" if has_environment else call)
    assert sorted(pool.ask(questions, 3.0)) == [0, 1]
    assert noting.until == [math.inf, 10.0, 8.0]
    assert pool._ready_since == math.inf


def opened(pool: EnvironmentPool, path: Path, count: int) -> list[Path]:
    """Where those that close write."""
    closed = [path.with_name(f"closed{i}") for i in range(count)]
    rows = [{"path": str(path), "closed": str(own)} for own in closed]
    assert len(pool.ask({i: Opening(row, "0") for i, row in enumerate(rows)})) == count
    return closed


def test_an_environment_goes_on_while_another_one_waits_for_it(
    environments: EnvironmentPool, path: Path
) -> None:
    closed = opened(environments, path, 3)
    found = environments.ask({0: "waits", 1: "on", 2: "ends"}, 0.0)
    while len(found) < 2:
        found |= environments.ask({}, 0.0)
    assert sorted(found) == [1, 2]
    assert found[1] == Observation(({"role": "user", "content": "on"},), 1.0)
    found = environments.ask({1: "makes"})
    assert sorted(found) == [0, 1]
    environments.end_all()
    assert [own.read_text() for own in closed] == ["x"] * 3


def test_environments_with_a_pending_turn_are_closed_after_it(
    environments: EnvironmentPool, path: Path
) -> None:
    closed = opened(environments, path, 2)
    assert list(environments.ask({0: "waits", 1: "on"}, 0.0)) == [1]
    path.touch()
    environments.end_all()
    assert [own.read_text() for own in closed] == ["x"] * 2
    opened(environments, path, 1)
    assert list(environments.ask({0: "on"})) == [0]


def test_one_that_ends_the_worker_fails_those_whose_results_are_pending(
    environments: EnvironmentPool, path: Path
) -> None:
    opened(environments, path, 2)
    assert list(environments.ask({0: "waits", 1: "on"}, 0.0)) == [1]
    found = environments.ask({1: "kills the worker"})
    assert all(isinstance(found[i], CallFailure) and found[i].kind == EXIT for i in (0, 1))


def test_a_conversation_takes_its_turns_while_the_reply_of_another_is_pending(
    tools: ToolPool, path: Path
) -> None:
    """The pending one comes when the other's third turn makes the file."""
    calls = {0: [waits(path)], 1: [SUM], 11: [SUM], 21: [makes(path)]}

    def generate(requests: Sequence[Request]) -> list[Sample]:
        ids = [(r, r.samples[0] + 10 * r.turn) for r in requests]
        return [
            Sample.drawn(r.samples[0], r.prompt, np.array([i], np.int32), STOPPED, 0, logps=[0.0])
            for r, i in ids
        ]

    class Numbered(Suffix):
        def ids(self, messages: Sequence[Any]) -> list[int]:
            return [99]

    class LastId(Ids):
        def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
            return str(ids[-1]) if ids else ""

    class Calls(ToolTurns):
        def asks(self, turn: dict[str, Any], before: Any, written: str) -> list[ToolCall] | None:
            return calls.get(int(turn["content"]))

    stand_ins: dict[str, Any] = {"tokenizer": LastId(), "suffix": Numbered()}
    driver = Conversations(responder=Calls(lambda _: [], tools), max_turns=8, **stand_ins)
    requests = [Request(np.array([5], np.int32), (i,)) for i in range(2)]
    one, other = driver.run(requests, 100, generate)
    assert one.tokens.tolist() == [0, 99, 10] and other.tokens.tolist() == [
        1,
        99,
        11,
        99,
        21,
        99,
        31,
    ]
    assert [m["content"] for m in one.messages if m["role"] == "tool"] == ["waited"]
