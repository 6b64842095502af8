"""Collectives (all-reduce, all-gather, barrier and others) over one segment of shared memory.

NativeGroup runs them in the C library, so that kernels inside graphs can use the same group; PolledGroup is the Python
equivalent for hosts without a C compiler.
"""

from __future__ import annotations

import ctypes
import pickle
import weakref
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from mindgrpo.backend.contract import Group, Share
from mindgrpo.backend.cpu.host import LocalRanks, SharedSegment
from mindgrpo.backend.group_cells import ExchangeByGather, GatherBySum, ScatterBySum
from mindgrpo.backend.kernels.native.library import as_first, operation

SMALL_BYTES = 32 * 1024
# The enums of native/collective.h and .c.
KINDS = {"float32": 0, "float64": 1, "int32": 2, "int64": 3}
OUT_OF_STEP, LOST, BUSY = 2, 3, 4


class NativeSum(nn.Cell):
    """All-reduce (sum) [...] -> [...] in the C library, which looks the group up by `kernel_id`."""

    def __init__(self, kernel_id: int) -> None:
        super().__init__()
        self.group = Tensor([kernel_id], ms.int32)
        self.call = operation("shared_sum", as_first, as_first)

    def construct(self, x: Any) -> Any:
        return self.call(x, self.group)


class NativeGather(nn.Cell):
    def __init__(self, kernel_id: int, size: int) -> None:
        super().__init__()
        self.group = Tensor([kernel_id], ms.int32)

        def stacked(x: Any, group: Any) -> Any:
            return [size, *x]

        self.call = operation("shared_gather", stacked, as_first)

    def construct(self, x: Any) -> Any:
        return self.call(x, self.group)


class NativeScatterSum(nn.Cell):
    def __init__(self, kernel_id: int) -> None:
        super().__init__()
        self.group = Tensor([kernel_id], ms.int32)

        def own(x: Any, group: Any) -> Any:
            return x[1:]

        self.call = operation("shared_scatter_sum", own, as_first)

    def construct(self, x: Any) -> Any:
        return self.call(x, self.group)


class NativeExchange(nn.Cell):
    def __init__(self, kernel_id: int) -> None:
        super().__init__()
        self.group = Tensor([kernel_id], ms.int32)
        self.call = operation("shared_exchange", as_first, as_first)

    def construct(self, x: Any) -> Any:
        return self.call(x, self.group)


class PythonSum(nn.Cell):
    """All-reduce (sum) [...] -> [...] as a Python callback on numpy arrays, for hosts without a C compiler."""

    def __init__(self, group: SharedGroup) -> None:
        super().__init__()

        def call(x: np.ndarray) -> np.ndarray:
            source = np.ascontiguousarray(x)
            out = np.empty_like(source)
            group.sum_into(source.reshape(-1), out.reshape(-1))
            return out

        self.call = ops.Custom(call, out_shape=as_first, out_dtype=as_first, func_type="pyfunc")

    def construct(self, x: Any) -> Any:
        return self.call(x)


class SharedGroup(Group):
    def __init__(self, host: LocalRanks, ranks: Sequence[int]) -> None:
        self.ranks = tuple(ranks)
        self.index = self.ranks.index(host.rank)
        self._host = host

    @property
    def _segment_name(self) -> str:
        return "group-" + "_".join(map(str, self.ranks))

    def sum_cell(self) -> nn.Cell:
        return PythonSum(self)

    def gather_cell(self) -> nn.Cell:
        return GatherBySum(self.sum_cell(), self.index, self.size)

    def scatter_sum_cell(self) -> nn.Cell:
        return ScatterBySum(self.sum_cell(), self.index)

    def exchange_cell(self) -> nn.Cell:
        return ExchangeByGather(self.gather_cell(), self.index)

    def sum_array(self, array: np.ndarray) -> np.ndarray:
        dense = np.ascontiguousarray(array)
        self.sum_into(dense.reshape(-1), dense.reshape(-1))
        if dense is not array:
            array[...] = dense
        return array

    @abstractmethod
    def sum_into(self, source: np.ndarray, out: np.ndarray) -> None:
        """Writes the sum of all members' `source` [n], added in a binary tree, to `out` [n], of the same dtype.

        Both are contiguous, and may be the same array.
        """

    @abstractmethod
    def _take_bytes(
        self, mine: np.ndarray, sizes: np.ndarray, begins: np.ndarray, ends: np.ndarray
    ) -> list[np.ndarray]:
        """Returns the bytes [begins[i], ends[i]) of each member i's `mine`, as uint8 arrays.

        `mine` uint8 [sizes[index]] is this member's payload; `sizes`, `begins` and `ends` are int64 [members].
        """

    def gather_objects(self, value: Any) -> list[Any]:
        """Returns every member's value. Values are pickled; the memory is shared by this job's own processes only."""
        payload = np.frombuffer(pickle.dumps(value, protocol=5), np.uint8)
        sizes = np.zeros(len(self.ranks), np.int64)
        sizes[self.index] = payload.size
        self.sum_into(sizes, sizes)
        pickled = self._take_bytes(payload, sizes, np.zeros_like(sizes), sizes)
        return [pickle.loads(own.data) for own in pickled]

    def exchange_bytes(self, parcels: Sequence[np.ndarray]) -> list[np.ndarray]:
        size = len(self.ranks)
        sizes = np.zeros((size, size), np.int64)
        sizes[self.index] = [parcel.size for parcel in parcels]
        self.sum_into(sizes.reshape(-1), sizes.reshape(-1))
        ends = sizes.cumsum(1)
        of_this = [np.ascontiguousarray(edges[:, self.index]) for edges in (ends - sizes, ends)]
        return self._take_bytes(np.concatenate(parcels), sizes.sum(1), *of_this)


class NativeGroup(SharedGroup):
    """Runs collectives and waits in the C library, through which kernels inside graphs use the same group."""

    def __init__(self, host: LocalRanks, ranks: Sequence[int], buffer_bytes: int) -> None:
        super().__init__(host, ranks)
        assert host.library is not None
        self._library = host.library
        declare(self._library)
        size = len(self.ranks)
        slot_bytes = -(-buffer_bytes // 64) * 64
        control = self._library.group_control_bytes(size)
        segment = SharedSegment(
            host, self._segment_name, self.ranks, control + 2 * size * slot_bytes
        )
        self.kernel_id = self._library.group_register(
            segment.address, slot_bytes, self.index, size, segment.pids_address, host.spins
        )
        if self.kernel_id < 0:
            raise RuntimeError("more groups than the C library has room for")
        # Keeps the segment mapped as long as the library may access it.
        weakref.finalize(self, _forget, self._library, self.kernel_id, segment)

    def sum_cell(self) -> nn.Cell:
        return NativeSum(self.kernel_id)

    def gather_cell(self) -> nn.Cell:
        return NativeGather(self.kernel_id, self.size)

    def scatter_sum_cell(self) -> nn.Cell:
        return NativeScatterSum(self.kernel_id)

    def exchange_cell(self) -> nn.Cell:
        return NativeExchange(self.kernel_id)

    def _done(self, status: int) -> None:
        if status == LOST:
            self._host.check_failure()
        if status == OUT_OF_STEP:
            raise RuntimeError(f"ranks {self.ranks} did not make the same calls in the same order")
        if status:
            raise RuntimeError(f"group {self.ranks}: two calls at a time (status {status})")

    def barrier(self) -> None:
        self._done(self._library.group_barrier(self.kernel_id))

    def sum_into(self, source: np.ndarray, out: np.ndarray) -> None:
        kind = KINDS[source.dtype.name]
        self._done(
            self._library.group_sum_of(
                self.kernel_id, kind, _address(source), source.size, _address(out)
            )
        )

    def sum_shares(self, array: np.ndarray, shares: Sequence[Share]) -> None:
        table, kind = _in_bytes(shares, array.itemsize), KINDS[array.dtype.name]
        self._done(
            self._library.group_sum_shares(
                self.kernel_id, kind, _address(array), array.size, _address(table), len(table)
            )
        )

    def gather_shares(self, array: np.ndarray, shares: Sequence[Share]) -> None:
        table = _in_bytes(shares, array.itemsize)
        self._done(
            self._library.group_gather_shares(
                self.kernel_id, _address(array), array.nbytes, _address(table), len(table)
            )
        )

    def _take_bytes(
        self, mine: np.ndarray, sizes: np.ndarray, begins: np.ndarray, ends: np.ndarray
    ) -> list[np.ndarray]:
        whole = np.empty(int((ends - begins).sum()), np.uint8)
        edges = (_address(each) for each in (sizes, begins, ends, whole))
        self._done(self._library.group_take_bytes(self.kernel_id, _address(mine), *edges))
        return np.split(whole, np.cumsum(ends - begins)[:-1])


def _forget(library: ctypes.CDLL, kernel_id: int, _: SharedSegment) -> None:
    library.group_forget(kernel_id)


def _in_bytes(shares: Sequence[Share], itemsize: int) -> np.ndarray:
    """Returns the shares as int64 [shares, 3], (start, stop, member), with start and stop in bytes."""
    return np.array(shares, np.int64).reshape(-1, 3) * np.array([itemsize, itemsize, 1])


def _address(array: np.ndarray) -> int:
    if not array.flags.c_contiguous:
        raise ValueError("an array with gaps cannot be shared: copy it first")
    return int(array.ctypes.data)


def declare(library: ctypes.CDLL) -> None:
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    id_, small = ctypes.c_int32, ctypes.c_int32
    library.group_control_bytes.restype = number
    library.group_control_bytes.argtypes = [small]
    library.group_lost_pid.restype = number
    library.group_register.argtypes = [pointer, number, small, small, pointer, ctypes.c_uint32]
    library.group_forget.argtypes = [id_]
    library.group_forget.restype = None
    library.group_barrier.argtypes = [id_]
    library.group_sum_of.argtypes = [id_, small, pointer, number, pointer]
    library.group_take_bytes.argtypes = [id_, pointer, pointer, pointer, pointer, pointer]
    library.group_sum_shares.argtypes = [id_, small, pointer, number, pointer, number]
    library.group_gather_shares.argtypes = [id_, pointer, number, pointer, number]


class PolledGroup(SharedGroup):
    """Collectives in Python, with two alternating buffers per member.

    A buffer is overwritten two operations later. A member gets there only after all others have posted the operation in
    between, and so have finished reading the buffer.
    """

    def __init__(self, host: LocalRanks, ranks: Sequence[int], buffer_bytes: int) -> None:
        super().__init__(host, ranks)
        self._buffer_bytes = buffer_bytes
        size = len(self.ranks)
        self._segment = SharedSegment(host, self._segment_name, ranks, 2 * size * buffer_bytes)
        self._buffers = [
            [
                self._segment.array((half * size + i) * buffer_bytes, buffer_bytes)
                for i in range(size)
            ]
            for half in range(2)
        ]
        self._posted = 0
        self._turn = 0

    def _post_and_wait(self) -> None:
        self._posted += 1
        counters = self._segment.counters
        counters.post(self.index, self._posted)
        counters.wait(range(len(self.ranks)), self._posted, self._segment.check)

    def _next_buffers(self) -> list[np.ndarray]:
        self._turn ^= 1
        return self._buffers[self._turn]

    def barrier(self) -> None:
        self._next_buffers()
        self._post_and_wait()

    def sum_into(self, source: np.ndarray, out: np.ndarray) -> None:
        step = self._buffer_bytes // source.itemsize
        for start in range(0, source.size, step):
            self._sum_piece(source[start : start + step], out[start : start + step])

    def _sum_piece(self, source: np.ndarray, out: np.ndarray) -> None:
        views = [b[: source.nbytes].view(source.dtype) for b in self._next_buffers()]
        np.copyto(views[self.index], source)
        self._post_and_wait()
        if source.nbytes <= SMALL_BYTES:
            self._add(views, slice(None), out)
            return
        # Reduce-scatter, then all-gather: each member sums its own share in its own buffer, where no other reads it.
        size = len(views)
        cuts = [source.size * i // size for i in range(size + 1)]
        shares = [slice(a, b) for a, b in zip(cuts, cuts[1:], strict=False)]
        mine = shares[self.index]
        self._add(views, mine, out[mine])
        np.copyto(views[self.index][mine], out[mine])
        self._post_and_wait()
        for view, share in zip(views, shares, strict=True):
            np.copyto(out[share], view[share])

    @staticmethod
    def _add(views: list[np.ndarray], share: slice, out: np.ndarray) -> None:
        sums = [view[share] for view in views]
        while len(sums) > 1:
            pairs = [sums[i : i + 2] for i in range(0, len(sums), 2)]
            sums = [np.add(*pair) if len(pair) == 2 else pair[0] for pair in pairs]
        np.copyto(out, sums[0])

    def _take_bytes(
        self, mine: np.ndarray, sizes: np.ndarray, begins: np.ndarray, ends: np.ndarray
    ) -> list[np.ndarray]:
        arrays = [np.empty(size, np.uint8) for size in ends - begins]
        for start in range(0, int(sizes.max()), self._buffer_bytes):
            buffers = self._next_buffers()
            piece = mine[start : start + self._buffer_bytes]
            buffers[self.index][: piece.size] = piece
            self._post_and_wait()
            for part, buffer, begin, end in zip(arrays, buffers, begins, ends, strict=True):
                first, last = max(begin, start), min(end, start + self._buffer_bytes)
                if first < last:
                    part[first - begin : last - begin] = buffer[first - start : last - start]
        return arrays


def shared_group(host: LocalRanks, ranks: Sequence[int], buffer_bytes: int) -> SharedGroup:
    kind = PolledGroup if host.library is None else NativeGroup
    return kind(host, ranks, buffer_bytes)
