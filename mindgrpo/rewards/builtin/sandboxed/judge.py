"""Evaluates assertions in a process in which the completion never ran.

A name that an assertion uses and neither it, its setup nor Python defines is the completion's: plain data is
fetched as a value, a function is called across a pipe with plain data. An assertion that needs more than that
of the completion (an object, an attribute, a generator, two names, the same process) is unjudgeable.
"""

from __future__ import annotations

import ast
import builtins
import os
import symtable
import sys

from plain_data import BrokenMessage, NotPlain, encode, receive, send

TYPE_CHECKING = False  # importing typing would take a tenth of the process's start
if TYPE_CHECKING:
    from typing import Any

PASSED, FAILED, UNJUDGEABLE = b"p", b"f", b"u"
# With these a returned value could become code, or the function would have to run in this process.
NEEDS_ONE_PROCESS = {
    *("eval", "exec", "__import__", "importlib", "runpy", "pickle", "marshal", "ctypes"),
    *("redirect_stdout", "redirect_stderr", "mock", "patch", "inspect"),
}
# A StopIteration would end a map or filter of the test as if all its items had been good.
EXCEPTIONS = {
    name: kind
    for name, kind in vars(builtins).items()
    if isinstance(kind, type)
    and issubclass(kind, Exception)
    and not issubclass(kind, StopIteration | StopAsyncIteration)
}


MISSING = object()


class Unjudgeable(BaseException):
    """The assertion needs more of the completion than plain data."""


class CompletionEnded(BaseException):
    """The completion's process does not answer, or not by the protocol."""


class CompletionError(Exception):
    """An exception of the completion's that is not one of Python's own."""


class CompletionPipes:
    """The pipes to the completion's process.

    `is_unjudgeable` and `has_ended` stay set however the assertion handles the exception.
    """

    def __init__(self, questions: int, replies: int) -> None:
        self._questions, self._replies = questions, replies
        self.is_unjudgeable = self.has_ended = False

    def value_of(self, name: str) -> Any:
        """Returns plain data that the completion calls `name`, a Remote for a function, or MISSING."""
        kind, *content = self._ask("look", name)
        if kind == "missing":
            return MISSING
        return Remote(self, name) if kind == "callable" else self._value(kind, content)[0]

    def call(self, name: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Returns plain data, or raises the exception of Python's that the function raised."""
        kind, *content = self._ask("call", name, list(arguments), keywords)
        if kind == "raised":
            raise exception_of(*content)
        result, changed = self._value(kind, content)
        if result is None:
            change(arguments, changed)
        return result

    def refuse(self) -> Unjudgeable:
        self.is_unjudgeable = True
        return Unjudgeable()

    def _ask(self, *question: Any) -> list[Any]:
        """Returns the reply: a kind and its content. Raises Unjudgeable for what is not plain data."""
        if self.has_ended:
            raise CompletionEnded
        nonce = os.urandom(8)
        try:
            encoded = encode([nonce, *question])
        except (NotPlain, RecursionError) as error:
            raise self.refuse() from error
        try:
            send(self._questions, encoded)
            repeated, *reply = receive(self._replies)
            # A reply that was written before its question cannot hold the question's nonce.
            if repeated != nonce or not is_reply(*reply):
                raise BrokenMessage
        except Exception as error:
            self.has_ended = True
            raise CompletionEnded from error
        return reply

    def _value(self, kind: str, content: list[Any]) -> list[Any]:
        if kind != "value":
            raise self.refuse()
        return content


def is_reply(kind: Any, *content: Any) -> bool:
    """Returns whether a reply has one of its five forms.

    They are ("missing",), ("object",), ("callable",), ("value", result, arguments) and ("raised", name, message).
    """
    if kind == "value":
        return len(content) == 2 and type(content[1]) is list
    if kind == "raised":
        return len(content) == 2 and {type(item) for item in content} == {str}
    return kind in ("missing", "object", "callable") and not content


def exception_of(name: str, message: str) -> Exception:
    try:
        return EXCEPTIONS[name](message)
    except (KeyError, TypeError):
        return CompletionError(message)


def change(arguments: tuple[Any, ...], changed: list[Any]) -> None:
    """Gives lists, dicts and sets that were passed as arguments their content after the call."""
    for argument, after in zip(arguments, changed, strict=False):
        if type(argument) is list and type(after) is list:
            argument[:] = after
        elif type(argument) in (dict, set) and type(after) is type(argument):
            argument.clear()
            argument.update(after)


class Remote:
    """A function of the completion's, which may be called and nothing else."""

    def __init__(self, pipes: CompletionPipes, name: str) -> None:
        self._pipes, self._name = pipes, name

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._pipes.call(self._name, arguments, keywords)


def _refuse(remote: Remote, *_: object) -> Any:
    raise remote._pipes.refuse()


for operation in (
    *("getattr", "eq", "ne", "lt", "le", "gt", "ge", "hash", "bool", "str", "repr", "len", "iter"),
    *("next", "getitem", "contains", "enter", "mro_entries", "add", "radd", "or", "ror", "await"),
):
    setattr(Remote, f"__{operation}__", _refuse)


def judge_all(order: dict[str, Any], pipes: CompletionPipes, verdicts: int) -> None:
    """Writes one letter per assertion as it is judged: p passed, f failed, u unjudgeable."""
    try:
        pipes.value_of("")  # Answered when the program has run to its end.
    except Unjudgeable:
        pass
    except CompletionEnded:
        return
    for assertion in order["assertions"]:
        os.write(verdicts, judge(assertion, order["setup"], pipes))


def judge(assertion: str, setup: str, pipes: CompletionPipes) -> bytes:
    pipes.is_unjudgeable = False
    source = f"{setup}\n{assertion}"
    try:
        code = compile(source, "test", "exec")
    except Exception:  # it is no Python
        return UNJUDGEABLE
    try:
        namespace = namespace_for(source, assertion, pipes)
        exec(code, namespace)  # noqa: S102
        passed = not pipes.has_ended
    except BaseException:
        passed = False
    if pipes.is_unjudgeable:
        return UNJUDGEABLE
    return PASSED if passed else FAILED


def namespace_for(source: str, assertion: str, pipes: CompletionPipes) -> dict[str, Any]:
    """Returns the globals to evaluate `source` in. Raises Unjudgeable and CompletionEnded.

    With two names of the completion's an assertion such as `isclose(root(2), 1.41)` or `root(2) == approx(1.41)`
    would tell one function the answer and believe it about the other.
    """
    tree = ast.parse(source)
    if NEEDS_ONE_PROCESS & set(identifiers(tree)):
        raise pipes.refuse()
    namespace: dict[str, Any] = {"__name__": "__main__"}
    modules = modules_without_import(tree)
    solution = solution_named_as_a_builtin(assertion)
    free = free_names(source) - modules
    names = [name for name in sorted(free) if name == solution or not hasattr(builtins, name)]
    values = {name: pipes.value_of(name) for name in names}
    defined = {name: value for name, value in values.items() if value is not MISSING}
    if len(defined) > 1:
        raise pipes.refuse()
    return namespace | {name: __import__(name) for name in modules} | defined


def identifiers(tree: ast.AST) -> list[str]:
    words = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            words.append(node.id)
        elif isinstance(node, ast.Attribute):
            words.append(node.attr)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None) or ""
            words += [part for alias in node.names for part in alias.name.split(".")]
            words += module.split(".")
    return words


def free_names(source: str) -> set[str]:
    """Names that are read as globals and that the source itself does not bind."""
    top = symtable.symtable(source, "test", "exec")
    bound = {s.get_name() for s in top.get_symbols() if s.is_assigned() or s.is_imported()}
    read, tables = set(), [top]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        read |= {s.get_name() for s in table.get_symbols() if s.is_referenced() and s.is_global()}
    return read - bound


def modules_without_import(tree: ast.AST) -> set[str]:
    """Returns modules of Python's of which an attribute is used, as `math` in `math.isclose(f(2), 1)`.

    Assertions often rely on the solution's imports; the judge must not use the completion's `math`.
    """
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    bases = [node.value for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    others = {node.id for node in names if not any(node is base for base in bases)}
    return ({node.id for node in names} - others) & sys.stdlib_module_names


def solution_named_as_a_builtin(assertion: str) -> str | None:
    """Returns the only name in an assertion such as `assert sum(10, 15) == 6`: the completion's, if it defines it.

    Where there are other names beside it (None), a built-in's name means Python's own.
    """
    names = {node.id for node in ast.walk(ast.parse(assertion)) if isinstance(node, ast.Name)}
    return names.pop() if len(names) == 1 else None
