"""Two hosts, each a network of its own on this machine: results of one host, and losses that both tell.

The shortest form of scripts/faults/two_hosts.py, with one rank a host and a very small model. Does not prove anything
of HCCL, of three hosts, nor of networks that lose or delay packets.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
from small_runs import input_keys, make_inputs, reward_words
from test_ascendjob import variables_of

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts" / "faults"))

import two_hosts  # noqa: E402
from job import Job  # noqa: E402
from kill_matrix import words  # noqa: E402

RANKS = 2
ARGUMENTS = {
    "context.backend": "device",
    "rl_config.prompts_per_step": 2,
    "rl_config.num_generations": 4,
    "rl_config.eval_samples": 2,
    "rl_config.eval_steps": 1000,
    "rl_config.seq_length": 64,
    "actor_config.lr_schedule.lr_decay_style": "constant",
    "actor_config.parallel_config.data_parallel": 2,
    "actor_config.parallel_config.model_parallel": 1,
    "actor_config.parallel_config.pipeline_stage": 1,
    "generate_config.parallel_config.model_parallel": 1,
    "generate_config.sampling_config.max_tokens": 4,
}


@pytest.fixture(autouse=True)
def without_bounds_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LONGEST_RUN", "LOST_WITHIN_SECONDS"):
        monkeypatch.setattr(two_hosts, name, math.inf)


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    if why := two_hosts.missing():
        pytest.skip(why)
    folder = tmp_path_factory.mktemp("inputs")
    make_inputs(folder)
    return [*words(ARGUMENTS | input_keys(folder)), *reward_words(folder)]


def test_two_hosts_have_the_results_of_one_until_a_rank_is_killed_which_both_tell(
    tmp_path: Path, arguments: list[str]
) -> None:
    with Job(tmp_path / "alone", RANKS, [*arguments, "--rl_config.max_steps", "1"]) as alone:
        ended = alone.end(0.0, math.inf)
    assert ended.status == 0, ended.last_line
    with two_hosts.two_networks() as networks:
        many = [*arguments, "--rl_config.max_steps", "500"]
        result = two_hosts.kill(tmp_path, networks, RANKS, many)
    assert result["good"], json.dumps(result)
    run, expected = tmp_path / "kill" / "host_0" / "run", tmp_path / "alone" / "run"
    assert two_hosts.are_same(run, expected), two_hosts.differences(run, expected)
    assert two_hosts.rows(run / "metrics.jsonl")[0]["grad_norm"] > 0


def test_a_line_that_is_cut_is_told_by_both_hosts_of_an_ascendjob_with_the_name_of_the_other(
    tmp_path: Path, arguments: list[str]
) -> None:
    """Started as by MindCluster's operator, which says how many ranks there are, and where, in variables."""
    started = [variables_of(host, 1, RANKS, two_hosts.ADDRESSES[0], 17801) for host in range(2)]
    with two_hosts.two_networks() as networks:
        jobs = two_hosts.start(tmp_path, networks, None, arguments, started)
        result = two_hosts.cut_between(jobs, networks, step=0)
    assert result["good"], json.dumps(result)
    for host, job in enumerate(jobs):
        assert f"host {host} of 2: 1 of 2 ranks" in job.screen
