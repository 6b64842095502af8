"""The vision encoder against transformers' features, with C kernels and with MindSpore's own operations.

Does not prove anything about pixels (test_pixels.py), or about what the language model makes of features
(test_image_models.py).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from golden_images import GoldenImages, encoded, read_golden_images

from mindgrpo.backend.connect import RuntimeSettings, connect
from mindgrpo.backend.contract import Backend
from mindgrpo.backend.targets import SHARED_MEMORY

ALL = [0, 1, 2]
PLAIN = ("matmul", "rms_norm", "glu", "attention")


@pytest.fixture(scope="module")
def golden() -> GoldenImages:
    return read_golden_images()


@pytest.fixture(params=["native", "plain"])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    settings = RuntimeSettings(matmul_precision="highest")
    if request.param == "plain":
        settings = RuntimeSettings(plain_kernels=PLAIN)
    made = connect(SHARED_MEMORY, {}, settings)
    made.kernels.batch_invariant = request.param == "native"
    yield made
    made.close()


def test_features_are_those_of_transformers(golden: GoldenImages, backend: Backend) -> None:
    """Three images in a row; windows do not divide two of them."""
    for ours, theirs in zip(encoded(golden, backend, ALL, 160), golden.features, strict=True):
        assert np.abs(ours - theirs).max() < 1e-5 * np.abs(theirs).max()


def test_an_image_has_the_same_features_beside_any_others(golden: GoldenImages) -> None:
    backend = connect(SHARED_MEMORY, {}, RuntimeSettings(matmul_precision="highest"))
    backend.kernels.batch_invariant = True
    together = encoded(golden, backend, ALL, 160)
    for number in ALL:
        np.testing.assert_array_equal(encoded(golden, backend, [number], 80)[0], together[number])
    backend.close()
