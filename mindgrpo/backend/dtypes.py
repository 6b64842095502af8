"""The dtypes that a pool may have, by name: their sizes, and what numpy and MindSpore call them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

Dtype = Literal["float32", "bfloat16", "float16"]
ITEM_BYTES: Mapping[Dtype, int] = {"float32": 4, "bfloat16": 2, "float16": 2}


def numpy_dtype(dtype: Dtype) -> np.dtype:
    """bfloat16 is MindSpore's own, which numpy rounds to as to any other: to the nearest, ties to even."""
    if dtype != "bfloat16":
        return np.dtype(dtype)
    from mindspore.common import np_dtype

    return np.dtype(np_dtype.bfloat16)


def mindspore_dtype(dtype: Dtype) -> Any:
    import mindspore as ms

    return getattr(ms, dtype)


def bits_of(array: np.ndarray) -> np.ndarray:
    """The same memory as unsigned integers of the elements' size."""
    return array.view(f"u{array.itemsize}")
