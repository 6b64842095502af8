"""The Ray starter of the examples on two real Ray nodes of this machine: results, and a lost node's name.

The shortest form of scripts/faults/ray_job.py, with one rank a node and a very small model. Skipped without ray, as in
continuous integration. Does not prove anything of nodes with devices, nor of a first node that is lost: the starter
runs there and is lost with it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from small_runs import input_keys, make_inputs, reward_words
from test_two_hosts import ARGUMENTS

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts" / "faults"))

import ray_job  # noqa: E402
import two_hosts  # noqa: E402
from kill_matrix import words  # noqa: E402


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    if why := ray_job.cannot():
        pytest.skip(f"no Ray cluster can be made here: {why}")
    folder = tmp_path_factory.mktemp("inputs")
    make_inputs(folder, layers=2)
    keys = ARGUMENTS | input_keys(folder) | {"rl_config.max_steps": 3}
    return [*words(keys), *reward_words(folder)]


@pytest.mark.parametrize("case", [ray_job.same, ray_job.lost])
def test_ray_starts_the_run_that_flags_start_and_a_lost_node_is_named(
    case: ray_job.Case, tmp_path: Path, arguments: list[str]
) -> None:
    with two_hosts.two_networks() as networks:
        result = case(tmp_path, networks, 2, arguments)
    assert result["good"], json.dumps(result)
