"""AdamW over a rank's parameters against AdamW in numpy, parameter by parameter.

Does not prove anything about several ranks, nor that the gradients are right or clipped rightly.
"""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
import pytest
from ascend_doubles import fused
from mindspore import Tensor, nn

from mindgrpo.backend.arithmetic.contract import Columns, Stored
from mindgrpo.backend.arithmetic.device import SumOfColumns, SumOfTensors
from mindgrpo.backend.arithmetic.device_rows import TENSORS_OF_LOOP
from mindgrpo.backend.connect import connect
from mindgrpo.backend.dtypes import Dtype
from mindgrpo.backend.host_pool import HostPool
from mindgrpo.backend.kernels.contract import Kernels
from mindgrpo.backend.kernels.native.kernels import NativeKernels
from mindgrpo.backend.kernels.native.library import library_path
from mindgrpo.backend.kernels.shapes import AdamWSettings
from mindgrpo.backend.targets import choose_target
from mindgrpo.models.decoder_config import decoder_config
from mindgrpo.models.parameters import parameter_specs
from mindgrpo.parallel.mesh import Mesh
from mindgrpo.parallel.sharding import Layout
from mindgrpo.training.optimizer import AdamW
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

    def __init__(
        self,
        backend: str,
        kernels: Kernels,
        on_host: bool,
        rounded: Dtype | None = None,
        num_layers: int = 2,
    ) -> None:
        config = decoder_config(RAW | {"num_hidden_layers": num_layers}, "here")
        layout = Layout.of(Mesh(1, 1), parameter_specs(config))
        self.backend = made = connect(choose_target("CPU", backend), {})
        made.kernels = kernels
        self.weights = Weights(layout, 0, made)
        self.gradients = Weights(layout, 0, made, "gradient")
        self.rounded = None
        if rounded is not None:
            self.rounded = Weights(layout, 0, made, "rounded", dtype=rounded)
            self.rounded.pool.load()
        roles = self.weights, self.gradients
        self.optimizer = AdamW(*roles, made, SETTINGS, on_host, self.rounded)

    def reset(self) -> None:
        fill_random(self.weights, seed=3)
        for role in (self.optimizer.first, self.optimizer.second, self.gradients):
            with role.on_host(write=True) as host:
                for run in host.flat_buffers:
                    run[...] = 0.0

    def copies(self) -> dict[str, np.ndarray]:
        with self.weights.on_host() as host:
            return {name: part.astype(np.float64) for name, part in host.hf_views.items()}

    def fill_gradients(self, value: float) -> None:
        with self.gradients.on_host(write=True) as host:
            for run in host.flat_buffers:
                run[...] = value


# On a device the update is a graph, and with moments on the host a kernel's; in shared memory it is a kernel's. An NPU
# has an operation for it, which has a double here.
WAYS = [
    ("shared_memory", NativeKernels, False),
    ("shared_memory", NativeKernels, True),
    ("shared_memory", Kernels, False),
    ("device", Kernels, False),
    ("device", Kernels, True),
    ("device", fused, False),
]


@pytest.fixture(
    scope="module", params=WAYS, ids=lambda way: f"{way[0]}-{way[1].__name__}{'-on_host' * way[2]}"
)
def built(request: pytest.FixtureRequest) -> Setting:
    backend, kernels, on_host = request.param
    if kernels is NativeKernels and library_path() is None:
        pytest.skip("no C compiler on this machine")
    return Setting(backend, kernels(), on_host)


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
        with setting.gradients.on_host(write=True) as host:
            for name, part in host.hf_views.items():
                gradient = rng.normal(0, 10.0 ** rng.uniform(-4, 1), part.shape)
                part[...] = gradient
                expected[name].step(part.astype(np.float64) * scale, rate)
        setting.optimizer.step(update, rate, scale)
    with setting.weights.on_host() as host, setting.optimizer.second.on_host() as moments:
        for name, part in host.hf_views.items():
            np.testing.assert_allclose(part, expected[name].weight, rtol=0, atol=1e-6, err_msg=name)
            moment = moments.hf_views[name]
            np.testing.assert_allclose(moment, expected[name].second, rtol=2e-5, err_msg=name)


def test_without_gradients_matrices_shrink_by_the_decay_and_norms_and_biases_stay(
    setting: Setting,
) -> None:
    before = setting.copies()
    setting.fill_gradients(0.0)
    setting.optimizer.step(1, 0.5, 1.0)
    for name, part in setting.copies().items():
        factor = 1 - 0.5 * SETTINGS.weight_decay if is_matrix(name) else 1.0
        np.testing.assert_allclose(part, before[name] * factor, rtol=1e-6, err_msg=name)


def test_the_gradients_are_zero_after_a_step(setting: Setting) -> None:
    setting.fill_gradients(2.0)
    setting.optimizer.step(1, 1e-3, 0.25)
    with setting.gradients.on_host() as host:
        for run in host.flat_buffers:
            np.testing.assert_array_equal(run, 0.0)


@pytest.mark.parametrize("on_host", [False, True])
def test_narrow_weights_on_a_device_are_those_of_the_optimizer_rounded(on_host: bool) -> None:
    setting = Setting("device", Kernels(), on_host, "float16")
    setting.reset()
    setting.fill_gradients(1.0)
    before = setting.backend.host_device_bytes
    setting.optimizer.step(1, 1e-2, 1.0)
    assert on_host or setting.backend.host_device_bytes == before
    assert setting.rounded is not None
    with setting.weights.on_host() as exact, setting.rounded.on_host() as narrow:
        for name, part in exact.hf_views.items():
            wanted = part.astype(np.float16)
            assert wanted.any() and narrow.hf_views[name].tobytes() == wanted.tobytes(), name


def test_a_device_sums_and_updates_more_tensors_than_a_graph_can_nest_calls_for() -> None:
    """MindSpore takes 1000 calls, which 44 layers made more of; fewer, so that less is compiled here."""
    setting = Setting("device", Kernels(), False, "float16", num_layers=20)
    setting.reset()
    setting.fill_gradients(0.5)
    before = setting.copies()
    assert len(setting.weights.fused) > 2 * TENSORS_OF_LOOP
    ms.set_recursion_limit(400)
    try:
        norm = setting.optimizer.sum_gradients()
        setting.optimizer.step(1, 1e-2, 1.0)
    finally:
        ms.set_recursion_limit(1000)
    assert norm == pytest.approx(0.5 * sum(part.size for part in before.values()) ** 0.5, rel=1e-6)
    assert setting.rounded is not None
    with setting.weights.on_host() as exact, setting.rounded.on_host() as narrow:
        for name, part in exact.hf_views.items():
            # Adam's first move is as long as the rate.
            decay = 1e-2 * SETTINGS.weight_decay * is_matrix(name)
            np.testing.assert_allclose(part, before[name] * (1 - decay) - 1e-2, atol=1e-6)
            np.testing.assert_array_equal(narrow.hf_views[name], part.astype(np.float16))


class Doubling:
    """A group of two ranks that have the same."""

    def sum_cell(self) -> nn.Cell:
        return Twice()


class Twice(nn.Cell):
    def construct(self, x: Any) -> Any:
        return x + x


@pytest.mark.parametrize(
    ("shape", "ranges"),
    [
        ((6,), ((0, 6),)),
        ((4, 6), ((0, 6),)),
        ((4, 6), ((0, 2),)),
        ((4, 6), ((2, 3), (5, 6))),
        ((2, 4, 6), ((1, 2), (2, 4))),
        ((6,), ((4, 6),)),
    ],
)
def test_a_sum_over_ranks_is_of_the_ranges_of_columns_alone(
    shape: tuple[int, ...], ranges: tuple[tuple[int, int], ...]
) -> None:
    """Beside a second tensor, whose columns follow in the same exchange."""
    connect(choose_target("CPU", "device"), {})
    draw = np.random.default_rng(0)
    given = [draw.normal(size=own).astype(np.float32) for own in (shape, (3, 5))]
    parameters = [ms.Parameter(Tensor(array), name=f"p{i}") for i, array in enumerate(given)]
    second = ((0, 5),) if len(ranges) == 1 and ranges[0] == (0, shape[-1]) else ((1, 4),)
    pool = HostPool(0)
    columns = [
        Columns(Stored(pool, 0, array.shape, parameter), own)
        for parameter, array, own in zip(parameters, given, (ranges, second), strict=True)
    ]
    kind = SumOfTensors if columns[0].is_whole else SumOfColumns
    kind(columns, Doubling())(Tensor([0.0], ms.float32))
    for parameter, expected, own in zip(parameters, given, (ranges, second), strict=True):
        for start, stop in own:
            expected[..., start:stop] *= 2
        np.testing.assert_array_equal(parameter.asnumpy(), expected)


def test_on_the_host_moments_and_all_that_travels_are_counted_on_a_device() -> None:
    setting = Setting("device", Kernels(), on_host=True)
    setting.reset()
    setting.fill_gradients(1.0)
    before = setting.backend.host_device_bytes
    setting.optimizer.step(1, 1e-2, 1.0)
    # Weights and gradients come and go; the moments do neither.
    expected = 2 * (setting.weights.num_bytes + setting.gradients.num_bytes)
    assert setting.backend.host_device_bytes - before == expected


def test_on_a_device_nothing_travels_and_a_step_touches_no_tensor_outside_of_its_graphs() -> None:
    setting = Setting("device", Kernels(), False, "float16")
    setting.reset()
    setting.fill_gradients(1.0)
    before = setting.backend.host_device_bytes
    setting.optimizer.sum_gradients()
    setting.optimizer.step(1, 1e-2, 1.0)
    setting.optimizer.clear_gradients()
    for role in (setting.weights, setting.gradients, setting.rounded):
        assert role is not None
        role.parameters = {}
    setting.optimizer.sum_gradients()
    setting.optimizer.step(2, 1e-2, 1.0)
    assert setting.backend.host_device_bytes == before
