"""Fixtures of every test: what it finds does not depend on what ran before it, in this process or in none.

MindSpore compiles graphs, as it does in a run by default; what a module or a test changes of its mode, of the
environment, the current folder and the seeds ends with it.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
# pytest's own, which it changes between a test and its fixtures.
OF_PYTEST = "PYTEST_CURRENT_TEST"


@pytest.fixture(autouse=True, scope="module")
def begins_with_graphs() -> None:
    """Before the module's own fixtures, which may choose another mode for all of its tests."""
    os.chdir(ROOT)
    if "mindspore" in sys.modules:
        import mindspore as ms

        # MindSpore's threads for large operations spin between them, and take the cores from the workers beside.
        ms.set_context(mode=ms.GRAPH_MODE, runtime_num_threads=0, inter_op_parallel_num=1)


@pytest.fixture(autouse=True)
def keeps_mode() -> Iterator[None]:
    """A backend chooses the mode when it is made."""
    if "mindspore" not in sys.modules:
        yield
        return
    import mindspore as ms

    mode = ms.get_context("mode")
    yield
    ms.set_context(mode=mode)


@pytest.fixture(autouse=True)
def draws_from_a_seed() -> None:
    random.seed(0)
    np.random.seed(0)


@pytest.fixture(autouse=True)
def keeps_environment_and_folder() -> Iterator[None]:
    environment, folder = dict(os.environ), Path.cwd()
    yield
    os.chdir(folder)
    for name in os.environ.keys() - environment.keys() - {OF_PYTEST}:
        del os.environ[name]
    for name, value in environment.items():
        if name != OF_PYTEST and os.environ.get(name) != value:
            os.environ[name] = value
