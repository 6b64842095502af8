"""A reference that follows the policy: by which share, in which dtype."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from mindgrpo.weight_sync.transfer import mix


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_reference_takes_its_share_of_the_policys_weights(dtype: type) -> None:
    old, new = np.array([1.0, -2.0, 0.5], dtype), np.array([3.0, 2.0, 0.5], dtype)
    expected = 0.25 * new.astype(np.float64) + 0.75 * old
    pool = SimpleNamespace(is_host_memory=True)
    reference, policy = (
        SimpleNamespace(pool=pool, arrays=SimpleNamespace(flat_buffers=[each]))
        for each in (old, new)
    )
    mix(reference, policy, 0.25)  # type: ignore[arg-type]
    np.testing.assert_array_equal(old, expected)  # numbers that both dtypes hold
    assert old.dtype == dtype and new.tolist() == [3.0, 2.0, 0.5]
