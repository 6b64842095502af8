"""Four processes share the suite (`-n 4`) on 2 cores, as some tests wait more than they compute.

What starts ranks of its own goes through one of them: two jobs of 8 ranks at a time would each look hung to the other's
deadlines. So does what starts and ends other processes. A file's other tests stay together, as they share what they
have built.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from config_files import Loader
from source_cache import cache_sources
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

# Lines would be wrapped for the terminal of whoever runs the tests.
os.environ.pop("COLUMNS", None)
# Of the graphs that MindSpore is asked to write, those that tests read: writing all takes longer than compiling.
os.environ["MS_DEV_DUMP_IR_PASSES"] = "validate,hwopt_d_after_optimization"

GROUPS = {
    "ranks": (
        "test_distributed",
        "test_faults_in_numbers",
        "test_users_configuration",
        "test_two_hosts",
        "test_faults",
        "test_resume_on_ranks",
        "test_several_trainers",
        "test_graph_collectives",
    ),
    "processes": (
        "test_engine_ends",
        "test_engine_process",
        "test_launch_script",
        "test_restarts",
        "test_wheel",
        "test_shared_memory",
        "test_fork_server",
        "test_rank_log",
        "test_launch_signals",
        "test_health",
    ),
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
FIRST = (*GROUPS["ranks"], *GROUPS["processes"], *LONGEST)
GROUP_OF = {name: group for group, names in GROUPS.items() for name in names}


def pytest_configure(config: pytest.Config) -> None:
    """Gives programs that tests start the system's allocator, as users' have, and not that of run_tests.sh.

    test_distributed.py, whose ranks compile most, gives it to its own.
    """
    starts_others = bool(config.getoption("numprocesses", None)) and not hasattr(
        config, "workerinput"
    )
    if not starts_others and "mimalloc" in os.environ.get("LD_PRELOAD", ""):
        os.environ["TEST_ALLOCATOR"] = os.environ.pop("LD_PRELOAD")


def _place(item: pytest.Item) -> tuple[int, str]:
    name = item.path.stem
    return (FIRST.index(name), "") if name in FIRST else (len(FIRST), name)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_place)


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
