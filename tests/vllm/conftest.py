"""One process of transformers for all tests of the engine, and an engine of the untied model for each file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from engine_process import Oracle
from engine_subject import Subject, started


@pytest.fixture(scope="session")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Oracle]:
    oracle = Oracle(tmp_path_factory.mktemp("oracle"))
    yield oracle
    oracle.close()


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    """With one worker; the last test of test_engine_process.py stops it."""
    subject = started(tmp_path_factory.mktemp("untied") / "model", "untied")
    yield subject
    subject.engine.close()
