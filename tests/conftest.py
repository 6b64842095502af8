"""Two processes share the suite (`-n 2`): what starts ranks of its own goes through one of them.

On 2 cores, two jobs of 8 ranks at a time would each look hung to the other's deadlines. A file's other tests stay
together, as they share what they have built.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from config_files import Loader
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

# Lines would be wrapped for the terminal of whoever runs the tests.
os.environ.pop("COLUMNS", None)

# Those that take longest first: the two processes then end at about the same time.
STARTS_RANKS = (
    "test_distributed",
    "test_faults_in_numbers",
    "test_faults",
    "test_two_hosts",
    "test_restarts",
    "test_several_trainers",
    "test_resume_on_ranks",
    "test_users_configuration",
    "test_launch_script",
    "test_launch_signals",
    "test_fork_server",
    "test_wheel",
    "test_engine_process",
    "test_engine_ends",
    "test_graph_collectives",
    "test_shared_memory",
    "test_health",
    "test_rank_log",
)


def _place(item: pytest.Item) -> tuple[int, str]:
    name = item.path.stem
    return (STARTS_RANKS.index(name), "") if name in STARTS_RANKS else (len(STARTS_RANKS), name)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_place)


class _OneForRanks(LoadFileScheduling):
    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return "ranks" if Path(file).stem in STARTS_RANKS else file


def pytest_collection_finish() -> None:
    """MindSpore collects garbage at every compilation: what was imported and collected by then takes no part."""
    gc.collect()
    gc.freeze()


# The marks of `--dist loadgroup` are not seen under pytest 9.
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> _OneForRanks:
    return _OneForRanks(config, log)


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
