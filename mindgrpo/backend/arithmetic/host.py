"""Arithmetic on host arrays; tensors in device memory are copied to the host and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

import numpy as np

from mindgrpo.backend.arithmetic.contract import (
    Arithmetic,
    Columns,
    Operation,
    Sharded,
    Step,
    Stored,
    Tensors,
    Updated,
    neighbours,
)
from mindgrpo.backend.contract import Backend, Group, Share
from mindgrpo.backend.kernels.shapes import AdamWSettings

# (start, number of elements) in a pool.
Span = tuple[int, int]


def array_of(tensor: Stored, shape: Sequence[int] | None = None) -> np.ndarray:
    """Returns a view of the memory from the tensor's first element on, with `shape`, by default the tensor's own."""
    with tensor.pool.on_host() as memory:
        return memory.view(tensor.offset, tensor.shape if shape is None else shape)


def runs_of(tensors: Sequence[Stored]) -> list[np.ndarray]:
    """Returns the memory of tensors of one pool as flat views [n], one for each contiguous run of tensors."""
    runs: list[list[Stored]] = []
    for tensor in tensors:
        if runs and tensor.offset == runs[-1][-1].offset + runs[-1][-1].size:
            runs[-1].append(tensor)
        else:
            runs.append([tensor])
    return [array_of(run[0], (sum(one.size for one in run),)) for run in runs]


class HostArithmetic(Arithmetic):
    def __init__(self, backend: Backend) -> None:
        self._backend, self._kernels = backend, backend.kernels

    def sum_columns(self, columns: Sequence[Columns], group: Group) -> Operation:
        views = [
            array_of(own.tensor)[..., start:stop] for own in columns for start, stop in own.ranges
        ]

        def run() -> None:
            flat = np.concatenate([view.reshape(-1) for view in views])
            group.sum_array(flat)
            start = 0
            for view in views:
                view[...] = flat[start : start + view.size].reshape(view.shape)
                start += view.size

        return run

    def sum_tensors(self, tensors: Sequence[Stored], group: Group) -> Operation:
        runs = runs_of(tensors)

        def run() -> None:
            for values in runs:
                group.sum_array(values)

        return run

    def _shared(
        self, tensors: Sharded, stored: Tensors
    ) -> list[tuple[Group, np.ndarray, list[Share]]]:
        """Returns (group, memory [n], shares of it) for each run of tensors that are sharded over the same ranks."""
        return [
            (
                self._backend.group(ranks),
                values,
                [share for tensor in own for share in tensor.shares(own[0].whole.offset)],
            )
            for ranks, own in neighbours(tensors)
            for values in runs_of([stored[tensor.whole.key] for tensor in own])
        ]

    def scatter_sum(self, tensors: Sharded, gradients: Tensors) -> Operation:
        shared = self._shared(tensors, gradients)

        def run() -> None:
            for group, values, shares in shared:
                group.sum_shares(values, shares)

        return run

    def gather(self, tensors: Sharded, trained: Tensors, masters: Tensors | None) -> Operation:
        shared = self._shared(tensors, trained)
        rounded = [
            (
                array_of(trained[tensor.whole.key])[start:stop],
                array_of(masters[tensor.whole.key])[at : at + stop - start],
            )
            for tensor in tensors
            for start, stop, at in tensor.own_rows()
            if masters is not None
        ]

        def run() -> None:
            for whole, share in rounded:
                whole[...] = share
            for group, values, shares in shared:
                group.gather_shares(values, shares)

        return run

    def norm(
        self, columns: Sequence[Columns], copies: Sequence[int], group: Group
    ) -> Callable[[], float]:
        views = [array_of(own.tensor)[own.region] for own in columns]
        views = [
            view.swapaxes(-1, -2) if own.is_transposed else view
            for own, view in zip(columns, views, strict=True)
        ]
        square_of = self._kernels.square_sum

        def run() -> float:
            pairs = zip(views, copies, strict=True)
            square = sum(square_of(view) / number for view, number in pairs)
            return float(np.sqrt(group.sum_array(np.array([square], np.float64))[0]))

        return run

    def adamw(self, tensors: Sequence[Updated], settings: AdamWSettings) -> Step:
        """Implements Arithmetic.adamw on the host.

        For tensors on a device, weights and gradients are copied to the host and back, while moments stay there.
        """
        spans = list(_spans(tensors))
        is_sharded = any(one.sharded for one in tensors)
        if not tensors:
            return lambda update, lr, scale: None
        weights, gradients, first, second = (tensor.pool for tensor in tensors[0].tensors)

        def run(update: int, lr: float, scale: float) -> None:
            with (
                weights.on_host(write=True) as w,
                gradients.on_host(write=True) as g,
                first.on_host() as f,
                second.on_host() as s,
            ):
                for decays, own in spans:
                    weight, gradient, *moments = (
                        memory.view(start, (size,))
                        for memory, (start, size) in zip((w, g, f, s), own, strict=True)
                    )
                    numbers = settings.at(update, lr, scale, decays)
                    self._kernels.adamw(weight, gradient, moments[0], moments[1], numbers)
                if is_sharded:
                    # Clears the rows of other ranks as well.
                    for one in tensors:
                        g.view(one.gradient.offset, one.gradient.shape)[...] = 0.0

        return run

    def round(self, targets: Sequence[Stored], sources: Sequence[Stored]) -> Operation:
        pairs = list(zip(runs_of(targets), runs_of(sources), strict=True))

        def run() -> None:
            for target, source in pairs:
                target[...] = source

        return run

    def clear(self, tensors: Sequence[Stored]) -> None:
        for values in runs_of(tensors):
            values[...] = 0.0


def _spans(tensors: Sequence[Updated]) -> Iterator[tuple[bool, list[Span]]]:
    """Yields (whether weights decay, spans in the four pools), for runs of tensors, or for the rows of a share."""
    for decays, own in groupby(tensors, lambda one: one.decays):
        first, *others = own
        if first.sharded is None:
            size = sum(one.gradient.size for one in (first, *others))
            yield decays, [(tensor.offset, size) for tensor in first.tensors]
            continue
        for one in (first, *others):
            assert one.sharded is not None
            width, whole = one.sharded.row_size, one.gradient.shape
            for start, stop, at in one.sharded.own_rows():
                begins = [
                    tensor.offset + width * (start if tensor.shape == whole else at)
                    for tensor in one.tensors
                ]
                yield decays, [(begin, (stop - start) * width) for begin in begins]
