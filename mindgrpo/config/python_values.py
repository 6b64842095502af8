"""Reads calls of a Python program, GRPOConfig(...) and its like, with the values that stand there. Runs nothing."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from mindgrpo.errors import UserError

_OPERATORS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_LARGEST = 2**53


class NoValue(Exception):
    """An expression whose value only the program knows."""


@dataclass(frozen=True)
class Call:
    """Holds a call's arguments: values that stand in the program, and the expressions of the others.

    `is_guarded`: an import of the program does not make the call.
    """

    name: str
    values: dict[str, Any]
    others: dict[str, ast.expr]
    is_guarded: bool


@dataclass(frozen=True)
class Program:
    """Holds a program's calls by the names asked for, the modules of its imported names, and its own functions."""

    calls: list[Call]
    modules: dict[str, str]
    functions: frozenset[str]


def read_program(text: str, file: str, names: Mapping[str, Sequence[str]]) -> Program:
    """Reads the calls of `names`, which have the names of their arguments by position. Raises UserError."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError) as error:
        line = f" line {error.lineno}" if isinstance(error, SyntaxError) else ""
        reason = error.msg if isinstance(error, SyntaxError) else error
        raise UserError(f"{file}{line} is no Python: {reason}; correct it.") from None
    known: dict[str, Any] = {}
    calls = list(_calls(tree, names, known, is_guarded=False))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    modules = {
        alias.asname or alias.name: f"{node.module}:{alias.name}"
        for node in imports
        for alias in node.names
    }
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    return Program(calls, modules, frozenset(functions))


def _calls(
    node: ast.AST, names: Mapping[str, Sequence[str]], known: dict[str, Any], is_guarded: bool
) -> Iterator[Call]:
    """Yields calls in the order of the program; adds variables with values to `known`."""
    for inner in ast.iter_child_nodes(node):
        is_main = isinstance(inner, ast.If) and "__name__" in ast.unparse(inner.test)
        is_function = isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef)
        yield from _calls(inner, names, known, is_guarded or is_main or is_function)
        if isinstance(inner, ast.Assign | ast.AnnAssign) and inner.value is not None:
            targets = inner.targets if isinstance(inner, ast.Assign) else [inner.target]
            _remember(targets, inner.value, known)
        if isinstance(inner, ast.Call):
            name = ast.unparse(inner.func).rpartition(".")[2]
            if name in names:
                yield _call(name, inner, names[name], known, is_guarded)


def _remember(targets: Sequence[ast.expr], value: ast.expr, known: dict[str, Any]) -> None:
    for target in targets:
        if isinstance(target, ast.Name):
            known.pop(target.id, None)
            with suppress(NoValue):
                known[target.id] = value_of(value, known)


def _call(
    name: str, node: ast.Call, positions: Sequence[str], known: Mapping[str, Any], is_guarded: bool
) -> Call:
    values: dict[str, Any] = {}
    others: dict[str, ast.expr] = {}
    # More than there are names for is no call that works.
    arguments = [*zip(positions, node.args, strict=False)]
    arguments += [(keyword.arg or "**", keyword.value) for keyword in node.keywords]
    for argument, expression in arguments:
        try:
            value = value_of(expression, known)
        except NoValue:
            others[argument] = expression
            continue
        values |= value if argument == "**" and isinstance(value, dict) else {argument: value}
    return Call(name, values, others, is_guarded)


def value_of(node: ast.expr, known: Mapping[str, Any]) -> Any:
    """Returns the value of an expression of constants and `known` names. Raises NoValue for any other."""
    match node:
        case ast.Constant(value):
            return value
        case ast.Name(name) if name in known:
            return known[name]
        case ast.List(elements) | ast.Tuple(elements) | ast.Set(elements):
            return [value_of(each, known) for each in elements]
        case ast.Dict(keys, values) if all(keys):
            pairs = zip(filter(None, keys), values, strict=True)
            return {value_of(key, known): value_of(each, known) for key, each in pairs}
        case ast.Call(ast.Name("dict"), [], keywords) if all(each.arg for each in keywords):
            return {str(each.arg): value_of(each.value, known) for each in keywords}
        case ast.UnaryOp(ast.USub(), operand):
            return _number(lambda value: -value, value_of(operand, known))
        case ast.UnaryOp(ast.Not(), operand):
            return not value_of(operand, known)
        case ast.BinOp(left, operation, right) if type(operation) in _OPERATORS:
            sides = value_of(left, known), value_of(right, known)
            return _number(_OPERATORS[type(operation)], *sides)
        case ast.JoinedStr(values):
            return "".join(str(value_of(_plain(part), known)) for part in values)
        # A directory or a name that is loaded stands for what is loaded, for a model and a tokenizer.
        case ast.Call(ast.Attribute(attr="from_pretrained"), [name, *_]):
            return value_of(name, known)
        # An enumeration's member, as TaskType.CAUSAL_LM and torch.bfloat16.
        case ast.Attribute(ast.Name(first), name) if first in (
            "TaskType",
            "torch",
            "SchedulerType",
        ):
            return name.lower() if first == "SchedulerType" else name
    raise NoValue


def _plain(node: ast.expr) -> ast.expr:
    is_plain = (
        isinstance(node, ast.FormattedValue) and node.conversion == -1 and not node.format_spec
    )
    return node.value if is_plain and isinstance(node, ast.FormattedValue) else node


def _number(operation: Callable[..., Any], *values: Any) -> Any:
    numbers = all(isinstance(value, int | float) and abs(value) <= _LARGEST for value in values)
    texts = operation is operator.add and all(isinstance(value, str) for value in values)
    if not numbers and not texts:
        raise NoValue
    try:
        return operation(*values)
    except ArithmeticError:
        raise NoValue from None


def calculated(text: str, known: Mapping[str, Any]) -> Any:
    """Returns the value of a sum, a product and so on in text; None where there is none."""
    try:
        return value_of(ast.parse(text.replace("$", "").strip(), mode="eval").body, known)
    except (NoValue, SyntaxError, ValueError, RecursionError):
        return None
