"""Chooses where to compute with the tensors of a pool: where they are."""

from __future__ import annotations

from mindgrpo.backend.arithmetic.contract import Arithmetic
from mindgrpo.backend.arithmetic.device import DeviceArithmetic
from mindgrpo.backend.arithmetic.host import HostArithmetic
from mindgrpo.backend.contract import Backend, Pool


def arithmetic_of(pool: Pool, backend: Backend) -> Arithmetic:
    return HostArithmetic(backend) if pool.is_host_memory else DeviceArithmetic(backend)
