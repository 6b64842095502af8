"""README's main command on one rank: the files, columns and figures that a run leaves.

Does not prove anything of several ranks (test_distributed.py), nor that the run learns: three steps are too few.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from small_clone import ROOT, make_clone

STEPS = 3
PHASES = ("reshard", "rollout", "score", "reference", "update")
COLUMNS = {
    *("step", "reward/mean", "reward/std", "loss", "kl", "entropy", "grad_norm", "lr"),
    *("clip_fraction", "zero_std_fraction", "completion_length/mean", "completion_length/max"),
    *("truncated_fraction", "logprob_gap/mean", "logprob_gap/max", "logprob_gap/differing"),
    *("updates_per_rollout", "tokens", "memory/rss", "reshard/bytes", "reshard/seconds"),
    *("weights_version", "time/step", *(f"time/{phase}" for phase in PHASES)),
}
COMPLETION = {
    *("step", "prompt", "completion", "answer", "finish_reason", "length", "rewards"),
    *("reward", "advantage", "token_ids"),
}


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    clone = make_clone(tmp_path_factory.mktemp("main") / "clone")
    clone.shell(f"bash scripts/quickstart.sh --ranks 1 --rl_config.max_steps {STEPS}")
    return clone.folder / "output" / "latest"


def test_a_run_leaves_the_files_that_the_page_on_monitoring_lists(run: Path) -> None:
    table = (ROOT / "docs/monitoring.md").read_text(encoding="utf-8").split("| file | content |")[1]
    rows = [line.split("|") for line in table.partition("\n\n")[0].splitlines() if "`" in line]
    asked_for = ("`monitor_config.", "`rl_config.", "`actor_config.")
    always = [row[1] for row in rows if not any(key in row[2] for key in asked_for)]
    names = [name for cell in always for name in re.findall(r"`([^`]+)`", cell)]
    assert len(names) > 8
    assert [name for name in names if not (run / name).exists()] == []


def test_every_step_has_every_column_and_generator_and_trainer_agree_in_every_bit(
    run: Path,
) -> None:
    rows = _lines(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert all(row.keys() >= COLUMNS for row in rows), COLUMNS - rows[0].keys()
    assert all(row["logprob_gap/max"] == row["logprob_gap/differing"] == 0 for row in rows)
    assert [row["weights_version"] for row in rows] == sorted(
        {row["weights_version"] for row in rows}
    )
    assert all(row["grad_norm"] > 0 for row in rows)


def test_every_completion_of_a_step_is_written_with_its_rewards_and_advantage(run: Path) -> None:
    rows, samples = _lines(run / "metrics.jsonl"), _lines(run / "completions.jsonl")
    for row in rows:
        own = [sample for sample in samples if sample["step"] == row["step"]]
        lengths = [sample["length"] for sample in own]
        assert sum(lengths) / len(lengths) == pytest.approx(row["completion_length/mean"])
        assert all(sample.keys() >= COMPLETION for sample in own)
        mean = sum(sample["reward"] for sample in own) / len(own)
        assert mean == pytest.approx(row["reward/mean"])


def test_the_summary_has_the_held_out_rewards_before_and_after(run: Path) -> None:
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    assert summary["steps"] == STEPS and summary["engine"] == "embedded"
    assert summary["eval_before"].keys() == summary["eval_after"].keys() != set()
