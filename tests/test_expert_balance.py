"""What balances experts: a loss, whose gradient is that of its definition, and steps of the bias they are chosen by.

One process, random weights. Several ranks: the distributed case "experts". Does not prove that balance helps training.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from algorithms import replace
from mindspore import Tensor, ops
from small_generators import WITH_AVX512
from test_expert_files import DEEPSEEK
from test_families import EXAMPLE, read
from test_router_replay import CONFIG, LAYOUT
from test_update import SETTINGS, batch

from mindgrpo.algorithm.packing import MicroShape, PackedRollout
from mindgrpo.algorithm.sample import Rollout
from mindgrpo.backend.contract import AloneGroup, Group
from mindgrpo.backend.cpu.backend import CpuBackend
from mindgrpo.backend.dtypes import NUM_PARTS, Dtype
from mindgrpo.config import load_config
from mindgrpo.errors import UserError
from mindgrpo.models.decoder_config import decoder_config
from mindgrpo.models.expert_routes import StepExperts, balance_factors, load_by_expert
from mindgrpo.models.moe import Balance
from mindgrpo.models.parameters import parameter_specs
from mindgrpo.parallel.mesh import Mesh
from mindgrpo.parallel.sharding import Layout
from mindgrpo.plan.run_plan import plan_run
from mindgrpo.training.policy import Policy
from mindgrpo.training.update import accumulate_gradients
from mindgrpo.weights.expert_files import addends
from mindgrpo.weights.pretrained import fill_random

TOKENS, HIDDEN, EXPERTS, CHOSEN, COEF = 24, 6, 5, 2, 0.3


def probabilities(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    powers = np.exp(x @ weight)
    return powers / powers.sum(1, keepdims=True)


def balance_loss(x: np.ndarray, weight: np.ndarray, routes: np.ndarray) -> float:
    """As transformers' load_balancing_loss_func of one layer: means over tokens of choices [K, E], of p [E]."""
    share = np.eye(EXPERTS)[routes].mean(0)
    return float((share * probabilities(x, weight).mean(0)).sum() * EXPERTS)


def test_the_gradient_is_that_of_the_definition() -> None:
    rng = np.random.default_rng(4)
    x, weight = rng.normal(size=(TOKENS, HIDDEN)), rng.normal(size=(HIDDEN, EXPERTS))
    routes = np.argsort(-probabilities(x, weight), 1)[:, :CHOSEN]
    # The first three tokens are a prompt's, once for two samples, and others only pad.
    repeats = np.ones(TOKENS, int)
    repeats[:3], repeats[-4:] = 2, 0
    whole = np.repeat(np.arange(TOKENS), repeats)
    samples = np.split(routes[whole][:, None], [9, 17])
    load = load_by_expert(samples, 1, EXPERTS)
    factors = balance_factors(load, CHOSEN, COEF)
    packed = np.concatenate([repeats, factors[0]]).astype(np.float32)
    scores = rng.random((TOKENS, CHOSEN))
    inputs = [Tensor(each.astype(np.float32)) for each in (scores, x, weight, packed)]
    np.testing.assert_array_equal(Balance()(*inputs).asnumpy(), inputs[0].asnumpy())
    gradient = ops.GradOperation(get_all=True, sens_param=True)(Balance())
    dscores, dx, dweight, _ = (each.asnumpy() for each in gradient(*inputs, inputs[0]))
    np.testing.assert_array_equal(dscores, inputs[0].asnumpy())
    value = (repeats[:, None] * probabilities(x, weight) * factors).sum()
    assert value == pytest.approx(COEF * balance_loss(x[whole], weight, routes[whole]), rel=1e-6)
    for found, of, at in ((dx, x, 0), (dweight, weight, 1)):
        expected = np.zeros_like(of)
        for index in np.ndindex(*of.shape):
            sides = []
            for step in (1e-5, -1e-5):
                moved = [x.copy(), weight.copy()]
                moved[at][index] += step
                sides.append(COEF * balance_loss(moved[0][whole], moved[1], routes[whole]))
            expected[index] = (sides[0] - sides[1]) / 2e-5
        assert np.abs(expected).max() > 1e-3
        np.testing.assert_allclose(found, expected, atol=1e-6)


def gradients_of(coef: float, shape: MicroShape, is_pulled: bool) -> dict[str, np.ndarray]:
    """Of an update without recorded routes; with `is_pulled`, samples have advantages beside."""
    moe = CONFIG.moe
    assert moe is not None
    config = replace(CONFIG, moe=replace(moe, balance_coef=coef))
    settings = replace(SETTINGS, shape=shape, loss_config=replace(SETTINGS.loss_config, beta=0.0))
    policy = Policy(config, LAYOUT, CpuBackend({}), settings)
    fill_random(policy.weights, seed=2, scale=0.3)
    made, rng = batch(), np.random.default_rng(5)
    lengths = made.rollout.completion_lengths.tolist()
    # Two samples each have one prompt, which is once in a row of both.
    prompts = [rng.integers(0, CONFIG.vocab_size, 2 + n).astype(np.int32) for n in range(4)]
    rollout = Rollout.single_turn(
        [prompts[i // 2] for i in range(len(lengths))],
        [rng.integers(0, CONFIG.vocab_size, n).astype(np.int32) for n in lengths],
        ["stop"] * len(lengths),
        [np.zeros(n, np.float32) for n in lengths],
        range(len(lengths)),
    )
    advantages = made.advantages if is_pulled else np.zeros_like(made.advantages)
    made = replace(made, rollout=rollout, advantages=advantages, reference_logps=None)
    weights = np.full(len(made), 0.1, np.float32)
    accumulate_gradients(policy, made, PackedRollout(rollout), range(len(made)), weights)
    return {name: own.copy() for name, own in policy.gradients.arrays.hf_views.items()}


def test_packing_changes_no_gradient_and_samples_without_advantage_are_balanced() -> None:
    in_rows = gradients_of(COEF, MicroShape(2, 40), False)
    alone = gradients_of(COEF, MicroShape(1, 40, max_per_row=1), False)
    routers = [name for name in in_rows if name.endswith("mlp.gate.weight")]
    assert len(routers) == 2
    for name in routers:
        assert np.abs(in_rows[name]).max() > 1e-3
    for name, own in in_rows.items():
        np.testing.assert_allclose(own, alone[name], rtol=0, atol=2e-6, err_msg=name)
    # Of the last layer, the loss concerns nothing but the router and what is before it.
    assert not in_rows["model.norm.weight"].any()


def test_without_a_coefficient_the_gradient_is_what_it_was() -> None:
    shape = MicroShape(2, 40)
    both, balanced, pulled = (
        gradients_of(*how)
        for how in ((COEF, shape, True), (COEF, shape, False), (0.0, shape, True))
    )
    for name, own in pulled.items():
        np.testing.assert_allclose(
            both[name], own + balanced[name], rtol=0, atol=2e-6, err_msg=name
        )


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=WITH_AVX512)])
def test_a_bias_moves_by_the_rate_towards_an_even_load_and_keeps_its_bits(dtype: Dtype) -> None:
    backend = CpuBackend({}, num_parts=NUM_PARTS["medium"] if dtype == "bfloat16" else None)
    backend.compute_dtype = dtype
    rate, config = 0.001, decoder_config(DEEPSEEK, "here")
    layout = Layout.of(Mesh(1, 1), parameter_specs(config))
    policy = Policy(config, layout, backend, replace(SETTINGS, bias_update_rate=rate))
    fill_random(policy.masters, seed=2, scale=0.3)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    expected = np.float32([0.3, -1 / 3, 1e-4, 7.1])
    with policy.masters.on_host(write=True) as own:
        own.hf_views[name][...] = addends(expected)
    policy.masters_changed()
    before = {n: own.copy() for n, own in policy.weights.arrays.hf_views.items() if n != name}
    # The mean is 5: the third expert has as many.
    for _ in range(3):
        policy.move_biases(np.array([[9, 1, 5, 5]]))
        expected = expected + np.float32(rate) * np.float32([-1, 1, 0, 0])
    for weights in (policy.weights, policy.masters):
        own = weights.arrays.hf_views[name].astype(np.float32)
        assert own.sum(0).tobytes() == expected.tobytes()
        np.testing.assert_array_equal(own, addends(expected))
    for other, values in before.items():
        np.testing.assert_array_equal(policy.weights.arrays.hf_views[other], values)


class FirstStage(CpuBackend):
    """A rank whose neighbours are not there."""

    def link(self, peer: int, shape: Sequence[int]) -> Any:
        return None

    def _make_group(self, ranks: tuple[int, ...]) -> Group:
        return AloneGroup(self.rank)


def test_a_stage_of_dense_layers_has_no_bias_to_move() -> None:
    config = decoder_config(DEEPSEEK, "here")
    assert [kind.has_experts for kind in config.layers] == [False, True]
    layout = Layout.of(Mesh(1, 1, 2), parameter_specs(config))
    policy = Policy(config, layout, FirstStage({}), replace(SETTINGS, bias_update_rate=0.05))
    fill_random(policy.weights, seed=2)
    before = {name: own.copy() for name, own in policy.weights.arrays.hf_views.items()}
    none = StepExperts(policy.pipeline.experts, {})
    policy.move_biases(none.load(range(len(batch()))))
    for name, own in policy.weights.arrays.hf_views.items():
        np.testing.assert_array_equal(own, before[name])


@pytest.mark.parametrize(
    ("family", "words", "sentence"),
    [
        ("llama", ["--rl_config.router_aux_loss_coef=0.01"], "type llama have no experts"),
        ("deepseek_v3", ["--rl_config.router_aux_loss_coef=0.01"], "without a softmax"),
        ("qwen3_moe", ["--rl_config.moe_router_bias_update_rate=0.001"], "no experts by a bias"),
    ],
)
def test_what_a_model_lacks_is_refused(family: str, words: list[str], sentence: str) -> None:
    words = [*words, "--actor_config.parallel_config.model_parallel=1", "--rl_config.beta=0"]
    config = load_config(EXAMPLE, words).config
    with pytest.raises(UserError, match=sentence):
        plan_run(config, read(family, max_position_embeddings=4096), None)
