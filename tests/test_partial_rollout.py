"""Partial rollouts with an engine whose tokens are a function of the prompt and what follows it: chunks, ends, ages.

Does not prove that engines go on right after a cut: test_partial_runs.py compares chunks with whole completions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from distributed.scripted_turns import scripted

from mindgrpo.algorithm.sample import LENGTH, STOPPED, Request, Sample
from mindgrpo.checkpoint.format import RunState, StoredGroup, restored_groups, stored_groups
from mindgrpo.data.prompt_source import PromptSource
from mindgrpo.rollout.conversations import Conversations
from mindgrpo.rollout.partial import (
    PartialGroup,
    PartialLimits,
    PartialRollouts,
    PartialSettings,
    draw_partial,
)

SIZE = 2
STOP = 0
NO_TOKENS = np.zeros(0, np.int32)


class Counter:
    """Writes 9, 8, ... 0 from the token before on and stops after 0; a prompt ends with the number to start below."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.rounds: list[list[Request]] = []

    def complete(self, requests: Sequence[Request]) -> list[Sample]:
        assert {request.turn for request in requests} <= {len(self.rounds)}
        self.rounds.append(list(requests))
        completions = []
        for request in requests:
            for sample, limit in zip(request.samples, request.max_tokens or (), strict=True):
                tokens = np.arange(request.prompt[-1] - 1, -1, -1, dtype=np.int32)[:limit]
                reason = STOPPED if tokens[-1] == STOP else LENGTH
                logps = -tokens.astype(np.float32)
                completions.append(
                    Sample.drawn(sample, NO_TOKENS, tokens, reason, self.version, logps=logps)
                )
        return completions[::-1]


def group(position: int, length: int, step: int = 0) -> PartialGroup:
    """Its completions have `length` tokens."""
    return PartialGroup.begun(position, np.array([7, length], np.int32), step, SIZE)


def limits(groups: int, **others: int) -> PartialLimits:
    return PartialLimits(
        **{"groups": groups, "chunk": 4, "max_tokens": 100, "max_staleness": 2} | others
    )


def test_a_rollout_ends_when_its_groups_are_whole_and_the_rest_goes_on_under_the_next_weights() -> (
    None
):
    first = Counter(3)
    begun = [group(0, 10), group(1, 3), group(2, 4)]
    outcome = draw_partial(begun, limits(2), 0, first.complete)
    assert [one.position for one in outcome.groups] == [1, 2]
    assert outcome.rounds == 1 and outcome.tokens == SIZE * (4 + 3 + 4)
    assert [len(sample.tokens) for sample in outcome.unfinished[0].samples] == [4, 4]

    second = Counter(4)
    after = draw_partial([*outcome.unfinished, group(3, 2, 1)], limits(2), 1, second.complete)
    rollout = after.rollout()
    assert [one.position for one in after.groups] == [0, 3] and not after.unfinished
    assert rollout.completion_ids[0].tolist() == list(range(9, -1, -1))
    assert rollout.weights_version[0].tolist() == [3] * 4 + [4] * 6
    np.testing.assert_array_equal(rollout.generator_logps[0], -np.arange(9, -1, -1.0))
    assert list(rollout.finish_reasons) == [STOPPED] * 4
    assert list(rollout.group_ids) == [0, 0, 1, 1]


def test_a_completion_has_at_most_its_tokens_over_all_chunks() -> None:
    engine = Counter(0)
    outcome = draw_partial([group(0, 10)], limits(1, max_tokens=6), 0, engine.complete)
    rollout = outcome.rollout()
    assert [len(ids) for ids in rollout.completion_ids] == [6, 6]
    assert list(rollout.finish_reasons) == [LENGTH] * 2
    assert [request.max_tokens for request in engine.rounds[1]] == [(2,), (2,)]


def test_no_prompt_is_drawn_twice_where_fewer_are_under_way_than_go_on() -> None:
    """As after a resume with a smaller rl_config.over_sampling_batch_size."""
    prompts: Any = [SimpleNamespace(ids=np.array([7, i], np.int32)) for i in range(40)]
    source = PromptSource(prompts, 0, 3)
    settings = PartialSettings(limits(3), under_way=5, num_generations=SIZE)
    goes_on = [group(position, 9) for position in source.next_positions(8)]
    replicas: Any = None
    rollouts = PartialRollouts(settings, source, replicas, tuple(goes_on))
    assert len(rollouts.begin_step(1)) == 8 * (1 + SIZE)
    # Three of them are still there a step later, and two are drawn for the others.
    rollouts = PartialRollouts(settings, source, replicas, tuple(goes_on[5:]))
    drawn = rollouts.begin_step(2)[3 * (1 + SIZE) :: 1 + SIZE]
    expected = [prompt.ids for prompt in source.at([8, 9])]
    assert [ids.tolist() for ids in drawn] == [ids.tolist() for ids in expected]
    assert source.position == 10


def test_samples_of_a_round_have_numbers_of_their_own_and_fresh_ones_share_their_prompt() -> None:
    engine = Counter(0)
    draw_partial([group(0, 6), group(1, 2), group(2, 9)], limits(3), 0, engine.complete)
    assert [request.samples for request in engine.rounds[0]] == [(0, 1), (2, 3), (4, 5)]
    assert [request.samples for request in engine.rounds[1]] == [(0,), (1,), (4,), (5,)]


@pytest.mark.parametrize(("step", "rounds"), [(1, 1), (2, 3)])
def test_a_group_that_is_too_old_is_waited_for(step: int, rounds: int) -> None:
    engine = Counter(0)
    old, young = group(0, 12, step=0), group(1, 2, step=step)
    outcome = draw_partial([old, young], limits(1), step, engine.complete)
    assert outcome.rounds == rounds
    assert outcome.groups[0].position == (0 if step == 2 else 1)


def test_whole_groups_that_are_too_many_wait_for_the_next_step_in_their_order() -> None:
    engine = Counter(0)
    outcome = draw_partial([group(i, 2) for i in range(3)], limits(2), 0, engine.complete)
    assert [one.position for one in outcome.unfinished] == [2]
    again = draw_partial(outcome.unfinished, limits(1), 1, engine.complete)
    assert again.rounds == 0 and [one.position for one in again.groups] == [2]


def test_a_budget_ends_a_rollout_with_what_is_whole_and_never_with_nothing() -> None:
    engine = Counter(0)
    begun = [group(0, 20), group(1, 6), group(2, 30)]
    outcome = draw_partial(begun, limits(3, token_budget=1), 0, engine.complete)
    assert outcome.rounds == 2 and [one.position for one in outcome.groups] == [1]
    assert [one.position for one in outcome.unfinished] == [0, 2]


def test_what_is_unfinished_comes_back_from_a_manifest_bit_for_bit() -> None:
    engine, rng = Counter(5), np.random.default_rng(0)
    outcome = draw_partial([group(3, 9), group(4, 2)], limits(1), 0, engine.complete)
    logps = rng.normal(size=4).astype(np.float32)
    unfinished = [*outcome.unfinished, group(9, 5, step=1)]
    unfinished[0].samples[0].logps[...] = logps
    state = RunState(
        step=1, prompts=10, updates=1, weights_version=1, unfinished=stored_groups(unfinished)
    )
    stored = RunState.model_validate_json(state.model_dump_json()).unfinished
    restored = restored_groups(stored, [one.prompt for one in unfinished])
    for one, other in zip(unfinished, restored, strict=True):
        assert (one.position, one.step) == (other.position, other.step)
        for a, b in zip(one.samples, other.samples, strict=True):
            assert a.finish_reason == b.finish_reason
            for name in ("tokens", "logps", "versions"):
                x, y = getattr(a, name), getattr(b, name)
                assert x.dtype == y.dtype and x.tobytes() == y.tobytes()


class Speaker:
    """Says the next turn of a sample's script, as much as it is asked for; the last id of a turn ends it."""

    script = [list(range(10, 10 + n)) + [STOP] for n in (1, 6, 3, 4)]

    def __init__(self) -> None:
        self._left: dict[int, list[list[int]]] = {}

    def complete(self, requests: Sequence[Request]) -> list[Sample]:
        made = []
        for request in requests:
            limits = request.max_tokens or (100,) * len(request.samples)
            for sample, limit in zip(request.samples, limits, strict=True):
                left = self._left.setdefault(sample, [list(t) for t in self.script[sample % 3 :]])
                ids, left[0] = left[0][:limit], left[0][limit:]
                reason = LENGTH if left[0] else STOPPED
                if not left[0]:
                    left.pop(0)
                tokens = np.array(ids, np.int32)
                logps = -tokens.astype(np.float32)
                made.append(Sample.drawn(sample, NO_TOKENS, tokens, reason, 1, logps=logps))
        return made


def conversations() -> Conversations:
    driver = scripted(max_turns=3, has_environment=False, is_first=True)
    assert driver is not None
    return driver


@pytest.mark.parametrize("max_tokens", [11, 14, 100])
@pytest.mark.parametrize("chunk", [1, 3, 50])
def test_conversations_in_chunks_are_those_that_are_drawn_turn_by_turn(
    chunk: int, max_tokens: int
) -> None:
    driver, engine = conversations(), Speaker()
    prompts = [np.array([7, i], np.int32) for i in range(3)]
    requests = [Request(p, (2 * i, 2 * i + 1), (max_tokens,) * 2) for i, p in enumerate(prompts)]
    expected = driver.run(requests, max_tokens, engine.complete)
    assert max(len(one.messages) for one in expected) >= 3

    def answer(drawn: Mapping[int, Sample]) -> Mapping[int, Sample]:
        return driver.next_turns(drawn, max_tokens)

    begun = [PartialGroup.begun(i, prompt, 0, SIZE) for i, prompt in enumerate(prompts)]
    wanted = limits(len(begun), chunk=chunk, max_tokens=max_tokens)
    rollout = draw_partial(begun, wanted, 0, Speaker().complete, answer).rollout()
    for i, whole in enumerate(expected):
        np.testing.assert_array_equal(rollout.completion_ids[i], whole.tokens)
        np.testing.assert_array_equal(rollout.action_mask[i], whole.action_mask)
        np.testing.assert_array_equal(rollout.generator_logps[i], whole.logps)
        assert rollout.finish_reasons[i] == whole.finish_reason
        assert rollout.messages[i] == whole.messages


def test_a_conversation_comes_back_from_a_manifest() -> None:
    sample = Sample.begun(np.array([7, 8], np.int32)).with_written(
        Sample.drawn(0, NO_TOKENS, np.array([3, STOP], np.int32), STOPPED, 4, logps=[-1, -2])
    )
    call = {"role": "assistant", "content": "3", "tool_calls": [{"name": "f", "arguments": {}}]}
    told = [call, {"role": "tool", "content": "\u00e9", "failure": None}]
    sample = sample.with_answer([9, 9, 9], told)
    stored = StoredGroup.model_validate_json(
        stored_groups([PartialGroup(2, 1, (sample,))])[0].model_dump_json()
    )
    (group_,) = restored_groups([stored], [sample.prompt])
    (other,) = group_.samples
    for name in ("prompt", "tokens", "logps", "versions", "action_mask"):
        x, y = getattr(sample, name), getattr(other, name)
        assert x.dtype == y.dtype and x.tobytes() == y.tobytes()
    assert (other.messages, other.finish_reason) == (sample.messages, None)
    assert other.turn.size == 0 and other.num_turns == 1


def test_a_manifest_whose_versions_are_not_of_its_tokens_is_refused() -> None:
    outcome = draw_partial([group(3, 9), group(4, 2)], limits(1), 0, Counter(5).complete)
    body = stored_groups(outcome.unfinished)[0].model_dump()
    body["samples"][0]["versions"] = [(5, 3)]
    with pytest.raises(ValueError, match="16 bytes, but the versions are of 12"):
        StoredGroup.model_validate(body)
