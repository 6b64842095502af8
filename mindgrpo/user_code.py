"""Imports modules that users name, `package.module` or `file.py`, and says in a sentence what went wrong in them."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from mindgrpo.errors import UserError

PACKAGE = Path(__file__).parent
LONGEST_MESSAGE = 300


@dataclass(frozen=True)
class Kind:
    """What is imported, such as "reward function", and the key that names it."""

    what: str
    key: str


def import_named(kind: Kind, text: str, source: str, name: str) -> Any:
    """Imports `name` from `source`, a module or a .py file; `text` is what the user wrote. Raises UserError."""
    module = import_source(kind, text, source)
    if name not in vars(module):
        raise UserError(
            f"{kind.what} {text!r}: {source} has no {name!r}{nearest(name, public_callables(module))}; correct "
            f"{kind.key}"
        )
    return vars(module)[name]


def import_source(kind: Kind, text: str, source: str) -> ModuleType:
    path = Path(source).expanduser().resolve()
    is_file = source.endswith(".py")
    if is_file and not path.is_file():
        here = [str(other.relative_to(path.parent)) for other in path.parent.glob("*.py")]
        raise UserError(
            f"{kind.what} {text!r}: the file {path} does not exist{nearest(path.name, here)}; correct {kind.key}"
        )
    # It finds the modules beside it, as a script would, later imports in a call included.
    folder = str(path.parent if is_file else Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        return _module_in(path) if is_file else importlib.import_module(source)
    except (Exception, SystemExit) as error:  # anything may happen at import
        raise UserError(
            f"{kind.what} {text!r} does not import: {describe(error)}; correct the module or {kind.key}"
        ) from error


def _module_in(path: Path) -> ModuleType:
    name = f"mindgrpo_user_file_{path.stem}_{abs(hash(str(path))):x}"
    module_spec = importlib.util.spec_from_file_location(name, path)
    assert module_spec is not None and module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up here
    module_spec.loader.exec_module(module)
    return module


def describe(error: BaseException) -> str:
    """Returns the kind of error, its first line, and the deepest line outside this package and importlib."""
    text = (str(error).strip().splitlines() or ["no message"])[0]
    location = ""
    trace = error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if PACKAGE not in Path(file).parents and "importlib" not in file:
            location = f" at {file}:{trace.tb_lineno}"
        trace = trace.tb_next
    return f"{type(error).__name__}: {text[:LONGEST_MESSAGE]}{location}"


def nearest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" (the nearest name is {close[0]!r})" if close else ""


def public_callables(module: ModuleType) -> list[str]:
    return [key for key, held in vars(module).items() if callable(held) and key[0] != "_"]
