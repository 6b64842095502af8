"""The table of a generator that the kernels of rollout.h read and write, filled from Python by the fields' names.

The names, types and offsets come from the compiled library (ROLLOUT_FIELDS of rollout.h): a field is described once.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import NamedTuple

import numpy as np

from mindgrpo.backend.kernels.native.library import library

# The C types of rollout.h.
DTYPES = {
    "int64_t": np.int64,
    "int32_t": np.int32,
    "uint64_t": np.uint64,
    "uint8_t": np.uint8,
    "float": np.float32,
    "double": np.float64,
}


class _CField(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("type", ctypes.c_char_p),
        ("is_array", ctypes.c_int64),
        ("offset", ctypes.c_int64),
    )


class _Field(NamedTuple):
    dtype: np.dtype
    is_array: bool
    offset: int


def _read_fields(native: ctypes.CDLL) -> tuple[dict[str, _Field], int]:
    """The fields by name, and the table's bytes."""
    described = ctypes.pointer(_CField.in_dll(native, "rollout_fields"))
    fields: dict[str, _Field] = {}
    for index in range(1000):
        one = described[index]
        if one.name is None:
            return fields, one.offset
        dtype = np.dtype(DTYPES[one.type.decode()])
        fields[one.name.decode()] = _Field(dtype, bool(one.is_array), one.offset)
    raise RuntimeError("rollout_fields of native/rollout.c has no end")


class RolloutTable:
    """One table, registered with the library under `number` as long as this lives.

    `table[name] = value` sets a number, or the address and number of elements of an array, which stays alive here.
    KeyError for a name that rollout.h does not have, ValueError for an array of another dtype or with gaps.
    """

    def __init__(self) -> None:
        native = library()
        if native is None:
            raise RuntimeError("the C kernels are not there: no C compiler was found, or it failed")
        self._fields, num_bytes = _read_fields(native)
        self._memory = np.zeros(num_bytes, np.uint8)
        self._values: dict[str, np.ndarray] = {}
        native.rollout_register.argtypes = [ctypes.c_void_p]
        self.number = int(native.rollout_register(self._memory.ctypes.data))
        if self.number < 0:
            raise RuntimeError("more generators at once than native/rollout.c has room for")
        weakref.finalize(self, _forget, native, self.number, self._memory)

    def __setitem__(self, name: str, value: float | np.ndarray) -> None:
        field = self._fields[name]
        if not field.is_array:
            self._values[name] = self._memory[field.offset :][: field.dtype.itemsize].view(
                field.dtype
            )
            self._values[name][0] = value
            return
        if (
            not isinstance(value, np.ndarray)
            or value.dtype != field.dtype
            or not value.flags.c_contiguous
        ):
            raise ValueError(
                f"{name} is an array of {field.dtype} without gaps in native/rollout.h, not {value!r:.80}"
            )
        self._memory[field.offset :][:16].view(np.int64)[:] = value.ctypes.data, value.size
        self._values[name] = value

    def __getitem__(self, name: str) -> np.ndarray:
        """The array, or for a number an array [1] of it."""
        return self._values[name]

    def check_complete(self) -> None:
        """RuntimeError if a field of rollout.h has never been given a value."""
        if missing := self._fields.keys() - self._values.keys():
            raise RuntimeError(
                f"native/rollout.h has fields without a value: {', '.join(sorted(missing))}"
            )


def _forget(native: ctypes.CDLL, number: int, memory: np.ndarray) -> None:
    """Takes the memory, which must not be freed before."""
    native.rollout_forget(number)
