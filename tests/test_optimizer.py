"""AdamW over a rank's parameters against AdamW in numpy, parameter by parameter.

Does not prove anything about several ranks, nor that the gradients are right or clipped rightly.
"""

from __future__ import annotations

import numpy as np
import pytest

from mindgrpo.backend.cpu.backend import CpuBackend
from mindgrpo.backend.kernels.contract import Kernels
from mindgrpo.backend.kernels.mindspore_ops import PlainKernels
from mindgrpo.backend.kernels.native.kernels import NativeKernels
from mindgrpo.backend.kernels.native.library import library_path
from mindgrpo.models.decoder_config import decoder_config
from mindgrpo.models.parameters import parameter_specs
from mindgrpo.parallel.mesh import Grid
from mindgrpo.parallel.sharding import Layout
from mindgrpo.training.optimizer import AdamW, AdamWSettings
from mindgrpo.weights.local_weights import Weights
from mindgrpo.weights.pretrained import fill_random

SETTINGS = AdamWSettings(beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
RAW = {
    "model_type": "qwen2",
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


class Setting:
    """Weights, gradients and the optimizer of one process, as a policy has them."""

    def __init__(self, kernels: Kernels, on_host: bool) -> None:
        config = decoder_config(RAW, "here")
        layout = Layout(Grid(1, 1, 1), parameter_specs(config), (range(2),))
        backend = CpuBackend({})
        backend.kernels = kernels
        self.weights = Weights(layout, 0, backend)
        self.gradients = Weights(layout, 0, backend)
        self.optimizer = AdamW(self.weights, self.gradients, backend, SETTINGS, on_host)

    def reset(self) -> None:
        fill_random(self.weights, seed=3)
        for moments in (self.optimizer.first, self.optimizer.second):
            for run in moments.arrays.flat_buffers:
                run[...] = 0.0

    def copies(self) -> dict[str, np.ndarray]:
        return {
            name: part.astype(np.float64) for name, part in self.weights.arrays.hf_views.items()
        }


# With plain kernels the device's way is a graph, and the host's is numpy's.
WAYS = [(NativeKernels, False), (NativeKernels, True), (PlainKernels, False), (PlainKernels, True)]


@pytest.fixture(
    scope="module", params=WAYS, ids=lambda way: f"{way[0].__name__}{'-on_host' * way[1]}"
)
def built(request: pytest.FixtureRequest) -> Setting:
    kernels, on_host = request.param
    if kernels is NativeKernels and library_path() is None:
        pytest.skip("no C compiler on this machine")
    return Setting(kernels(), on_host)


@pytest.fixture
def setting(built: Setting) -> Setting:
    built.reset()
    return built


def is_matrix(name: str) -> bool:
    return name.endswith("weight") and "norm" not in name


class NumpyAdamW:
    """Algorithm 2 of arXiv:1711.05101, one tensor; `rate` is both the step and the decay's factor."""

    def __init__(self, weight: np.ndarray, decay: float) -> None:
        self.weight, self.decay = weight, decay
        self.first = np.zeros_like(weight)
        self.second = np.zeros_like(weight)
        self.time = 0

    def step(self, gradient: np.ndarray, rate: float) -> None:
        self.time += 1
        self.first = SETTINGS.beta1 * self.first + (1 - SETTINGS.beta1) * gradient
        self.second = SETTINGS.beta2 * self.second + (1 - SETTINGS.beta2) * gradient**2
        first = self.first / (1 - SETTINGS.beta1**self.time)
        second = self.second / (1 - SETTINGS.beta2**self.time)
        move = first / (np.sqrt(second) + SETTINGS.eps)
        self.weight = self.weight - rate * (move + self.decay * self.weight)


def test_five_steps_are_those_of_adamw_in_numpy(setting: Setting) -> None:
    expected = {
        name: NumpyAdamW(weight, SETTINGS.weight_decay if is_matrix(name) else 0.0)
        for name, weight in setting.copies().items()
    }
    assert {is_matrix(name) for name in expected} == {True, False}
    rng = np.random.default_rng(0)
    scale = 0.5
    for update in range(1, 6):
        rate = 1e-2 / update
        for name, part in setting.gradients.arrays.hf_views.items():
            gradient = rng.normal(0, 10.0 ** rng.uniform(-4, 1), part.shape).astype(np.float32)
            part[...] = gradient
            expected[name].step(gradient.astype(np.float64) * scale, rate)
        setting.optimizer.step(update, rate, scale)
    for name, part in setting.weights.arrays.hf_views.items():
        np.testing.assert_allclose(part, expected[name].weight, rtol=0, atol=1e-6, err_msg=name)
        moment = setting.optimizer.second.arrays.hf_views[name]
        np.testing.assert_allclose(moment, expected[name].second, rtol=2e-5, err_msg=name)


def test_without_gradients_matrices_shrink_by_the_decay_and_norms_and_biases_stay(
    setting: Setting,
) -> None:
    before = setting.copies()
    for run in setting.gradients.arrays.flat_buffers:
        run[...] = 0.0
    setting.optimizer.step(1, 0.5, 1.0)
    for name, part in setting.weights.arrays.hf_views.items():
        factor = 1 - 0.5 * SETTINGS.weight_decay if is_matrix(name) else 1.0
        np.testing.assert_allclose(part, before[name] * factor, rtol=1e-6, err_msg=name)


def test_the_gradients_are_zero_after_a_step(setting: Setting) -> None:
    for run in setting.gradients.arrays.flat_buffers:
        run[...] = 2.0
    setting.optimizer.step(1, 1e-3, 0.25)
    for run in setting.gradients.arrays.flat_buffers:
        np.testing.assert_array_equal(run, 0.0)


class Distant:
    """A pool whose graphs see only what was pushed and whose views show only what was pulled."""

    def __init__(self, runs: tuple[np.ndarray, ...]) -> None:
        self.flat_buffers = runs
        self.device = [run.copy() for run in runs]

    def pull(self) -> None:
        for run, kept in zip(self.flat_buffers, self.device, strict=True):
            run[...] = kept

    def push(self) -> None:
        for run, kept in zip(self.flat_buffers, self.device, strict=True):
            kept[...] = run


def test_on_the_host_weights_come_from_the_device_and_go_back_with_empty_gradients() -> None:
    setting = Setting(PlainKernels(), on_host=True)
    setting.reset()
    before = [run.copy() for run in setting.weights.arrays.flat_buffers]
    weights = setting.weights.pool = Distant(setting.weights.arrays.flat_buffers)  # type: ignore[assignment]
    for run in setting.gradients.arrays.flat_buffers:
        run[...] = 1.0
    gradients = setting.gradients.pool = Distant(setting.gradients.arrays.flat_buffers)  # type: ignore[assignment]
    for run in setting.weights.arrays.flat_buffers:
        run[...] = np.nan
    setting.optimizer.step(1, 1e-2, 1.0)
    for device, old in zip(weights.device, before, strict=True):
        # A first step of Adam moves by lr, whatever the gradient.
        assert np.isfinite(device).all()
        np.testing.assert_allclose(
            device, old * (1 - 1e-3 * (device is weights.device[0])) - 1e-2, atol=1e-6
        )
    for device in gradients.device:
        np.testing.assert_array_equal(device, 0.0)
