"""Which modules each file of the repository imports, read from the sources: nothing is executed.

Knows mindgrpo/ and the modules beside the tests. Does not know what a program that a test starts imports, unless the
test names mindgrpo's command line: such a test counts as importing all of it.
"""

from __future__ import annotations

import ast
from collections import deque
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Where modules are looked up that are not in the package, as in PYTHONPATH of the tests and of their ranks.
TEST_FOLDERS = (ROOT / "tests", ROOT / "tests" / "distributed", ROOT / "tests" / "vllm")
ENTRY = ROOT / "mindgrpo" / "__main__.py"


@cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _statements(path: Path, late: bool) -> Iterator[ast.AST]:
    """Statements of `path`; those inside functions and of `if TYPE_CHECKING` only with `late`."""
    waiting: deque[ast.AST] = deque(_parsed(path).body)
    while waiting:
        node = waiting.popleft()
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        is_for_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        if late or not (is_function or is_for_types):
            yield node
            for name in ("body", "handlers", "orelse", "finalbody", "cases"):
                waiting.extend(getattr(node, name, ()))


@cache
def imported_names(path: Path, late: bool = True) -> frozenset[str]:
    """Dotted names that `path` imports; of `from a import b` both `a` and `a.b`."""
    names: set[str] = set()
    for node in _statements(path, late):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return frozenset(names)


@cache
def strings(path: Path) -> frozenset[str]:
    """The string constants of `path`."""
    return frozenset(
        node.value
        for node in ast.walk(_parsed(path))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


@cache
def _files_of(name: str) -> tuple[Path, ...]:
    """The module `name`, and the packages that it is in, which Python imports before it."""
    parts = name.split(".")
    folders = (ROOT,) if parts[0] == "mindgrpo" else TEST_FOLDERS
    bases = [folder.joinpath(*parts[: i + 1]) for folder in folders for i in range(len(parts))]
    named = [own for base in bases for own in (base.with_suffix(".py"), base / "__init__.py")]
    return tuple(own for own in named if own.is_file())


@cache
def imported_files(path: Path, late: bool = True) -> frozenset[Path]:
    """Files of the repository that `path` imports itself."""
    files = {own for name in imported_names(path, late) for own in _files_of(name)}
    if path.name.startswith("test_") and "mindgrpo" in strings(path):
        files.add(ENTRY)
    return frozenset(files - {path})


def distances(path: Path, late: bool = True) -> dict[Path, int]:
    """Every file that `path` imports, over how many imports; 0 for itself.

    Without `late`, what the package imports inside of functions is left out.
    """
    found = {path: 0}
    waiting = deque([path])
    while waiting:
        current = waiting.popleft()
        is_of_package = ROOT / "mindgrpo" in current.parents
        for own in imported_files(current, late or not is_of_package):
            if own not in found:
                found[own] = found[current] + 1
                waiting.append(own)
    return found


def distance_to(path: Path, changed: Iterable[Path]) -> float:
    """Over how many imports `path` reaches one of the `changed` files; infinity where it reaches none.

    A changed file that is no module of Python stands for the modules of its folder (a kernel in C, a table in YAML),
    and is reached at once by a file that names it.
    """
    found = distances(path)
    wanted: set[Path] = set()
    nearest = float("inf")
    for own in changed:
        if own.suffix == ".py":
            wanted.add(own)
        else:
            wanted.update(own.parent.glob("*.py"))
            if any(own.name in text for text in strings(path)):
                nearest = 1.0
    return min((float(found[own]) for own in wanted if own in found), default=nearest)
