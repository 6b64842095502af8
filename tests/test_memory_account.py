"""The memory account of whole small runs: what the backend handed out, what is registered, and what the plan said.

Does not prove what an operation allocates for itself inside a graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import small_runs

from mindgrpo.backend.contract import Pool
from mindgrpo.config import load_config
from mindgrpo.grpo.roles import Roles
from mindgrpo.memory.residency import Residency
from mindgrpo.models.decoder_config import decoder_config
from mindgrpo.plan.run_plan import plan_run

CASES = {
    "mixed reference, penalty": ["--generate_config.sampling_config.repetition_penalty", "1.2"],
    "copied reference, adapters": [
        *("--ref_config.ref_model_mixup_alpha", "1.0"),
        *("--actor_config.lora.rank", "2"),
    ],
    "moments on the host": ["--actor_config.optimizer.opt_offload", "true"],
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    small_runs.make_inputs(folder)
    return folder


def registered(memory: Residency) -> set[int]:
    return {id(pool) for role in memory.roles.values() for pool in role.pools}


@pytest.mark.parametrize("case", CASES)
def test_every_pool_is_registered_in_every_phase_and_the_plan_has_the_same_bytes(
    case: str, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--rl_config.max_steps", "2", *CASES[case]]
    made: list[Roles] = []
    checked: list[str] = []
    make, activate, temporary = Roles.__init__, Residency.activate, Residency.temporary_host

    def making(self: Roles, *given: Any, **named: Any) -> None:
        make(self, *given, **named)
        made.append(self)

    def check(memory: Residency, when: str) -> None:
        handed_out: set[Pool] = set(made[-1].backend.live_pools)
        unregistered = [pool.num_bytes for pool in handed_out if id(pool) not in registered(memory)]
        assert unregistered == [], f"pools of these bytes have no role in {when}"
        checked.append(when)

    def activating(self: Residency, phase: str) -> None:
        activate(self, phase)
        check(self, phase)

    @contextmanager
    def for_a_while(self: Residency, name: str, pools: Any) -> Iterator[None]:
        with temporary(self, name, pools):
            check(self, name)
            yield

    monkeypatch.setattr(Roles, "__init__", making)
    monkeypatch.setattr(Residency, "activate", activating)
    monkeypatch.setattr(Residency, "temporary_host", for_a_while)
    small_runs.run(inputs, tmp_path / "run", *words)
    phases = {"reshard", "rollout", "reference", "old_logps", "update", "sync_reference"}
    assert phases | {"export_copy"} <= set(checked)
    memory = made[-1].residency
    planned = plan_of(inputs, words).memory()
    assert [row.by_role for row in memory.table()] == [row.by_role for row in planned]
    peaks = memory.ledger.peak_by_phase
    assert {row.phase: row.total for row in planned if row.phase in peaks} == peaks


def plan_of(inputs: Path, words: list[str]) -> Any:
    paths = ["--actor_checkpoint_path", str(inputs / "model")]
    paths += ["--dataset_file", str(inputs / "train.jsonl")]
    paths += ["--rl_config.eval_dataset_file", str(inputs / "train.jsonl")]
    config = load_config(inputs / "small.yaml", [*paths, *words]).config
    return plan_run(config, decoder_config(small_runs.MODEL, "here"), 1)
