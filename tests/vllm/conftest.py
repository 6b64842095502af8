"""One process of transformers for all tests of the engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from engine_process import Oracle


@pytest.fixture(scope="session")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Oracle]:
    oracle = Oracle(tmp_path_factory.mktemp("oracle"))
    yield oracle
    oracle.close()
