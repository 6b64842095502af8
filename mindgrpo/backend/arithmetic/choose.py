"""Chooses the arithmetic for a pool's tensors: on the host for host memory, else on the device."""

from __future__ import annotations

from mindgrpo.backend.arithmetic.contract import Arithmetic
from mindgrpo.backend.arithmetic.device import DeviceArithmetic
from mindgrpo.backend.arithmetic.host import HostArithmetic
from mindgrpo.backend.contract import Backend, Pool


def arithmetic_of(pool: Pool, backend: Backend) -> Arithmetic:
    return HostArithmetic(backend) if pool.is_host_memory else DeviceArithmetic(backend)
