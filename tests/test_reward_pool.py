"""Rewards in worker processes: what hangs, dies, grows or raves costs its own samples and nothing else.

Deadlines here are short, and what is ended at one would hang for years. Does NOT prove anything about kernels
without RLIMIT_DATA or PR_SET_PDEATHSIG, nor about a function that wrecks the machine on purpose.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator
from multiprocessing import connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tables import each_row

from mindgrpo.errors import UserError
from mindgrpo.processes.linux import is_alive
from mindgrpo.rewards.executors import ISOLATED_GRACE, Limits
from mindgrpo.rewards.score import Scorer
from mindgrpo.rewards.scores import Scores
from mindgrpo.workers import client
from mindgrpo.workers.client import TICK_SECONDS, Worker

ROOT = Path(__file__).resolve().parent.parent
# For what hangs, and for what ends by itself, however slow the machine.
DEADLINE, PATIENCE = 1.5, 300.0
MIB = 1 << 20

REWARDS = ROOT / "tests" / "data"
HOSTILE, ODD = f"{REWARDS}/hostile_rewards.py", f"{REWARDS}/odd_rewards.py"


@pytest.fixture
def scorer() -> Iterator[Callable[..., Scorer]]:
    """Makes scorers, patient ones unless they are given a deadline, and closes them."""
    made: list[Scorer] = []

    def make(*names: str, **limits: Any) -> Scorer:
        if "deadline" not in limits:
            limits = {"deadline": PATIENCE, "together": PATIENCE} | limits
        made.append(Scorer(names, None, Limits(**limits)))
        return made[-1]

    yield make
    for scorer in made:
        scorer.close()


def score(scorer: Scorer, texts: list[str], answers: list[str] | None = None) -> Scores:
    return scorer.score(texts, answers or texts, {})


def test_hostile_rewards_cost_their_samples_only(scorer: Callable[..., Scorer]) -> None:
    kinds = {"sleeps": "timeouts", "exits": "exits", "raises": "exceptions", "nans": "nan"}
    kinds |= {"forgets": "bad_results", "short": "bad_results", "eats": "memory"}
    specs = [f"{HOSTILE}:{name}" for name in kinds]
    given = scorer(*specs, f"{HOSTILE}:good", "accuracy_reward", deadline=3.0, memory=256 * MIB)
    texts = [str(i) for i in range(16)]
    given.dry_run(texts, texts, {})
    for step in range(2):
        scores = score(given, texts)
        figures = scores.metrics()
        right = np.ones(16)
        assert scores.per_function["good"].tolist() == right.tolist(), step
        assert scores.per_function["accuracy_reward"].tolist() == right.tolist(), step
        right[3] = np.nan
        for name, kind in kinds.items():
            expected = right.copy()
            expected[4] = np.nan if name == "nans" else 1.0
            np.testing.assert_array_equal(scores.per_function[name], expected, name)
            assert figures[f"reward/{name}/errors"] == 1, name
            assert figures[f"reward/{name}/{kind}"] == 1, name
            assert "\n" not in scores.messages[name]
        assert figures["reward/nans/none"] == 1
        assert np.flatnonzero(scores.failed).tolist() == [3]
        assert set(scores.messages) == set(kinds)
    assert "in sleeps at" in scores.messages["sleeps"]
    assert "ended with status 3" in scores.messages["exits"]


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Lists how many seconds each call of a worker may take."""
    ask, waited = Worker.ask, list[float]()

    def noting(worker: Worker, tasks: Any, deadline: float, seconds: float, *more: Any) -> Any:
        waited.append(seconds)
        return ask(worker, tasks, deadline, seconds, *more)

    monkeypatch.setattr(Worker, "ask", noting)
    return waited


def test_a_function_that_hangs_on_every_sample_takes_one_deadline(
    scorer: Callable[..., Scorer], waited: list[float]
) -> None:
    given = scorer(f"{ODD}:spins", "format_reward", deadline=DEADLINE)
    scores = score(given, [str(i % 10) for i in range(40)])
    # For all together, and then for all of them beside each other.
    assert waited == [DEADLINE, DEADLINE + ISOLATED_GRACE]
    assert scores.metrics()["reward/spins/timeouts"] == 40
    assert scores.metrics()["reward/format_reward/errors"] == 0


def test_a_function_that_eats_memory_on_every_sample_is_held_to_its_share(
    scorer: Callable[..., Scorer],
) -> None:
    given = scorer(f"{HOSTILE}:eats", deadline=3.0, memory=256 * MIB)
    scores = score(given, ["3"] * 12)
    figures = scores.metrics()
    assert figures["reward/eats/errors"] == 12
    assert figures["reward/eats/memory"] + figures["reward/eats/timeouts"] == 12  # type: ignore
    assert figures["reward/eats/memory"] > 0  # type: ignore[operator]


def test_what_is_only_slow_with_all_samples_is_scored_apart(scorer: Callable[..., Scorer]) -> None:
    given = scorer(f"{ODD}:slow_together", together=0.5)
    scores = score(given, ["a"] * 20)
    assert scores.metrics()["reward/slow_together/errors"] == 0
    assert scores.metrics()["reward/slow_together/restarts"] == 1
    assert scores.metrics()["reward/slow_together/together_failures"] == 1
    assert "raise reward_config.together_deadline" in scores.messages["slow_together"]


def test_a_sample_that_hangs_when_scored_alone_is_found(scorer: Callable[..., Scorer]) -> None:
    scores = score(scorer(f"{ODD}:slow_after_raising", deadline=DEADLINE), ["0", "1", "2"])
    np.testing.assert_array_equal(scores.per_function["slow_after_raising"], [1.0, np.nan, 1.0])
    assert scores.metrics()["reward/slow_after_raising/timeouts"] == 1


def test_what_is_printed_is_kept_up_to_a_bound_and_counted(scorer: Callable[..., Scorer]) -> None:
    report = score(scorer(f"{ODD}:prints"), ["a"]).reports["prints"]
    assert report.counts["printed_bytes"] == 20000 * 101 + 16
    assert report.printed.startswith("first line\nxxx")
    assert len(report.printed) <= 16 << 10


def test_nothing_wakes_the_rank_while_a_function_without_output_works(
    scorer: Callable[..., Scorer], monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[tuple[list[Any], float]] = []

    def noting(channels: list[Any], seconds: float) -> list[Any]:
        ready = connection.wait(channels, seconds)
        if len(channels) == 2:  # of a worker and of what is printed
            waits.append((ready, seconds))
        return ready

    monkeypatch.setattr(client, "wait", noting)
    given = scorer(f"{ODD}:closes_its_output")
    assert score(given, ["a"]).errors == {"closes_its_output": 0}
    # The descriptor is that of what is printed; the end of that would be ready at every look.
    assert not any(isinstance(one, int) for ready, _ in waits for one in ready)
    assert ([], TICK_SECONDS) in waits and min(seconds for _, seconds in waits) > 0


def test_a_worker_imports_its_reward_and_no_device_library(scorer: Callable[..., Scorer]) -> None:
    names = ["mindspore", "numpy", "sympy", "mindgrpo.workers.worker"]
    scores = score(scorer(f"{ODD}:loaded"), names)
    assert scores.total.tolist() == [0.0, 0.0, 0.0, 1.0]


def test_classes_keep_their_state_and_async_functions_are_awaited(
    scorer: Callable[..., Scorer],
) -> None:
    given = scorer(f"{ODD}:Counter(start=5)", f"{ODD}:waits")
    assert [score(given, ["a"]).total.item() for _ in range(3)] == [7.0, 8.0, 9.0]


def test_a_class_keeps_its_state_when_a_call_raises(scorer: Callable[..., Scorer]) -> None:
    given = scorer(f"{ODD}:PickyCounter")
    assert score(given, ["a"]).total.item() == 1.0
    scores = score(given, ["a", "x", "b"])
    assert scores.per_function["PickyCounter"].tolist()[::2] == [
        1.0,
        1.0,
    ]  # each in a fresh process
    assert scores.errors == {"PickyCounter": 1}
    assert scores.metrics()["reward/PickyCounter/restarts"] == 0
    assert score(given, ["a"]).total.item() == 3.0


def test_a_function_that_writes_to_the_rank_costs_its_step_only(
    scorer: Callable[..., Scorer],
) -> None:
    given = scorer(f"{ODD}:writes_half_a_message", f"{HOSTILE}:good", deadline=1.0)
    scores = score(given, ["3", "3"])
    assert scores.errors == {"writes_half_a_message": 2, "good": 0}
    scores = score(given, ["a", "b"])
    assert scores.total.tolist() == [2.0, 2.0]


def test_samples_are_dealt_to_several_workers(scorer: Callable[..., Scorer]) -> None:
    scores = score(scorer(f"{ODD}:how_many", workers=3), ["a"] * 7)
    assert scores.total.tolist() == [3.0, 3.0, 3.0, 2.0, 2.0, 2.0, 2.0]


def test_a_worker_that_is_killed_between_steps_is_replaced(scorer: Callable[..., Scorer]) -> None:
    others = children_of(os.getpid())  # of tests before this one, in the same process
    given = scorer(f"{HOSTILE}:good", f"{ODD}:Counter")
    assert score(given, ["a"]).total.item() == 2.0
    supervisors = children_of(os.getpid(), others)
    end(workers_of(supervisors), signal.SIGKILL)
    # A worker that is asked before its end is known has its samples scored one by one, in a further process.
    end(supervisors)
    assert score(given, ["a"]).total.item() == 2.0
    supervisors = children_of(os.getpid(), others)
    workers = workers_of(supervisors)
    assert len(supervisors) == len(workers) == 2
    end(supervisors, signal.SIGKILL)
    end(workers)  # each is told by the kernel
    assert score(given, ["a"]).total.item() == 2.0


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import time\ndef f(completions):\n    time.sleep(10**9)", "no answer within 0.7 s"),
        ("import os\ndef f(completions):\n    os._exit(4)", "ended with status 4"),
        ("import os\nos._exit(5)", "ended with status 5 while loading it"),
        ("import os\nprint('no model')\nos._exit(5)", r"\(no model\)"),
        ("def f(completions):\n    return 1.0", "returned a float; it must return"),
        ("def f(completions, level):\n    return [1.0]", "wants 'level'"),
        ("held = b'x' * 10**9", "more than reward_config.memory, 256 MiB"),
        ("raise SystemExit(3)", "SystemExit"),
    ],
)
def test_the_dry_run_refuses_what_fails_on_every_step(
    source: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / "bad.py").write_text(source)
    scorer = Scorer([f"{tmp_path}/bad.py:f"], None, Limits(deadline=0.7, memory=256 * MIB))
    try:
        with pytest.raises(UserError, match=said) as caught:
            scorer.dry_run(["a", "b"], ["1", "2"], {})
        assert "\n" not in str(caught.value)
    finally:
        scorer.close()


def test_threads_reserve_memory_that_they_may_have(scorer: Callable[..., Scorer]) -> None:
    """256 stacks of 8 MiB are more than 1 GiB, of which hardly any is used."""
    scores = score(scorer(f"{ODD}:asks_with_many_threads", memory=1024 * MIB), ["a"] * 256)
    assert scores.messages == {} and scores.total.tolist() == [1.0] * 256


def test_memory_that_a_call_leaves_in_use_is_told(scorer: Callable[..., Scorer]) -> None:
    report = score(scorer(f"{ODD}:keeps_what_it_has_read", memory=256 * MIB), ["a"])
    assert report.metrics()["reward/keeps_what_it_has_read/memory"] == 1
    assert "more than reward_config.memory, 256 MiB" in report.messages["keeps_what_it_has_read"]


@each_row("raises", ["x", ""])
def test_a_module_that_starts_a_thread_is_never_forked(
    scorer: Callable[..., Scorer], raises: str
) -> None:
    given = scorer(f"{REWARDS}/threaded_rewards.py:judged", deadline=DEADLINE)
    given.dry_run(["a", "b"], ["", ""], {})
    scores = score(given, ["a", raises, "b"])
    right = [1.0, np.nan if raises else 1.0, 1.0]
    np.testing.assert_array_equal(scores.per_function["judged"], right)
    assert scores.metrics()["reward/judged/timeouts"] == 0


def test_samples_after_one_that_hangs_are_told_why_they_were_not_reached(
    scorer: Callable[..., Scorer],
) -> None:
    given = scorer(f"{REWARDS}/threaded_rewards.py:hangs", deadline=0.5, together=0.5)
    scores = score(given, ["0"] * 20)
    assert scores.errors == {"hangs": 20}
    assert "start them in the first call" in scores.reports["hangs"].line


def test_a_judge_whose_thread_was_started_at_import_has_the_whole_deadline(
    scorer: Callable[..., Scorer], waited: list[float]
) -> None:
    assert score(scorer(f"{REWARDS}/threaded_rewards.py:judged", deadline=60.0), ["a"]).total == [
        1.0
    ]
    assert waited == [60.0]


def test_what_a_file_defines_can_be_pickled_for_another_process(
    scorer: Callable[..., Scorer],
) -> None:
    scores = score(scorer(f"{REWARDS}/pickled_rewards.py:in_other_processes"), ["a", "bcd"])
    assert scores.messages == {} and scores.total.tolist() == [1.0, 3.0]


def test_math_verify_is_ended_at_its_deadline(scorer: Callable[..., Scorer]) -> None:
    endless = r"\boxed{9^{9^{9^{9^{9}}}}}"
    given = scorer("math_verify_reward", deadline=2.0)
    given.dry_run(["42", "42"], ["42", "42"], {})  # or loading would be timed
    scores = score(given, ["42", endless, r"\boxed{42}"], ["42"] * 3)
    values = scores.per_function["math_verify_reward"]
    assert (values[0], values[2]) == (1.0, 1.0)
    assert values[1] == 0.0 or scores.metrics()["reward/math_verify_reward/timeouts"] == 1


def children_of(parent: int, but: Collection[int] = ()) -> list[int]:
    listed = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(parent)], capture_output=True, text=True
    )
    found = [int(word) for word in listed.stdout.split()]
    return [
        pid
        for pid in found
        if pid not in but
        and Path(f"/proc/{pid}/exe").exists()
        and "python" in os.readlink(f"/proc/{pid}/exe")
    ]


def workers_of(supervisors: list[int]) -> list[int]:
    return [worker for supervisor in supervisors for worker in children_of(supervisor)]


def end(pids: list[int], number: int = 0) -> None:
    """Waits until they have ended, after sending them a signal unless it is 0."""
    for pid in pids:
        if number:
            os.kill(pid, number)
    while any(is_alive(pid) for pid in pids):
        time.sleep(0.02)


def marked(mark: str) -> list[int]:
    """Living processes with LEFT_BEHIND=mark in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            environment = (entry / "environ").read_bytes() if entry.name.isdecimal() else b""
        except OSError:
            continue
        if f"LEFT_BEHIND={mark}".encode() in environment.split(b"\0"):
            found.append(int(entry.name))
    return found


RANK = """
import sys
from mindgrpo.rewards.executors import Limits
from mindgrpo.rewards.score import Scorer
scorer = Scorer(sys.argv[1:], None, Limits(deadline=60.0))
scorer.dry_run(["aa", "bb"], ["", ""], {})
print("ready", flush=True)
scorer.score(["a", "b"], ["", ""], {})
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_is_left_behind_when_the_rank_is_killed(
    number: signal.Signals,
) -> None:
    mark = f"{os.getpid() * 10 + int(number)}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "LEFT_BEHIND": mark}
    rank = subprocess.Popen(
        [
            sys.executable,
            "-c",
            RANK,
            f"{ODD}:leaves_a_process",
            f"{HOSTILE}:good",
        ],
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
    )
    assert rank.stdout is not None and rank.stdout.readline() == "ready\n"
    # The rank, two workers and their supervisors, and what one of them has started.
    while len(marked(mark)) < 6:
        time.sleep(0.02)
    rank.send_signal(number)
    rank.wait()
    rank.stdout.close()
    while marked(mark):
        time.sleep(0.05)


def test_closing_leaves_nothing_behind(
    scorer: Callable[..., Scorer], monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = f"{os.getpid()}5"
    monkeypatch.setenv("LEFT_BEHIND", mark)
    given = scorer(f"{ODD}:leaves_a_process", f"{HOSTILE}:good", deadline=0.5)
    assert score(given, ["a", "bb"]).metrics()["reward/leaves_a_process/timeouts"] == 1
    assert len(marked(mark)) >= 3
    given.close()
    assert marked(mark) == []
