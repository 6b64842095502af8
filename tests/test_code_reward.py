"""What programs in completions earn: by their output, by assertions, and what cannot be judged.

Cheats are in test_code_cheats.py, isolation in test_code_isolation.py.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from mindgrpo.errors import UserError
from mindgrpo.rewards.builtin import sandbox
from mindgrpo.rewards.builtin.program import code_reward, last_code_block
from mindgrpo.rewards.builtin.sandbox import Isolation, IsolationUnavailable
from mindgrpo.rewards.builtin.sandboxed.plain_data import NotPlain, decode, encode
from mindgrpo.rewards.call import Score, from_json, to_json
from mindgrpo.rewards.score import Scorer
from mindgrpo.workers.protocol import CallFailure

FENCED = "Here:\n```python\n{}\n```\nDone."
DOUBLE = FENCED.format("print(2 * int(input()))")
ADD = "def add(a, b):\n    return a + b"
MIB = 1 << 20


def verdicts_of(code: str, *assertions: str, setup: str = "", seconds: float = 10.0) -> str:
    return sandbox.judge_assertions(code, setup, assertions, seconds, 512 * MIB)


def test_the_share_of_tests_passed_is_the_reward() -> None:
    cases = [
        {"input": "1\n", "output": "2\n"},
        {"input": "2", "output": "4"},
        {"input": "3", "output": "7"},
    ]
    as_pairs = {"inputs": ["1", "2"], "outputs": ["2", "4"]}
    rewards = code_reward([DOUBLE] * 3, ["", "", ""], [cases, json.dumps(cases[:2]), as_pairs])
    assert rewards == pytest.approx([2 / 3, 1.0, 1.0])


def test_assertions_are_counted_one_by_one() -> None:
    assertions = [["assert add(1, 2) == 3", "assert add(1, 2) == one", "assert add(1, 2) == two"]]
    assert code_reward([FENCED.format(ADD)], [""], None, assertions, ["one = 1"]) == [1 / 3]


def test_cases_and_assertions_together_are_one_share() -> None:
    code = FENCED.format(ADD + "\nprint(add(1, 1))")
    cases, assertions = (
        [{"input": "", "output": "2"}],
        ["assert add(2, 2) == 4", "assert add(2, 2) == 5"],
    )
    assert code_reward([code], [""], [cases], [assertions]) == [2 / 3]


def test_without_tests_the_gold_answer_must_be_printed() -> None:
    texts = [
        FENCED.format("print(42)"),
        FENCED.format("print(41)"),
        "42",
        FENCED.format("print(42)"),
    ]
    assert code_reward(texts, ["42", "42", "42", ""]) == [1.0, 0.0, 0.0, None]


@pytest.mark.parametrize(
    ("code", "assertion"),
    [
        ("from collections import Counter\ndef f(s): return Counter(s)", "assert f('aab') == {'a': 2, 'b': 1}"),
        ("from collections import defaultdict\ndef f():\n    d = defaultdict(list)\n    d[1] += [2]\n    return d",
         "assert f() == {1: [2]}"),
        ("from collections import namedtuple\nP = namedtuple('P', 'x y')\ndef f(): return [P(1, 2)]",
         "assert f() == [(1, 2)]"),
        ("import enum\nclass E(enum.IntEnum):\n    A = 1\ndef f(): return E.A", "assert f() == 1 and f() in {1}"),
        ("def f(*a, **k): return (a, k)", "assert f(1, [2], x={3}) == ((1, [2]), {'x': {3}})"),
        ("def f(x): return x", "assert f(2**20000) == 2**20000"),
        ("def f(x): return x", "assert f((None, b'\\xff', 1j, '\\ud800', {(1,): frozenset({2})}, -0.0, True))"
         " == (None, b'\\xff', 1j, '\\ud800', {(1,): frozenset({2})}, -0.0, True)"),
        ("def f(x): return x / 3", "assert f(1.0) == 1 / 3 and f(float('inf')) == float('inf')"),
        ("def f(): return float('nan')", "import math\nassert math.isnan(f())"),
        ("def f(xs): xs.sort()", "xs = [3, 1, 2]\nassert f(xs) is None\nassert xs == [1, 2, 3]"),
        ("def f(d, s):\n    d.pop(1)\n    s.add(2)", "d, s = {1: 1}, {1}\nf(d, s)\nassert not d and s == {1, 2}"),
        ("def f(x):\n    raise ValueError('negative')",
         "try:\n    f(-1)\n    assert False\nexcept ValueError as error:\n    assert str(error) == 'negative'"),
        ("TABLE = {'a': [1]}", "assert TABLE['a'] == [1]"),
        ("def f(x): return x * x", "assert [f(x) for x in range(3)] == list(map(f, range(3))) == [0, 1, 4]"),
        ("def f(x): return -x", "assert sorted([1, 3, 2], key=f) == [3, 2, 1]"),
        ("def f(x): return math.sqrt(x)\nimport math", "assert math.isclose(f(2), 2**0.5)"),
        ("def sum(a, b): return a + b", "assert sum(10, 15) == 25"),
        ("def f(n):\n    print('working')\n    return n", "print('judging')\nassert f(1) == 1"),
        ("counter = 0\ndef f():\n    global counter\n    counter += 1\n    return counter",
         "assert f() == 1\nassert f() == 2"),
        ("def f(x):\n    return f(x - 1) + 1 if x else 0", "assert f(500) == 500"),
        ("def f(x): return x", "def check(candidate):\n    assert candidate(3) == 3\n\ncheck(f)"),
        ("import numpy\ndef f(x): return float(numpy.mean(x))", "import numpy\nassert f([1, 2]) == numpy.mean([1, 2])"),
    ],
)  # fmt: skip
def test_right_solutions_pass(code: str, assertion: str) -> None:
    assert verdicts_of(code, assertion) == "p"


@pytest.mark.parametrize(
    ("code", "assertion"),
    [
        ("class Stack:\n    def push(self, x): pass", "s = Stack()\ns.push(1)"),
        ("class Solution:\n    def f(self): return 1", "assert Solution().f() == 1"),
        ("def f(n):\n    yield from range(n)", "assert list(f(3)) == [0, 1, 2]"),
        ("def f(): return range(3)", "assert list(f()) == [0, 1, 2]"),
        ("def f(g, x): return g(x)", "assert f(lambda x: x + 1, 2) == 3"),
        ("def f(g): return g\ndef h(): pass", "f(h)"),
        ("def f(x): return x + 1\ndef g(x): return x - 1", "assert g(f(3)) == 3"),
        ("def f(): pass\nf.calls = 3", "assert f.calls == 3"),
        ("def f(): pass", "assert f == f"),
        ("async def f(): return 1", "import asyncio\nassert asyncio.run(f()) == 1"),
        ("def f(): return '1 + 1'", "assert eval(f()) == 2"),
        ("def f(): return b''", "import pickle\nassert pickle.loads(f()) == 2"),
        ("def f(): print('hello')", "import io, contextlib\nwith contextlib.redirect_stdout(io.StringIO()) as s:\n"
         "    f()\nassert s.getvalue() == 'hello\\n'"),
        ("class Bad(Exception): pass\ndef f(): raise Bad", "try:\n    f()\nexcept Bad:\n    pass"),
        ("def f(): return [object()]", "try:\n    f()\nexcept BaseException:\n    pass"),
        ("def f(): pass", "assert f( =="),
    ],
)  # fmt: skip
def test_what_needs_more_than_plain_data_is_unjudgeable(code: str, assertion: str) -> None:
    assert verdicts_of(code, assertion, "assert True") == "up"


def test_unjudgeable_assertions_are_a_metric_and_earn_nothing() -> None:
    text = FENCED.format(ADD + "\ndef make(): return object()")
    assertions = ["assert add(1, 2) == 3", "assert make()", "assert add(1, 1) == 3", "add.name"]
    scorer = Scorer(["code_reward"])
    try:
        scores = scorer.score([text, "no code"], ["", ""], {"test_list": [assertions, assertions]})
    finally:
        scorer.close()
    assert scores.per_function["code_reward"].tolist() == [0.25, 0.0]
    assert scores.metrics()["reward/code_reward/unjudgeable"] == 2
    assert scores.errors == {"code_reward": 0}


@pytest.mark.parametrize(
    "outcome", [None, 0.5, Score(0.5, {"unjudgeable": 2}), CallFailure("nan", "x")]
)
def test_an_outcome_crosses_processes_as_it_is(outcome: Any) -> None:
    back = from_json(json.loads(json.dumps(to_json(outcome))))
    assert back == outcome and type(back) is type(outcome)
    assert getattr(back, "counts", None) == getattr(outcome, "counts", None)


def test_only_exact_plain_data_crosses_strictly() -> None:
    class Number(int):
        pass

    for value in (Number(3), [Number(3)], {Number(3): 1}, object(), range(3), len):
        with pytest.raises(NotPlain):
            encode(value)
    number, table = decode(encode([Number(3), {"a": math.nan}], exact=False))
    assert type(number) is int and number == 3 and math.isnan(table["a"])


HASHABLE = st.none() | st.booleans() | st.integers() | st.floats() | st.binary() | st.text()
PLAIN = st.recursive(
    HASHABLE | st.complex_numbers() | st.sets(HASHABLE) | st.frozensets(HASHABLE),
    lambda inner: st.builds(
        lambda kind, pairs: kind(pairs),
        st.sampled_from([list, tuple, dict]),
        st.lists(st.tuples(HASHABLE, inner)),
    ),
)


def typed(value: Any) -> Any:
    """Something to compare that tells 1 from True and NaN from nothing, in any order of a set."""
    if isinstance(value, dict):
        return dict, [(repr(key), typed(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return type(value), list(map(typed, value))
    if isinstance(value, set | frozenset):
        return type(value), sorted(map(repr, value))
    return repr(value)


@settings(deadline=None, max_examples=50)
@given(PLAIN)
def test_plain_data_comes_back_as_it_went(value: Any) -> None:
    assert typed(decode(encode(value))) == typed(value)


@settings(deadline=None, max_examples=50)
@given(st.binary())
def test_whatever_is_decoded_is_plain_or_an_exception(data: bytes) -> None:
    try:
        encode(decode(data))
    except Exception as error:
        assert not isinstance(error, NotPlain)


def test_a_call_that_hangs_leaves_what_was_judged_before() -> None:
    code = "import time\ndef f(x):\n    if x > 1: time.sleep(3600)\n    return x"
    assertions = ["assert f(0) == 0", "assert f(1) == 1", "assert f(2) == 2", "assert f(0) == 0"]
    assert verdicts_of(code, *assertions, seconds=3.0) == "pp"


def test_a_value_that_makes_the_assertion_hang_or_eat_memory_fails() -> None:
    code = "def f(): return 10**18\ndef g(): return 1"
    eats = ["assert len('x' * f()) == 3", "assert g() == 1"]
    assert verdicts_of(code, *eats) == "fp"
    assert verdicts_of(code, "assert g() == 1", "assert sum(range(f())) == 1", seconds=3.0) == "p"


def test_a_program_that_ends_or_fails_passes_nothing_not_even_what_does_not_call_it() -> None:
    assert verdicts_of("def f(): return 1\n1 / 0", "assert True", "assert f() == 1") == ""
    assert verdicts_of("def f(): return 1\nexit()", "assert True") == ""
    assert (
        verdicts_of("import os\ndef f(): os._exit(0)", "assert f() is None", "assert True") == "ff"
    )


def test_all_tests_of_a_completion_share_its_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    run_program, num_started = sandbox.run_program, 0

    def counted(*arguments: Any) -> sandbox.Ending:
        nonlocal num_started
        num_started += 1
        return run_program(*arguments)

    monkeypatch.setattr(sandbox, "run_program", counted)
    cases = [{"input": "", "output": "1"}] * 5
    (reward,) = code_reward([FENCED.format("while True: pass")], [""], [cases], seconds=0.6)
    # The first uses up what all have.
    assert reward == 0.0 and num_started == 1


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```python\na\n```", "a\n"),
        ("```py\na\n```\nand\n```\nb\n```", "b\n"),
        ("```python\na\n```\n```text\nb\n```", "a\n"),
        ("```python\na\n```\n```python\nb", "a\n"),
        ("```python\nnever closed", "never closed"),
        ("no fence", None),
        ("```", None),
        ("```python\n\n```", None),
        ("```" * 10**5, None),
        (None, None),
    ],
)
def test_the_last_closed_block_is_run(text: str, code: str | None) -> None:
    assert last_code_block(text) == code


@pytest.fixture
def fresh() -> Iterator[None]:
    """Isolation is looked for anew, before and after."""
    sandbox.find_isolation.cache_clear()
    yield
    sandbox.find_isolation.cache_clear()


def test_one_method_at_least_works_here(fresh: None) -> None:
    assert sandbox.find_isolation().name in ("bubblewrap", "landlock and seccomp")


def test_without_isolation_the_reward_says_what_to_install(
    fresh: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setitem(sys.modules, "pyseccomp", None)
    with pytest.raises(UserError) as raised:
        code_reward(["no code"], ["1"])
    said = str(raised.value)
    assert "bubblewrap: bwrap is not on the PATH; mindgrpo[code]: " in said
    assert "apt-get install bubblewrap" in said and "pip install 'mindgrpo[code]'" in said
    assert "reward_config.verifier_function" in said


def test_a_run_does_not_start_without_isolation(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "pyseccomp.py").write_text("raise ImportError('not here')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PATH", "")
    scorer = Scorer(["code_reward"])
    try:
        with pytest.raises(UserError, match="nothing on this machine can isolate .*not here"):
            scorer.dry_run(["no code"] * 2, ["1"] * 2, {})
    finally:
        scorer.close()


def test_a_method_that_does_not_isolate_is_not_taken(
    fresh: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "METHODS", {"none": lambda: Isolation("none")})
    with pytest.raises(IsolationUnavailable, match="none: its trial ended with status 0"):
        sandbox.find_isolation()
