"""A step's samples: which groups dynamic sampling replaces, by what, how often; and what an engine is asked for.

Engine, roles and rewards are stand-ins. Does not prove that noise differs, nor anything of several ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mindgrpo.algorithm.sample import Request, Rollout, Sample
from mindgrpo.backend.kernels.shapes import SamplingParams
from mindgrpo.config import Config
from mindgrpo.grpo.metrics import Resampling
from mindgrpo.grpo.scoring import Scored
from mindgrpo.grpo.state import Run
from mindgrpo.grpo.step import Stepper
from mindgrpo.parallel.mesh import Mesh
from mindgrpo.rewards.scores import Report, Scores
from mindgrpo.rollout.engine import RolloutStats, SeedKey
from mindgrpo.rollout.noise import ROLLOUT
from mindgrpo.rollout.replicas import Replicas

GROUP, SEED, STEP, VERSION = 2, 3, 7, 5
SAMPLING = SamplingParams(max_tokens=4)


class Alone:
    rank = 0

    def gather_objects(self, value: Any) -> list[Any]:
        return [value]

    @property
    def world(self) -> Alone:
        return self

    def computing(self) -> AbstractContextManager[None]:
        return nullcontext()


class Engine:
    """Two tokens a sample: its prompt's first token and the sample's number."""

    stats = RolloutStats(1, 1, 1, 1)
    version = VERSION

    def __init__(self) -> None:
        self.asked: list[tuple[list[Request], SamplingParams, SeedKey, int]] = []

    def generate(
        self, requests: list[Request], sampling: SamplingParams, key: SeedKey, version: int
    ) -> list[Sample]:
        self.asked.append((requests, sampling, key, version))
        return [
            Sample.drawn(i, r.prompt, np.array([r.prompt[0], i]), "stop", version, logps=[0, 0])
            for r in requests
            for i in r.samples
        ]


class Task:
    """Prompts [0], [1], ... as they are asked for, and the rewards of one round after the other."""

    def __init__(self, num_groups: int, rounds: Sequence[Sequence[float]], texts: bool) -> None:
        self._num_groups, self._rounds, self._texts = num_groups, list(rounds), texts
        self.replaced: list[list[int]] = []
        self.solved: list[int] = []
        self._taken = 0

    def _take(self, count: int) -> list[Any]:
        self._taken += count
        numbers = range(self._taken - count, self._taken)
        return [SimpleNamespace(ids=np.array([i], np.int32)) for i in numbers]

    def begin_step(self, step: int) -> list[Any]:
        assert step == STEP
        return self._take(self._num_groups)

    def replace(self, groups: Sequence[int]) -> list[Any]:
        self.replaced.append(list(groups))
        return self._take(len(groups))

    def solve(self, groups: Sequence[int]) -> None:
        self.solved += groups

    def owners(self, group_ids: Sequence[int]) -> list[Any]:
        return list(group_ids)

    def begin(self, rollout: Rollout, prompts: Sequence[Any]) -> Callable[[], Scored]:
        scored = self.score(rollout, prompts)
        return lambda: scored

    def score(self, rollout: Rollout, prompts: Sequence[Any]) -> Scored:
        assert list(prompts) == list(rollout.group_ids)
        values = np.array(self._rounds.pop(0), np.float32)
        assert len(values) == len(rollout)
        reports = {"f": Report({"errors": 1})}
        scores = Scores({"f": values.astype(float)}, values, values != values, reports)
        scores = scores.filled(rollout.group_ids)
        return Scored(scores, [f"text {value:g}" for value in values] if self._texts else [])


def collected(
    rewards: Sequence[Sequence[float]], rounds: int, texts: bool = True, **more: Any
) -> tuple[Rollout, Scored, Resampling | None, Task, Engine]:
    engine, task = Engine(), Task(len(rewards[0]) // GROUP, rewards, texts)
    keys = {"num_generations": GROUP, "seed": SEED, "dynamic_sampling": rounds > 0}
    keys |= {"dynamic_sampling_rounds": rounds} if rounds else {}
    config = Config.model_validate({"rl_config": keys | more})
    backend: Any = Alone()
    roles: Any = SimpleNamespace(
        refresh_engine=lambda: None, enter_rollout=lambda: VERSION, encoder=None
    )
    prompts: Any = task
    inputs: Any = SimpleNamespace(sampling=SAMPLING)
    run = Run(config, backend, inputs, roles, prompts, 1)
    replicas = Replicas(engine, Mesh(1, 1), backend)  # type: ignore[arg-type]
    scorer: Any = task
    stepper = Stepper(run, replicas, scorer)
    rollout, scores, resampling = stepper.collect(STEP)
    return rollout, scores(), resampling, task, engine


def test_only_groups_of_equal_rewards_are_replaced_until_none_is_left() -> None:
    rounds = [1, 1, 0, 1, 0, 0, 1, 0], [0, 1, 1, 1], [1, 0]
    rollout, scored, resampling, task, _ = collected(rounds, 5)
    assert task.replaced == [[0, 2], [2]]
    assert list(rollout.group_ids) == [0, 0, 1, 1, 2, 2, 3, 3]
    for ids in (rollout.prompt_ids, rollout.completion_ids):
        assert [tokens[0] for tokens in ids] == [4, 4, 1, 1, 6, 6, 3, 3]
    assert scored.scores.total.tolist() == [0, 1, 0, 1, 1, 0, 1, 0]
    assert scored.scores.per_function["f"].tolist() == scored.scores.total.tolist()
    assert scored.texts[:2] + scored.texts[4:6] == ["text 0", "text 1", "text 1", "text 0"]
    assert resampling == Resampling(rounds=2, groups=3, sampled_mean=(4 + 3 + 1) / 14)
    assert scored.scores.errors == {"f": 3}


def test_no_two_samples_of_a_step_have_one_number() -> None:
    *_, engine = collected([[1, 1, 0, 1, 0, 0], [0, 0, 1, 1], [1, 0, 0, 1]], 2)
    numbers = [i for requests, *_ in engine.asked for r in requests for i in r.samples]
    assert numbers[:6] == [0, 1, 2, 3, 4, 5] and len(set(numbers)) == len(numbers) == 14
    assert {(s, k, v) for _, s, k, v in engine.asked} == {
        (SAMPLING, SeedKey(SEED, ROLLOUT, STEP), VERSION)
    }


def test_the_rounds_are_bounded_and_groups_that_stay_equal_stay() -> None:
    rollout, scored, resampling, task, _ = collected([[1, 0, 0, 0], [1, 1], [0, 0]], 2)
    assert task.replaced == [[1], [1]] and resampling is not None
    assert resampling.rounds == resampling.groups == 2
    assert [tokens[0] for tokens in rollout.completion_ids] == [0, 0, 3, 3]
    assert scored.scores.total.tolist() == [1, 0, 0, 0]


def test_nothing_is_drawn_again_where_every_group_teaches_or_nobody_asked() -> None:
    _, _, resampling, task, _ = collected([[1, 0, 0, 1]], 3)
    assert task.replaced == [] and resampling == Resampling(0, 0, 0.5)
    _, _, resampling, task, _ = collected([[1, 1, 0, 1]], 0)
    assert task.replaced == [] and resampling is None


def test_a_prompt_is_solved_by_samples_that_passed_not_by_those_whose_reward_failed() -> None:
    failed = float("nan")
    rewards = [1, 1, failed, failed, 1, failed, 1, 0]
    for share, solved in ((1.0, [0]), (0.5, [0, 2, 3])):
        _, scored, _, task, _ = collected(
            [rewards], 0, no_positive_resampling=share, eval_pass_threshold=0.7
        )
        # Failed samples have the mean of their group's others, or of all: enough to pass.
        assert scored.scores.total.tolist() == pytest.approx([1, 1, 0.8, 0.8, 1, 1, 1, 0])
        assert task.solved == solved


def test_texts_that_are_not_those_of_the_replaced_samples_are_refused() -> None:
    values = np.array([1.0, 0.0])
    scores = Scores({"f": values}, values, values < 0, {"f": Report({"errors": 0})})
    scored = Scored(scores, ["a", "b"])
    with pytest.raises(ValueError, match="zip"):
        scored.with_replaced([0, 1], Scored(scores, ["c"]))


def test_ranks_without_the_texts_do_without() -> None:
    _, scored, *_ = collected([[1, 1], [1, 0]], 1, texts=False)
    assert scored.texts == []


def test_every_token_knows_the_weights_that_wrote_it() -> None:
    rollout, *_ = collected([[1, 1, 0, 1], [1, 0]], 1)
    assert [versions.tolist() for versions in rollout.weights_version] == [[VERSION] * 2] * 4
    assert all(mask.all() and mask.size == 2 for mask in rollout.action_mask)
