"""Real runs of two ranks in which something is damaged on one of them: caught in that step, and named.

Training is DP2 and generation MP2, so that replicas, the reshard and shared draws are all there. Does not prove that
damage which leaves every bit of the weights and samples as they were is noticed, nor anything of accelerators.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from small_runs import input_keys, make_inputs

from mindgrpo.cli import replay
from mindgrpo.errors import UserError
from mindgrpo.run import batch_dump as dump
from mindgrpo.training.policy import Policy

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "grpo" / "tiny_arithmetic" / "grpo_config.yaml"
RUN_SECONDS = 240
LAYOUTS = {"actor_config": (2, 1, 1), "ref_config": (2, 1, 1), "generate_config": (1, 2, 1)}
SMALL = {
    "rl_config.max_steps": "3",
    "rl_config.prompts_per_step": "4",
    "rl_config.eval_samples": "4",
    "rl_config.eval_on_start": "false",
    "rl_config.num_generations": "4",
}
# Of runs in which nothing is the matter with the reference: ranks compile one graph less.
NO_REFERENCE = {"rl_config.beta": "0"}


def run(folder: Path, damage: str, **keys: str) -> tuple[int, str]:
    """The launcher's status and what was said."""
    make_inputs(folder)
    words = []
    for role, degrees in LAYOUTS.items():
        for name, degree in zip(
            ("data_parallel", "model_parallel", "pipeline_stage"), degrees, strict=True
        ):
            words += [f"--{role}.parallel_config.{name}", str(degree)]
    for key, value in (
        SMALL | input_keys(folder) | {"output_dir": str(folder / "run")} | keys
    ).items():
        words += [f"--{key}", value]
    own = Path(sys.executable).parent
    environment = {"DAMAGE": damage, "DAMAGED_RANK": "1", "PATH": f"{own}:{os.environ['PATH']}"}
    environment["MINDGRPO_LOG_DIR"] = str(folder / "logs")
    command = ["bash", "scripts/launch.sh", "--ranks", "2", "--", "scripts/faults/damage.py"]
    ended = subprocess.run(
        [*command, "--config", str(EXAMPLE), *words],
        cwd=ROOT,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=RUN_SECONDS,
    )
    return ended.returncode, ended.stdout


@pytest.fixture(scope="module")
def skipping(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run with something not finite in each of its steps but the third, which ends it after three in a row."""
    folder = tmp_path_factory.mktemp("skipping")
    damage = "nan_rewards@1,nan_advantages@2,nan_logps@4,nan_loss@5,nan_gradient@6"
    keys = {"rl_config.max_steps": "7", "rl_config.max_skipped_updates": "2"}
    status, said = run(folder, damage, **keys)
    assert status == 1, said[-3000:]
    return folder / "run", said


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_an_update_with_a_number_that_is_not_finite_is_skipped_on_all_ranks_and_counted(
    skipping: tuple[Path, str],
) -> None:
    folder, _ = skipping
    steps = rows(folder)
    assert [step["skipped_updates"] for step in steps] == [1, 1, 0, 1, 1]
    assert [step["weights_version"] for step in steps] == [0, 0, 1, 1, 1]
    assert [step["loss"] is None for step in steps] == [True, True, False, True, True]
    assert [step["updates_per_rollout"] for step in steps] == [1] * 5


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (1, "rewards of sample 1: nan"),
        (2, "advantages of sample 2: nan"),
        (4, "the reference's log-probs of sample 3, token 0: nan"),
        (5, "the loss: nan"),
        (6, "the gradient of model.embed_tokens.weight: nan"),
    ],
)
def test_it_is_named_with_its_step_and_rank(
    skipping: tuple[Path, str], step: int, words: str
) -> None:
    folder, said = skipping
    assert f"warning: step {step}: 1 of 1 updates skipped" in said
    # Data-parallel ranks have the sum of their gradients.
    first = 0 if "gradient" in words else 1
    assert f"{words}, first on rank {first}" in said
    kept = dump.read(folder / "dumps" / f"step_{step:06d}")
    assert kept.about.cause == words
    assert kept.about.members == list(range(16))
    # That of step 3 was made.
    assert kept.about.updates == (step > 3)


def test_the_batch_is_replayed_with_the_weights_that_saw_it(
    skipping: tuple[Path, str], tmp_path: Path
) -> None:
    folder = skipping[0] / "dumps" / "step_000004"
    told = tmp_path / "told.json"
    ended = subprocess.run(
        [sys.executable, "-m", "mindgrpo", "replay", str(folder), "--output", str(told)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS,
    )
    assert ended.returncode == 0, ended.stderr
    figures = json.loads(told.read_text())
    assert figures["stored"]["reference_logps"]["samples_not_finite"] == [3]
    assert figures["stored"]["generator_logps"]["not_finite"] == 0
    again = figures["replay"]
    assert again["samples whose log-probs are not finite now"] == []
    assert float(again["largest gap to the generator's log-probs"].split()[0]) < 1e-3
    assert again["update"].startswith("not made again")


def test_a_replay_draws_its_random_numbers_as_the_update_did(
    skipping: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By how many updates the policy has made."""
    made: list[int] = []

    def kept(policy: Policy, *_: object) -> SimpleNamespace:
        made.append(policy.updates)
        return SimpleNamespace(loss=0.0, grad_norm=0.0)

    monkeypatch.setattr("mindgrpo.training.update.update", kept)
    replay.main([str(skipping[0] / "dumps" / "step_000005")])
    assert made == [1]


@pytest.mark.parametrize(
    ("damage", "pattern", "done"),
    [
        ("reshard_places@2", r"rank 1 is not what the other replicas|first \S+down_proj", 1),
        ("replica_weight@1", r"the policy's \S+ on rank 1 is not what the other replicas have", 1),
        ("stale_generator@2", r"the generator's tensors are not the policy's of version 1", 1),
        ("token@2", r"rank 1 drew other tokens than the ranks \[0, 1\].*step 2", 1),
        ("seed", r"rank 1 starts with another configuration than rank 0: rl_config.seed is 1", 0),
    ],
)
def test_what_would_train_on_nonsense_ends_the_run_in_that_step(
    tmp_path: Path, damage: str, pattern: str, done: int
) -> None:
    status, said = run(tmp_path, damage, **NO_REFERENCE)
    assert status == (2 if damage == "seed" else 1), said[-3000:]
    assert re.search(pattern, said), said[-3000:]
    if done:
        assert len(rows(tmp_path / "run")) == done


def test_too_many_in_a_row_end_the_run_with_the_last_ones_name(skipping: tuple[Path, str]) -> None:
    _, said = skipping
    assert "3 updates in a row were skipped (rl_config.max_skipped_updates is 2)" in said
    assert "in step 6 for the gradient of model.embed_tokens.weight: nan" in said
    assert "python -m mindgrpo replay" in said


def test_a_dump_that_lacks_something_is_refused_in_a_sentence(
    skipping: tuple[Path, str], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="is not a dump of a batch"):
        dump.read(tmp_path)
    good = skipping[0] / "dumps" / "step_000001"
    for name in (dump.BATCH, dump.ARRAYS, dump.CONFIG):
        (tmp_path / name).write_bytes((good / name).read_bytes())
    (tmp_path / dump.ARRAYS).write_bytes((good / dump.ARRAYS).read_bytes()[:-100])
    with pytest.raises(UserError, match="cannot be read"):
        dump.read(tmp_path)
    (tmp_path / dump.BATCH).write_text("{}")
    with pytest.raises(UserError, match=dump.BATCH):
        dump.read(tmp_path)


def test_a_gap_beyond_the_limit_is_raised_on_every_rank(tmp_path: Path) -> None:
    """`stale_generator` is for a step that never comes: nothing is damaged here."""
    keys = {"rl_config.logprob_gap_limit": "1e-12", "context.batch_invariant": "false"}
    status, said = run(tmp_path, "stale_generator@9", **NO_REFERENCE, **keys)
    assert status == 1 and "log-probs of the same tokens differ by up to" in said
    logs = [path.read_text() for path in sorted((tmp_path / "logs").rglob("*.log"))]
    assert sum("GapTooLarge" in log for log in logs) == 2


DEVICE = {"context.backend": "device"}


def test_on_a_device_numbers_that_are_not_finite_are_skipped_and_a_damaged_reshard_ends_the_run(
    tmp_path: Path,
) -> None:
    damage = "nan_loss@1,nan_gradient@2,reshard_bit@3"
    status, said = run(tmp_path, damage, **DEVICE, **NO_REFERENCE)
    assert status == 1
    steps = rows(tmp_path / "run")
    assert [step["skipped_updates"] for step in steps] == [1, 1]
    assert [step["weights_version"] for step in steps] == [0, 0]
    assert "the generator's tensors are not the policy's" in said
