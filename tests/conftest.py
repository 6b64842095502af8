"""Chooses and orders the tests: tiers, shards and changed files (tiers.py), and which files wait for each other.

Four processes share the whole suite (`-n 4`) on 2 cores, as some tests wait more than they compute. A file's tests stay
together, as they share what they have built.
"""

from __future__ import annotations

import gc
import os
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiers
from config_files import Loader
from import_graph import ROOT, distance_to
from isolation import (  # noqa: F401 (fixtures of every test)
    begins_with_graphs,
    draws_from_a_seed,
    keeps_environment_and_folder,
    keeps_mode,
)
from source_cache import cache_sources
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

# Lines would be wrapped for the terminal of whoever runs the tests.
os.environ.pop("COLUMNS", None)
# Of the graphs that MindSpore is asked to write, those that tests read: writing all takes longer than compiling.
os.environ["MS_DEV_DUMP_IR_PASSES"] = "validate,hwopt_d_after_optimization"

# Files of a group run in one process, one after the other.
GROUPS = {
    # Jobs of many ranks: two at a time would each look hung to the other's deadlines.
    "ranks": (
        "test_distributed",
        "test_users_configuration",
        "test_two_hosts",
        "test_faults",
        "test_ray_job",
        "test_resume_on_ranks",
        "test_named_sources",
    ),
    # Share a process of transformers.
    "vllm": ("test_engine_process", "test_engine_ends"),
    # Look for each other's segments in shared memory.
    "engine doubles": ("test_vllm_process", "test_vllm_devices"),
}
# Of the others those that take longest: short ones are left for the end, which all processes then reach together.
LONGEST = (
    "test_doctor_jobs",
    "test_compute_dtype",
    "test_device_runs",
    "test_update",
    "test_benches",
    "test_docs_commands",
    "test_trackers",
    "test_runs_that_go_on",
    "test_resume",
    "test_full_disk",
    "test_sampling",
)
FIRST = (*(name for names in GROUPS.values() for name in names), *LONGEST)
GROUP_OF = {name: group for group, names in GROUPS.items() for name in names}


# Run whole in the quick tier, as their imports reach a change.
WHOLE_FILES = pytest.StashKey[frozenset[Path]]()
LEFT_OUT = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("mindgrpo")
    group.addoption("--tier", choices=("quick", "all"), default="all", help="default: all")
    group.addoption("--shard", choices=tiers.SHARDS, help="run one part of the whole suite")
    group.addoption(
        "--changed",
        metavar="REV",
        help="with --tier quick: also run the test files whose imports reach what has changed since REV",
    )
    group.addoption(
        "--file-order", type=int, metavar="SEED", help="run files in the order drawn with SEED"
    )
    group.addoption(
        "--first", metavar="PATH", help="begin with the test files that import PATH most directly"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Gives programs that tests start the system's allocator, as users' have, and not that of run_tests.sh.

    test_distributed.py, whose ranks compile most, gives it to its own.
    """
    # Files run in the order in which they were collected.
    config.option.loadscopereorder = False
    starts_others = bool(config.getoption("numprocesses", None)) and not hasattr(
        config, "workerinput"
    )
    if not starts_others and "mimalloc" in os.environ.get("LD_PRELOAD", ""):
        os.environ["TEST_ALLOCATOR"] = os.environ.pop("LD_PRELOAD")
    changed = tiers.changed_since(config.option.changed) if config.option.changed else []
    config.stash[WHOLE_FILES] = tiers.reaching(changed)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out the files of other tiers and shards without importing them."""
    if not collection_path.name.startswith("test_") or collection_path.suffix != ".py":
        return None
    options = config.option
    if options.shard and tiers.shard_of(collection_path) != options.shard:
        return True
    if options.tier == "all" or collection_path in config.stash[WHOLE_FILES]:
        return None
    return None if tiers.is_quick(collection_path) else True


def _name(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[2]


def _leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves the quick tier's tests in `items`."""
    if not (hasattr(config, "workerinput") or config.option.keyword):
        names: dict[Path, list[str]] = {}
        for item in items:
            names.setdefault(item.path, []).append(_name(item))
        unused = [
            f"{path.name}: '{word}'"
            for path, own in names.items()
            for word in tiers.unused_words(path, own)
        ]
        if unused:
            raise pytest.UsageError(f"words of tests/tiers.py are in no test's id: {unused}")
    whole = config.stash[WHOLE_FILES]
    left_out = [
        item
        for item in items
        if item.path not in whole and not tiers.is_quick_test(item.path, _name(item))
    ]
    items[:] = [item for item in items if item not in {*left_out}]
    config.hook.pytest_deselected(items=left_out)
    config.stash[LEFT_OUT] = len(left_out)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.tier == "quick":
        _leave_out(config, items)
    files = sorted({item.path for item in items})
    if config.option.file_order is not None:
        random.Random(config.option.file_order).shuffle(files)
    elif config.option.first:
        changed = [(ROOT / config.option.first).resolve()]
        files.sort(key=lambda path: distance_to(path, changed))
    else:
        files.sort(key=lambda path: FIRST.index(path.stem) if path.stem in FIRST else len(FIRST))
    place = {path: index for index, path in enumerate(files)}
    items.sort(key=lambda item: place[item.path])


class _Grouped(LoadFileScheduling):
    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return GROUP_OF.get(Path(file).stem, file)


def pytest_collection_finish() -> None:
    """MindSpore collects garbage at every compilation: what was imported and collected by then takes no part."""
    gc.collect()
    gc.freeze()
    cache_sources()


# The marks of `--dist loadgroup` are not seen under pytest 9.
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> _Grouped:
    return _Grouped(config, log)


@pytest.fixture(autouse=True, scope="module")
def draws_no_curve(request: pytest.FixtureRequest) -> Iterator[None]:
    """A picture takes a run of this process as long as some steps; test_monitor.py and launched runs draw it."""
    with pytest.MonkeyPatch.context() as patch:
        if request.path.stem != "test_monitor":
            patch.setattr("mindgrpo.monitor.curve.CurveProcess.draw_last", lambda *_: None)
        yield


@pytest.fixture
def load(tmp_path: Path) -> Loader:
    return Loader(tmp_path)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = session.config.stash.get(LEFT_OUT, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    node.config.stash[LEFT_OUT] = getattr(node, "workeroutput", {}).get("left_out", 0)


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Prints what every shard ran, with the seconds that its tests took in all processes together."""
    if config.option.tier != "all" or config.option.file_order is None:
        return
    seconds, counts = Counter[str](), Counter[str]()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                shard = tiers.shard_of(ROOT / report.nodeid.partition("::")[0])
                seconds[shard] += report.duration
                counts[shard] += report.when == "call" or report.outcome != "passed"
    terminalreporter.section("shards")
    for shard in tiers.SHARDS:
        if counts[shard]:
            terminalreporter.line(f"{shard:24}{counts[shard]:6} tests {seconds[shard]:8.0f} s")


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Ends the quick tier with what it did not run."""
    if config.option.tier != "quick" or hasattr(config, "workerinput"):
        return
    files = tiers.test_files()
    others = [own for own in files if pytest_ignore_collect(own, config)]
    left_out = config.stash.get(LEFT_OUT, 0)
    print(
        f"quick tier: not run are {len(others)} of {len(files)} test files (among them vLLM, MindSpore's own "
        f"communication, faults and the documents) and {left_out} tests of the others. All of them: "
        "bash scripts/run_tests.sh --all"
    )
