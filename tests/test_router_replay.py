"""Router replay: the engine's routes are those of every token, updates compute exactly these, and another one is seen.

One process, random weights. Several ranks: the distributed case "experts". Does not prove that replay helps training.
"""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_runs
from small_generators import GROUP, KERNELS, MAX_PROMPT, MAX_TOKENS, VOCAB, WITH_C, kernels_named
from small_mixtures import LATENTS
from test_families_in_runs import FAMILIES
from test_partial_runs import PARTIAL, SAVED, SMALL_CHUNKS

from mindgrpo.algorithm.packing import MicroBatch, MicroShape, PackedRollout
from mindgrpo.algorithm.sample import PartialGroup, Request, Rollout, Sample, collect
from mindgrpo.algorithm.token_arrays import TOKEN_ARRAYS
from mindgrpo.backend.cpu.backend import CpuBackend
from mindgrpo.backend.kernels.contract import Kernels
from mindgrpo.backend.kernels.shapes import SamplingParams
from mindgrpo.checkpoint.folders import folder_of
from mindgrpo.checkpoint.format import StoredGroup, read_manifest, restored_groups, stored_groups
from mindgrpo.config import load_config
from mindgrpo.models.decoder_config import DecoderConfig, decoder_config, read_config
from mindgrpo.models.expert_plan import ExpertInputs
from mindgrpo.models.expert_routes import StepExperts
from mindgrpo.models.parameters import parameter_specs
from mindgrpo.models.pipeline import ForwardPipeline, record_log_probs
from mindgrpo.models.shard import Shard
from mindgrpo.monitor.metrics import read_metrics
from mindgrpo.parallel.mesh import Mesh
from mindgrpo.parallel.sharding import Layout
from mindgrpo.plan.memory import unfinished_bytes
from mindgrpo.plan.run_plan import plan_run
from mindgrpo.rollout.embedded import slots
from mindgrpo.rollout.embedded.engine import EmbeddedEngine
from mindgrpo.rollout.embedded.kv_cache import KVCacheConfig
from mindgrpo.rollout.engine import SeedKey
from mindgrpo.rollout.noise import EVALUATION, ROLLOUT
from mindgrpo.rollout.replicas import Replicas
from mindgrpo.training.policy import Policy
from mindgrpo.weights.expert_files import BIAS
from mindgrpo.weights.pretrained import fill_random

LAYERS, EXPERTS, CHOSEN, LONGEST = 2, 4, 2, MAX_PROMPT + 3 * MAX_TOKENS
CONFIG = decoder_config(
    {
        "model_type": "qwen3_moe",
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts": EXPERTS,
        "num_experts_per_tok": CHOSEN,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "max_position_embeddings": 128,
    },
    "here",
)
IN_GROUPS = replace(
    CONFIG,
    moe=replace(
        CONFIG.moe,
        num_experts=8,
        scores="sigmoid",
        groups=4,
        groups_taken=2,
        has_bias=True,
        scaling=2.5,
    ),
)
# A dense layer, then one with experts, one of which all tokens pass; latents of queries as well.
DEEPSEEK = decoder_config(
    {
        "model_type": "deepseek_v3",
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": LAYERS + 1,
        "num_attention_heads": 4,
        **LATENTS,
        "n_routed_experts": 8,
        "num_experts_per_tok": CHOSEN,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
        "n_shared_experts": 2,
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "max_position_embeddings": 128,
    },
    "here",
)
OTHER_LATENT = replace(DEEPSEEK.latent, query_rank=None, is_interleaved=False)
LAYOUT = Layout.of(Mesh(1, 1), parameter_specs(CONFIG))
SAMPLING = SamplingParams(
    temperature=0.8, max_tokens=MAX_TOKENS, stop_ids=tuple(range(0, VOCAB, 3))
)


@pytest.fixture(scope="module")
def backend() -> CpuBackend:
    return CpuBackend({})


def engine(
    backend: CpuBackend,
    kernels: Kernels,
    goes_on: bool = False,
    config: DecoderConfig = CONFIG,
) -> EmbeddedEngine:
    room = KVCacheConfig(32, GROUP, None, LONGEST, MAX_TOKENS, goes_on)
    layout = Layout.of(Mesh(1, 1), parameter_specs(config))
    made = EmbeddedEngine(config, layout, backend, SAMPLING, room, kernels, records_routes=True)
    made.publish(lambda: fill_random(made.weights, seed=1, scale=0.25), 0)
    return made


def trainer(
    made: EmbeddedEngine, backend: CpuBackend, config: DecoderConfig = CONFIG
) -> ForwardPipeline:
    """The policy's forward pass with the generator's own weights."""
    shard, shape = Shard(config, made.weights, backend), MicroShape(2, LONGEST)
    return ForwardPipeline(shard, backend, "policy", shape, LONGEST, 0.8, keeps_flows=True)


def requests() -> list[Request]:
    """Prompts of one token up to the longest, which samples of a group share."""
    rng = np.random.default_rng(3)
    lengths = range(1, MAX_PROMPT + 1)
    prompts = [rng.integers(1, VOCAB, n).astype(np.int32) for n in lengths]
    numbers = [tuple(range(i * GROUP, (i + 1) * GROUP)) for i in range(len(prompts))]
    return [Request(prompt, own) for prompt, own in zip(prompts, numbers, strict=True)]


def drawn(made: EmbeddedEngine, purpose: int = ROLLOUT) -> Rollout:
    samples = made.generate(requests(), SAMPLING, SeedKey(0, purpose, 0), 0)
    return collect(samples, GROUP, range(MAX_PROMPT))


def parts(sample: Sample) -> tuple[Any, ...]:
    return sample.arrays["routes"].segments if "routes" in sample.arrays else ()


def whole(sample: Sample) -> np.ndarray:
    return np.concatenate(parts(sample))


def with_parts(sample: Sample, *own: np.ndarray) -> Sample:
    """The sample with these routes, and without any where there are none."""
    others = {name: values for name, values in sample.arrays.items() if name != "routes"}
    routes = {"routes": TOKEN_ARRAYS["routes"].of(own, 0)} if own else {}
    return replace(sample, arrays=others | routes)


def replayed(
    pipeline: ForwardPipeline, backend: CpuBackend, rollout: Rollout
) -> tuple[StepExperts, list[np.ndarray]]:
    logps, experts = record_log_probs(pipeline, Mesh(1, 1), backend, PackedRollout(rollout))
    assert experts is not None
    return experts, logps


@pytest.mark.parametrize("name", KERNELS)
def test_the_engines_routes_are_those_that_the_trainer_chooses(
    backend: CpuBackend, name: str
) -> None:
    made = engine(backend, kernels_named(name))
    rollout, pipeline = drawn(made), trainer(made, backend)
    assert len({sample.finish_reason for sample in rollout.samples}) == 2
    without = Rollout(tuple(map(with_parts, rollout.samples)), rollout.group_ids)
    recorded, expected = replayed(pipeline, backend, without)
    packed, logps = replayed(pipeline, backend, rollout)
    counted, figures = recorded.statistics, packed.statistics
    assert (counted.compared, counted.changed) == (0, 0)
    assert figures.compared > 0 and figures.changed == 0
    for i, sample in enumerate(rollout.samples):
        assert whole(sample).dtype == np.uint8
        assert whole(sample).shape == (sample.num_inputs, LAYERS, CHOSEN)
        np.testing.assert_array_equal(whole(sample), recorded.routes[i])
        np.testing.assert_array_equal(packed.routes[i], recorded.routes[i])
        np.testing.assert_array_equal(logps[i], expected[i])
        # A prompt's are there once for its group.
        assert parts(sample)[0] is parts(rollout.samples[i - i % GROUP])[0]
    assert figures.load_max == counted.load_max
    # Every sample's tokens but the last, in each layer.
    assert figures.margins.count == LAYERS * sum(s.num_inputs for s in rollout.samples)
    assert 0 < figures.margins.least < figures.margins.mean < 1
    assert figures.margins == counted.margins


@WITH_C
@pytest.mark.parametrize("config", [IN_GROUPS, DEEPSEEK, replace(DEEPSEEK, latent=OTHER_LATENT)])
def test_the_loop_in_c_draws_the_tokens_and_chooses_the_experts_of_plain_operations(
    backend: CpuBackend, config: DecoderConfig
) -> None:
    in_c, plain = (engine(backend, kernels_named(n), config=config) for n in ("native", "plain"))
    assert isinstance(in_c._decoder, slots.SlotDecoder)
    found, expected = drawn(in_c), drawn(plain)
    packed, logps = replayed(trainer(in_c, backend, config), backend, found)
    figures = packed.statistics
    assert figures.changed == 0 and 0 < figures.margins.least < figures.margins.mean
    for i, (one, other) in enumerate(zip(found.samples, expected.samples, strict=True)):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_array_equal(whole(one), whole(other))
        np.testing.assert_allclose(one.logps, other.logps, rtol=0, atol=1e-4)
        np.testing.assert_allclose(one.logps, logps[i], rtol=0, atol=1e-4)
    # Without the bias other experts are the best.
    with in_c.weights.on_host(write=True) as host:
        for name in [n for n in host.hf_views if n.endswith(BIAS)]:
            host.hf_views[name][...] = 0
    in_c.publish(lambda: None, 0)
    unbiased = zip(found.samples, drawn(in_c).samples, strict=True)
    assert any((parts(one)[0] != parts(other)[0]).any() for one, other in unbiased)


@WITH_C
def test_another_route_changes_what_comes_behind_it_and_is_counted(backend: CpuBackend) -> None:
    made = engine(backend, kernels_named("native"))
    rollout, pipeline = drawn(made), trainer(made, backend)
    _, before = replayed(pipeline, backend, rollout)
    number = int(np.argmax(rollout.completion_lengths))
    changed = planted(rollout.samples[number], 2)
    samples = tuple(changed if s.number == number else s for s in rollout.samples)
    packed, after = replayed(pipeline, backend, replace(rollout, samples=samples))
    # The router would have chosen what the generator did, up to the layer behind.
    assert 1 <= packed.statistics.changed <= packed.statistics.compared
    for i, (one, other) in enumerate(zip(before, after, strict=True)):
        same = one == other
        # Token 2 is what the generator saw before it drew number 3.
        assert same.all() if i != number else same[:3].all() and not same[3:].any()


def planted(sample: Sample, token: int) -> Sample:
    """The sample with another pair of experts of a token of its completion, in the first layer."""
    routes = whole(sample).copy()
    at = len(sample.prompt) + token
    routes[at, 0] = [e for e in range(EXPERTS) if e not in routes[at, 0]][:CHOSEN]
    return with_parts(sample, routes)


def test_evaluations_have_none_nor_do_engines_that_are_not_asked(backend: CpuBackend) -> None:
    made = engine(backend, Kernels())
    assert "routes" not in drawn(made, EVALUATION).token_arrays
    assert "routes" in drawn(made).token_arrays


@WITH_C
@pytest.mark.parametrize("config", [CONFIG, DEEPSEEK])
def test_conversations_that_go_on_from_kept_keys_have_the_routes_of_those_computed_again(
    backend: CpuBackend, monkeypatch: pytest.MonkeyPatch, config: DecoderConfig
) -> None:
    monkeypatch.setattr(slots, "FULL_STEP_ROWS", 1)
    kept, again = (
        converse(engine(backend, kernels_named("native"), goes_on, config))
        for goes_on in (True, False)
    )
    assert len(kept) > GROUP and max(len(parts(s)) for s in kept) > 2
    for one, other in zip(kept, again, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        assert len(whole(one)) == one.num_inputs
        np.testing.assert_array_equal(whole(one), whole(other))


def converse(made: EmbeddedEngine) -> list[Sample]:
    """Samples of three turns, with two tokens of an answer in between."""
    samples = {i: Sample.begun(r.prompt, i) for r in requests() for i in r.samples}
    waiting = [replace(r, max_tokens=(3,) * GROUP) for r in requests()]
    for turn in range(3):
        for written in made.generate(waiting, SAMPLING, SeedKey(0, ROLLOUT, 0), 0):
            one = samples[written.number].with_written(written)
            assert sum(map(len, parts(one))) == one.num_inputs
            samples[one.number] = one.with_answer([7, 11], []) if turn < 2 else one
        waiting = [sample.request(i, 3, turn + 1) for i, sample in samples.items()]
    return list(samples.values())


def test_a_sample_with_a_gap_in_its_routes_has_none() -> None:
    part = np.zeros((3, LAYERS, CHOSEN), np.uint8)
    prompt, tokens = np.array([1, 2], np.int32), np.array([3, 4], np.int32)
    written = Sample.drawn(0, prompt, tokens, "stop", 0, logps=[0.0, 0.0], routes=(part,))
    begun = Sample.begun(prompt).with_written(written)
    assert len(whole(begun)) == 3
    more = with_parts(written, part[:2])
    assert parts(begun.with_written(more)) == (part, *parts(more))
    assert parts(begun.with_answer([5], []).with_written(more)) == ()
    assert parts(begun.with_written(with_parts(written))) == ()


def test_ended_samples_of_a_checkpoint_bring_their_routes_back() -> None:
    routes = np.arange(3 * 2 * 2, dtype=np.uint16).reshape(3, 2, 2)
    prompt, tokens = np.array([1, 2], np.int32), np.array([3, 4], np.int32)
    ended = Sample.drawn(0, prompt, tokens, "stop", 0, logps=[0.0, 0.0], routes=(routes,))
    running = replace(ended, number=1, finish_reason=None)
    (stored,) = stored_groups([PartialGroup(2, 1, (ended, running))])
    # Version 1 has the values beside their shape; the file of today is test_checkpoint_routes.py's.
    text = base64.b64encode(routes.tobytes()).decode()
    first = json.loads(stored.model_dump_json())
    first["samples"][0]["routes"].append(text)
    by_form = {
        "in the manifest": ([StoredGroup.model_validate_json(json.dumps(first))], [prompt]),
        "in a file": ([stored], [prompt], {(0, 0): {"routes": routes}}),
    }
    for form, given in by_form.items():
        (group,) = restored_groups(*given)
        assert whole(group.samples[0]).dtype == np.uint16, form
        np.testing.assert_array_equal(whole(group.samples[0]), routes, form)
        # What an engine computes again is not kept.
        assert parts(group.samples[1]) == (), form
    first["samples"][0]["routes"][1][0] = 4
    with pytest.raises(ValueError, match="24 bytes"):
        StoredGroup.model_validate_json(json.dumps(first))


@WITH_C
@pytest.mark.parametrize("plants", [False, True])
def test_updates_of_a_run_compute_the_experts_that_the_generator_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plants: bool
) -> None:
    for key, value in {"model_type": "qwen3_moe", **FAMILIES["qwen3_moe"][0]}.items():
        monkeypatch.setitem(small_runs.MODEL, key, value)
    small_runs.make_inputs(tmp_path)
    rollouts: list[Rollout] = []
    updates: list[tuple[Rollout, MicroBatch, ExpertInputs]] = []
    generate, accumulate = Replicas.generate, Policy.accumulate

    def generating(self: Replicas, *given: Any, **named: Any) -> Rollout:
        rollout = generate(self, *given, **named)
        if plants and "routes" in rollout.token_arrays:
            longest = int(np.argmax(rollout.completion_lengths))
            changed = planted(rollout.samples[longest], 0)
            samples = [changed if s.number == longest else s for s in rollout.samples]
            rollout = replace(rollout, samples=tuple(samples))
        if "routes" in rollout.token_arrays:
            rollouts.append(rollout)
        return rollout

    def accumulating(self: Policy, batches: Sequence[MicroBatch], *others: Any) -> Any:
        *_, experts = others
        updates.extend((rollouts[-1], *pair) for pair in zip(batches, experts, strict=True))
        return accumulate(self, batches, *others)

    monkeypatch.setattr(Replicas, "generate", generating)
    monkeypatch.setattr(Policy, "accumulate", accumulating)
    words = [*small_runs.ONE_GRAPH, "--rl_config.max_steps", "2"]
    words += ["--rl_config.dynamic_sampling", "false", "--rl_config.logprob_gap_limit", "null"]
    run = small_runs.run(tmp_path, tmp_path / "run", *words)
    assert len(rollouts) == 2 and updates
    for rollout, batch, experts in updates:
        own = np.moveaxis(experts.topk_ids, 0, 1).reshape(*batch.tokens.shape, -1, CHOSEN)
        for number, row in enumerate(batch.rows):
            for placed in row:
                expected = whole(rollout.samples[placed.sample])
                np.testing.assert_array_equal(own[number, placed.inputs], expected)
    for step in read_metrics(run / "metrics.jsonl"):
        assert step["moe/routes_replayed"] == 1.0
        assert (step["logprob_gap/max"] > 0) == plants


@WITH_C
def test_partial_rollouts_that_are_resumed_replay_the_routes_of_the_run_that_never_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of completions that have ended and wait for others, which no engine computes again."""
    for key, value in {"model_type": "qwen3_moe", **FAMILIES["qwen3_moe"][0]}.items():
        monkeypatch.setitem(small_runs.MODEL, key, value)
    small_runs.make_inputs(tmp_path)
    words = [*PARTIAL, *SMALL_CHUNKS, *SAVED, "--rl_config.max_steps", "2"]
    whole_run = small_runs.run(tmp_path, tmp_path / "whole", *words)
    manifest = read_manifest(folder_of(whole_run, 1))
    kept = [sample for group in manifest.state.unfinished for sample in group.samples]
    assert any(sample.routes for sample in kept)
    file = manifest.files["routes.safetensors"]
    config = load_config(whole_run / "config_resolved.yaml", []).config
    planned = unfinished_bytes(plan_run(config, read_config(tmp_path / "model"), 1))
    assert 0 < file.bytes - file.header_bytes < planned
    again = tmp_path / "again"
    shutil.copytree(whole_run, again)
    shutil.rmtree(folder_of(again, 2))
    small_runs.run(tmp_path, again, "--resume_training", *words)
    assert small_runs.rows(again) == small_runs.rows(whole_run)
    assert all(row["moe/routes_replayed"] == 1.0 for row in small_runs.rows(again))
    assert small_runs.model_bits(again) == small_runs.model_bits(whole_run)
