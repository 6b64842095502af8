"""Tools as users write them: schemas, calls in a model's text, and what becomes of calls that misbehave.

Does not prove anything of conversations: that is test_conversations.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mindgrpo.errors import UserError
from mindgrpo.tools.builtin import calculator, python
from mindgrpo.tools.calls import MALFORMED, ToolCall, find_parser, parser_for
from mindgrpo.tools.pool import LONGEST_ANSWER, UNKNOWN, ToolAnswer, ToolPool, load_tools
from mindgrpo.workers.protocol import BAD_RESULT, EXIT, RAISED, TIMEOUT, CallLimits

# For what hangs, and for what ends by itself, however slow the machine.
DEADLINE, PATIENCE = 1.5, 300.0
TOOLS = '''
import os, sys, time

def hangs(seconds: int = 3600) -> str:
    """Takes its time.

    Args:
        seconds: how long
    """
    time.sleep(seconds)
    return "late"

def loud() -> str:
    """Prints 100 MB."""
    for _ in range(100):
        sys.stdout.write("x" * 1_000_000)
    return "printed"

def nothing() -> str:
    """Returns nothing."""

def itself() -> str:
    """Calls itself."""
    return itself()

def dies() -> str:
    """Ends its process."""
    os._exit(3)

def closes() -> str:
    """Ends its parent."""
    os.kill(os.getppid(), 9)
    time.sleep(3600)

def counts(upto: int) -> list[int]:
    """Counts.

    Args:
        upto: the last number
    """
    return list(range(upto))

def undocumented(x: int) -> int:
    return x

class Stateful:
    pass
'''


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tools") / "own_tools.py"
    path.write_text(TOOLS)
    return path


def pool_of(file: Path, deadline: float) -> Iterator[ToolPool]:
    names = ["hangs", "loud", "nothing", "itself", "dies", "closes", "counts"]
    texts = ["calculator", *(f"{file}:{name}" for name in names)]
    made = ToolPool(texts, ["calculator", *names], CallLimits(deadline, 1 << 30))
    yield made
    made.close()


@pytest.fixture
def pool(file: Path) -> Iterator[ToolPool]:
    yield from pool_of(file, PATIENCE)


@pytest.fixture
def hasty(file: Path) -> Iterator[ToolPool]:
    yield from pool_of(file, DEADLINE)


def run(pool: ToolPool, calls: list[ToolCall]) -> list[ToolAnswer]:
    """The answers to the calls of one turn."""
    return pool.ask({0: calls})[0]


def test_calls_that_hang_cost_themselves_alone(hasty: ToolPool) -> None:
    calls = [ToolCall("calculator", {"expression": "6 * 7"}), *[ToolCall("hangs")] * 8]
    first, *late = run(hasty, calls)
    assert (first.text, first.failure) == ("42", None)
    assert {answer.failure for answer in late} == {TIMEOUT}
    assert "no answer within 1.5 s" in late[0].text


def test_calls_that_misbehave_cost_themselves_alone(pool: ToolPool) -> None:
    calls = [
        ToolCall("calculator", {"expression": "6 * 7"}),
        *(ToolCall(name) for name in ("loud", "nothing", "itself", "dies")),
        ToolCall("calculator", {"sum": "1"}),
        ToolCall("abacus"),
        ToolCall("", error="the call is not JSON"),
        ToolCall("counts", {"upto": 3}),
        ToolCall("counts", {"upto": LONGEST_ANSWER}),
    ]
    run(pool, calls[:1])
    first, loud, nothing, itself, dies, *rest = run(pool, calls)
    assert (first.text, first.failure) == ("42", None)
    assert (loud.text, loud.failure) == ("printed", None)
    kinds = [answer.failure for answer in (nothing, itself, dies)]
    assert kinds == [BAD_RESULT, RAISED, EXIT]
    assert "RecursionError" in itself.text
    assert [answer.failure for answer in rest] == [RAISED, UNKNOWN, MALFORMED, None, None]
    assert rest[0].text.startswith("Error: TypeError: ")
    assert "there are calculator, closes, counts" in rest[1].text
    assert rest[3].text == "[0, 1, 2]"
    assert "letters left out" in rest[4].text
    assert len(rest[4].text) < LONGEST_ANSWER + 100


def test_calls_that_need_no_process_are_run_again_if_their_worker_ends(
    pool: ToolPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "_bounded", frozenset({"calculator", "dies"}))
    sums = [ToolCall("calculator", {"expression": f"{i} + 1"}) for i in range(2)]
    answers = run(pool, [sums[0], ToolCall("dies"), sums[1]])
    assert [(a.text, a.failure) for a in (answers[0], answers[2])] == [("1", None), ("2", None)]
    assert answers[1].failure == EXIT


def test_a_tool_that_ends_its_worker_fails_what_was_asked_and_nothing_later(
    pool: ToolPool,
) -> None:
    sums = [ToolCall("calculator", {"expression": "1 + 1"})]
    (answer,) = run(pool, [ToolCall("closes")])
    assert answer.failure == EXIT
    assert [answer.text for answer in run(pool, sums)] == ["2"]


def test_schemas_are_those_of_transformers(file: Path) -> None:
    (tool,) = load_tools([f"{file}:counts"])
    schema = tool.schema()["function"]
    assert schema["name"] == tool.name == "counts"
    properties = {"upto": {"type": "integer", "description": "the last number"}}
    assert schema["parameters"]["properties"] == properties
    assert schema["parameters"]["required"] == ["upto"]


@pytest.mark.parametrize(
    ("texts", "sentence"),
    [
        (["calculater"], "not built in (the nearest name is 'calculator')"),
        (
            ["{file}:count"],
            "has no 'count' (the nearest name is 'counts'); correct rl_config.tools",
        ),
        (["nowhere.py:f"], "nowhere.py does not exist"),
        (["{file}:Stateful"], "is a type, not a function; correct rl_config.tools"),
        (["calculator", "calculator"], "two tools named 'calculator'"),
        (["{file}:undocumented"], "has no schema: DocstringParsingException"),
    ],
)
def test_what_is_no_tool_is_refused_in_a_sentence(
    file: Path, texts: list[str], sentence: str
) -> None:
    with pytest.raises(UserError) as refused:
        [tool.schema() for tool in load_tools([text.format(file=file) for text in texts])]
    assert sentence in str(refused.value)


def test_calls_are_found_in_the_forms_that_models_write() -> None:
    hermes, llama3 = find_parser("hermes"), find_parser("llama3")
    text = 'So:\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call><tool_call>{"name": "g"}'
    assert hermes(text) == [ToolCall("f", {"x": 1}), ToolCall("g")]
    assert hermes("no call") == llama3("no call") == []
    for written in ("{", "[1]", '{"arguments": {}}', '{"name": "f", "arguments": 3}'):
        (call,) = hermes(f"<tool_call>{written}</tool_call>")
        assert call.error is not None and call.failure == MALFORMED
    own = json.dumps({"name": "f", "parameters": {"x": 1}})
    assert llama3(own) == llama3(f"<|python_tag|>{own}") == [ToolCall("f", {"x": 1})]
    (deep,) = hermes("<tool_call>" + "[" * 100_000)
    assert deep.error is not None


def test_a_users_parser_is_called_and_its_failure_is_his(tmp_path: Path) -> None:
    path = tmp_path / "own_parser.py"
    path.write_text(
        "def words(text):\n    return [{'name': word} for word in text.split()]\n"
        "def fails(text):\n    return text.no\n"
    )
    assert find_parser(f"{path}:words")("f g") == [ToolCall("f"), ToolCall("g")]
    with pytest.raises(UserError, match="tool parser .* failed: AttributeError"):
        find_parser(f"{path}:fails")("x")
    with pytest.raises(UserError, match="rl_config.tool_parser 'json' is unknown"):
        find_parser("json")


def test_the_parser_follows_from_the_template() -> None:
    assert parser_for("... <tool_call> ...") == "hermes"
    assert parser_for('{"name": x, "parameters": y}') == "llama3"
    assert parser_for("plain") is None


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2 + 3 * 4", "14"),
        ("-(1 - 2) ** 2", "-1"),
        ("7 / 2", "3.5"),
        ("8 / 2", "4"),
        ("7 // 2 % 2", "1"),
    ],
)
def test_the_calculator_computes(expression: str, value: str) -> None:
    assert calculator(expression) == value


@pytest.mark.parametrize(
    "expression",
    ["__import__('os')", "x + 1", "'a' * 9", "9 ** 9999", "10 ** 999 * 100", "1 if 1 else 2", "("],
)
def test_the_calculator_computes_nothing_else(expression: str) -> None:
    with pytest.raises((ValueError, SyntaxError)):
        calculator(expression)


def test_python_prints_and_its_exceptions_are_a_line() -> None:
    assert python("print(6 * 7)") == "42\n"
    assert python("x = 1\nprint(x)\nx / 0").split("\n")[:2] == [
        "1",
        "line 3: ZeroDivisionError: division by zero",
    ]


def test_schemas_of_the_built_in_tools() -> None:
    schemas: list[dict[str, Any]] = [tool.schema() for tool in load_tools(["calculator", "python"])]
    assert [list(s["function"]["parameters"]["properties"]) for s in schemas] == [
        ["expression"],
        ["code"],
    ]
