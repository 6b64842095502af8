"""One update of a tiny model in one process: how its samples are arranged must not change what is learnt.

Does not prove that the update is right for one arrangement, nor anything about several ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from algorithms import loss_of, replace

from mindgrpo.algorithm import packing
from mindgrpo.algorithm.estimators import AlgorithmConfig
from mindgrpo.algorithm.losses import policy_loss, token_weights
from mindgrpo.algorithm.non_finite import NonFiniteUpdate
from mindgrpo.algorithm.packing import MicroBatch, MicroShape, PackedRollout, pack
from mindgrpo.algorithm.row_shapes import ShapeChoice
from mindgrpo.algorithm.sample import Rollout, TrainBatch
from mindgrpo.algorithm.surrogates import Tokens
from mindgrpo.backend.cpu.backend import CpuBackend
from mindgrpo.backend.kernels.contract import Kernels
from mindgrpo.backend.kernels.shapes import AdamWSettings
from mindgrpo.models.decoder import KEEP_ALL, WHOLE_LAYERS
from mindgrpo.models.decoder_config import decoder_config
from mindgrpo.models.parameters import parameter_specs
from mindgrpo.models.pipeline import compute_log_probs
from mindgrpo.parallel.mesh import Mesh
from mindgrpo.parallel.sharding import Layout
from mindgrpo.training.policy import Policy, UpdateSettings
from mindgrpo.training.update import UpdateReport, update
from mindgrpo.weights.pretrained import fill_random

RAW = {
    "model_type": "qwen2",
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
CONFIG = decoder_config(RAW, "here")
LAYOUT = Layout.of(Mesh(1, 1), parameter_specs(CONFIG))
# An eps well above rounding: Adam's first step would make noise in a zero gradient as large as any other.
SETTINGS = UpdateSettings(
    shape=MicroShape(2, 24),
    num_positions=24,
    temperature=0.9,
    recompute=KEEP_ALL,
    loss_config=loss_of(epsilon_low=0.2, epsilon_high=0.3, beta=0.05),
    max_grad_norm=0.5,
    adamw=AdamWSettings(0.9, 0.95, 1e-2, 0.1),
)
LENGTHS = ((3, 5), (1, 8), (6, 0), (4, 20), (2, 2), (5, 9), (3, 1), (7, 4))


@dataclass(frozen=True)
class Outcome:
    report: UpdateReport
    weights: dict[str, np.ndarray]


def batch() -> TrainBatch:
    rng = np.random.default_rng(0)
    lengths = [c for _, c in LENGTHS]
    rollout = Rollout.single_turn(
        [rng.integers(0, 67, p).astype(np.int32) for p, _ in LENGTHS],
        [rng.integers(0, 67, c).astype(np.int32) for c in lengths],
        ["stop"] * len(lengths),
        [np.zeros(c, np.float32) for c in lengths],
        range(len(lengths)),
    )
    return TrainBatch(
        rollout,
        advantages=rng.normal(size=len(lengths)).astype(np.float32),
        reference_logps=[rng.normal(-4.2, 0.3, c).astype(np.float32) for c in lengths],
    )


PolicyOf = Callable[[UpdateSettings], Policy]


@pytest.fixture(scope="module")
def policy_of() -> PolicyOf:
    """A policy with the same random weights and no past; settings that differ in samples a row share its graphs."""
    backend = CpuBackend({})
    backend.kernels.batch_invariant = True
    made: dict[UpdateSettings, Policy] = {}

    def of(settings: UpdateSettings) -> Policy:
        shape = replace(settings.shape, max_per_row=None)
        key = replace(settings, shape=shape)
        policy = made[key] = made.get(key) or Policy(CONFIG, LAYOUT, backend, key)
        for graphs in (policy, policy.pipeline):
            graphs.shapes = ShapeChoice(settings.shape)
            # Graphs that predict every token, whatever rows hold.
            graphs.shapes.restore(((shape.length, shape.tokens),), 0)
        fill_random(policy.weights, seed=2, scale=0.1)
        for past in (policy.optimizer.first, policy.optimizer.second):
            for run in past.arrays.flat_buffers:
                run[...] = 0.0
        policy.clear_gradients()
        policy.updates = policy.version = 0
        return policy

    return of


def one_update(policy: Policy, given: TrainBatch, members: range | None = None) -> Outcome:
    packed = PackedRollout(given.rollout)
    report = update(policy, given, packed, members or range(len(given)), 1e-2)
    return Outcome(
        report, {name: part.copy() for name, part in policy.weights.arrays.hf_views.items()}
    )


@pytest.fixture(scope="module")
def packed(policy_of: PolicyOf) -> Outcome:
    return one_update(policy_of(SETTINGS), batch())


def assert_same(found: Outcome, expected: Outcome, atol: float = 0.0) -> None:
    """Log-probs to `atol`: bit for bit by kernels in C."""
    for figure in ("loss", "grad_norm", "kl", "entropy"):
        pair = getattr(found.report, figure), getattr(expected.report, figure)
        assert pair[0] == pytest.approx(pair[1], rel=1e-5, abs=1e-7), figure
    assert found.report.logps.keys() == expected.report.logps.keys()
    for i, logps in found.report.logps.items():
        np.testing.assert_allclose(logps, expected.report.logps[i], rtol=0, atol=atol)
    for name, weight in found.weights.items():
        np.testing.assert_allclose(weight, expected.weights[name], rtol=0, atol=2e-6, err_msg=name)


def test_the_update_is_large_enough_to_tell_arrangements_apart(
    policy_of: PolicyOf, packed: Outcome
) -> None:
    before = policy_of(SETTINGS).weights.arrays.hf_views
    moved = max(float(np.abs(packed.weights[n] - part).max()) for n, part in before.items())
    assert moved > 1e-3 and packed.report.grad_norm > 0.1
    assert packed.report.padding_share < 0.4


def test_one_sample_a_row_learns_the_same_as_packed_rows(
    policy_of: PolicyOf, packed: Outcome
) -> None:
    lone = replace(SETTINGS, shape=MicroShape(2, 24, 1))
    unpacked = one_update(policy_of(lone), batch())
    assert unpacked.report.padding_share > packed.report.padding_share
    assert_same(unpacked, packed)


def test_one_micro_batch_learns_the_same_as_several(policy_of: PolicyOf, packed: Outcome) -> None:
    for shape in (MicroShape(8, 24, 1), MicroShape(1, 96)):
        whole = replace(SETTINGS, shape=shape)
        assert_same(one_update(policy_of(whole), batch()), packed)


@pytest.mark.parametrize(("per_row", "is_plain"), [(None, False), (1, True)])
def test_rows_as_long_as_their_content_learn_the_same_as_full_ones(
    per_row: int | None, is_plain: bool, packed: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, atol = CpuBackend({}), 1e-5 if is_plain else 0.0
    if is_plain:
        monkeypatch.setattr(backend, "kernels", Kernels())
    backend.kernels.batch_invariant = not is_plain
    settings = replace(SETTINGS, shape=MicroShape(2, 256, per_row))
    logps, padding = [], []
    for in_use in ((), ((256, 512),)):
        policy = Policy(CONFIG, LAYOUT, backend, settings)
        policy.shapes.restore(in_use, 0)
        policy.pipeline.shapes.restore(in_use, 0)
        fill_random(policy.weights, seed=2, scale=0.1)
        given = batch()
        rollout = PackedRollout(given.rollout)
        logps.append(compute_log_probs(policy.pipeline, LAYOUT.mesh, backend, rollout))
        found = one_update(policy, given)
        assert_same(found, packed, atol)
        assert policy.shapes.in_use[0][0] == (256 if in_use else 64)
        padding.append(found.report.padding_share)
    assert padding[0] < padding[1]
    for short, full in zip(*logps, strict=True):
        np.testing.assert_allclose(short, full, rtol=0, atol=atol)


def test_a_prompt_that_is_computed_once_a_row_learns_the_same(policy_of: PolicyOf) -> None:
    given = batch()
    own = given.rollout.samples
    samples = tuple(replace(one, prompt=own[i // 3].prompt) for i, one in enumerate(own))
    given = replace(given, rollout=replace(given.rollout, samples=samples))
    (first, *_) = pack(given.rollout, range(len(given)), SETTINGS.shape)
    assert len({placed.prompt_start for placed in first}) < len(first)
    together = one_update(policy_of(SETTINGS), given)
    apart = one_update(policy_of(replace(SETTINGS, shape=MicroShape(2, 24, 1))), given)
    assert_same(together, apart)


def test_a_head_in_chunks_learns_the_same(
    policy_of: PolicyOf, packed: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Seven rows a chunk, the last one short.
    monkeypatch.setattr("mindgrpo.models.pipeline.LOGITS_BYTES", 7 * 4 * 67)
    chunked = replace(SETTINGS, temperature=SETTINGS.temperature, max_grad_norm=0.5 + 1e-12)
    assert_same(one_update(policy_of(chunked), batch()), packed)


def test_kernels_of_mindspores_own_operations_learn_the_same(
    packed: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = CpuBackend({})
    monkeypatch.setattr(backend, "kernels", Kernels())
    policy = Policy(CONFIG, LAYOUT, backend, SETTINGS)
    fill_random(policy.weights, seed=2, scale=0.1)
    assert_same(one_update(policy, batch()), packed, 1e-5)


def test_recomputing_layers_changes_nothing() -> None:
    backend, config = CpuBackend({}), decoder_config(RAW | {"num_hidden_layers": 2}, "here")
    outcomes = []
    for recompute in (KEEP_ALL, WHOLE_LAYERS):
        settings = replace(SETTINGS, recompute=recompute)
        layout = Layout.of(Mesh(1, 1), parameter_specs(config))
        policy = Policy(config, layout, backend, settings)
        fill_random(policy.weights, seed=2, scale=0.1)
        outcomes.append(one_update(policy, batch()))
    assert_same(*outcomes)


def test_old_log_probs_that_are_the_policys_own_change_nothing(
    policy_of: PolicyOf, packed: Outcome
) -> None:
    given = batch()
    given = replace(given, old_logps=[packed.report.logps[i] for i in range(len(given))])
    assert_same(one_update(policy_of(SETTINGS), given), packed)


def test_the_reported_loss_is_that_of_the_reported_log_probs(packed: Outcome) -> None:
    given, loss_config = batch(), SETTINGS.loss_config
    assert given.reference_logps is not None
    lengths = given.rollout.completion_lengths
    weights = token_weights(lengths, loss_config)
    logps = np.concatenate([packed.report.logps[i] for i in range(len(given))])
    numbers = (
        np.concatenate(given.reference_logps),
        np.zeros(logps.size),
        np.repeat(given.advantages, lengths),
        np.repeat(weights, lengths),
        np.ones(logps.size),
    )
    total = policy_loss(Tokens(logps, logps, *numbers, lengths=lengths), loss_config)
    assert packed.report.loss == pytest.approx(total, abs=1e-6)


def elaborate(packed: Outcome) -> TrainBatch:
    """Everything that a batch may have: other old log-probs, weights of the rollout, a sample that does not count."""
    rng = np.random.default_rng(1)
    given = batch()
    old_logps = [
        (packed.report.logps[i] + rng.normal(0, 0.2, c)).astype(np.float32)
        for i, (_, c) in enumerate(LENGTHS)
    ]
    return replace(
        given,
        old_logps=old_logps,
        rollout_is_weights=[rng.uniform(0, 2, c).astype(np.float32) for _, c in LENGTHS],
        sample_mask=np.array([i != 3 for i in range(len(given))]),
    )


ALL_TERMS = loss_of(
    epsilon_low=0.1,
    epsilon_high=0.1,
    beta=0.05,
    entropy_coef=0.02,
    importance_sampling_correction="token_truncate",
)
VARIANTS = {
    "gspo": replace(
        ALL_TERMS, importance_sampling_level="sequence", epsilon_low=0.02, epsilon_high=0.02
    ),
    "dapo": replace(ALL_TERMS, loss_type="dapo", delta=1.3, kl_estimator="k2"),
    "cispo": replace(ALL_TERMS, loss_type="cispo", kl_estimator="k1"),
    "gmpo": replace(ALL_TERMS, loss_type="gmpo", epsilon_low=0.02, epsilon_high=0.02),
    "clip_cov": replace(
        ALL_TERMS,
        loss_type="clip_cov",
        clip_cov_ratio=0.2,
        clip_cov_low=0.01,
        top_entropy_quantile=0.5,
    ),
    "kl_cov": replace(
        ALL_TERMS, loss_type="kl_cov", kl_cov_ratio=0.3, importance_sampling_correction="none"
    ),
    "vespo": replace(ALL_TERMS, loss_type="vespo", loss_aggregation="prompt_mean"),
    "sapo": replace(ALL_TERMS, loss_type="sapo", unbiased_kl=True),
    "dppo_tv": replace(ALL_TERMS, loss_type="dppo_tv", epsilon_low=1e-3, epsilon_high=1e-3),
    "dppo_kl": replace(ALL_TERMS, loss_type="dppo_kl", epsilon_low=1e-4, epsilon_high=1e-4),
    "gpg": replace(ALL_TERMS, loss_type="gpg", off_policy_mask_threshold=0.01),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_every_loss_learns_the_same_however_samples_are_arranged(
    policy_of: PolicyOf, packed: Outcome, name: str
) -> None:
    given = elaborate(packed)
    if name == "cispo":
        rng = np.random.default_rng(2)
        advantages = [rng.normal(size=c).astype(np.float32) for _, c in LENGTHS]
        given = replace(given, token_advantages=advantages)
    found = []
    for shape in (MicroShape(2, 24), MicroShape(2, 24, 1)):
        settings = replace(SETTINGS, shape=shape, loss_config=VARIANTS[name])
        found.append(one_update(policy_of(settings), given))
    assert_same(found[0], found[1])
    assert found[0].report.clip_fraction == found[1].report.clip_fraction
    assert (found[0].report.clip_fraction > 0) == VARIANTS[name].clips
    reports = [one.report for one in found]
    for figure, has in (
        ("unselected", VARIANTS[name].leaves_out),
        ("off_policy", VARIANTS[name].off_policy_mask_threshold is not None),
    ):
        shares = [getattr(report, figure) for report in reports]
        assert shares[0] == shares[1]
        assert 0 < shares[0] < 1 if has else shares[0] is None
    if name == "kl_cov":  # of whose tokens none is left out
        every = replace(VARIANTS[name], loss_type="bnpo", epsilon_low=1.0, epsilon_high=1e3)
        whole = one_update(policy_of(replace(SETTINGS, loss_config=every)), given)
        assert abs(whole.report.loss - found[0].report.loss) > 1e-4
    assert 3 in found[0].report.logps


def test_a_sample_that_does_not_count_teaches_nothing_whatever_it_earned(
    policy_of: PolicyOf, packed: Outcome
) -> None:
    settings = replace(SETTINGS, loss_config=VARIANTS["dapo"])
    outcomes = []
    for reward in (0.0, 1e6):
        given = elaborate(packed)
        given.advantages[3] = reward
        outcomes.append(one_update(policy_of(settings), given))
    assert_same(outcomes[0], outcomes[1])
    assert outcomes[0].report.grad_norm > 0.01


WITHOUT_KL = {
    "grpo": loss_of(epsilon_low=0.1, epsilon_high=0.1),
    "gspo": replace(VARIANTS["gspo"], beta=0.0, entropy_coef=0.0),
}


@pytest.mark.parametrize("name", WITHOUT_KL)
@pytest.mark.parametrize("equal", [range(3, 8), range(8)], ids=["some", "all"])
def test_samples_without_advantage_need_no_backward_pass(
    policy_of: PolicyOf, packed: Outcome, name: str, equal: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = replace(SETTINGS, shape=MicroShape(1, 24, 1), loss_config=WITHOUT_KL[name])
    given = elaborate(packed)
    given.advantages[equal] = 0.0
    backward: list[int] = []
    accumulate = Policy.accumulate

    def counted(policy: Policy, batches: list[MicroBatch], *rest: Any) -> Any:
        backward.append(len(batches))
        return accumulate(policy, batches, *rest)

    monkeypatch.setattr(Policy, "accumulate", counted)
    spared = one_update(policy_of(settings), given)
    monkeypatch.setattr("mindgrpo.training.update.FORWARD_SHARE", 1.0)
    whole = one_update(policy_of(settings), given)
    assert backward == [*([3] if len(equal) < 8 else []), 8]
    assert_same(spared, whole)
    assert spared.report.clip_fraction == whole.report.clip_fraction
    assert (spared.report.grad_norm > 0.01) == (len(equal) < 8)


@pytest.mark.parametrize(
    "loss_config",
    [SETTINGS.loss_config, loss_of(entropy_coef=0.02)],
    ids=["by KL", "by entropy"],
)
def test_samples_without_advantage_have_a_gradient_by_kl_and_by_entropy(
    policy_of: PolicyOf, packed: Outcome, loss_config: AlgorithmConfig
) -> None:
    assert (loss_config.beta > 0) != (loss_config.entropy_coef > 0)
    settings = replace(SETTINGS, loss_config=loss_config)
    given = elaborate(packed)
    given.advantages[:] = 0.0
    assert one_update(policy_of(settings), given).report.grad_norm > 1e-3


def test_samples_that_are_not_members_have_no_part_in_the_update(policy_of: PolicyOf) -> None:
    some = one_update(policy_of(SETTINGS), batch(), members=range(0, 4))
    assert sorted(some.report.logps) == [0, 1, 2, 3]
    given = batch()
    given.advantages[4:] = 1e6
    assert given.reference_logps is not None
    far = [np.full(c, -1e3, np.float32) for _, c in LENGTHS[4:]]
    given = replace(given, reference_logps=[*given.reference_logps[:4], *far])
    assert_same(one_update(policy_of(SETTINGS), given, members=range(0, 4)), some)


def test_log_probs_and_updates_of_a_step_pack_its_rollout_once(
    policy_of: PolicyOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, given, calls = policy_of(SETTINGS), batch(), []
    monkeypatch.setattr(packing, "pack", lambda *arguments: calls.append(1) or pack(*arguments))
    packed = PackedRollout(given.rollout)
    logps = compute_log_probs(policy.pipeline, LAYOUT.mesh, policy.backend, packed)
    for _ in range(2):
        given = replace(given, old_logps=logps)
        update(policy, given, packed, range(len(given)), 1e-2)
    assert len(calls) == 1


def test_gradients_are_zero_after_an_update_and_versions_count_up(policy_of: PolicyOf) -> None:
    policy = policy_of(SETTINGS)
    one_update(policy, batch())
    assert not any(run.any() for run in policy.gradients.arrays.flat_buffers)
    one_update(policy, batch())
    assert (policy.version, policy.updates) == (2, 2)


def test_an_infinite_gradient_leaves_weights_and_moments_untouched(policy_of: PolicyOf) -> None:
    policy = policy_of(SETTINGS)
    before = {name: part.copy() for name, part in policy.weights.arrays.hf_views.items()}
    given = batch()
    given.advantages[0] = np.inf
    with pytest.raises(NonFiniteUpdate, match="the update was not made"):
        one_update(policy, given)
    for name, part in policy.weights.arrays.hf_views.items():
        np.testing.assert_array_equal(part, before[name])
    assert not any(run.any() for run in policy.optimizer.first.arrays.flat_buffers)
    assert (policy.version, policy.updates) == (0, 0)
