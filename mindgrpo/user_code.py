"""Imports modules that users name, `package.module` or `file.py`, and says in a sentence what went wrong in them.

Also limits time and memory of code that processes what users supply: a template, a damaged file.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import importlib
import importlib.util
import os
import re
import resource
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from mindgrpo.errors import UserError

PACKAGE = Path(__file__).parent
LONGEST_MESSAGE = 300
# A name, perhaps behind a module or file, with arguments in brackets.
CALL = re.compile(r"(?P<name>(?:[^:]*:)?\s*[^\W\d]\w*)\s*(?P<arguments>\(.*\))", re.DOTALL)
PAGE_BYTES = resource.getpagesize()


@dataclass(frozen=True)
class Kind:
    """What is imported, such as "reward function", and the key that names it."""

    what: str
    key: str


def read_arguments(kind: Kind, written: str, text: str) -> dict[str, Any]:
    """Reads `(name=value, ...)` with plain values; `text` is what the user wrote. Raises UserError."""
    try:
        call = ast.parse(f"f{written}", mode="eval").body
        assert isinstance(call, ast.Call)
        if call.args:
            raise ValueError(f"{ast.unparse(call.args[0])} has no name")
        return {str(word.arg): ast.literal_eval(word.value) for word in call.keywords if word.arg}
    except (SyntaxError, ValueError, AssertionError) as error:
        raise UserError(
            f"{kind.what} {text!r}: {written} cannot be read as arguments ({getattr(error, 'msg', None) or error}); "
            f"write (name=value, ...) with plain values in {kind.key}"
        ) from None


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
    """Imports the file under its own name, by which pickle finds it in other processes, too.

    A file that has changed since is imported again. Where another module has the name, the file gets one of its own.
    """
    name, status = path.stem, path.stat()
    state = (status.st_mtime_ns, status.st_size, status.st_ino)
    known = sys.modules.get(name)
    if known is not None and _file_of(known) == path:
        if _states.get(path, state) == state:
            return known
    elif known is not None or not _is_found(name, path):
        name = f"mindgrpo_user_file_{name}_{hashlib.sha256(os.fsencode(path)).hexdigest()[:16]}"
    module_spec = importlib.util.spec_from_file_location(name, path)
    assert module_spec is not None and module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up here
    _states[path] = state
    try:
        module_spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


# Of imported files, when they were imported.
_states: dict[Path, tuple[int, int, int]] = {}


def _file_of(module: ModuleType) -> Path | None:
    file = getattr(module, "__file__", None)
    return Path(file).resolve() if file else None


def _is_found(name: str, path: Path) -> bool:
    """Returns whether a process with this one's search path imports `path` by `name`."""
    if "." in name:
        return False
    importlib.invalidate_caches()  # the file may be as new as what is remembered of its folder
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin is not None and Path(spec.origin).resolve() == path


def describe(error: BaseException) -> str:
    """Returns the kind of error, its first line with words, and the deepest line outside this package and importlib."""
    lines = str(error).strip().splitlines() or ["no message"]
    # NLTK frames what it says of missing data in lines of asterisks.
    text = next((line.strip() for line in lines if any(map(str.isalnum, line))), lines[0])
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


class OutOfTime(BaseException):
    """Not an Exception: jinja's compiler swallows those where it computes constants."""


@contextmanager
def limits(seconds: float, num_bytes: int) -> Iterator[None]:
    """Ends the code inside after `seconds` of the process's own time, and lets it allocate `num_bytes`.

    Raises OutOfTime or MemoryError. Both limits are the process's, so they are set in its main thread alone, in which
    runs prepare their prompts; other threads go without.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_AS)
    handler = signal.signal(signal.SIGVTALRM, _out_of_time)
    limit_memory(num_bytes)
    # Again every second, in case the first one met code that no exception leaves.
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, before)
        signal.signal(signal.SIGVTALRM, handler or signal.SIG_DFL)


def limit_memory(num_bytes: int) -> None:
    """Limits what this process may allocate from now on to `num_bytes`, unless it has a lower limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    statm = os.open("/proc/self/statm", os.O_RDONLY)
    in_use = int(os.read(statm, 64).split()[0]) * PAGE_BYTES
    os.close(statm)
    bounds = [size for size in (in_use + num_bytes, soft, hard) if size != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(bounds), hard))


def _out_of_time(*_: object) -> NoReturn:
    raise OutOfTime
