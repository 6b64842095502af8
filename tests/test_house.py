"""The rules of the house, read from the sources: levels, device words, sizes, names, the tree of folders.

Does not prove that a module does what its docstring says, nor that the figures of the pages are right.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from mindgrpo.cli.verbs import MODULES, USAGE

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "mindgrpo"

# Rooms and root modules of mindgrpo/, lowest first: each may import itself and what stands before it.
ROOMS = (
    "errors",
    "processes",
    "strict_files",
    "settings",
    "user_code",
    "parallel",
    "health",
    "algorithm",
    "backend",
    "config",
    "data",
    "weights",
    "models",
    "memory",
    "weight_sync",
    "training",
    "workers",
    "rewards",
    "tools",
    "environments",
    "rollout",
    "checkpoint",
    "monitor",
    "report",
    "plan",
    "grpo",
    "run",
    "launch",
    "trainer",
    "doctor",
    "cli",
    "__main__",
)
MAX_ROOT_MODULES = 6
WITHOUT_MINDSPORE = (
    "errors",
    "settings",
    "processes",
    "strict_files",
    "health",
    "config",
    "parallel",
    "data",
    "workers",
    "rewards",
    "tools",
    "environments",
    "algorithm",
    "monitor",
    "report",
    "launch",
    "checkpoint/folders",
    "models/decoder_config",
    "models/families",
    "models/parameters",
    "weights/model_files",
    "weight_sync/plan",
    "run/machine_checks",
    "cli/verbs",
    "cli/replay",
    "cli/watch",
    "doctor/jobs",
    "doctor/probes/host",
)
# Rooms above mindgrpo/config/ that get settings of their own.
WITHOUT_CONFIG = (
    "data",
    "weights",
    "memory",
    "weight_sync",
    "training",
    "workers",
    "rewards",
    "tools",
    "environments",
    "checkpoint",
)
# Runs in vLLM's environment, where mindgrpo's backends are not.
ENGINE = PACKAGE / "rollout" / "vllm" / "child"
NAME_DEVICES = (PACKAGE / "backend", PACKAGE / "doctor" / "probes", ENGINE)
DEVICE_WORDS = (
    "cpu|ascend|npu|hccl|mccl|lccl|cann|madvise|empty_cache|FlashAttentionScore"
    "|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all"
)
FORBIDDEN_NAMES = re.compile(r"(^|_)(utils?|helpers?|common|managers?|misc)$")
LONG_FILE, LONG_FUNCTION = 500, 80


def repository_files() -> list[str]:
    """What git tracks or would track: what a run leaves behind does not count."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git clone: what belongs to the repository is not known")
    return [name for name in listed.stdout.split("\0") if name and (ROOT / name).exists()]


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path) -> Iterator[str]:
    """Full names of what a file imports, inside functions and for type checking too.

    `from a import b` gives a.b, which may be a module.
    """
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}:{node.lineno} imports relatively"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room_of(module: str) -> str | None:
    """The part of mindgrpo/ that an import goes to; None for the package itself and for others."""
    parts = module.split(".")
    if parts[0] != "mindgrpo" or len(parts) < 2:
        return None
    inside = (PACKAGE / parts[1]).is_dir() or (PACKAGE / f"{parts[1]}.py").is_file()
    return parts[1] if inside else None


def rooms() -> list[str]:
    folders = [path.parent.name for path in PACKAGE.glob("*/__init__.py")]
    return sorted(folders + [path.stem for path in PACKAGE.glob("*.py") if path.stem != "__init__"])


def test_every_room_has_its_level() -> None:
    assert set(rooms()) <= set(ROOMS), "give the new room its level in ROOMS"


def test_the_package_has_few_modules_outside_its_rooms() -> None:
    modules = sorted(path.name for path in PACKAGE.glob("*.py"))
    assert len(modules) <= MAX_ROOT_MODULES, modules


def test_imports_go_down_only() -> None:
    wrong = []
    for path in sources("mindgrpo"):
        here = room_of(module_of(path))
        for target in imports_of(path):
            there = room_of(target)
            if here and there and ROOMS.index(there) > ROOMS.index(here):
                wrong.append(f"{name_of(path)} imports {target}")
    assert wrong == []


def test_no_module_imports_itself_in_a_circle() -> None:
    known = {module_of(path): path for path in sources("mindgrpo")}
    edges: dict[str, set[str]] = {}
    for module, path in known.items():
        targets = set(imports_of(path))
        reached = {name if name in known else name.rpartition(".")[0] for name in targets}
        edges[module] = (reached & known.keys()) - {module, "mindgrpo"}
    # What imports nothing that is left can be taken away; what remains then is a circle.
    while free := {module for module in edges if not edges[module]}:
        edges = {module: edges[module] - free for module in edges if module not in free}
    assert sorted(edges) == []


def test_what_needs_no_mindspore_does_not_import_it_not_even_through_others() -> None:
    """It takes two seconds, on every start of a command or of a worker process."""
    paths = [
        path
        for part in WITHOUT_MINDSPORE
        for path in [PACKAGE / part, PACKAGE / f"{part}.py", *(PACKAGE / part).rglob("*.py")]
        if path.is_file() and "sandboxed" not in path.parts
    ]
    names = [module_of(path) for path in paths]
    program = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    if 'mindspore' in sys.modules: sys.exit(name + ' imports it')\n"
    )
    command = [sys.executable, "-c", program, *names]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def test_rooms_with_settings_of_their_own_do_not_import_the_configuration() -> None:
    wrong = [
        f"{name_of(path)} imports {target}"
        for part in WITHOUT_CONFIG
        for path in sources(f"mindgrpo/{part}")
        for target in imports_of(path)
        if room_of(target) == "config"
    ]
    assert wrong == []


def test_device_words_are_said_in_the_backend_only() -> None:
    word = re.compile(rf"\b({DEVICE_WORDS})\b", re.IGNORECASE)
    wrong = [
        f"{name_of(path)}:{number} says {found.group()!r}"
        for path in sources("mindgrpo")
        if not any(folder in path.parents for folder in NAME_DEVICES)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        for found in word.finditer(line)
    ]
    assert wrong == []


def test_cells_with_a_gradient_of_their_own_do_not_return_inputs_side_by_side() -> None:
    """Later layers would read other numbers: docs/extending.md, "A cell with a gradient of its own"."""
    own: dict[str, ast.FunctionDef] = {}
    for path in sources("mindgrpo"):
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        for cell in (node for node in nodes if isinstance(node, ast.ClassDef)):
            methods = {node.name: node for node in cell.body if isinstance(node, ast.FunctionDef)}
            if {"bprop", "construct"} <= methods.keys():
                own[f"{name_of(path)} {cell.name}"] = methods["construct"]
    assert len(own) >= 13
    wrong = []
    for name, construct in own.items():
        inputs = {argument.arg for argument in construct.args.args}
        for node in ast.walk(construct):
            if isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple):
                returned = {each.id for each in node.value.elts if isinstance(each, ast.Name)}
                wrong += [f"{name} returns {each}" for each in sorted(returned & inputs)]
    assert wrong == []


@pytest.fixture(autouse=True, scope="module")
def outliers() -> None:
    """Warns of files and functions that have grown long; a subject may need it."""
    for path in sources("mindgrpo", "scripts", "examples", "tests"):
        text = path.read_text(encoding="utf-8")
        if text.count("\n") > LONG_FILE:
            warnings.warn(f"{name_of(path)} has {text.count(chr(10))} lines", stacklevel=1)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if num_lines > LONG_FUNCTION:
                    where = f"{name_of(path)}:{node.lineno} {node.name}"
                    warnings.warn(f"{where} has {num_lines} lines", stacklevel=1)


def test_no_file_has_a_name_that_says_nothing() -> None:
    names = {part for name in repository_files() for part in Path(name).with_suffix("").parts}
    assert [name for name in sorted(names) if FORBIDDEN_NAMES.search(name)] == []


def test_no_variable_of_the_package_has_a_name_that_says_nothing() -> None:
    vague = {"place", "found", "given", "told", "said", "pieces", "parts", "ways"}
    wrong = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            stored = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
            name = node.id if stored else node.arg if isinstance(node, ast.arg) else ""
            if name in vague:
                wrong.append(f"{name_of(path)}:{node.lineno} {name}")
    assert not wrong


def test_every_module_says_what_it_is() -> None:
    files = sources("mindgrpo", "scripts", "examples", "tests")
    dumb = [path for path in files if not ast.get_docstring(ast.parse(path.read_text("utf-8")))]
    assert [name_of(path) for path in dumb] == []


def tree() -> dict[str, str]:
    """Path and comment of each line of the tree in docs/architecture.md."""
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```tree\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 1, "docs/architecture.md has one block that starts with ```tree"
    pairs = [(line.split(maxsplit=1) + [""])[:2] for line in blocks[0].splitlines() if line.strip()]
    return {path: comment for path, comment in pairs}


def test_the_tree_names_only_what_exists_and_says_what_it_is() -> None:
    for path, comment in tree().items():
        assert (ROOT / path).exists(), f"the tree names {path}, which is not there"
        assert (ROOT / path).is_dir() == path.endswith("/"), f"{path}: folders end with a slash"
        assert comment.strip(), f"the tree does not say what {path} is"


def test_the_tree_leaves_nothing_out() -> None:
    named = {path.rstrip("/") for path in tree()}
    prefixes = named | {path.split("/")[0] for path in named}
    top = {name.split("/")[0] for name in repository_files()}
    assert sorted(top - prefixes) == []
    paths = {f"mindgrpo/{room}" for room in rooms()}
    paths = {path if (ROOT / path).is_dir() else f"{path}.py" for path in paths}
    assert sorted(paths - named) == []


def test_commands_in_readme_and_docs_exist() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    guides = sorted((ROOT / "docs").glob("*.md"))
    pages = "\n".join([readme, *(path.read_text(encoding="utf-8") for path in guides)])
    named = re.compile(r"\b(?:bash|source|python) ((?:scripts|examples)/[\w./-]*\w)")
    scripts = set(named.findall(pages))
    assert {"scripts/quickstart.sh", "scripts/run_tests.sh"} <= set(named.findall(readme))
    assert [name for name in sorted(scripts) if not (ROOT / name).is_file()] == []
    verbs = set(re.findall(r"\bpython -m mindgrpo ([a-z]+)", pages))
    modules = {verb: PACKAGE / "cli" / f"{MODULES.get(verb, verb)}.py" for verb in USAGE}
    assert sorted(verbs - USAGE.keys()) == []
    assert [verb for verb, module in modules.items() if not module.is_file()] == []


def test_files_that_the_pages_name_exist() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
    # Files of the package are named from the clone's folder or from the package's; others are a run's or a user's.
    above = dict.fromkeys(("mindgrpo", "tests", "docs", "scripts", "examples"), ROOT)
    above |= dict.fromkeys(rooms(), PACKAGE)
    missing, num_paths = [], 0
    for page in pages:
        for name in re.findall(r"`([\w.]+(?:/[\w.]+)+/?)`", page.read_text(encoding="utf-8")):
            folder = above.get(name.split("/")[0])
            # `checkpoint/errors` is a metric.
            folder = None if folder == PACKAGE and not Path(name).suffix else folder
            num_paths += folder is not None
            if folder is not None and not (folder / name).exists():
                missing.append(f"{page.name} names {name}")
    assert missing == [] and num_paths > 60
