"""Declares the per-token arrays that engines return with samples.

The code between engine and loss handles them by these declarations: how they grow, which ranks hold them, and whether
they are inputs of the model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np


class RemoteSegment:
    """An array [tokens, ...] that stays on the ranks that computed it, the first of which is `owner`.

    On other ranks `values` is None (backend/remote_arrays.py).
    """

    def __init__(self, values: np.ndarray, owner: int) -> None:
        self.values: np.ndarray | None = values
        self.owner, self.shape, self.dtype = owner, values.shape, values.dtype

    def __len__(self) -> int:
        return self.shape[0]

    def __array__(self, dtype: Any = None) -> np.ndarray:
        if self.values is None:
            raise ValueError(f"these entries are on rank {self.owner}")
        return np.asarray(self.values, dtype)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"values": None}


Segment = RemoteSegment | np.ndarray


@dataclass(frozen=True, eq=False, repr=False)
class RemoteArray:
    """A sample's entries [tokens, ...] as consecutive segments; samples of one prompt share their first segment.

    Segments that are numpy arrays are present on every rank.
    """

    segments: tuple[Segment, ...] = ()

    def __len__(self) -> int:
        return sum(map(len, self.segments))

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self), *self.segments[0].shape[1:])

    @property
    def dtype(self) -> np.dtype:
        return self.segments[0].dtype

    def __array__(self, dtype: Any = None) -> np.ndarray:
        return np.asarray(np.concatenate([np.asarray(segment) for segment in self.segments]), dtype)

    def __repr__(self) -> str:
        """Shows the segments' lengths, which are known on every rank and compared between ranks."""
        return f"RemoteArray{list(map(len, self.segments))}"

    def held_by(self, owner: int, known: dict[int, RemoteSegment]) -> RemoteArray:
        """Returns the array with references to rank `owner` for transfer; `known` caches the segments seen, by id."""
        for segment in self.segments:
            if isinstance(segment, np.ndarray):
                known.setdefault(id(segment), RemoteSegment(segment, owner))
        return RemoteArray(tuple(known.get(id(segment), segment) for segment in self.segments))


@dataclass(frozen=True)
class TokenArray:
    """Declares an array [completion length, *trailing] that every rank holds.

    `title` is its name in messages, `dump_name` in dumps, if different from the key. Context tokens have the value
    `on_context`; None repeats the previous token's entry. With `is_input` the array is an input of micro-batches, where
    prompts and padding have `on_context`, too.
    """

    title: str
    dtype: type[np.generic]
    trailing: tuple[int, ...] = ()
    on_context: float | None = 0
    is_input: bool = False
    dump_name: str | None = None

    def of(self, values: Any, num_tokens: int) -> Any:
        """Returns `values` with the declared dtype and shape. Raises ValueError if their number differs."""
        return np.asarray(values, self.dtype).reshape(num_tokens, *self.trailing)

    def num_bytes(self, num_tokens: int) -> int:
        return math.prod((num_tokens, *self.trailing)) * np.dtype(self.dtype).itemsize

    def is_whole(self, values: Any, num_inputs: int) -> bool:
        """Returns whether `values` are complete for a sample of `num_inputs` input tokens."""
        return True

    def joined(self, values: Any, written: Any, num_inputs: int) -> Any:
        """Appends the entries `written` to `values`; None if either is missing."""
        return None if values is None or written is None else np.concatenate([values, written])

    def with_context(self, values: Any, count: int) -> Any:
        """Appends the entries of `count` context tokens."""
        context = np.full((count, *self.trailing), self.on_context or 0, self.dtype)
        if self.on_context is None:
            context[...] = values[-1]
        return np.concatenate([values, context])


@dataclass(frozen=True)
class RemoteTokenArray(TokenArray):
    """Declares an array with one entry per input token: prompt and completion, without the last token.

    It stays on the ranks that computed it (RemoteArray), in the engine's dtype and shape; other ranks fetch it on
    demand, and rank 0 gathers it for files. An engine returns the entries of the new tokens only or of all: for context
    tokens once the policy has continued after them, and for an unfinished sample again.
    """

    dtype: type[np.generic] = np.void

    def of(self, values: Any, num_tokens: int) -> RemoteArray:
        return RemoteArray(values if isinstance(values, tuple) else (np.asarray(values),))

    def is_whole(self, values: RemoteArray, num_inputs: int) -> bool:
        return bool(values.segments) and len(values) == num_inputs

    def joined(
        self, values: RemoteArray | None, written: RemoteArray | None, num_inputs: int
    ) -> RemoteArray | None:
        if written is None or len(written) == num_inputs:
            return written
        if values is None or len(values) + len(written) != num_inputs:
            return None
        return RemoteArray((*values.segments, *written.segments))

    def with_context(self, values: RemoteArray, count: int) -> RemoteArray:
        return values


# Engines return the first two with every sample; an array that any of a step's samples lacks is dropped for the step.
TOKEN_ARRAYS: dict[str, TokenArray] = {
    # In nats, at the sampling temperature, by the engine.
    "logps": TokenArray("the generator's log-probs", np.float32, dump_name="generator_logps"),
    # Version of the weights that generated the token; context tokens have that of the token before.
    "versions": TokenArray(
        "the versions of the generator's weights",
        np.int32,
        on_context=None,
        dump_name="weights_version",
    ),
    # The experts that the generator's routers chose, uint8 or uint16 [tokens, layers with experts, experts a token].
    "routes": RemoteTokenArray("the experts of tokens", dump_name="routed_experts"),
}
