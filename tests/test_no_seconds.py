"""No test compares seconds that have passed: a loaded machine would fail it. Order of readings of a clock is fine.

Rules of time are tested by events in order, and pytest's own time-out ends what hangs. Does not find seconds that come
from elsewhere, such as a row of metrics.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
CLOCKS = {"monotonic", "perf_counter", "process_time", "thread_time", "time"}


def is_reading(node: ast.AST) -> bool:
    """Says whether this calls a clock, as `time.monotonic()` or `monotonic()`."""
    if not isinstance(node, ast.Call) or node.args:
        return False
    name = node.func.attr if isinstance(node.func, ast.Attribute) else ast.unparse(node.func)
    owner = ast.unparse(node.func.value) if isinstance(node.func, ast.Attribute) else "time"
    return owner == "time" and name.removesuffix("_ns") in CLOCKS


class Elapsed(ast.NodeVisitor):
    """Finds what a function or class binds to readings of a clock, and to what is added to or taken from these."""

    def __init__(self, scope: ast.AST) -> None:
        self._readings, self._elapsed = set[str](), set[str]()
        known = -1
        while known < len(self._readings | self._elapsed):
            known = len(self._readings | self._elapsed)
            self.visit(scope)

    def _holds(self, node: ast.AST, names: set[str]) -> bool:
        return any(
            isinstance(one, ast.Name | ast.Attribute) and ast.unparse(one) in names
            for one in ast.walk(node)
        )

    def _has_reading(self, node: ast.AST) -> bool:
        return self._holds(node, self._readings) or any(map(is_reading, ast.walk(node)))

    def is_elapsed(self, node: ast.AST) -> bool:
        return self._holds(node, self._elapsed) or any(
            isinstance(one, ast.BinOp)
            and isinstance(one.op, ast.Add | ast.Sub)
            and self._has_reading(one)
            for one in ast.walk(node)
        )

    def is_compared(self, node: ast.Compare) -> bool:
        """Says whether it compares elapsed seconds, or a reading with a number."""
        parts = [node.left, *node.comparators]
        has_number = any(isinstance(part, ast.Constant) for part in parts)
        return any(map(self.is_elapsed, parts)) or (
            has_number and any(map(self._has_reading, parts))
        )

    def _bind(self, target: ast.AST, value: ast.AST) -> None:
        while isinstance(target, ast.Subscript):
            target = target.value
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for one, own in zip(target.elts, value.elts, strict=False):
                self._bind(one, own)
        elif self.is_elapsed(value):
            self._elapsed.add(ast.unparse(target))
        elif self._has_reading(value):
            self._readings.add(ast.unparse(target))

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            self._bind(target, node.value)
        self.generic_visit(node)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self._bind(node.target, node.value)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Attribute) and node.func.attr == "append" and node.args:
            self._bind(node.func.value, node.args[0])
        self.generic_visit(node)


def comparisons_of_seconds(source: str) -> Iterator[str]:
    for scope in ast.parse(source).body:
        elapsed = Elapsed(scope)
        for node in ast.walk(scope):
            if isinstance(node, ast.Compare) and elapsed.is_compared(node):
                yield f"{node.lineno}: {ast.unparse(node)}"


def test_no_test_compares_seconds_that_have_passed() -> None:
    found = {
        str(path.relative_to(TESTS)): lines
        for path in TESTS.rglob("*.py")
        if (lines := [*comparisons_of_seconds(path.read_text())])
    }
    assert found == {}


@pytest.mark.parametrize(
    "body",
    [
        "started = time.monotonic(); work(); assert time.monotonic() - started < 5.0",
        "until = time.monotonic() + 90.0\n    while not done(): assert time.monotonic() < until",
        "end = time.time() + 3\n    while time.time() < end and not done(): pass",
        "before = time.perf_counter(); work(); took = time.perf_counter() - before; assert took < 2",
        "took = []; a = time.time(); work(); took.append(time.time() - a); assert min(took) < 2",
        "slow = {}; a = process_time_ns(); slow['x'] = process_time_ns() - a; assert max(slow.values()) < 2",
        "work(); assert time.process_time() < 0.2",
        "a = time.monotonic(); work(); assert time.monotonic() - a == pytest.approx(1, rel=0.1)",
    ],
)
def test_a_comparison_of_seconds_is_found(body: str) -> None:
    assert len([*comparisons_of_seconds(f"def test_it():\n    {body}\n")]) == 1


@pytest.mark.parametrize(
    "body",
    [
        "before = time.monotonic(); seen = work(); assert before < seen < time.monotonic()",
        "long_ago = time.time() - 9000; os.utime(path, (long_ago, long_ago)); assert work() == 3",
        "while not done(): time.sleep(0.02)",
    ],
)
def test_the_order_of_events_may_be_compared(body: str) -> None:
    assert [*comparisons_of_seconds(f"def test_it():\n    {body}\n")] == []
