"""A role's memory on a device: parameters with memory of their own, and a copy on the host while they are away."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum

import numpy as np
from mindspore import Parameter, Tensor

from mindgrpo.backend.contract import Pool, ReleasedMemory
from mindgrpo.backend.device.hardware import Hardware
from mindgrpo.backend.dtypes import ITEM_BYTES, Dtype, mindspore_dtype, numpy_dtype


class _State(Enum):
    RELEASED = "released"
    DEVICE = "on the device"
    HOST = "on the host"


class _Flat:
    """Contract.HostArrays over one array."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def view(self, offset: int, shape: Sequence[int]) -> np.ndarray:
        count = int(np.prod(shape, dtype=np.int64))
        return self.array[offset : offset + count].reshape(shape)


class DevicePool(Pool):
    """Nothing is on the device until `load` or the first writing on the host.

    `count` is called with the bytes that pass between device and host.
    """

    is_host_memory = False

    def __init__(
        self,
        size: int,
        hardware: Hardware,
        count: Callable[[int], None],
        dtype: Dtype = "float32",
    ) -> None:
        """`size` is in elements."""
        self.num_bytes, self.dtype = size * ITEM_BYTES[dtype], dtype
        self._size = size
        self._hardware, self._count = hardware, count
        self._parameters: list[tuple[Parameter, int, tuple[int, ...]]] = []
        self._state = _State.RELEASED
        self._host: np.ndarray | None = None

    def parameter(self, name: str, offset: int, shape: Sequence[int]) -> Parameter:
        end = offset + int(np.prod(shape, dtype=np.int64))
        for other, start, taken in self._parameters:
            if offset < start + int(np.prod(taken, dtype=np.int64)) and start < end:
                raise ValueError(f"{name} would lie on {other.name}: a range has one parameter")
        if self._state is not _State.RELEASED:
            raise ValueError(f"{name} comes too late: its pool is {self._state.value}")
        parameter = Parameter(Tensor([0.0], mindspore_dtype(self.dtype)), name)
        self._parameters.append((parameter, offset, tuple(shape)))
        return parameter

    @property
    def parameters(self) -> list[Parameter]:
        return [parameter for parameter, _, _ in self._parameters]

    def require(self, user: str) -> None:
        if self._state is not _State.DEVICE:
            name = self._parameters[0][0].name if self._parameters else "a pool"
            raise ReleasedMemory(
                f"{user} uses {name}, whose memory is {self._state.value}: its role is not active in this phase"
            )

    def load(self) -> None:
        if self._state is _State.DEVICE:
            return
        if self._host is not None:
            self._upload(self._host)
        else:
            for parameter, _, shape in self._parameters:
                self._replace(parameter, self._hardware.zeros(shape, self.dtype))
        self._host = None
        self._state = _State.DEVICE

    def offload(self) -> None:
        if self._state is _State.DEVICE:
            self._host = self._download()
            self._give_up(_State.HOST)

    def release(self) -> None:
        self._host = None
        self._give_up(_State.RELEASED)

    @contextmanager
    def on_host(self, write: bool = False) -> Iterator[_Flat]:
        if self._state is _State.HOST and self._host is not None:
            yield _Flat(self._host)
            return
        if not write:
            self.require("reading on the host")
        self.load()
        array = self._download()
        yield _Flat(array)
        if write:
            self._upload(array)

    def _download(self) -> np.ndarray:
        array = np.zeros(self._size, numpy_dtype(self.dtype))
        flat = _Flat(array)
        for parameter, offset, shape in self._parameters:
            values = parameter.asnumpy()
            flat.view(offset, shape)[...] = values
            self._count(values.nbytes)
        return array

    def _upload(self, array: np.ndarray) -> None:
        flat = _Flat(array)
        for parameter, offset, shape in self._parameters:
            values = flat.view(offset, shape)
            self._replace(parameter, self._hardware.copied(values, self.dtype))
            self._count(values.nbytes)

    def _give_up(self, state: _State) -> None:
        # What was started may still use the memory.
        self._hardware.synchronize()
        for parameter, _, _ in self._parameters:
            self._replace(parameter, Tensor([np.nan], mindspore_dtype(self.dtype)))
        self._state = state

    def _replace(self, parameter: Parameter, tensor: Tensor) -> None:
        """Gives the parameter the memory of `tensor` and its own back."""
        if self._state is _State.DEVICE:
            self._hardware.give_up(parameter)
        parameter.set_data(tensor, slice_shape=True)
