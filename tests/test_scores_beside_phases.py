"""Reward functions score while the model computes: in a run, in an evaluation, and where something fails.

Waits for events: a function that returns only once another phase has begun ends no run that scores before it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import small_runs

from mindgrpo.grpo.ended_groups import EndedGroups
from mindgrpo.grpo.roles import Roles
from mindgrpo.monitor.metrics import read_metrics
from mindgrpo.rollout.replicas import Replicas

# Less than the deadline of a function.
PATIENCE = 9.0
# Samples of the trial at a run's start.
TRIED = 2
PLAIN = ("--rl_config.dynamic_sampling=false", "--rl_config.eval_steps=0")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    small_runs.make_inputs(folder)
    return folder


class Events:
    """Set where a run calls what is watched, and reset by the reward that waits for it."""

    def __init__(self) -> None:
        self.happened = threading.Event()

    def reward(self, completions: Sequence[str], answers: Sequence[str]) -> list[float]:
        if len(completions) <= small_runs.EVAL_SAMPLES:
            return small_runs.spread(completions, answers)
        assert self.happened.wait(PATIENCE), "the run waits for scores before it goes on"
        self.happened.clear()
        return small_runs.spread(completions, answers)


def test_scores_are_waited_for_after_the_references_pass_and_have_the_same_bits(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = small_runs.run(inputs, tmp_path / "plain", *PLAIN)
    events, enter = Events(), Roles.enter

    def entered(roles: Roles, phase: str) -> None:
        enter(roles, phase)
        if phase == "reference":
            events.happened.set()

    monkeypatch.setattr(Roles, "enter", entered)
    run = small_runs.run(inputs, tmp_path / "run", *PLAIN, reward=named(events.reward))
    assert small_runs.rows(run) == small_runs.rows(expected)
    assert small_runs.model_bits(run) == small_runs.model_bits(expected)
    assert all(row["time/score_hidden"] > 0 for row in read_metrics(run / "metrics.jsonl"))


def named(reward: Any) -> Any:
    """Scores are reported by a function's name."""

    def spread(completions: Sequence[str], answers: Sequence[str]) -> list[float]:
        scores: list[float] = reward(completions, answers)
        return scores

    return spread


ENDS = "--reward_config.score_as_ended=true"


@pytest.mark.parametrize("backend", ["shared_memory", "device"])
def test_groups_are_scored_while_others_are_generated_with_the_same_bits(
    inputs: Path, tmp_path: Path, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Generation goes on only once the first group that has ended is being scored; others wait for a slot."""
    words = [f"--context.backend={backend}", "--rl_config.eval_steps=0"]
    words += ["--generate_config.max_num_seqs=4"]
    expected = small_runs.run(inputs, tmp_path / "whole", *words)
    sizes: list[int] = []
    called, add = threading.Event(), EndedGroups.add

    def added(groups: EndedGroups, samples: Sequence[Any]) -> None:
        called.clear()
        before = groups.num_whole
        add(groups, samples)
        if (before, groups.num_whole) == (0, 1):
            assert called.wait(PATIENCE), "the group is not scored before the others have ended"

    monkeypatch.setattr(EndedGroups, "add", added)

    def spread(completions: Sequence[str], answers: Sequence[str]) -> list[float]:
        sizes.append(len(completions))
        called.set()
        return small_runs.spread(completions, answers)

    run = small_runs.run(inputs, tmp_path / "ended", *words, ENDS, reward=spread)
    assert small_runs.rows(run) == small_runs.rows(expected)
    assert small_runs.model_bits(run) == small_runs.model_bits(expected)
    assert small_runs.completions(run) == small_runs.completions(expected)
    # A step has 12 samples in groups of 4.
    assert sizes.count(4) >= small_runs.STEPS and 12 not in sizes


def test_a_function_that_fails_on_a_group_is_counted_as_one_that_fails_on_the_step(
    inputs: Path, tmp_path: Path
) -> None:
    def spread(completions: Sequence[str], answers: Sequence[str]) -> list[float | None]:
        scores: list[float | None] = [*small_runs.spread(completions, answers)]
        return [
            float("nan") if text[:1] in "abcdefghijklm" else s
            for text, s in zip(completions, scores, strict=True)
        ]

    runs = [
        small_runs.run(
            inputs,
            tmp_path / str(ended),
            *PLAIN,
            f"--reward_config.score_as_ended={ended}",
            reward=spread,
        )
        for ended in ("false", "true")
    ]
    first, second = map(small_runs.rows, runs)
    assert first == second
    assert sum(row["reward/spread/nan"] for row in first) > 0


def test_an_evaluation_draws_its_next_mode_while_the_last_is_scored(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = threading.Semaphore(0)
    generate = Replicas.generate

    def generated(replicas: Replicas, *arguments: Any, **more: Any) -> Any:
        begun.release()
        return generate(replicas, *arguments, **more)

    scored: list[int] = []

    def patient(completions: Sequence[str]) -> list[float]:
        if len(completions) <= TRIED:
            return [0.0] * len(completions)
        scored.append(len(completions))
        # The first mode's scores need the second mode to be drawn; the second's need nothing.
        for _ in range(2 if len(scored) == 1 else 0):
            assert begun.acquire(timeout=PATIENCE), (
                "the second mode waits for the first one's scores"
            )
        return [1.0] * len(completions)

    trainer = small_runs.trainer(
        inputs,
        tmp_path / "run",
        "--rl_config.max_steps=1",
        "--rl_config.eval_modes=[sampled, greedy]",
        "--rl_config.eval_steps=1",
        "--rl_config.dynamic_sampling=false",
        *small_runs.ONE_GRAPH,
        reward=patient,
    )
    monkeypatch.setattr(Replicas, "generate", generated)
    trainer.train()
    # Two modes before and after, and a step.
    assert len(scored) == 5


def test_what_fails_before_functions_are_called_ends_the_run_with_its_sentence(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mindgrpo.grpo.scoring import RolloutScorer

    def broken(*_: Any) -> Any:
        raise ValueError("broken here")

    monkeypatch.setattr(RolloutScorer, "_begin_here", broken)
    with pytest.raises(RuntimeError, match="could not be computed on rank 0: ValueError: broken"):
        small_runs.run(inputs, tmp_path / "run", *PLAIN, *small_runs.ONE_GRAPH)
