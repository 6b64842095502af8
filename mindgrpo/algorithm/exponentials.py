"""Computes exponentials, logarithms and powers of arrays with the same bits wherever the arrays lie in memory.

On processors with AVX-512, NumPy (1.26) computes powers, and in float64 exponentials and logarithms, by other code,
whose last bits differ, where input and output touch in memory. Under glibc no two arrays touch, but under allocators
without a header before each block (jemalloc, mimalloc, tcmalloc) some do. What is computed in place never does.
"""

from __future__ import annotations

import numpy as np


def exp(x: np.ndarray) -> np.ndarray:
    """Returns e ** x in x's dtype, a float."""
    out = np.array(x)
    return np.exp(out, out=out)


def log(x: np.ndarray) -> np.ndarray:
    """Returns the natural logarithm of x in x's dtype, a float."""
    out = np.array(x)
    return np.log(out, out=out)


def power(base: float, exponents: np.ndarray) -> np.ndarray:
    """Returns base ** exponents, float [n], in the exponents' dtype."""
    # One more than is needed lies between the two.
    bases, powers = np.empty((2, len(exponents) + 1), exponents.dtype)[:, :-1]
    bases[:], powers[:] = base, exponents
    return np.power(bases, powers, out=powers)
