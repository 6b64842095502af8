"""Environments as users write them, in processes of their own: what they return, and what becomes of those that fail.

Does not prove anything of conversations and rewards: that is test_environment_turns.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from mindgrpo.environments.contract import Closing, Observation, Opening, load_environment
from mindgrpo.environments.mixture import Mixture
from mindgrpo.environments.pool import EnvironmentPool
from mindgrpo.errors import UserError
from mindgrpo.workers.protocol import (
    BAD_RESULT,
    EXIT,
    MEMORY,
    NOT_FINITE,
    RAISED,
    TIMEOUT,
    CallFailure,
    CallLimits,
)

# For what hangs, and for what ends by itself, however slow the machine.
DEADLINE, PATIENCE = 2.5, 300.0
ENVIRONMENTS = '''
import os, random, subprocess, sys, time

class Counts:
    """Is done at the row's `most`; says how often it was stepped."""

    def reset(self, row):
        self.steps, self.most = 0, row["most"]
        return [{"role": "user", "content": f"count to {self.most}, {random.random()}"}]

    def step(self, completion):
        self.steps += 1
        return f"{completion}: {self.steps}", 0.5 * self.steps, self.steps == self.most

class Misbehaves:
    def reset(self, row):
        self.path = row.get("path")
        if row.get("in_reset"):
            self.step(row["in_reset"])
        return "go"

    def close(self):
        if self.path:
            open(self.path, "a").write("closed\\n")

    def step(self, completion):
        if completion == "hangs":
            time.sleep(3600)
        if completion == "raises":
            raise ValueError("*****\\n  no such move\\n*****")
        if completion == "exits":
            os._exit(3)
        if completion == "leaves":
            sys.exit(0)
        if completion == "prints":
            for _ in range(100):
                sys.stdout.write("x" * 1_000_000)
        if completion == "eats":
            self.eaten = bytearray(os.urandom(1 << 20)) * 3000
        if completion == "kills the worker":
            os.kill(os.getppid(), 9)
            time.sleep(3600)
        if completion == "starts":
            self.started = subprocess.Popen(["sleep", "3600"])
        if completion == "lies":
            os.write(3, b"x" * 100)
        return {
            "text": "text",
            "two": ("text", 1.0),
            "number": (3, 1.0, False),
            "word": ("text", "high", False),
            "maybe": ("text", 1.0, "no"),
            "nan": ("text", float("nan"), False),
            "nothing": ([], 1.0, False),
            "assistant": ([{"role": "assistant", "content": "x"}], 1.0, False),
            "surrogate": ("\\ud800", 1.0, False),
            "long": ("x" * (1 << 19), 1.0, False),
            "none": ([], None, True),
        }.get(completion, ("well", 1, False))

class Waits:
    async def reset(self, row):
        return [{"role": "user", "content": "wait"}]

    async def step(self, completion):
        import asyncio
        await asyncio.sleep(0.01)
        return "waited", 1.0, False

class Gymnasium:
    def __init__(self, most=1):
        self.most = most

    def reset(self, row):
        return f"up to {self.most}", {"row": row}

    def step(self, completion):
        number = int(completion)
        return f"not {number}", number / 4, number == self.most, number > self.most, {}

def make(most):
    return Gymnasium(most)

LEVEL = 3

class NoStep:
    def reset(self, row):
        return "x"

class TwoArguments:
    def reset(self, row, seed):
        return "x"
    def step(self, completion):
        return "x", 0, True

class NeedsArguments:
    def __init__(self, size):
        self.size = size
    reset = step = print

def function(row):
    return row
'''


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("environments") / "own_environments.py"
    path.write_text(ENVIRONMENTS)
    return path


def pool_of(
    file: Path, name: str, memory: int = 1 << 30, deadline: float = PATIENCE
) -> Iterator[EnvironmentPool]:
    # Runs of other tests may not have been collected yet.
    others = workers()
    pool = EnvironmentPool(Mixture.read([f"{file}:{name}"]), CallLimits(deadline, memory))
    yield pool
    pool.close()
    assert workers() <= others


def workers() -> set[psutil.Process]:
    return {child for child in psutil.Process().children(recursive=True) if is_worker(child)}


def is_worker(process: psutil.Process) -> bool:
    try:
        return "mindgrpo.workers" in " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def counts(file: Path) -> Iterator[EnvironmentPool]:
    yield from pool_of(file, "Counts")


@pytest.fixture
def misbehaves(file: Path) -> Iterator[EnvironmentPool]:
    yield from pool_of(file, "Misbehaves")


@pytest.fixture
def hangs(file: Path) -> Iterator[EnvironmentPool]:
    yield from pool_of(file, "Misbehaves", deadline=DEADLINE)


def opened(pool: EnvironmentPool, samples: range, seed: str = "0", most: int = 2) -> list[str]:
    results = pool.ask({sample: Opening({"most": most}, seed) for sample in samples})
    texts = []
    for sample in samples:
        result = results[sample]
        assert isinstance(result, Observation)
        texts.append(result.messages[-1]["content"])
    return texts


def test_state_is_kept_from_turn_to_turn_and_each_conversation_has_its_own(
    counts: EnvironmentPool,
) -> None:
    opened(counts, range(40), most=3)
    first = counts.ask({sample: f"turn of {sample}" for sample in range(40)})
    second = counts.ask({sample: "again" for sample in range(0, 40, 2)})
    for sample in range(40):
        message = {"role": "user", "content": f"turn of {sample}: 1"}
        assert first[sample] == Observation((message,), 0.5)
    assert set(second) == set(range(0, 40, 2))
    assert all(
        result == Observation(({"role": "user", "content": "again: 2"},), 1.0)
        for result in second.values()
    )
    last = counts.ask({4: "x", 5: "x"})
    assert isinstance(last[4], Observation) and last[4].is_done and last[4].reward == 1.5
    assert isinstance(last[5], Observation) and not last[5].is_done
    # What is done is gone, and so is everything after a rollout.
    (gone,) = counts.ask({4: "x"}).values()
    assert isinstance(gone, CallFailure) and gone.kind == EXIT
    counts.end_all()
    assert all(isinstance(result, CallFailure) for result in counts.ask({5: "x", 6: "x"}).values())


def test_random_numbers_follow_from_the_seed(counts: EnvironmentPool) -> None:
    first, second = opened(counts, range(4), "seed"), opened(counts, range(4), "seed")
    assert len(set(first)) == 1 and first == second
    assert opened(counts, range(1), "another") != first[:1]


def test_environments_that_hang_cost_themselves_alone(hangs: EnvironmentPool) -> None:
    turns = ["fine", *["hangs"] * 8]
    hangs.ask({sample: Opening({}, "0") for sample in range(len(turns))})
    fine, *late = hangs.ask(dict(enumerate(turns))).values()
    assert isinstance(fine, Observation)
    for result in late:
        assert isinstance(result, CallFailure) and result.kind == TIMEOUT
        assert "no answer within 2.5 s, in step at " in result.message


def test_environments_that_fail_cost_themselves_alone(misbehaves: EnvironmentPool) -> None:
    turns = ["fine", "raises", "exits", "leaves", "eats", "fine"]
    rows = {sample: Opening({}, "0") for sample in range(len(turns))}
    assert not any(isinstance(result, CallFailure) for result in misbehaves.ask(rows).values())
    results = misbehaves.ask(dict(enumerate(turns)))
    kinds = [
        result.kind if isinstance(result, CallFailure) else None for result in results.values()
    ]
    assert kinds[:4] == [None, RAISED, EXIT, RAISED]
    assert kinds[4] in (MEMORY, RAISED) and kinds[5] is None
    raised = results[1]
    assert isinstance(raised, CallFailure) and "ValueError: no such move at " in raised.message
    assert misbehaves.ask({0: "fine"})[0] == Observation(
        ({"role": "user", "content": "well"},), 1.0
    )


@pytest.mark.parametrize(
    ("turn", "kind", "sentence"),
    [
        ("text", BAD_RESULT, "step returned 'text', not (messages, reward, done)"),
        ("two", BAD_RESULT, "step returned a tuple, not (messages, reward, done)"),
        ("number", BAD_RESULT, "step returned 3 for messages, which are a list"),
        ("word", BAD_RESULT, "step returned 'high' for reward, which is a number or None"),
        ("maybe", BAD_RESULT, "step returned 'no' for done, which is True or False"),
        ("nan", NOT_FINITE, "step returned nan for reward"),
        ("nothing", BAD_RESULT, "step returned no messages, but is not done"),
        ("assistant", BAD_RESULT, "a message of the role 'assistant'; roles are user, tool"),
        ("surrogate", BAD_RESULT, "cannot be written as UTF-8"),
        ("long", BAD_RESULT, "messages of 524288 letters"),
    ],
)
def test_what_is_no_observation_is_a_failure(
    misbehaves: EnvironmentPool, turn: str, kind: str, sentence: str
) -> None:
    misbehaves.ask({0: Opening({}, "0")})
    (failure,) = misbehaves.ask({0: turn}).values()
    assert isinstance(failure, CallFailure)
    assert failure.kind == kind and sentence in failure.message


def test_a_reset_that_fails_leaves_no_environment(hangs: EnvironmentPool) -> None:
    results = hangs.ask(
        {i: Opening({"in_reset": turn}, "0") for i, turn in enumerate(["raises", "hangs", "none"])}
    )
    kinds = [
        result.kind if isinstance(result, CallFailure) else None for result in results.values()
    ]
    assert kinds == [RAISED, TIMEOUT, None]
    assert [isinstance(r, CallFailure) for r in hangs.ask({0: "x", 1: "x", 2: "x"}).values()] == [
        True,
        True,
        False,
    ]


def test_environments_are_closed_once_whether_done_failed_or_left(
    misbehaves: EnvironmentPool, tmp_path: Path
) -> None:
    paths = [tmp_path / name for name in ("done", "raised", "left")]
    misbehaves.ask({i: Opening({"path": str(path)}, "0") for i, path in enumerate(paths)})
    misbehaves.ask({0: "none", 1: "raises", 2: "fine"})
    assert [path.exists() for path in paths] == [True, True, False]
    misbehaves.end_all()
    assert [path.read_text() for path in paths] == ["closed\n"] * 3
    assert misbehaves.ask({3: Closing()})  # there is none: nothing happens


def test_one_that_ends_the_worker_fails_those_of_its_rollout_and_nothing_later(
    misbehaves: EnvironmentPool,
) -> None:
    misbehaves.ask({0: Opening({}, "0"), 1: Opening({}, "0")})
    results = misbehaves.ask({0: "kills the worker", 1: "hangs"})
    assert all(isinstance(result, CallFailure) for result in results.values())
    misbehaves.ask({0: Opening({}, "0")})
    assert isinstance(misbehaves.ask({0: "fine"})[0], Observation)


def test_what_an_environment_starts_ends_with_the_pool(misbehaves: EnvironmentPool) -> None:
    misbehaves.ask({0: Opening({}, "0")})
    misbehaves.ask({0: "starts"})
    sleeping = [
        child for child in psutil.Process().children(recursive=True) if child.name() == "sleep"
    ]
    assert sleeping
    misbehaves.close()
    assert not any(process.is_running() for process in sleeping)


def test_one_that_prints_without_end_goes_on(file: Path) -> None:
    pool = EnvironmentPool(Mixture.read([f"{file}:Misbehaves"]), CallLimits(60.0, 1 << 30))
    try:
        pool.ask({0: Opening({}, "0")})
        assert isinstance(pool.ask({0: "prints"})[0], Observation)
    finally:
        pool.close()


def test_methods_may_be_coroutines(file: Path) -> None:
    pool = EnvironmentPool(Mixture.read([f"{file}:Waits"]), CallLimits(PATIENCE, 1 << 30))
    try:
        pool.ask({0: Opening({}, "0")})
        for _ in range(2):
            message = {"role": "user", "content": "waited"}
            assert pool.ask({0: "x"})[0] == Observation((message,), 1.0)
    finally:
        pool.close()


@pytest.mark.parametrize("name", ["Gymnasium(most=3)", "make(most=3)"])
def test_a_class_or_function_takes_arguments_and_may_answer_as_gymnasium_does(
    file: Path, name: str
) -> None:
    pool = EnvironmentPool(Mixture.read([f"{file}:{name}"]), CallLimits(PATIENCE, 1 << 30))
    try:
        asked = pool.ask({sample: Opening({}, "0") for sample in range(3)})
        assert {own.messages[0]["content"] for own in asked.values()} == {"up to 3"}
        answers = pool.ask(dict(enumerate(("2", "3", "4"))))
        assert [(own.reward, own.is_done) for own in answers.values()] == [
            (0.5, False),
            (0.75, True),
            (1.0, True),
        ]
        assert answers[0].messages == ({"role": "user", "content": "not 2"},)
    finally:
        pool.close()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("Counts", "does not name a class; write package.module:Class or path/to/file.py:Class"),
        ("{file}:Count", "has no 'Count' (the nearest name is 'Counts'); correct rl_config.env"),
        ("nowhere.py:E", "nowhere.py does not exist"),
        ("{file}:LEVEL", "is a int, not a class or a function that makes an environment"),
        ("{file}:NoStep", "has no method step; give it step(self, completion)"),
        ("{file}:TwoArguments", "reset(self, row, seed) cannot be called with one argument"),
        ("{file}:NeedsArguments", "cannot be made without arguments"),
        ("{file}:NeedsArguments(widht=1)", "cannot be made with the arguments widht"),
        ("{file}:NeedsArguments(1)", "1 has no name); write (name=value, ...) with plain values"),
        ("gem:game:Nothing-v0", "Environment game:Nothing-v0 not found in registry"),
        ("reasoning_gym:chain_sum(terms=2)", "unexpected keyword argument 'terms'"),
    ],
)
def test_what_is_no_environment_is_refused_in_a_sentence(
    file: Path, text: str, sentence: str
) -> None:
    with pytest.raises(UserError) as refused:
        load_environment(text.format(file=file))
    assert sentence in str(refused.value)


def test_rows_meet_the_environment_that_their_weights_say(tmp_path: Path) -> None:
    (tmp_path / "two.py").write_text(
        "class One:\n    def reset(self, row):\n        return 'One'\n    step = print\n"
        "class Two(One):\n    def reset(self, row):\n        return 'Two'\n"
    )
    mixture = Mixture.read([f"{tmp_path}/two.py:One", f"9 * {tmp_path}/two.py:Two"])
    openings = {row: Opening({}, "", f"0/{row}") for row in range(20)}
    pool = EnvironmentPool(mixture, CallLimits(60.0, 1 << 30))
    try:
        met = {row: answer.messages[0]["content"] for row, answer in pool.ask(openings).items()}
    finally:
        pool.close()
    names = {row: mixture.names[mixture.number_of(opening)] for row, opening in openings.items()}
    assert met == {row: name.rpartition(":")[2] for row, name in names.items()}
    assert 0 < sum(name == "One" for name in met.values()) < 7
