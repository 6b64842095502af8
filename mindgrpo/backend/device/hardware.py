"""Declares what the devices of one backend differ in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from mindspore import nn

from mindgrpo.backend.contract import ProfileSettings
from mindgrpo.backend.dtypes import Dtype
from mindgrpo.backend.kernels.contract import Kernels


class Hardware(ABC):
    """One kind of device. Tensors are MindSpore's, in the device's memory."""

    name: str
    # MindSpore's name of its communication.
    communication: str
    kernels: Kernels
    has_profile = False
    # The variable that lists, for other programs, which of the host's devices they see.
    devices_variable: str | None = None

    @abstractmethod
    def open(self, world_size: int) -> None:
        """Sets this process up, after MindSpore has the device and before anything is placed on it."""

    @abstractmethod
    def zeros(self, shape: Sequence[int], dtype: Dtype) -> Any:
        """Fresh memory of the device."""

    @abstractmethod
    def copied(self, array: np.ndarray, dtype: Dtype) -> Any:
        """`array`, which is of `dtype`, in fresh memory of the device, apart from the host's."""

    def give_up(self, parameter: Any) -> None:
        """Gives back the memory of a parameter that is about to get another.

        Compiled graphs that used the parameter refer to the memory until they run again: it is taken from under them.
        """
        # Of `data`, which is made anew: a Parameter keeps returning the storage that it returned first.
        parameter.data.untyped_storage().resize_(0)

    def empty_cache(self) -> None:
        """See contract.Backend.make_room."""
        return None

    @abstractmethod
    def synchronize(self) -> None:
        """See contract.Backend.synchronize."""

    @abstractmethod
    def gather_cell(self, group: str, index: int, size: int) -> nn.Cell:
        """See contract.Group.gather_cell."""

    @abstractmethod
    def scatter_sum_cell(self, group: str, index: int, size: int) -> nn.Cell:
        """A cell for use inside graphs: [size, n] -> [n], the sum of what the members have at [index]."""

    @abstractmethod
    def exchange(
        self,
        rank: int,
        sends: Mapping[int, Any],
        receives: Mapping[int, Sequence[int]],
        pair: Callable[[int, int], str],
        dtype: Dtype,
    ) -> dict[int, Any]:
        """See contract.Backend.exchange; `pair` names the group of two ranks, the lower one first."""

    @property
    def memory_bytes(self) -> int | None:
        """Bytes of the device, once ranks are connected; None where it has no limit of its own."""
        return None

    def take_peak(self) -> int | None:
        """See contract.Backend.take_device_peak."""
        return None

    def profile(self, folder: Path, settings: ProfileSettings) -> AbstractContextManager[None]:
        """Writes the device's own profile of what runs inside into `folder`, where it has one."""
        return nullcontext()

    def mark(self, name: str) -> AbstractContextManager[None]:
        """Marks what runs inside as a range in that profile."""
        return nullcontext()
