"""The total of a sample is one number: what advantages came from, what the run's files hold, and what its page shows.

A whole run whose reward functions have arguments and weights; test_environment_runs.py has one with an environment.
Does not prove how the page looks.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from report_runs import data_of
from small_runs import input_keys, make_inputs, rows

from mindgrpo.config import load_config

REWARDS = """
def graded(completions, answers, base=1):
    return [sum(map(ord, text)) % base / base for text in completions]

def short(completions, answers):
    return [float(len(text) % 2) for text in completions]
"""
WEIGHTS = {"graded": 0.25, "short": 2.0}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from mindgrpo.trainer import GRPOTrainer

    folder = tmp_path_factory.mktemp("totals")
    make_inputs(folder)
    (folder / "rewards.py").write_text(REWARDS)
    file = folder / "rewards.py"
    words = [f"--{key}={value}" for key, value in input_keys(folder).items()]
    words += [f"--output_dir={folder / 'run'}", "--rl_config.max_steps=2"]
    words.append("--monitor_config.report=true")
    functions = [f"{file}:graded(base=5)", f"{file}:short"]
    words.append(f"--reward_config.verifier_function={json.dumps(functions)}")
    words.append(f"--reward_config.verifier_weight={json.dumps(list(WEIGHTS.values()))}")
    return GRPOTrainer(load_config(folder / "small.yaml", words)).train()


@pytest.fixture(scope="module")
def shown(whole: Path) -> dict[str, Any]:
    return data_of((whole / "report.html").read_text(encoding="utf-8"))


def groups_of(shown: dict[str, Any], step: int) -> list[list[dict[str, Any]]]:
    return [group["samples"] for group in shown[f"step-0-{step}"]["groups"]]


def test_the_pages_totals_are_those_that_advantages_came_from(
    whole: Path, shown: dict[str, Any]
) -> None:
    num_different = 0
    for row in rows(whole):
        groups = groups_of(shown, row["step"])
        totals = [sample["total"] for samples in groups for sample in samples]
        assert np.mean(totals) == pytest.approx(row["reward/mean"], abs=1e-5)
        for samples in groups:
            total, advantage = (np.array([s[k] for s in samples]) for k in ("total", "advantage"))
            centred = total - total.mean()
            assert np.sign(advantage).tolist() == np.sign(centred.round(6)).tolist()
            assert np.allclose(
                np.outer(centred, advantage), np.outer(advantage, centred), atol=1e-4
            )
            num_different += bool(advantage.any())
    assert num_different


def weighted(rewards: dict[str, float]) -> float:
    by_function = {name.partition("(")[0].rpartition(":")[2]: v for name, v in rewards.items()}
    return sum(WEIGHTS[name] * value for name, value in by_function.items())


@pytest.mark.parametrize("name", ["completions", "eval_completions"])
def test_every_sample_in_a_runs_files_has_its_total(whole: Path, name: str) -> None:
    found = [json.loads(line) for line in (whole / f"{name}.jsonl").open()]
    assert found
    for row in found:
        assert row["reward"] == pytest.approx(weighted(row["rewards"]), abs=1e-5)


def test_held_out_answers_have_the_weighted_total_and_its_change(shown: dict[str, Any]) -> None:
    changes = set()
    for row in shown["data"]["heldOut"]["rows"]:
        before, after = row["cells"]
        for cell in (before, after):
            assert cell["total"] == pytest.approx(weighted(cell["rewards"]), abs=1e-5)
        assert row["change"] == pytest.approx(after["total"] - before["total"], abs=1e-5)
        changes.add(row["change"])
    assert changes - {0.0}
