"""A reward by name, by `package.module:function`, by `path/to/file.py:function`, or as it is.

Resolving imports the user's module, and whatever goes wrong there is one sentence. A class is
made into an object once and that object is called. Refuses to guess which function was meant.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from mindgrpo.errors import UserError
from mindgrpo.reward.builtin import BUILTINS

WHERE = "reward_config.verifier_function"


@dataclass(frozen=True)
class RewardFunction:
    name: str
    call: Callable[..., Any]


def resolve(spec: str | Callable[..., Any]) -> RewardFunction:
    if not isinstance(spec, str):
        return from_callable(spec)
    if spec in BUILTINS:
        return RewardFunction(spec, BUILTINS[spec])
    source, colon, function = spec.rpartition(":")
    if not (colon and source and function):
        raise unknown_name(spec)
    module = load_file(source, spec) if source.endswith(".py") else load_module(source, spec)
    if function not in vars(module):
        raise UserError(
            f"reward function {spec!r}: {source} has no {function!r}"
            f"{nearest(function, public_callables(module))}; correct {WHERE}"
        )
    return RewardFunction(function, instance_of(vars(module)[function], spec))


def unknown_name(spec: str) -> UserError:
    if spec.endswith(".py"):
        return UserError(
            f"reward function {spec!r} names a file only; write {spec}:function in {WHERE}"
        )
    return UserError(
        f"reward function {spec!r} is not built in{nearest(spec, BUILTINS)}; use one of "
        f"{', '.join(BUILTINS)}, package.module:function or path/to/file.py:function in {WHERE}"
    )


def from_callable(given: object) -> RewardFunction:
    called = instance_of(given, given)
    name = getattr(called, "__name__", type(called).__name__)
    return RewardFunction(str(name), called)


def instance_of(found: object, spec: object) -> Callable[..., Any]:
    if isinstance(found, type):
        try:
            found = found()
        except Exception as error:  # the user's own constructor
            raise UserError(
                f"reward class {spec!r} cannot be made without arguments: {describe(error)}; "
                f"give its parameters defaults ({WHERE})"
            ) from error
    if not callable(found):
        raise UserError(
            f"reward function {spec!r} is a {type(found).__name__}; it must be callable as "
            f"reward(completions, answers, **columns) ({WHERE})"
        )
    return found


def load_file(source: str, spec: str) -> ModuleType:
    path = Path(source).resolve()
    if not path.is_file():
        here = [str(other.relative_to(path.parent)) for other in path.parent.glob("*.py")]
        raise UserError(
            f"reward function {spec!r}: the file {path} does not exist"
            f"{nearest(path.name, here)}; correct {WHERE}"
        )
    name = f"mindgrpo_reward_file_{path.stem}_{abs(hash(str(path))):x}"
    found = importlib.util.spec_from_file_location(name, path)
    if found is None or found.loader is None:
        raise UserError(f"reward function {spec!r}: {path} is not a Python file ({WHERE})")
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module  # dataclasses and pickle look their module up here
    with searching(path.parent), one_sentence(spec):
        found.loader.exec_module(module)
    return module


def load_module(source: str, spec: str) -> ModuleType:
    with searching(Path.cwd()), one_sentence(spec):
        return importlib.import_module(source)


@contextmanager
def searching(folder: Path) -> Iterator[None]:
    """A reward finds the modules beside it, as a script would."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


@contextmanager
def one_sentence(spec: str) -> Iterator[None]:
    try:
        yield
    except (Exception, SystemExit) as error:  # anything may happen at import
        raise UserError(
            f"reward function {spec!r} does not import: {describe(error)}; "
            f"correct the module or {WHERE}"
        ) from error


def describe(error: BaseException) -> str:
    """The kind of error, its first line, and the deepest place outside the import machinery."""
    text = (str(error).strip().splitlines() or ["no message"])[0]
    place = ""
    trace = error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if file != __file__ and "importlib" not in file:
            place = f" at {file}:{trace.tb_lineno}"
        trace = trace.tb_next
    return f"{type(error).__name__}: {text}{place}"


def public_callables(module: ModuleType) -> list[str]:
    return [key for key, held in vars(module).items() if callable(held) and key[0] != "_"]


def nearest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" (the nearest name is {close[0]!r})" if close else ""
