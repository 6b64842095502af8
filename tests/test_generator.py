"""The generator of one process: its log-probs are the trainer's, and its tokens depend on the request alone.

One qwen2 model of two layers with random weights, in C kernels and in plain operations. Does not prove that either
agrees with another implementation of the model, nor anything about several ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
from small_generators import (
    CONFIG,
    GROUP,
    KERNELS,
    LAYOUT,
    MAX_PROMPT,
    MAX_TOKENS,
    ROW,
    SETTINGS,
    STOPS,
    VERSION,
    assert_same,
    generator_with,
    kernels_named,
    random_weights,
    requests_of,
    room_of,
    run,
)

from mindgrpo.algorithm.packing import MicroShape, PackedRollout
from mindgrpo.algorithm.sample import LENGTH, STOPPED, Request, Rollout, Sample
from mindgrpo.backend.cpu.backend import CpuBackend
from mindgrpo.backend.kernels.contract import Kernels
from mindgrpo.backend.kernels.shapes import SamplingParams
from mindgrpo.models.pipeline import ForwardPipeline, compute_log_probs
from mindgrpo.models.shard import Shard
from mindgrpo.rollout.embedded.engine import EmbeddedEngine
from mindgrpo.rollout.engine import RolloutEngine, SeedKey, StaleWeights
from mindgrpo.weights.local_weights import Weights

MakeGenerator = Callable[..., EmbeddedEngine]
TrainerLogps = Callable[[Sequence[Request], Sequence[Sample]], list[np.ndarray]]
Agree = Callable[[Sequence[Request], Sequence[Sample]], None]


@pytest.fixture(scope="module")
def backend() -> CpuBackend:
    made = CpuBackend({})
    made.kernels.batch_invariant = True
    return made


@pytest.fixture(scope="module")
def weights(backend: CpuBackend) -> Weights:
    return random_weights(backend)


@pytest.fixture(scope="module", params=KERNELS)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return kernels_named(request.param)


@pytest.fixture(scope="module")
def generator_of(backend: CpuBackend, weights: Weights, kernels: Kernels) -> MakeGenerator:
    """One generator, compiled once, for each combination of arguments."""
    made: dict[tuple[SamplingParams, int, int], EmbeddedEngine] = {}

    def of(
        settings: SamplingParams = SETTINGS, slots: int = 16, copies: int = GROUP
    ) -> EmbeddedEngine:
        key = (settings, slots, copies)
        if key not in made:
            made[key] = generator_with(weights, backend, kernels, settings, slots, copies)
        return made[key]

    return of


@pytest.fixture(scope="module")
def trainer_logps(backend: CpuBackend, weights: Weights) -> TrainerLogps:
    shard = Shard(CONFIG, weights, backend)
    shape = MicroShape(4, ROW)
    pipeline = ForwardPipeline(shard, backend, "policy", shape, ROW, SETTINGS.temperature)

    def of(requests: Sequence[Request], completions: Sequence[Sample]) -> list[np.ndarray]:
        rollout = Rollout.single_turn(
            [request.prompt for request in requests for _ in request.samples],
            [completion.tokens for completion in completions],
            [completion.finish_reason for completion in completions],
            [completion.logps for completion in completions],
            [i for i, request in enumerate(requests) for _ in request.samples],
        )
        return compute_log_probs(pipeline, LAYOUT.mesh, backend, PackedRollout(rollout))

    return of


@pytest.fixture
def assert_logps_agree(trainer_logps: TrainerLogps, kernels: Kernels) -> Agree:
    """Bit for bit where the generator has the trainer's kernels."""

    def check(requests: Sequence[Request], completions: Sequence[Sample]) -> None:
        trained = trainer_logps(requests, completions)
        assert len(trained) == len(completions)
        atol = 0 if kernels.batch_invariant else 1e-4
        for completion, logps in zip(completions, trained, strict=True):
            np.testing.assert_allclose(completion.logps, logps, rtol=0, atol=atol)

    return check


def test_log_probs_are_the_trainers_though_the_stop_id_is_paddings_token(
    generator_of: MakeGenerator, assert_logps_agree: Agree
) -> None:
    requests = requests_of()
    ended_by_padding = False
    for step in range(3):
        completions = run(generator_of(), requests, step)
        assert_logps_agree(requests, completions)
        ended_by_padding |= any(
            c.finish_reason == STOPPED and c.tokens[-1] == 0 for c in completions
        )
    assert ended_by_padding
    assert min(float(c.logps.min()) for c in completions) < -4, "the distributions are too sharp"


def test_log_probs_are_the_trainers_up_to_the_very_last_position(
    generator_of: MakeGenerator, assert_logps_agree: Agree
) -> None:
    requests = requests_of()
    completions = run(generator_of(), requests)
    longest = [
        completion
        for completion in completions
        if len(requests[completion.number // GROUP].prompt) == MAX_PROMPT
        and len(completion.tokens) == MAX_TOKENS
    ]
    assert longest, "no sample fills its row"
    assert_logps_agree(requests, completions)


def test_a_group_of_one_has_the_trainers_log_probs(
    generator_of: MakeGenerator, assert_logps_agree: Agree
) -> None:
    requests = requests_of(group=1)
    completions = run(generator_of(slots=4, copies=1), requests)
    assert [completion.number for completion in completions] == list(range(len(requests)))
    assert_logps_agree(requests, completions)


def test_the_samples_of_a_group_differ(generator_of: MakeGenerator) -> None:
    completions = run(generator_of(), requests_of())
    for start in range(0, len(completions), GROUP):
        drawn = {c.tokens.tobytes() for c in completions[start : start + GROUP]}
        assert len(drawn) == GROUP


def test_the_same_request_is_answered_alike_again_and_otherwise_at_another_step(
    generator_of: MakeGenerator,
) -> None:
    generator, requests = generator_of(), requests_of()
    first = run(generator, requests, 0)
    other = run(generator, requests, 1)
    assert [c.tokens.tobytes() for c in first] != [c.tokens.tobytes() for c in other]
    assert_same(run(generator, requests, 0), first)


@pytest.mark.parametrize("slots, copies", [(4, 4), (4, 1)])
def test_the_number_of_slots_does_not_change_what_is_drawn(
    generator_of: MakeGenerator, slots: int, copies: int
) -> None:
    requests = requests_of(group=copies)
    whole = run(generator_of(slots=16), requests)
    assert_same(run(generator_of(slots=slots, copies=copies), requests), whole)


def test_the_order_of_requests_does_not_change_what_is_drawn(generator_of: MakeGenerator) -> None:
    requests = requests_of()
    expected = run(generator_of(), requests)
    for order in (requests[::-1], requests[3:] + requests[:3]):
        assert_same(run(generator_of(), order), expected)
    assert_same(run(generator_of(), [requests[4]]), expected[4 * GROUP : 5 * GROUP])


def test_a_stop_id_ends_a_sample_and_every_id_of_the_list_does(
    generator_of: MakeGenerator,
) -> None:
    last: set[int] = set()
    for step in range(6):
        for completion in run(generator_of(), requests_of(), step):
            tokens = completion.tokens
            assert tokens.shape == completion.logps.shape
            assert not np.isin(tokens[:-1], STOPS).any()
            if completion.finish_reason == STOPPED:
                last.add(int(tokens[-1]))
            else:
                assert completion.finish_reason == LENGTH
                assert len(tokens) == MAX_TOKENS and tokens[-1] not in STOPS
    assert last == set(STOPS)


def test_a_stop_id_at_the_last_token_counts_as_stopped(generator_of: MakeGenerator) -> None:
    completions = [c for step in range(6) for c in run(generator_of(), requests_of(), step)]
    full = [c for c in completions if len(c.tokens) == MAX_TOKENS]
    assert {c.finish_reason for c in full} == {STOPPED, LENGTH}
    for completion in full:
        stopped = completion.tokens[-1] in STOPS
        assert completion.finish_reason == (STOPPED if stopped else LENGTH)


def test_requests_of_different_turns_draw_together_what_each_turn_draws_by_itself(
    generator_of: MakeGenerator,
) -> None:
    generator = generator_of()
    requests = [replace(request, turn=i % 3) for i, request in enumerate(requests_of())]
    turns = [run(generator, [r for r in requests if r.turn == turn]) for turn in range(3)]
    assert_same(run(generator, requests), [sample for own in turns for sample in own])
    first = {sample.number: sample.tokens.tolist() for sample in run(generator, requests_of())}
    assert all(first[sample.number] == sample.tokens.tolist() for sample in turns[0])
    assert any(first[sample.number] != sample.tokens.tolist() for sample in turns[1])


def test_no_sample_stops_before_its_least_number_of_tokens(
    generator_of: MakeGenerator, assert_logps_agree: Agree
) -> None:
    generator = generator_of(replace(SETTINGS, min_tokens=4))
    requests = requests_of()
    completions = [c for step in range(4) for c in run(generator, requests, step)]
    assert not any(np.isin(c.tokens[:4], STOPS).any() for c in completions)
    assert min(len(c.tokens) for c in completions) == 5
    # The ban does not enter the log-probs, or the trainer's would be others.
    assert_logps_agree(requests, run(generator, requests))


def test_the_penalty_sees_prompt_and_completion_and_forgets_other_samples(
    generator_of: MakeGenerator,
) -> None:
    """So strong a penalty that the likeliest token is always one that has not been seen."""
    settings = SamplingParams(
        temperature=0.0, repetition_penalty=1e6, max_tokens=MAX_TOKENS, stop_ids=()
    )
    generator, requests = generator_of(settings, 4), requests_of()
    completions = run(generator, requests)
    for completion in completions:
        prompt = requests[completion.number // GROUP].prompt
        assert not np.isin(completion.tokens, prompt).any()
        assert len(set(completion.tokens.tolist())) == MAX_TOKENS
    assert_same(run(generator, requests[::-1]), completions)


def test_greedy_samples_of_a_group_are_alike(generator_of: MakeGenerator) -> None:
    settings = SamplingParams(
        temperature=0.0, repetition_penalty=1e6, max_tokens=MAX_TOKENS, stop_ids=()
    )
    completions = run(generator_of(settings, 4), requests_of()[:2])
    assert len({c.tokens.tobytes() for c in completions[:GROUP]}) == 1


@pytest.mark.parametrize("wanted", [VERSION - 1, VERSION + 1])
def test_weights_of_another_version_are_refused_with_both_versions(
    generator_of: MakeGenerator, wanted: int
) -> None:
    with pytest.raises(StaleWeights, match=f"weights {VERSION}, the policy {wanted}"):
        generator_of().generate(requests_of(), SETTINGS, SeedKey(0, 0, 0), wanted)


def test_a_generator_without_weights_refuses_to_run(backend: CpuBackend) -> None:
    empty = EmbeddedEngine(CONFIG, LAYOUT, backend, SETTINGS, room_of(4, 4))
    with pytest.raises(StaleWeights, match="weights None"):
        empty.generate(requests_of(), SETTINGS, SeedKey(0, 0, 0), 0)


def test_completions_have_the_version_of_the_weights_that_wrote_them(
    generator_of: MakeGenerator,
) -> None:
    versions = [c.versions for c in run(generator_of(), requests_of())]
    assert set(np.concatenate(versions).tolist()) == {VERSION}


def test_a_publish_that_fails_or_a_sleep_leaves_weights_of_no_version(
    backend: CpuBackend, weights: Weights, kernels: Kernels
) -> None:
    engine: RolloutEngine = generator_with(weights, backend, kernels, slots=4)
    assert engine.publish(lambda: "moved", 8) == "moved" and engine.version == 8

    def breaks() -> None:
        raise OSError("the other side is gone")

    for left in (lambda: engine.publish(breaks, 9), engine.sleep):
        engine.publish(lambda: None, 8)
        with suppress(OSError):
            left()
        assert engine.version is None
        engine.wake()
        with pytest.raises(StaleWeights, match="weights None"):
            engine.generate(requests_of(), SETTINGS, SeedKey(0, 0, 0), 8)


def test_a_prompt_that_is_too_long_is_refused_and_not_cut(generator_of: MakeGenerator) -> None:
    request = Request(np.ones(MAX_PROMPT + 1, np.int32), (0,))
    with pytest.raises(ValueError, match="7 tokens in a cache for 6"):
        run(generator_of(), [request])


def test_other_weights_in_the_same_memory_are_used_at_once(
    generator_of: MakeGenerator, weights: Weights
) -> None:
    generator, requests = generator_of(), requests_of()
    before = run(generator, requests)
    for target in generator.weights.arrays.flat_buffers:
        target *= 1.5
    changed = run(generator, requests)
    for target, source in zip(
        generator.weights.arrays.flat_buffers, weights.arrays.flat_buffers, strict=True
    ):
        target[...] = source
    assert [c.tokens.tobytes() for c in changed] != [c.tokens.tobytes() for c in before]
    assert_same(run(generator, requests), before)
