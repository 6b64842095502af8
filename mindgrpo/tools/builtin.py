"""Tools that need no file: a calculator, and Python in the sandbox of code_reward."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any

MAX_EXPONENT, MAX_DIGITS = 1000, 1000
PYTHON_SECONDS, PYTHON_MEMORY = 5.0, 512 << 20
# Its first line: an exception is printed as its kind and line, without the sandbox's own frames.
PRELUDE = (
    "import sys, traceback; sys.stderr = sys.stdout; sys.excepthook = lambda kind, error, trace: print("
    "f'line {traceback.extract_tb(trace)[-1].lineno - 1}:', *traceback.format_exception_only(kind, error))\n"
)
BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


def calculator(expression: str) -> str:
    """Computes an arithmetic expression.

    Args:
        expression: The expression, with numbers, + - * / // % ** and brackets.

    Returns:
        The value as text.
    """
    value = _value(ast.parse(expression.strip(), mode="eval").body)
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        value = int(value)
    return str(value)


def _value(node: ast.expr) -> int | float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value  # type: ignore[return-value]
    if isinstance(node, ast.UnaryOp) and type(node.op) in UNARY:
        return UNARY[type(node.op)](_value(node.operand))
    if isinstance(node, ast.BinOp) and type(node.op) in BINARY:
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow) and abs(right) > MAX_EXPONENT:
            raise ValueError(f"the exponent {right} is above {MAX_EXPONENT}")
        value = BINARY[type(node.op)](left, right)
        if isinstance(value, complex):
            raise ValueError("the value is no real number")
        if isinstance(value, int) and abs(value) >= 10**MAX_DIGITS:
            raise ValueError(f"the value has more than {MAX_DIGITS} digits")
        return value
    raise ValueError(f"{ast.unparse(node)} is no arithmetic")


def python(code: str) -> str:
    """Runs a Python program and returns what it prints.

    Args:
        code: The program's source.

    Returns:
        Its output, standard error included.
    """
    from mindgrpo.rewards.builtin.sandbox import run_program

    ending = run_program(PRELUDE + code, "", PYTHON_SECONDS, PYTHON_MEMORY)
    text = ending.output.decode("utf-8", "replace")
    if ending.status is None:
        raise TimeoutError(f"the program took more than {PYTHON_SECONDS:g} s")
    return text


# They end soon and keep nothing, so that no process of its own is needed for a call.
BOUNDED = frozenset({"calculator"})
BUILTINS: dict[str, Callable[..., str]] = {"calculator": calculator, "python": python}
